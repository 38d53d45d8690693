"""Azure's events are seen through every failure of watchers that has been reported, and only those of this VM."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from spotsafe.clock import Clock
from spotsafe.errors import WatcherUnavailable
from spotsafe.events import NoticeCancelled, NoticeReceived, WatcherBlind, WatcherRecovered
from spotsafe.reclaim import azure_events
from spotsafe.reclaim.azure import (
    ENDPOINT,
    EVENTS_PATH,
    NAME_PATH,
    AzureWatcher,
    endpoint_of,
    from_environment,
    is_azure,
)
from spotsafe.reclaim.http import LocalHttp
from spotsafe.reclaim.notice import NoticeKind, ReclaimNotice
from spotsafe.reclaim.watcher import Watch, Watcher
from spotsafe.testing.azure import INSTANCE, FakeAzureMetadata
from spotsafe.testing.clock import ManualClock
from spotsafe.testing.sinks import RecordingSink
from tests.reclaim.clouds import PROXIES, CloudConformance, ServerErrors, in_background, send_through_a_proxy

WALL = 1_700_000_000.0
DAY_S = 86400.0


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(wall=WALL)


@pytest.fixture
def azure(clock: ManualClock) -> Iterator[FakeAzureMetadata]:
    with FakeAzureMetadata(clock=clock) as fake:
        yield fake


def watcher_of(fake: FakeAzureMetadata, clock: Clock | None = None, **options: Any) -> AzureWatcher:
    return AzureWatcher(environ=fake.environ, clock=clock, **options)


@pytest.fixture
def watcher(azure: FakeAzureMetadata, clock: ManualClock) -> AzureWatcher:
    return watcher_of(azure, clock)


def polled(watcher: Watcher) -> ReclaimNotice:
    """The notice that there must be."""
    notice = watcher.poll()
    assert notice is not None
    return notice


class TestConformance(CloudConformance):
    make_fake = FakeAzureMetadata
    fake: FakeAzureMetadata

    def make_watcher(self) -> AzureWatcher:
        return watcher_of(self.fake)


class TestConformanceWithServerErrors(ServerErrors, TestConformance):
    """The same for a service that answers, but with errors."""


class TestFailureModes:
    """One test for each way in which watchers of Azure fail. Further down, wrong watchers fail these tests."""

    def make(self, fake: FakeAzureMetadata, clock: Clock) -> Watcher:
        return watcher_of(fake, clock)

    def test_another_vms_event(self, azure: FakeAzureMetadata, clock: ManualClock):
        """Events of the whole scale set arrive; only what names this VM is its own."""
        watcher = self.make(azure, clock)
        azure.schedule("Preempt", resources=["trainer_5", "trainer_66", "trainer000006"])
        azure.schedule("Terminate", resources=[])
        assert watcher.poll() is None
        azure.schedule("Preempt", resources=["trainer_5", "TRAINER_6"])
        assert polled(watcher).kind is NoticeKind.RECLAIM

    def test_freeze_taken_for_eviction(self, azure: FakeAzureMetadata, clock: ManualClock):
        """A pause of seconds loses nothing: it stops nothing, before and while it lasts, and is one risk only."""
        watcher = self.make(azure, clock)
        freeze = azure.schedule("Freeze", duration_s=5)
        first = polled(watcher)
        clock.advance(5.0)
        azure.start_event(freeze)
        assert (first.kind, first.action, first.deadline) == (NoticeKind.RISK, "Freeze", None)
        assert polled(watcher) == first

    def test_first_call_slow(
        self, azure: FakeAzureMetadata, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
    ):
        """The call that turns events on may take two minutes, and is waited for; later ones are not given so long."""
        patience, request = list[float](), LocalHttp.request

        def recording(http: LocalHttp, *words: str, read_timeout_s: float, **more: Any) -> Any:
            patience.append(read_timeout_s)
            return request(http, *words, read_timeout_s=read_timeout_s, **more)

        monkeypatch.setattr(LocalHttp, "request", recording)
        watcher = self.make(azure, clock)
        azure.faults.first_call_s = 120.0
        azure.schedule("Preempt", in_seconds=140.0)
        found = in_background(watcher.poll)
        clock.await_waiters()
        clock.advance(120.0)
        notice = found()
        assert notice is not None
        assert (notice.received, notice.deadline) == (1120.0, 1140.0)
        watcher.poll()
        assert patience[0] > 120.0
        assert max(patience[1:]) <= 5.0

    def test_429_while_many_processes_ask(self, azure: FakeAzureMetadata, clock: ManualClock):
        """Too many requests say nothing about the VM; the notice is there when the service answers again."""
        watcher = self.make(azure, clock)
        azure.schedule("Preempt")
        azure.fail_next(429)
        with pytest.raises(WatcherUnavailable, match="429"):
            watcher.poll()
        assert polled(watcher).action == "Preempt"

    def test_410_while_the_service_is_updated(self, azure: FakeAzureMetadata, clock: ManualClock):
        """Gone is the service, for a minute, not the event."""
        watcher = self.make(azure, clock)
        azure.schedule("Preempt")
        first = polled(watcher)
        azure.fail_next(410, times=3)
        for _ in range(3):
            with pytest.raises(WatcherUnavailable, match="410"):
                watcher.poll()
        assert polled(watcher) == first

    def test_event_straight_to_started(self, azure: FakeAzureMetadata, clock: ManualClock):
        """A failure of the hardware, and an approval by others: no time is left, and none is named."""
        watcher = self.make(azure, clock)
        assert watcher.poll() is None
        azure.schedule("Reboot", started=True)
        reboot = polled(watcher)
        assert (reboot.kind, reboot.action, reboot.deadline) == (NoticeKind.RECLAIM, "Reboot", 1000.0)
        azure.cancel()
        clock.advance(5.0)
        azure.schedule("Preempt", started=True)
        preempt = polled(self.make(azure, clock))
        assert (preempt.kind, preempt.deadline) == (NoticeKind.RECLAIM, 1005.0)

    def test_cancelled(self, azure: FakeAzureMetadata, clock: ManualClock):
        """There is no word for it: the event is gone, and another event does not bring it back."""
        watcher = self.make(azure, clock)
        event = azure.schedule("Preempt")
        polled(watcher)
        azure.cancel(event)
        assert watcher.poll() is None
        azure.schedule("Preempt", resources=["trainer_5"])
        assert watcher.poll() is None

    @pytest.mark.parametrize("kind", ["Preempt", "Terminate", "Reboot"])
    def test_stale(self, kind: str, azure: FakeAzureMetadata, clock: ManualClock):
        """What should have started an hour ago, and has not, must not end every start from now on."""
        azure.faults.stuck = True
        azure.schedule(kind, in_seconds=-3600.0)
        notice = polled(self.make(azure, clock))
        assert (notice.kind, notice.deadline) == (NoticeKind.RISK, None)

    @pytest.mark.parametrize("iso", [False, True])
    def test_both_dates(self, iso: bool, azure: FakeAzureMetadata, clock: ManualClock):
        """The documentation's dates are those of HTTP, the samples' those of ISO 8601."""
        azure.faults.iso_dates = iso
        azure.schedule("Preempt", in_seconds=20.0)
        assert polled(self.make(azure, clock)).deadline == 1020.0

    def test_truncated_json(self, azure: FakeAzureMetadata, clock: ManualClock):
        """Half a document is no document; neither is one that ends early."""
        watcher = self.make(azure, clock)
        azure.schedule("Preempt")
        for fault in ("truncate_json", "cut_connection"):
            setattr(azure.faults, fault, True)
            with pytest.raises(WatcherUnavailable, match=r"."):
                watcher.poll()
            setattr(azure.faults, fault, False)
        assert polled(watcher).action == "Preempt"

    def test_a_proxy_in_the_environment(
        self, azure: FakeAzureMetadata, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
    ):
        """A proxy that answers for another machine, which goes, is never asked."""
        with FakeAzureMetadata(clock=clock) as proxy:
            proxy.schedule("Preempt")
            send_through_a_proxy(monkeypatch, proxy.url)
            assert self.make(azure, clock).poll() is None
            assert proxy.requests == []

    @pytest.mark.parametrize("kind", ["Reboot", "Redeploy"])
    def test_a_restart_in_days(self, kind: str, azure: FakeAzureMetadata, clock: ManualClock):
        """Told a week ahead for hardware that will fail: training goes on until it is near."""
        watcher = self.make(azure, clock)
        azure.schedule(kind, in_seconds=3 * DAY_S)
        early = polled(watcher)
        assert (early.kind, early.action, early.deadline) == (NoticeKind.RISK, kind, 1000.0 + 3 * DAY_S)
        clock.advance(3 * DAY_S - 120.1)
        assert polled(watcher) == early
        clock.advance(0.1)
        late = polled(watcher)
        assert (late.kind, late.action) == (NoticeKind.RECLAIM, kind)
        assert late.deadline == pytest.approx(1000.0 + 3 * DAY_S)
        assert late.received == pytest.approx(late.deadline - 120.0)
        assert polled(watcher) == late

    @pytest.mark.parametrize("kind", ["Reboot", "Redeploy"])
    def test_a_restart_that_is_just_over(self, kind: str, azure: FakeAzureMetadata, clock: ManualClock):
        """Events stay listed for minutes: to leave for what has brought the VM up would be to leave at every start."""
        azure.schedule(kind, started=True)
        watcher = self.make(azure, clock)
        first = polled(watcher)
        assert (first.kind, first.deadline) == (NoticeKind.RISK, None)
        clock.advance(5.0)
        assert polled(watcher) == first


class Naive:
    """As scripts do it: asks through the proxy of the environment, for a second, and takes any event for its end."""

    name, interval_s = "azure", 1.0

    def __init__(self, fake: FakeAzureMetadata, clock: Clock) -> None:
        self._url, self._clock = fake.url + EVENTS_PATH, clock

    def poll(self) -> ReclaimNotice | None:
        asked = urllib.request.Request(self._url, headers={"Metadata": "true"})
        with urllib.request.build_opener().open(asked, timeout=1.0) as reply:
            return self.judge(json.load(reply)["Events"])

    def judge(self, events: list[dict[str, Any]]) -> ReclaimNotice | None:
        return self.notice(events[0]["EventType"]) if events else None

    def notice(self, action: str, deadline: float | None = None) -> ReclaimNotice:
        now = self._clock.monotonic()
        return ReclaimNotice(
            source="azure", kind=NoticeKind.RECLAIM, action=action, deadline=deadline, received=now
        )

    def close(self) -> None:
        pass


class AnyPreemptIsMine(Naive):
    """Looks at the kind, not at whom it concerns."""

    def judge(self, events: list[dict[str, Any]]) -> ReclaimNotice | None:
        return next((self.notice("Preempt") for each in events if each["EventType"] == "Preempt"), None)


class ScheduledOnly(Naive):
    """Waits for what is Scheduled."""

    def judge(self, events: list[dict[str, Any]]) -> ReclaimNotice | None:
        return super().judge([each for each in events if each["EventStatus"] == "Scheduled"])


class OneDate(Naive):
    """Reads the dates of the documentation."""

    def judge(self, events: list[dict[str, Any]]) -> ReclaimNotice | None:
        at = time.strptime(events[0]["NotBefore"], "%a, %d %b %Y %H:%M:%S GMT") if events else None
        return None if at is None else self.notice("Preempt", deadline=1020.0)


class Wrapped:
    """A right watcher, and something wrong around it."""

    name, interval_s = "azure", 1.0

    def __init__(self, fake: FakeAzureMetadata, clock: Clock) -> None:
        self._right = watcher_of(fake, clock)
        self._last: ReclaimNotice | None = None

    def poll(self) -> ReclaimNotice | None:
        raise NotImplementedError

    def close(self) -> None:
        self._right.close()


class BlindIsNothing(Wrapped):
    """Takes "could not ask" for "nothing is announced"."""

    def poll(self) -> ReclaimNotice | None:
        try:
            return self._right.poll()
        except WatcherUnavailable:
            return None


class Sticky(Wrapped):
    """Once told, never taken back."""

    def poll(self) -> ReclaimNotice | None:
        self._last = self._right.poll() or self._last
        return self._last


def one_second(fake: FakeAzureMetadata, clock: Clock) -> Watcher:
    """Gives the first call no more time than the others."""
    return watcher_of(fake, clock, first_timeout_s=1.0)


def restarts_stop(fake: FakeAzureMetadata, clock: Clock) -> Watcher:
    """Takes a restart for certain from the first word on."""
    return watcher_of(fake, clock, near_s=10 * DAY_S)


@pytest.mark.parametrize(
    ("wrong", "name", "more"),
    [
        (AnyPreemptIsMine, "test_another_vms_event", {}),
        (Naive, "test_another_vms_event", {}),
        (Naive, "test_freeze_taken_for_eviction", {}),
        (one_second, "test_first_call_slow", {"monkeypatch": True}),
        (BlindIsNothing, "test_429_while_many_processes_ask", {}),
        (BlindIsNothing, "test_410_while_the_service_is_updated", {}),
        (BlindIsNothing, "test_truncated_json", {}),
        (ScheduledOnly, "test_event_straight_to_started", {}),
        (Sticky, "test_cancelled", {}),
        (Naive, "test_stale", {"kind": "Preempt"}),
        (OneDate, "test_both_dates", {"iso": True}),
        (Naive, "test_a_proxy_in_the_environment", {"monkeypatch": True}),
        (restarts_stop, "test_a_restart_in_days", {"kind": "Reboot"}),
        (Naive, "test_a_restart_that_is_just_over", {"kind": "Reboot"}),
    ],
)
def test_a_wrong_watcher_fails_the_test_that_is_named_for_it(
    *,
    wrong: Callable[[FakeAzureMetadata, Clock], Watcher],
    name: str,
    more: dict[str, Any],
    azure: FakeAzureMetadata,
    clock: ManualClock,
    monkeypatch: pytest.MonkeyPatch,
):
    """Each of these tests can fail, and does for the watcher that it is about."""

    class Suite(TestFailureModes):
        def make(self, fake: FakeAzureMetadata, clock: Clock) -> Watcher:
            return wrong(fake, clock)

    for variable in PROXIES:  # of whoever runs the tests: some of these would follow them
        monkeypatch.delenv(variable, raising=False)
    if "monkeypatch" in more:
        more = {**more, "monkeypatch": monkeypatch}
    with pytest.raises((AssertionError, pytest.fail.Exception, WatcherUnavailable, ValueError)):
        getattr(Suite(), name)(azure=azure, clock=clock, **more)


class TestNotice:
    def test_a_vm_without_events(self, azure: FakeAzureMetadata, watcher: AzureWatcher):
        """An empty list is the normal state; the VM's name is asked for once, and every request has the header."""
        assert [watcher.poll(), watcher.poll()] == [None, None]
        assert [request.path for request in azure.requests] == [EVENTS_PATH, NAME_PATH, EVENTS_PATH]
        assert {request.headers["metadata"] for request in azure.requests} == {"true"}
        assert all("x-forwarded-for" not in request.headers for request in azure.requests)

    @pytest.mark.parametrize(("kind", "left_s"), [("Preempt", 25.0), ("Terminate", 600.0)])
    def test_what_deletes_the_vm(
        self, kind: str, left_s: float, azure: FakeAzureMetadata, watcher: AzureWatcher
    ):
        """A RECLAIM as soon as it is seen, until the time that it names."""
        azure.schedule(kind, in_seconds=left_s)
        notice = polled(watcher)
        assert (notice.source, notice.kind, notice.action) == ("azure", NoticeKind.RECLAIM, kind)
        assert (notice.received, notice.deadline) == (1000.0, 1000.0 + left_s)

    def test_the_deadline_does_not_move(
        self, azure: FakeAzureMetadata, watcher: AzureWatcher, clock: ManualClock
    ):
        """The same document is the same notice, and so is the same event in another document."""
        azure.schedule("Preempt")
        first = polled(watcher)
        clock.advance(10.0)
        assert polled(watcher) == first
        azure.schedule("Freeze", resources=["trainer_5"])
        assert polled(watcher) == first

    def test_a_document_of_the_same_incarnation_says_the_same(
        self, azure: FakeAzureMetadata, watcher: AzureWatcher, clock: ManualClock
    ):
        """A time that moves without a word of it is not believed; with one it is."""
        azure.faults.document = document(7, event(NotBefore="Tue, 14 Nov 2023 22:13:40 GMT"))
        first = polled(watcher)
        clock.advance(1.0)
        azure.faults.document = document(7, event(NotBefore="Tue, 14 Nov 2023 22:13:45 GMT"))
        assert polled(watcher) == first
        azure.faults.document = document(8, event(NotBefore="Tue, 14 Nov 2023 22:13:30 GMT"))
        assert polled(watcher).deadline == 1010.0

    def test_an_event_that_starts_before_its_time(
        self, azure: FakeAzureMetadata, watcher: AzureWatcher, clock: ManualClock
    ):
        """Somebody approved it: there is no time left."""
        terminate = azure.schedule("Terminate", in_seconds=600.0)
        polled(watcher)
        clock.advance(60.0)
        azure.start_event(terminate)
        started = polled(watcher)
        assert (started.kind, started.received, started.deadline) == (NoticeKind.RECLAIM, 1060.0, 1060.0)
        azure.finish(terminate)
        assert watcher.poll() is None

    def test_a_restart_that_was_seen_coming_and_starts(
        self, azure: FakeAzureMetadata, watcher: AzureWatcher, clock: ManualClock
    ):
        """Though it was there at the first look, Scheduled then."""
        reboot = azure.schedule("Reboot")
        assert polled(watcher).kind is NoticeKind.RISK
        clock.advance(30.0)
        azure.start_event(reboot)
        started = polled(watcher)
        assert (started.kind, started.deadline) == (NoticeKind.RECLAIM, 1030.0)

    def test_a_start_is_seen_by_its_status_alone(
        self, azure: FakeAzureMetadata, watcher: AzureWatcher, clock: ManualClock
    ):
        """An event that never had a time starts."""
        azure.faults.document = document(1, event(EventType="Redeploy", NotBefore=""))
        assert polled(watcher).kind is NoticeKind.RISK
        clock.advance(30.0)
        azure.faults.document = document(2, event(EventType="Redeploy", NotBefore="", EventStatus="Started"))
        started = polled(watcher)
        assert (started.kind, started.deadline) == (NoticeKind.RECLAIM, 1030.0)

    def test_what_ends_first_is_told(self, azure: FakeAzureMetadata, watcher: AzureWatcher):
        """A RECLAIM goes before a RISK, and the earlier before the later."""
        azure.schedule("Freeze")
        azure.schedule("Terminate", in_seconds=600.0)
        azure.schedule("Preempt", in_seconds=30.0)
        assert polled(watcher).action == "Preempt"

    def test_a_freeze_that_interrupts_nothing(self, azure: FakeAzureMetadata, watcher: AzureWatcher):
        """An update of the network, for instance, is not even a risk."""
        azure.schedule("Freeze", duration_s=0)
        assert watcher.poll() is None

    def test_a_kind_that_nobody_knows_yet(self, azure: FakeAzureMetadata, watcher: AzureWatcher):
        """Something is going to happen to this VM."""
        azure.schedule("Evaporate")
        notice = polled(watcher)
        assert (notice.kind, notice.action) == (NoticeKind.RISK, "Evaporate")

    @pytest.mark.parametrize("said", ["", "soon", None, 12])
    def test_an_event_without_a_usable_time(
        self, said: object, azure: FakeAzureMetadata, watcher: AzureWatcher
    ):
        """What deletes the VM is certain all the same; a restart may be days away."""
        azure.faults.document = document(1, event(NotBefore=said))
        preempt = polled(watcher)
        assert (preempt.kind, preempt.deadline) == (NoticeKind.RECLAIM, None)
        azure.faults.document = document(2, event(EventId="2", EventType="Reboot", NotBefore=said))
        reboot = polled(watcher)
        assert (reboot.kind, reboot.deadline) == (NoticeKind.RISK, None)


