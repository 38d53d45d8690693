"""Claims: everybody gets a number of their own, one run has one id, and another job is noticed."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator

import pytest

from spotsafe.checkpoint.attempts import encode_record
from spotsafe.checkpoint.catalog import Listing, look
from spotsafe.checkpoint.claim import HEARTBEAT_S, AttemptRecord, claim, in_use, read_attempt
from spotsafe.checkpoint.layout import CheckpointName, attempt_record
from spotsafe.errors import DamagedCheckpoint, StorageError, StorageUnavailable, UnsupportedFormat
from spotsafe.identity import Identity
from spotsafe.storage.store import Store
from spotsafe.testing.faults import CountingStore, FailingStore
from spotsafe.testing.memory import MemoryStore

IDENTITY = Identity(
    rank=0, world_size=1, local_rank=0, host="here", pid=10, boot="boot-1", job="j-1", arguments=("train.py",)
)


def take(store: Store, *, listing: Listing | None = None, run: str | None = None) -> AttemptRecord:
    """Claim with nothing special."""
    return claim(
        store, listing=listing or look(store), identity=IDENTITY, newest_seen=None, wall=1.0, run=run
    )


def test_first_claim_names_the_run() -> None:
    """The run's id is the nonce of attempt 1, and stays so for all later attempts."""
    store = MemoryStore()
    first, second, third = take(store), take(store), take(store)
    assert [one.attempt for one in (first, second, third)] == [1, 2, 3]
    assert first.run == first.nonce == second.run == third.run
    assert len({one.nonce for one in (first, second, third)}) == 3


def test_record_holds_what_was_seen() -> None:
    """What the look before the claim saw and chose is on storage, as given."""
    store = MemoryStore()
    made = claim(
        store,
        listing=look(store),
        identity=IDENTITY,
        newest_seen="a000001-s000000002-0001-00000000",
        wall=12.5,
        resumed_from="a000001-s000000001-0001-00000000",
        passed_over=["a000001-s000000002-0001-00000000"],
        passed_over_unhealthy_to="a000001-s000000001-0001-00000000",
    )
    assert read_attempt(store, 1) == made
    assert (made.started, made.host, made.pid, made.boot) == (12.5, "here", 10, "boot-1")
    assert made.passed_over == ("a000001-s000000002-0001-00000000",)
    assert made.version


def test_lost_creation_tries_the_next_number_and_never_lists() -> None:
    """A claimer with an old listing ends behind all others, by creations alone."""
    store = MemoryStore()
    old = look(store)
    for _ in range(3):
        take(store)
    counting = CountingStore(store)
    assert take(counting, listing=old).attempt == 4
    assert counting.count("list") + counting.count("names") == 0
    assert read_attempt(store, 4).run == read_attempt(store, 1).run


