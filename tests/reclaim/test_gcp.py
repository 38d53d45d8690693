"""Preemptions on Google Cloud are seen through every failure of its metadata server that has been reported."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from spotsafe.clock import Clock
from spotsafe.errors import WatcherUnavailable
from spotsafe.events import NoticeCancelled, NoticeReceived, WatcherBlind, WatcherRecovered
from spotsafe.reclaim.gcp import (
    ENDPOINT,
    MAINTENANCE_PATH,
    PREEMPTED_PATH,
    GcpWatcher,
    endpoint_of,
    from_environment,
    is_gce,
)
from spotsafe.reclaim.http import LocalHttp
from spotsafe.reclaim.notice import NoticeKind
from spotsafe.reclaim.watcher import Watch
from spotsafe.testing.clock import ManualClock
from spotsafe.testing.gcp import MAINTENANCE, PREEMPTED, FakeGcpMetadata
from spotsafe.testing.sinks import RecordingSink
from tests.reclaim.clouds import CloudConformance, ServerErrors, in_background, send_through_a_proxy

WALL = 1_700_000_000.0


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(wall=WALL)


@pytest.fixture
def gcp(clock: ManualClock) -> Iterator[FakeGcpMetadata]:
    with FakeGcpMetadata(clock=clock) as fake:
        yield fake


def watcher_of(fake: FakeGcpMetadata, clock: Clock | None = None, **options: Any) -> GcpWatcher:
    return GcpWatcher(environ=fake.environ, clock=clock, read_timeout_s=5.0, **options)


@pytest.fixture
def watcher(gcp: FakeGcpMetadata, clock: ManualClock) -> GcpWatcher:
    """It never hangs."""
    return watcher_of(gcp, clock, hang_s=0)


class TestConformance(CloudConformance):
    """Of a watcher that asks again and again."""

    make_fake = FakeGcpMetadata
    fake: FakeGcpMetadata

    def make_watcher(self) -> GcpWatcher:
        return watcher_of(self.fake, hang_s=0)


class TestConformanceHanging(TestConformance):
    """Of one that hangs, for the shortest time there is."""

    def make_watcher(self) -> GcpWatcher:
        return watcher_of(self.fake, hang_s=1)


class TestConformanceWithServerErrors(ServerErrors, TestConformance):
    """The same for a service that answers, but with errors."""


class TestNotice:
    def test_a_vm_that_is_not_preempted(self, gcp: FakeGcpMetadata, watcher: GcpWatcher):
        """FALSE and NONE are the normal state; each request carries the header that Google asks for."""
        assert [watcher.poll(), watcher.poll()] == [None, None]
        assert [request.place for request in gcp.requests] == [MAINTENANCE_PATH, PREEMPTED_PATH] * 2
        assert {request.headers["metadata-flavor"] for request in gcp.requests} == {"Google"}

    def test_a_preemption_leaves_thirty_seconds(self, gcp: FakeGcpMetadata, watcher: GcpWatcher):
        """What Google promises a Spot VM, from when it was seen."""
        gcp.preempt()
        notice = watcher.poll()
        assert notice is not None
        assert (notice.source, notice.kind, notice.action) == ("gcp", NoticeKind.RECLAIM, "preempted")
        assert (notice.received, notice.deadline) == (1000.0, 1030.0)

    def test_a_vm_with_a_longer_notice(self, gcp: FakeGcpMetadata, clock: ManualClock):
        """Only who made the VM knows."""
        watcher = watcher_of(gcp, clock, hang_s=0, notice_s=120)
        gcp.preempt()
        notice = watcher.poll()
        assert notice is not None
        assert notice.deadline == 1120.0

    def test_the_deadline_does_not_move(self, gcp: FakeGcpMetadata, watcher: GcpWatcher, clock: ManualClock):
        """TRUE stays TRUE."""
        gcp.preempt()
        first = watcher.poll()
        clock.advance(20)
        assert watcher.poll() == first

    def test_maintenance_that_ends_the_vm(self, gcp: FakeGcpMetadata, watcher: GcpWatcher):
        """A VM with a GPU cannot be moved; there are sixty seconds at least."""
        gcp.notice("TERMINATE_ON_HOST_MAINTENANCE")
        notice = watcher.poll()
        assert notice is not None
        assert (notice.kind, notice.action) == (NoticeKind.RECLAIM, "TERMINATE_ON_HOST_MAINTENANCE")
        assert notice.deadline == 1060.0

    def test_a_migration_is_a_risk(self, gcp: FakeGcpMetadata, watcher: GcpWatcher):
        """The VM goes on on another host; nothing must stop for it."""
        gcp.notice("MIGRATE_ON_HOST_MAINTENANCE")
        notice = watcher.poll()
        assert notice is not None
        assert (notice.kind, notice.deadline) == (NoticeKind.RISK, None)

    def test_a_preemption_goes_before_maintenance(self, gcp: FakeGcpMetadata, watcher: GcpWatcher):
        """It is the one that leaves less time."""
        gcp.notice("MIGRATE_ON_HOST_MAINTENANCE")
        gcp.preempt()
        notice = watcher.poll()
        assert notice is not None
        assert notice.action == "preempted"

    def test_maintenance_that_is_over_and_comes_again(
        self, gcp: FakeGcpMetadata, watcher: GcpWatcher, clock: ManualClock
    ):
        """It is another one, with a time of its own."""
        gcp.notice("TERMINATE_ON_HOST_MAINTENANCE")
        first = watcher.poll()
        gcp.cancel()
        assert watcher.poll() is None
        clock.advance(100)
        gcp.notice("TERMINATE_ON_HOST_MAINTENANCE")
        second = watcher.poll()
        assert first is not None
        assert second is not None
        assert second.received == first.received + 100

    def test_a_word_of_maintenance_that_nobody_knows_hides_no_preemption(
        self, gcp: FakeGcpMetadata, watcher: GcpWatcher
    ):
        """It is said, and the rest is still asked for."""
        gcp.set_key(MAINTENANCE, "SOMETHING_NEW")
        with pytest.raises(WatcherUnavailable, match="SOMETHING_NEW"):
            watcher.poll()
        gcp.preempt()
        assert watcher.poll() is not None

    def test_a_line_end_behind_the_value(self, gcp: FakeGcpMetadata, watcher: GcpWatcher):
        """Nobody promises that there is none."""
        gcp.set_key(PREEMPTED, "TRUE\n")
        assert watcher.poll() is not None


class TestHanging:
    def test_the_first_request_does_not_hang(self, gcp: FakeGcpMetadata, clock: ManualClock):
        """A VM that is being preempted already is told of at once."""
        gcp.preempt()
        notice = watcher_of(gcp, clock).poll()
        assert notice is not None
        assert gcp.requests[-1].path == PREEMPTED_PATH

    def test_a_change_ends_the_hanging(self, gcp: FakeGcpMetadata, clock: ManualClock):
        """A hundred seconds would be too long for any patience here."""
        watcher = watcher_of(gcp, clock, hang_s=100)
        assert watcher.poll() is None
        found = in_background(watcher.poll)
        gcp.wait_until_hanging()
        gcp.preempt()
        notice = found()
        assert notice is not None
        assert notice.action == "preempted"
        assert watcher.interval_s == 0

    def test_lost_wake_up_between_two_hanging_requests(self, gcp: FakeGcpMetadata, clock: ManualClock):
        """A change that comes while nobody hangs is seen at once by the ETag."""
        watcher = watcher_of(gcp, clock, hang_s=100)
        assert watcher.poll() is None
        gcp.preempt()
        assert in_background(watcher.poll)() is not None

    def test_a_watcher_without_etags_loses_wake_ups(self, gcp: FakeGcpMetadata, clock: ManualClock):
        """The test above can fail: this one hangs through the preemption."""
        naive = Naive(gcp.url)
        assert naive.poll() is None
        gcp.preempt()
        found = in_background(naive.poll)
        gcp.wait_until_hanging()
        gcp.break_hanging(503)
        with pytest.raises(WatcherUnavailable):
            found()

    def test_the_old_value_after_the_time_that_was_asked_for(self, gcp: FakeGcpMetadata, clock: ManualClock):
        """An answer is no change."""
        watcher = watcher_of(gcp, clock, hang_s=1)
        assert [watcher.poll(), watcher.poll()] == [None, None]
        assert gcp.requests[-1].asks("timeout_sec") == "1"

    @pytest.mark.parametrize("status", [0, 503])
    def test_503_and_reset_in_the_middle_of_a_hanging_request(
        self, status: int, gcp: FakeGcpMetadata, clock: ManualClock
    ):
        """As during maintenance of the server. The next request learns the state anew, and does not hang."""
        watcher = watcher_of(gcp, clock, hang_s=100)
        assert watcher.poll() is None
        found = in_background(watcher.poll)
        gcp.wait_until_hanging()
        gcp.break_hanging(status)
        with pytest.raises(WatcherUnavailable):
            found()
        gcp.preempt()
        assert watcher.poll() is not None

    def test_a_server_that_does_not_hang_is_not_asked_all_the_time(
        self, gcp: FakeGcpMetadata, clock: ManualClock
    ):
        """It would eat a core, and the server's patience."""
        watcher = watcher_of(gcp, clock, hang_s=100)
        gcp.faults.answers_at_once = True
        assert [watcher.poll(), watcher.poll()] == [None, None]
        assert watcher.interval_s == 1.0

    def test_closing_ends_a_request_that_hangs(self, gcp: FakeGcpMetadata, clock: ManualClock):
        """A process that ends waits for nobody."""
        watcher = watcher_of(gcp, clock, hang_s=100)
        watcher.poll()
        found = in_background(watcher.poll)
        gcp.wait_until_hanging()
        watcher.close()
        with pytest.raises(WatcherUnavailable):
            found()

    def test_in_a_watch(self):
        """A preemption is told as it comes; a burst of errors is told and got over."""
        sink = RecordingSink()
        with FakeGcpMetadata() as gcp:
            watch = Watch([watcher_of(gcp, hang_s=100)], emit=sink.emit)
            watch.start()
            try:
                gcp.wait_until_hanging()
                gcp.fail_next(503, times=3)
                gcp.break_hanging(503)
                sink.wait_for(WatcherBlind)
                sink.wait_for(WatcherRecovered)
                gcp.wait_until_hanging()
                gcp.preempt()
                assert sink.wait_for(NoticeReceived)[0].action == "preempted"
                assert sink.of(NoticeCancelled) == []
            finally:
                watch.stop()