class TestClocks:
    @pytest.mark.parametrize("skew_s", [-100_000.0, -600.0, 600.0, 100_000.0])
    def test_a_wrong_wall_clock_of_this_machine_changes_nothing(
        self, skew_s: float, azure: FakeAzureMetadata
    ):
        """The time left is counted by the service's own clock, which its answers carry."""
        azure.schedule("Preempt", in_seconds=20.0)
        assert polled(watcher_of(azure, ManualClock(wall=WALL + skew_s))).deadline == 1020.0

    @pytest.mark.parametrize("kind", ["Preempt", "Terminate"])
    def test_no_more_is_believed_than_what_is_promised(
        self, kind: str, azure: FakeAzureMetadata, watcher: AzureWatcher
    ):
        """Whatever the time says."""
        azure.schedule(kind, in_seconds=100_000.0)
        assert polled(watcher).deadline == 1000.0 + azure_events.LONGEST_NOTICE_S[kind]

    def test_a_restart_is_told_a_week_ahead_at_most(self, azure: FakeAzureMetadata, watcher: AzureWatcher):
        """More is a mistake of somebody's clock."""
        azure.schedule("Reboot", in_seconds=30 * DAY_S)
        assert polled(watcher).deadline == 1000.0 + 7 * DAY_S

    def test_a_time_just_past_is_now(self, azure: FakeAzureMetadata, watcher: AzureWatcher):
        """Azure waits for others that the event concerns; it comes at any moment."""
        azure.faults.stuck = True
        azure.schedule("Preempt", in_seconds=-20.0)
        assert polled(watcher).deadline == 1000.0