def test_claimers_at_once_get_different_numbers() -> None:
    """Of many threads that start at the same moment, each gets one attempt, and all agree on the run."""
    store = MemoryStore()
    old = look(store)
    claimed: list[AttemptRecord] = []
    threads = [threading.Thread(target=lambda: claimed.append(take(store, listing=old))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(one.attempt for one in claimed) == list(range(1, 9))
    assert len({one.run for one in claimed}) == 1


def test_number_lies_above_every_trace() -> None:
    """Checkpoints and marks of attempts whose records were not copied still count: a new attempt is newer."""
    store = MemoryStore()
    store.put(CheckpointName(5, 10, 1, "00000000").manifest, b"x")
    assert take(store, run="feed0000").attempt == 6
    store.put("attempts/000009.published", b"x")
    assert take(store).attempt == 10


def test_run_id_without_attempt_one() -> None:
    """A folder of which only the checkpoints were copied keeps the run id that its manifests name."""
    store = MemoryStore()
    store.put(CheckpointName(5, 10, 1, "00000000").manifest, b"x")
    assert take(store, run="feed0000").run == "feed0000"
    other = MemoryStore()
    other.put(CheckpointName(5, 10, 1, "00000000").manifest, b"x")
    made = take(other)
    assert made.run == made.nonce


def test_damaged_first_record_stops_unless_the_run_is_known() -> None:
    """A run's id is never invented when attempt 1 is there and damaged."""
    store = MemoryStore()
    store.put(attempt_record(1), b"{}")
    with pytest.raises(DamagedCheckpoint, match="000001"):
        take(store)
    assert take(store, run="feed0000").run == "feed0000"


def test_newer_format_of_the_first_record_stops() -> None:
    """A run of a newer spotsafe is not claimed."""
    store = MemoryStore()
    take(store)
    sealed_record = encode_record(read_attempt(store, 1))
    from spotsafe.checkpoint import sealed

    members = sealed.unseal(sealed_record, max_bytes=1 << 20)
    store.objects[attempt_record(1)] = sealed.seal({**members, "format": 2})
    with pytest.raises(UnsupportedFormat):
        take(store)
    assert attempt_record(2) not in store.objects


def test_storage_error_is_raised() -> None:
    """A claim that could not be made is never silently skipped."""
    store = FailingStore(
        MemoryStore(),
        fail=lambda name, path, number: StorageUnavailable("down") if name == "create" else None,
    )
    with pytest.raises(StorageUnavailable):
        take(store)


def test_store_that_refuses_every_number_is_an_error() -> None:
    """A store whose creations never succeed does not keep the start busy for ever."""

    made = take(MemoryStore())

    class Stubborn(MemoryStore):
        """Somebody else is always faster."""

        def create(self, path: str, data: bytes) -> bool:
            number = int(path[-11:-5])
            self.objects[path] = encode_record(dataclasses.replace(made, attempt=number))
            return False

    store = Stubborn()
    with pytest.raises(StorageError, match="in a row"):
        take(store, run="feed0000")


def test_store_that_contradicts_itself_is_an_error() -> None:
    """A name that is taken by nothing is no claim of anybody."""

    class Liar(MemoryStore):
        """Says for everything that it exists."""

        def create(self, path: str, data: bytes) -> bool:
            return False

    with pytest.raises(StorageUnavailable, match="both that it exists"):
        take(Liar(), run="feed0000")


class Watch:
    """A heartbeat that a test scripts, and the waits that were asked for."""

    def __init__(self, beats: list[bytes | None]) -> None:
        self._beats: Iterator[bytes | None] = iter(beats)
        self._last: bytes | None = None
        self.waited = 0.0

    def read(self) -> bytes | None:
        self._last = next(self._beats, self._last)
        return self._last

    def wait(self, seconds: float) -> None:
        self.waited += seconds


def previous(**changes: object) -> AttemptRecord:
    """The record of an attempt of the same job on the same machine, with changes."""
    store = MemoryStore()
    return dataclasses.replace(take(store), **changes)  # type: ignore[arg-type]  # names are checked at run time


def asked(record: AttemptRecord | None, watch: Watch, *, ended: bool = False, alive: bool = True) -> bool:
    """Ask whether the folder is in use."""
    running: Callable[[int], bool] = lambda pid: alive  # noqa: E731 - a scripted answer
    return in_use(
        record,
        ended=lambda: ended,
        identity=IDENTITY,
        is_running=running,
        read_heartbeat=watch.read,
        wait=watch.wait,
    )


@pytest.mark.parametrize("change", [{"job": "j-2"}, {"arguments": ("eval.py",)}])
def test_beating_heart_of_another_job_means_in_use(change: dict[str, object]) -> None:
    """If job or arguments differ and the heartbeat changes within the interval, the folder is in use."""
    watch = Watch([b"1", b"1", b"2"])
    assert asked(previous(**change), watch)
    assert watch.waited <= 1.25 * HEARTBEAT_S


def test_a_job_that_ends_while_it_is_watched_is_no_obstacle() -> None:
    """Its last beat came, and then it recorded its end."""
    ends = iter([False, True])
    watch = Watch([b"1", b"2"])
    assert not in_use(
        previous(job="j-2"),
        ended=lambda: next(ends),
        identity=IDENTITY,
        is_running=lambda pid: True,
        read_heartbeat=watch.read,
        wait=watch.wait,
    )


def test_a_restart_asks_the_store_nothing() -> None:
    """The same job and arguments: there is nothing to find out."""

    def fail() -> bool:
        raise StorageUnavailable("down")

    assert not in_use(
        previous(),
        ended=fail,
        identity=IDENTITY,
        is_running=lambda pid: True,
        read_heartbeat=lambda: None,
        wait=lambda seconds: None,
    )


def test_first_beat_counts() -> None:
    """An attempt that has just begun and writes its first heartbeat now is alive."""
    assert asked(previous(job="j-2"), Watch([None, b"1"]))


@pytest.mark.parametrize("beat", [b"1", None])
def test_silent_heart_is_watched_for_a_whole_interval(beat: bytes | None) -> None:
    """Only an interval without a change shows that nobody is there."""
    watch = Watch([beat])
    assert not asked(previous(job="j-2"), watch)
    assert watch.waited >= HEARTBEAT_S


@pytest.mark.parametrize(
    ("record", "ended", "alive"),
    [
        pytest.param(None, False, True, id="no attempt before"),
        pytest.param(previous(job="j-2"), True, True, id="it recorded its end"),
        pytest.param(previous(), False, True, id="same job and arguments"),
        pytest.param(previous(job="j-2"), False, False, id="its process on this machine is dead"),
    ],
)
def test_no_wait_where_the_answer_is_known(record: AttemptRecord | None, ended: bool, alive: bool) -> None:
    """A restart costs no waiting unless another job may be alive."""
    watch = Watch([b"1", b"2", b"3"])
    assert not asked(record, watch, ended=ended, alive=alive)
    assert watch.waited == 0


@pytest.mark.parametrize("change", [{"host": "there"}, {"boot": "boot-0"}])
def test_a_dead_pid_says_nothing_about_another_machine(change: dict[str, object]) -> None:
    """A process number is only looked up on the machine and in the boot that it belongs to."""
    assert asked(previous(job="j-2", **change), Watch([b"1", b"2"]), alive=False)


def test_unknown_boot_is_no_proof() -> None:
    """Where the kernel tells no boot id, the process number is not believed."""
    record = previous(job="j-2", boot="")
    identity = dataclasses.replace(IDENTITY, boot="")
    watch = Watch([b"1", b"2"])
    assert in_use(
        record,
        ended=lambda: False,
        identity=identity,
        is_running=lambda pid: False,
        read_heartbeat=watch.read,
        wait=watch.wait,
    )


def test_error_while_watching_is_raised() -> None:
    """A heartbeat that cannot be read is not a silent one."""

    def fail() -> bytes | None:
        raise StorageUnavailable("down")

    with pytest.raises(StorageUnavailable):
        in_use(
            previous(job="j-2"),
            ended=lambda: False,
            identity=IDENTITY,
            is_running=lambda pid: True,
            read_heartbeat=fail,
            wait=lambda seconds: None,
        )