class TestNotGoogle:
    def test_gke_hides_preempted(self, gcp: FakeGcpMetadata, watcher: GcpWatcher):
        """404 there says nothing about the VM: it is told that nobody watches, and what to do."""
        gcp.faults.conceals = True
        gcp.preempt()
        with pytest.raises(WatcherUnavailable, match="hides whether the VM is preempted"):
            watcher.poll()

    def test_a_portal_that_answers_everything(self, gcp: FakeGcpMetadata, watcher: GcpWatcher):
        """Whatever does not say that it is Google's is not believed."""
        gcp.faults.flavor = None
        gcp.preempt()
        with pytest.raises(WatcherUnavailable, match="not by Google's server"):
            watcher.poll()

    def test_proxy_variables_change_nothing(
        self, gcp: FakeGcpMetadata, watcher: GcpWatcher, monkeypatch: pytest.MonkeyPatch
    ):
        """A proxy would answer for another machine, if at all."""
        with FakeGcpMetadata() as other:
            send_through_a_proxy(monkeypatch, other.url)
            gcp.preempt()
            assert watcher.poll() is not None
            assert other.requests == []

    @pytest.mark.parametrize("status", [400, 403, 429, 500, 503])
    def test_errors_are_not_nothing(self, status: int, gcp: FakeGcpMetadata, watcher: GcpWatcher):
        """Each is an answer that says nothing about the VM."""
        gcp.faults.refuse_all = status
        with pytest.raises(WatcherUnavailable, match=f"answered {status}"):
            watcher.poll()

    def test_nonsense(self, gcp: FakeGcpMetadata, watcher: GcpWatcher):
        """Neither TRUE nor FALSE."""
        gcp.set_key(PREEMPTED, "<html>")
        with pytest.raises(WatcherUnavailable, match="neither TRUE nor FALSE"):
            watcher.poll()

    def test_an_answer_that_ends_early(self, gcp: FakeGcpMetadata, watcher: GcpWatcher):
        """TR is not TRUE."""
        gcp.preempt()
        gcp.faults.cut_connection = True
        with pytest.raises(WatcherUnavailable, match=r"early|whole"):
            watcher.poll()


