"""A save and a look over a network that loses, cuts and refuses: by every client, on real servers."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from spotsafe.checkpoint.catalog import candidates, look
from spotsafe.checkpoint.claim import is_exclusive
from spotsafe.checkpoint.verify import verify
from spotsafe.errors import StorageError, StorageNotFound, StorageShort, StorageUnavailable
from spotsafe.storage.remote import FsspecStore
from spotsafe.storage.retrying import RetryingStore
from spotsafe.storage.store import Store
from spotsafe.testing.proxy import Fault, FaultyProxy, Kind
from spotsafe.testing.saves import Attempt, steps_of
from spotsafe.testing.stores import pattern_bytes, read_all
from tests.servers import Server, behind
from tests.storage.test_servers import botocore_session

pytestmark = pytest.mark.slow

CLIENTS = ["s3fs", "boto3", "gcsfs", "adlfs"]
SERVER_OF = {"s3fs": "seaweedfs", "boto3": "seaweedfs", "gcsfs": "fake_gcs", "adlfs": "azurite"}
WRITES = "PUT|POST"
SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>later</Message></Error>"


@dataclass(frozen=True)
class Network:
    """A store, and the proxy that it talks through."""

    client: str
    store: Store
    proxy: FaultyProxy

    def lose_answer(self, word: str, kind: Kind = "lose_response") -> None:
        """Lose the answer to the next write of an object whose name holds a word."""
        if self.client == "gcsfs":
            self.proxy.add(Fault(kind, method="POST", contains=word.encode() + b'.json"}'))
        else:
            self.proxy.add(Fault(kind, method="PUT", path=word))


@contextmanager
def opened(client: str, server: Server) -> Iterator[Network]:
    """A new run on a server behind a proxy."""
    with FaultyProxy(server.endpoint) as proxy:
        url, options = server.url(uuid.uuid4().hex), dict(behind(server, proxy.url).options)
        if client == "boto3":
            from spotsafe.storage.s3 import S3Store

            yield Network(client, S3Store(url, endpoint_url=proxy.url, **boto3_options(options)), proxy)
            return
        if client == "s3fs":
            options["session"] = botocore_session()
        store = FsspecStore(url, **options)
        yield Network(client, store, proxy)
        store.close()


def boto3_options(options: dict[str, object]) -> dict[str, object]:
    """What s3fs calls by names of its own."""
    return {
        "aws_access_key_id": options["key"],
        "aws_secret_access_key": options["secret"],
        "region_name": "us-east-1",
    }


@pytest.fixture(params=CLIENTS)
def network(request: pytest.FixtureRequest) -> Iterator[Network]:
    """Each client, with its server behind a proxy."""
    with opened(request.param, request.getfixturevalue(SERVER_OF[request.param])) as found:
        yield found


def patient(store: Store, **options: object) -> RetryingStore:
    """The layer that tries again, without its waits."""
    return RetryingStore(store, sleep=lambda _seconds: None, **options)  # type: ignore[arg-type]  # handed through


@pytest.mark.parametrize("kind", ["lose_response", "half_close"])
def test_a_publish_whose_answer_is_lost_is_one_success(network: Network, kind: Kind) -> None:
    """The manifest is there, its writer knows that it is its own, and a resume finds one whole checkpoint."""
    plain, proxy = network.store, network.proxy
    store = patient(plain)
    attempt = Attempt(store)
    network.lose_answer("manifest", kind)

    result = attempt.save(100)

    assert proxy.fired == 1
    assert result.published
    (found,) = candidates(store, look(store))
    assert steps_of([found]) == [100]
    assert verify(store, found.name) == []


def test_a_claim_whose_answer_is_lost_is_ours(network: Network) -> None:
    """No attempt is skipped, and no second one is claimed."""
    plain, proxy = network.store, network.proxy
    network.lose_answer("000001")
    attempt = Attempt(patient(plain))
    assert proxy.fired == 1
    assert attempt.record.attempt == 1
    assert plain.names("attempts") == ["000001.json"]


def test_every_answer_to_a_write_is_lost_once(network: Network) -> None:
    """One after the other, whatever the client sends for a save."""
    plain, proxy = network.store, network.proxy
    store = patient(plain)
    attempt = Attempt(store)
    for number in range(12):
        proxy.clear()
        proxy.add(Fault("lose_response", method=WRITES, skip=number))
        fired = proxy.fired
        assert attempt.save(100 + number).published
        if proxy.fired == fired:
            break
    assert proxy.fired >= 4  # two data files, the index, the manifest
    for found in candidates(store, look(store)):
        assert verify(store, found.name) == []


def test_a_body_that_is_cut_is_found(network: Network) -> None:
    """Whether the connection breaks or the answer claims to be whole: an error, or the right bytes after all."""
    store, proxy = network.store, network.proxy
    data = pattern_bytes(100_000)
    store.put("large", data)
    errors = 0
    kinds: tuple[Kind, ...] = ("cut", "shorten")
    for kind in kinds:
        for read in (read_all, lambda store, path: store.read(path, max_bytes=len(data))):
            proxy.add(Fault(kind, method="GET", path="large", keep=50_000, times=20))
            before = proxy.fired
            try:
                assert read(store, "large") == data  # azure's client asks for the rest
            except (StorageUnavailable, StorageShort):
                errors += 1
            assert proxy.fired > before
            proxy.clear()
    assert errors >= (1 if network.client == "adlfs" else 4)
    proxy.add(Fault("cut", method="GET", path="large", keep=50_000))
    assert read_all(patient(store), "large") == data


def test_a_storm_of_503_is_waited_out(network: Network) -> None:
    """Every operation is tried again until the store has calmed down."""
    plain, proxy = network.store, network.proxy
    store = patient(plain, attempts=20)
    attempt = Attempt(store)
    assert attempt.save(100).published
    storm = Fault("status", status=503, body=SLOW_DOWN, times=6)
    proxy.add(storm)
    assert attempt.save(200).published
    for look_at in (
        lambda: steps_of(candidates(store, look(store))) == [200, 100],
        lambda: store.names("attempts") == ["000001.json", "000001.published"],
        lambda: not store.create("attempts/000001.json", b"other"),
    ):
        proxy.add(storm)
        assert look_at()
    assert proxy.fired == 24


@pytest.mark.parametrize("kind", ["status", "refuse"])
def test_a_store_that_cannot_be_asked_is_never_empty(network: Network, kind: Kind) -> None:
    """What was there is not "none" while the storm lasts; and it is given up when the time is over."""
    plain, proxy = network.store, network.proxy
    plain.put("attempts/000001.json", b"x")
    proxy.add(Fault(kind, status=503, body=SLOW_DOWN, times=10**6))
    left = iter(range(3, -10, -1))
    store = patient(plain, attempts=100, deadline=lambda: float(next(left)))
    for look_at in (
        lambda: store.names("attempts"),
        lambda: store.list(""),
        lambda: store.size("attempts/000001.json"),
        lambda: store.read("attempts/000001.json", max_bytes=9),
        lambda: store.create("attempts/000001.json", b"y"),
    ):
        with pytest.raises(StorageError) as caught:
            look_at()
        assert isinstance(caught.value, StorageUnavailable)
        assert not isinstance(caught.value, StorageNotFound)


@pytest.mark.parametrize(
    ("client", "liar"), [("s3fs", "rclone_s3"), ("boto3", "rclone_s3"), ("gcsfs", "gcp_emulator")]
)
def test_a_store_that_ignores_conditions_is_found(
    client: str, liar: str, request: pytest.FixtureRequest
) -> None:
    """By what it does, not by its name; and the claim stays ours."""
    with opened(client, request.getfixturevalue(liar)) as network:
        store = network.store
        attempt = Attempt(store)
        assert not is_exclusive(store, attempt.record)
        assert attempt.record.nonce.encode() in store.read("attempts/000001.json", max_bytes=10_000)


def test_an_honest_store_is_found_to_be_one(network: Network) -> None:
    """The same trial on the real servers."""
    store = network.store
    assert is_exclusive(store, Attempt(store).record)
