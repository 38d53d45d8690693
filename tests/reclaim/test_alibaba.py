"""The release of a preemptible instance on Alibaba Cloud is seen, whatever mode its metadata is in."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from spotsafe.clock import Clock
from spotsafe.errors import WatcherUnavailable
from spotsafe.reclaim.alibaba import ENDPOINT, TERMINATION_PATH, AlibabaWatcher, from_environment
from spotsafe.reclaim.detect import detect
from spotsafe.reclaim.notice import NoticeKind
from spotsafe.testing.alibaba import TERMINATION, FakeAlibabaMetadata
from spotsafe.testing.clock import ManualClock
from tests.reclaim.clouds import CloudConformance, ServerErrors, send_through_a_proxy

WALL = 1_700_000_000.0
PUT, GET = "PUT /latest/api/token", f"GET {TERMINATION_PATH}"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(wall=WALL)


@pytest.fixture(params=[False, True], ids=["normal", "hardened"])
def fake(request: pytest.FixtureRequest, clock: ManualClock) -> Iterator[FakeAlibabaMetadata]:
    with FakeAlibabaMetadata(clock=clock, tokens_required=request.param) as fake:
        yield fake


def watcher_of(fake: FakeAlibabaMetadata, clock: Clock | None = None, **options: Any) -> AlibabaWatcher:
    return AlibabaWatcher(environ=fake.environ, clock=clock, **{"read_timeout_s": 5.0, **options})


@pytest.fixture
def watcher(fake: FakeAlibabaMetadata, clock: ManualClock) -> AlibabaWatcher:
    return watcher_of(fake, clock)


def asked(fake: FakeAlibabaMetadata) -> list[tuple[str, int | None]]:
    return [(f"{request.method} {request.path}", request.status) for request in fake.requests]


class TestConformance(CloudConformance):
    make_fake = partial(FakeAlibabaMetadata, tokens_required=True)
    fake: FakeAlibabaMetadata

    def make_watcher(self) -> AlibabaWatcher:
        return watcher_of(self.fake)


class TestConformanceWithServerErrors(ServerErrors, TestConformance):
    """The same for a service that answers, but with errors."""


def test_an_instance_that_stays(fake: FakeAlibabaMetadata, watcher: AlibabaWatcher) -> None:
    """404 is the normal state, asked for with one token for many polls."""
    assert [watcher.poll(), watcher.poll()] == [None, None]
    assert asked(fake) == [(PUT, 200), (GET, 404), (GET, 404)]
    assert fake.requests[0].headers["x-aliyun-ecs-metadata-token-ttl-seconds"] == "21600"


def test_the_time_of_the_release_is_the_deadline(
    fake: FakeAlibabaMetadata, watcher: AlibabaWatcher, clock: ManualClock
) -> None:
    """In UTC, by the service's clock, and it does not move."""
    fake.notice(in_seconds=280)
    first = watcher.poll()
    assert first is not None
    assert (first.source, first.kind, first.action) == ("alibaba", NoticeKind.RECLAIM, "terminate")
    assert (first.received, first.deadline) == (1000.0, 1280.0)
    clock.advance(100)
    assert watcher.poll() == first


def test_no_more_than_five_minutes(fake: FakeAlibabaMetadata, watcher: AlibabaWatcher) -> None:
    """Whatever the time says: more was never promised."""
    fake.notice(in_seconds=86_400)
    notice = watcher.poll()
    assert notice is not None
    assert notice.deadline == 1300.0


def test_times_are_by_the_clock_of_the_service(fake: FakeAlibabaMetadata) -> None:
    """That of this machine may be wrong by hours."""
    fake.notice(in_seconds=90)
    notice = watcher_of(fake, ManualClock(wall=WALL + 7200)).poll()
    assert notice is not None
    assert notice.deadline == 1090.0


def test_a_stale_time_is_no_notice(fake: FakeAlibabaMetadata, watcher: AlibabaWatcher) -> None:
    """It is of a release that was not carried out; a moment ago may be one that is under way."""
    fake.notice(in_seconds=-121)
    assert watcher.poll() is None
    fake.notice(in_seconds=-5)
    notice = watcher.poll()
    assert notice is not None
    assert notice.deadline == notice.received