class TestName:
    def test_until_it_is_known_nothing_can_be_judged(self, azure: FakeAzureMetadata, watcher: AzureWatcher):
        """Not "nothing is announced": nobody knows. It is asked again, and the event is seen."""
        azure.schedule("Preempt")
        azure.faults.refuse_instance = 404
        for _ in range(2):
            with pytest.raises(WatcherUnavailable, match="404"):
                watcher.poll()
        azure.faults.refuse_instance = None
        assert polled(watcher).action == "Preempt"
        watcher.poll()
        assert [request.place.startswith(INSTANCE) for request in azure.requests].count(True) == 3

    def test_what_is_no_name(self, clock: ManualClock):
        """A name that no event can ever have would be the end of all watching."""
        with FakeAzureMetadata(clock=clock, name="<html> no such page") as fake:
            watcher = watcher_of(fake, clock)
            with pytest.raises(WatcherUnavailable, match="is no name"):
                watcher.poll()


class TestFailures:
    @pytest.mark.parametrize(
        ("status", "why"),
        [
            (400, "malformed"),
            (403, "forbids"),
            (404, "knows of no such thing"),
            (405, "does not offer"),
            (410, "updated"),
            (429, "five requests a second"),
            (500, "500"),
            (503, "503"),
            (302, "302"),
        ],
    )
    def test_an_error_status_is_unavailable_with_a_reason(
        self, status: int, why: str, azure: FakeAzureMetadata, watcher: AzureWatcher
    ):
        """Whether or not it is worth another try: it may be another service's, or a moment's."""
        azure.faults.refuse_all = status
        with pytest.raises(WatcherUnavailable, match=why):
            watcher.poll()

    @pytest.mark.parametrize(
        "body",
        [
            "",
            "<html>",
            "[]",
            "{}",
            "null",
            '{"DocumentIncarnation": 1}',
            '{"DocumentIncarnation": "1", "Events": []}',
            '{"DocumentIncarnation": true, "Events": []}',
            '{"DocumentIncarnation": 1, "Events": {}}',
            '{"DocumentIncarnation": 1, "Events": ' + "[" * 20_000,
        ],
    )
    def test_a_body_of_another_kind_is_unavailable(
        self, body: str, azure: FakeAzureMetadata, watcher: AzureWatcher
    ):
        """200 with something else than the documented JSON: a portal, an imitation, a change."""
        azure.faults.document = body
        with pytest.raises(WatcherUnavailable, match="not a document"):
            watcher.poll()

    @pytest.mark.parametrize(
        "broken",
        [
            None,
            "Preempt",
            {},
            {"EventId": 5},
            {"EventType": ""},
            {"EventStatus": "Completed"},
            {"EventStatus": ["Started"]},
            {"Resources": None},
            {"Resources": "trainer_6"},
            {"Resources": [6]},
        ],
    )
    def test_an_event_that_makes_no_sense(
        self, broken: object, azure: FakeAzureMetadata, watcher: AzureWatcher
    ):
        """It may be this VM's: nobody knows. It hides no other that ends the VM."""
        wrong = event(**broken) if isinstance(broken, dict) and broken else broken
        azure.faults.document = document(1, wrong)
        with pytest.raises(WatcherUnavailable, match="make no sense"):
            watcher.poll()
        azure.faults.document = document(2, wrong, event(EventId="2", EventType="Terminate"))
        assert polled(watcher).action == "Terminate"

    def test_a_service_that_hangs_is_let_go_of_at_the_end(self, azure: FakeAzureMetadata, clock: ManualClock):
        """Closing ends the first call, however slow: a process that ends waits for nobody."""
        azure.faults.first_call_s = 120.0
        watcher = watcher_of(azure, clock)
        found = in_background(watcher.poll)
        clock.await_waiters()
        watcher.close()
        with pytest.raises(WatcherUnavailable):
            found()

    def test_a_watch_lives_through_all_of_it(self, azure: FakeAzureMetadata, clock: ManualClock):
        """A slow first call, errors, a dead service: blind twice, recovered twice, and the notice is seen."""
        sink = RecordingSink()
        watch = Watch([watcher_of(azure, clock)], emit=sink.emit, clock=clock)
        azure.faults.first_call_s = 20.0
        azure.fail_next(410, times=3)
        watch.start()
        pump(clock, until=lambda: len(sink.of(WatcherRecovered)) == 1)
        azure.stop()
        pump(clock, until=lambda: len(sink.of(WatcherBlind)) == 2)
        azure.schedule("Preempt", started=True)
        azure.start()
        pump(clock, until=lambda: len(sink.of(NoticeReceived)) == 1)
        assert watch.notice is not None
        pump(clock, until=lambda: len(sink.of(WatcherRecovered)) == 2)
        assert sink.of(NoticeCancelled) == []
        azure.cancel()
        pump(clock, until=lambda: len(sink.of(NoticeCancelled)) == 1)
        watch.stop()