class TestEnvironment:
    @pytest.mark.parametrize(
        ("environ", "url"),
        [
            ({}, ENDPOINT),
            ({"GCE_METADATA_HOST": "127.0.0.1:1"}, "http://127.0.0.1:1"),
            ({"GCE_METADATA_ROOT": "127.0.0.1:2"}, "http://127.0.0.1:2"),
            ({"GCE_METADATA_HOST": "127.0.0.1:1", "GCE_METADATA_ROOT": "127.0.0.1:2"}, "http://127.0.0.1:1"),
        ],
    )
    def test_the_variables_of_googles_libraries(self, environ: dict[str, str], url: str):
        """The newer one first; the address where there is none, for a name would have to be resolved."""
        assert endpoint_of(environ) == url
        assert GcpWatcher(environ=environ).endpoint == url

    @pytest.mark.parametrize(
        ("product", "is_one"),
        [("Google Compute Engine", True), ("Google", True), ("", False), ("Not Google", False)],
    )
    def test_the_firmware(self, product: str, is_one: bool, clock: ManualClock):
        """It is asked without the network."""
        dmi = {"product_name": product}.get
        assert is_gce(lambda name: dmi(name, "")) is is_one
        assert (from_environment({}, dmi=lambda name: dmi(name, ""), clock=clock) is not None) is is_one

    @pytest.mark.parametrize(
        ("environ", "product", "watches"),
        [
            ({"GCE_METADATA_HOST": "127.0.0.1:1"}, "", True),
            ({"NO_GCE_CHECK": "true"}, "Google", False),
            ({"NO_GCE_CHECK": "True"}, "Google", True),
            ({"NO_GCE_CHECK": "true", "GCE_METADATA_HOST": "127.0.0.1:1"}, "", True),
            ({}, "", False),
        ],
    )
    def test_what_turns_it_on(self, environ: dict[str, str], product: str, watches: bool, clock: ManualClock):
        """A variable that names the server does, whatever the firmware says."""
        found = from_environment(environ, dmi=lambda _: product, clock=clock)
        assert (found is not None) is watches

    def test_a_longer_notice_by_a_variable(self, gcp: FakeGcpMetadata, clock: ManualClock):
        """For VMs that were made so."""
        environ = {**gcp.environ, "SPOTSAFE_GCP_NOTICE_S": "120"}
        found = from_environment(environ, dmi=lambda _: "", clock=clock)
        gcp.preempt()
        assert found is not None
        notice = found.poll()
        assert notice is not None
        assert notice.deadline == 1120.0

    @pytest.mark.parametrize("text", ["soon", "-1", "inf", "nan"])
    def test_a_notice_that_is_none(self, text: str, clock: ManualClock):
        """The variable is named."""
        environ = {"GCE_METADATA_HOST": "127.0.0.1:1", "SPOTSAFE_GCP_NOTICE_S": text}
        with pytest.raises(ValueError, match="SPOTSAFE_GCP_NOTICE_S"):
            from_environment(environ, dmi=lambda _: "", clock=clock)

    @pytest.mark.parametrize("wrong", [{"hang_s": -1}, {"notice_s": -0.5}])
    def test_seconds_that_are_none(self, wrong: dict[str, Any]):
        """A mistake of the caller."""
        with pytest.raises(ValueError, match="0 or more"):
            GcpWatcher(environ={}, **wrong)


class Naive:
    """As many scripts do it: hangs without the last ETag."""

    def __init__(self, endpoint: str) -> None:
        self._http = LocalHttp(endpoint)
        self._waits = False

    def poll(self) -> str | None:
        query, self._waits = "?wait_for_change=true" if self._waits else "", True
        headers = {"Metadata-Flavor": "Google"}
        reply = self._http.request("GET", PREEMPTED_PATH + query, headers=headers, read_timeout_s=100)
        if reply.status != 200:
            raise WatcherUnavailable(str(reply.status), source="naive")
        return "preempted" if reply.body == b"TRUE" else None
