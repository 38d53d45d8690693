"""The end of a spot instance on Tencent Cloud is seen, at the right hour."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any

import pytest

from spotsafe.clock import Clock
from spotsafe.errors import WatcherUnavailable
from spotsafe.reclaim.detect import detect
from spotsafe.reclaim.http import LocalHttp
from spotsafe.reclaim.notice import NoticeKind
from spotsafe.reclaim.tencent import ENDPOINT, TERMINATION_PATH, TencentWatcher, from_environment
from spotsafe.testing.clock import ManualClock
from spotsafe.testing.tencent import TERMINATION, FakeTencentMetadata
from tests.reclaim.clouds import CloudConformance, ServerErrors, send_through_a_proxy

WALL = 1_700_000_000.0  # 2023-11-14 22:13:20 UTC


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(wall=WALL)


@pytest.fixture
def fake(clock: ManualClock) -> Iterator[FakeTencentMetadata]:
    with FakeTencentMetadata(clock=clock) as fake:
        yield fake


def watcher_of(fake: FakeTencentMetadata, clock: Clock | None = None, **options: Any) -> TencentWatcher:
    return TencentWatcher(environ=fake.environ, clock=clock, **{"read_timeout_s": 5.0, **options})


@pytest.fixture
def watcher(fake: FakeTencentMetadata, clock: ManualClock) -> TencentWatcher:
    return watcher_of(fake, clock)


class TestConformance(CloudConformance):
    make_fake = FakeTencentMetadata
    fake: FakeTencentMetadata

    def make_watcher(self) -> TencentWatcher:
        return watcher_of(self.fake)


class TestConformanceWithServerErrors(ServerErrors, TestConformance):
    """The same for a service that answers, but with errors."""


def test_times_are_in_utc_plus_8(fake: FakeTencentMetadata, watcher: TencentWatcher) -> None:
    """What stands there is the clock on a wall in Shenzhen."""
    fake.set_key(TERMINATION, "2023-11-15 06:14:50")
    notice = watcher.poll()
    assert notice is not None
    assert (notice.source, notice.kind, notice.action) == ("tencent", NoticeKind.RECLAIM, "terminate")
    assert (notice.received, notice.deadline) == (1000.0, 1090.0)


def test_a_watcher_that_reads_utc_is_eight_hours_wrong(fake: FakeTencentMetadata) -> None:
    """The test above can fail: this one believes to have all day."""
    fake.set_key(TERMINATION, "2023-11-15 06:14:50")
    reply = LocalHttp(fake.url).request("GET", TERMINATION_PATH)
    naive = datetime.fromisoformat(reply.body.decode()).replace(tzinfo=timezone.utc).timestamp() - WALL
    assert naive == 90 + 8 * 3600


def test_an_instance_that_stays(fake: FakeTencentMetadata, watcher: TencentWatcher) -> None:
    """404 is the normal state; nothing is sent but the question."""
    assert [watcher.poll(), watcher.poll()] == [None, None]
    assert [(one.method, one.path, one.status) for one in fake.requests] == [
        ("GET", TERMINATION_PATH, 404)
    ] * 2


def test_no_more_than_two_minutes(fake: FakeTencentMetadata, watcher: TencentWatcher) -> None:
    """And the deadline does not move."""
    fake.notice(in_seconds=86_400)
    first = watcher.poll()
    assert first is not None
    assert first.deadline == 1120.0
    assert watcher.poll() == first


def test_times_are_by_the_clock_of_the_service(fake: FakeTencentMetadata) -> None:
    """That of this machine may be wrong by hours."""
    fake.notice(in_seconds=90)
    notice = watcher_of(fake, ManualClock(wall=WALL + 7200)).poll()
    assert notice is not None
    assert notice.deadline == 1090.0


def test_a_stale_time_is_no_notice(fake: FakeTencentMetadata, watcher: TencentWatcher) -> None:
    """An hour ago is of an end that did not come."""
    fake.notice(in_seconds=-3600)
    assert watcher.poll() is None


@pytest.mark.parametrize("status", [400, 403, 429, 500, 503])
def test_errors_are_not_nothing(status: int, fake: FakeTencentMetadata, watcher: TencentWatcher) -> None:
    """After a burst of them it sees again."""
    fake.fail_next(status, times=2)
    for _ in range(2):
        with pytest.raises(WatcherUnavailable, match=f"answered {status}"):
            watcher.poll()
    assert watcher.poll() is None


@pytest.mark.parametrize(
    "text", ["", "soon", "2023-11-15", "2023-11-15T06:14:50Z", "2023-13-45 00:00:00", "<html>"]
)
def test_what_is_no_time(text: str, fake: FakeTencentMetadata, watcher: TencentWatcher) -> None:
    """Also a form that the service does not write: nobody knows its zone."""
    fake.set_key(TERMINATION, text)
    with pytest.raises(WatcherUnavailable, match="is no time"):
        watcher.poll()


def test_proxy_variables_change_nothing(
    fake: FakeTencentMetadata, watcher: TencentWatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy would answer for another machine, if at all."""
    send_through_a_proxy(monkeypatch, "http://127.0.0.1:1")
    fake.notice()
    assert watcher.poll() is not None


def test_what_turns_it_on(clock: ManualClock) -> None:
    """The firmware's vendor, or the variable; neither asks the network. An address, for a name has to be resolved."""
    assert TencentWatcher(environ={}).endpoint == ENDPOINT == "http://169.254.0.23"
    assert from_environment({}, dmi=lambda _: "Tencent", clock=clock) is None
    firmware = {"sys_vendor": "Tencent Cloud"}
    [found] = detect(environ={}, dmi=lambda field: firmware.get(field, ""), clock=clock)
    assert isinstance(found, TencentWatcher)
    told = {"SPOTSAFE_TENCENT_METADATA": "http://127.0.0.1:1"}
    assert [each.name for each in detect(environ=told, dmi=lambda _: "", clock=clock)] == ["tencent"]
    with pytest.raises(ValueError, match="metadata service"):
        detect(environ={"SPOTSAFE_TENCENT_METADATA": "nowhere"}, dmi=lambda _: "", clock=clock)