def pump(clock: ManualClock, *, until: Callable[[], bool]) -> None:
    """Let the clock run until something has happened."""
    deadline = time.monotonic() + 30
    while not until():
        assert time.monotonic() < deadline
        clock.await_waiters(1)
        clock.advance(5.0)
        time.sleep(0.001)


class TestAcknowledging:
    def test_it_is_off_unless_asked_for(self, azure: FakeAzureMetadata, watcher: AzureWatcher):
        """An approval shortens what time there is."""
        azure.schedule("Preempt")
        polled(watcher)
        assert watcher.acknowledge() == ()
        assert azure.approved == []

    def test_an_event_of_this_vm_alone_is_approved(self, azure: FakeAzureMetadata, clock: ManualClock):
        """It starts; and what has started needs no word."""
        watcher = watcher_of(azure, clock, acknowledges=True)
        assert watcher.acknowledge() == ()
        event_id = azure.schedule("Terminate", resources=["Trainer_6"])
        polled(watcher)
        assert watcher.acknowledge() == (event_id,)
        assert azure.approved == [event_id]
        assert polled(watcher).deadline == 1000.0
        assert watcher.acknowledge() == ()

    @pytest.mark.parametrize(
        ("kind", "resources"),
        [
            ("Preempt", ["trainer_6", "trainer_5"]),
            ("Preempt", ["trainer_5"]),
            ("Freeze", ["trainer_6"]),
            ("Reboot", ["trainer_6"]),
        ],
    )
    def test_nobody_elses_and_nothing_that_the_vm_outlives(
        self, kind: str, resources: list[str], azure: FakeAzureMetadata, clock: ManualClock
    ):
        """An approval counts for every VM that the event concerns."""
        watcher = watcher_of(azure, clock, acknowledges=True)
        azure.schedule(kind, resources=resources)
        watcher.poll()
        assert watcher.acknowledge() == ()
        assert azure.approved == []

    def test_an_approval_that_is_refused_is_said(self, azure: FakeAzureMetadata, clock: ManualClock):
        """The caller learns that the event still waits for its time."""
        watcher = watcher_of(azure, clock, acknowledges=True)
        azure.schedule("Preempt")
        polled(watcher)
        azure.fail_next(500)
        with pytest.raises(WatcherUnavailable, match="500"):
            watcher.acknowledge()