def test_401_after_the_token_has_expired(
    fake: FakeAlibabaMetadata, watcher: AlibabaWatcher, clock: ManualClock
) -> None:
    """It is replaced in time, and once more at once if it is refused."""
    watcher.poll()
    clock.advance(21_600)
    fake.notice()
    assert watcher.poll() is not None
    fake.expire_tokens()
    assert watcher.poll() is not None


def test_a_put_that_times_out(clock: ManualClock) -> None:
    """As behind a bridge: the normal mode answers without a token, the hardened one says what is wrong."""
    for hardened in (False, True):
        with FakeAlibabaMetadata(clock=clock, tokens_required=hardened) as fake:
            fake.faults.drop_put = True
            fake.notice()
            watcher = watcher_of(fake, clock, read_timeout_s=0.2)
            if hardened:
                with pytest.raises(WatcherUnavailable, match="hardened mode"):
                    watcher.poll()
            else:
                assert watcher.poll() is not None


def test_the_variables_of_alibabas_libraries(clock: ManualClock) -> None:
    """One turns the service off unless it is named, the other requests without a token."""
    off = {"ALIBABA_CLOUD_ECS_METADATA_DISABLED": "true"}
    assert from_environment(off, dmi=lambda _: "Alibaba Cloud", clock=clock) is None
    with FakeAlibabaMetadata(clock=clock) as fake:
        assert from_environment({**off, **fake.environ}, dmi=lambda _: "", clock=clock) is not None
        fake.faults.refuse_put = 404
        environ = {**fake.environ, "ALIBABA_CLOUD_IMDSV1_DISABLED": "true"}
        with pytest.raises(WatcherUnavailable, match="no token can be had"):
            AlibabaWatcher(environ=environ, clock=clock).poll()


@pytest.mark.parametrize("status", [400, 403, 429, 500, 503])
def test_errors_are_not_nothing(status: int, fake: FakeAlibabaMetadata, watcher: AlibabaWatcher) -> None:
    """After a burst of them it sees again."""
    watcher.poll()
    fake.fail_next(status)
    with pytest.raises(WatcherUnavailable, match=f"answered {status}"):
        watcher.poll()
    assert watcher.poll() is None


@pytest.mark.parametrize("text", ["", "soon", "2015", "<html>", "{}"])
def test_what_is_no_time(text: str, fake: FakeAlibabaMetadata, watcher: AlibabaWatcher) -> None:
    """Somebody else's answer, perhaps."""
    fake.set_key(TERMINATION, text)
    with pytest.raises(WatcherUnavailable, match="is no time"):
        watcher.poll()


def test_proxy_variables_change_nothing(
    fake: FakeAlibabaMetadata, watcher: AlibabaWatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy would answer for another machine, if at all."""
    send_through_a_proxy(monkeypatch, "http://127.0.0.1:1")
    fake.notice()
    assert watcher.poll() is not None


def test_what_turns_it_on(clock: ManualClock) -> None:
    """The firmware's vendor, or the variable; neither asks the network."""
    assert AlibabaWatcher(environ={}).endpoint == ENDPOINT
    assert from_environment({}, dmi=lambda _: "Alibaba", clock=clock) is None
    firmware = {"sys_vendor": "Alibaba Cloud"}
    [found] = detect(environ={}, dmi=lambda field: firmware.get(field, ""), clock=clock)
    assert isinstance(found, AlibabaWatcher)
    told = {"SPOTSAFE_ALIBABA_METADATA": "http://127.0.0.1:1"}
    assert [each.name for each in detect(environ=told, dmi=lambda _: "", clock=clock)] == ["alibaba"]
    with pytest.raises(ValueError, match="metadata service"):
        detect(environ={"SPOTSAFE_ALIBABA_METADATA": "nowhere"}, dmi=lambda _: "", clock=clock)