class TestEnvironment:
    def test_the_endpoint(self, azure: FakeAzureMetadata, monkeypatch: pytest.MonkeyPatch):
        """Our variable, else the address; the process's environment is the default."""
        assert endpoint_of({}) == endpoint_of({"SPOTSAFE_AZURE_METADATA": " "}) == ENDPOINT
        for name, value in azure.environ.items():
            monkeypatch.setenv(name, value)
        assert AzureWatcher().endpoint == azure.url
        assert AzureWatcher("http://127.0.0.1:1").endpoint == "http://127.0.0.1:1"

    @pytest.mark.parametrize("wrong", ["169.254.169.254", "https://127.0.0.1"])
    def test_a_variable_that_is_no_url(self, wrong: str, clock: ManualClock):
        """The mistake is named at the start."""
        with pytest.raises(ValueError, match="write it like"):
            from_environment({"SPOTSAFE_AZURE_METADATA": wrong}, dmi=lambda _: "", clock=clock)

    @pytest.mark.parametrize(
        ("vendor", "tag", "expected"),
        [
            ("Microsoft Corporation", "7783-7084-3265-9085-8269-3286-77", True),
            ("Microsoft Corporation", "", False),
            ("Microsoft Corporation", "5319-2275-1123-8210-1234-5678-90", False),
            ("Amazon EC2", "7783-7084-3265-9085-8269-3286-77", False),
            ("", "", False),
        ],
    )
    def test_azure_is_told_by_its_firmware(self, vendor: str, tag: str, expected: bool, clock: ManualClock):
        """Vendor and asset tag together: Hyper-V is Microsoft's too. No network is needed."""
        fields = {"sys_vendor": vendor, "chassis_asset_tag": tag}

        def dmi(field: str) -> str:
            return fields.get(field, "")

        assert is_azure(dmi) is expected
        assert (from_environment({}, dmi=dmi, clock=clock) is not None) is expected

    def test_the_variable_turns_it_on_anywhere(self, clock: ManualClock):
        """Whatever the firmware says."""
        found = from_environment(
            {"SPOTSAFE_AZURE_METADATA": "http://127.0.0.1:1"}, dmi=lambda _: "", clock=clock
        )
        assert found is not None
        assert found.endpoint == "http://127.0.0.1:1"

    def test_seconds_that_are_none(self):
        """A mistake of the caller."""
        with pytest.raises(ValueError, match="0 or more"):
            AzureWatcher(environ={}, near_s=-1.0)


def event(**members: object) -> dict[str, object]:
    """An event as the service writes it, with other members than usual."""
    return {
        "EventId": "1",
        "EventType": "Preempt",
        "EventStatus": "Scheduled",
        "ResourceType": "VirtualMachine",
        "Resources": ["trainer_6"],
        "NotBefore": "Tue, 14 Nov 2023 22:13:50 GMT",
        **members,
    }


def document(incarnation: int, *events: object) -> str:
    return json.dumps({"DocumentIncarnation": incarnation, "Events": list(events)})
