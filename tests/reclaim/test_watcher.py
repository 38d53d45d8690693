"""The watch never dies, never blocks and never forgets."""

from __future__ import annotations

import os
import threading
import time
import timeit

import pytest

from spotsafe.errors import WatcherUnavailable
from spotsafe.events import (
    Event,
    NoticeCancelled,
    NoticeReceived,
    WatcherBlind,
    WatcherRecovered,
)
from spotsafe.reclaim.notice import NoticeKind, ReclaimNotice
from spotsafe.reclaim.watcher import LONGEST_RETRY_S, Watch, Watcher
from spotsafe.testing.clock import ManualClock
from spotsafe.testing.sinks import RecordingSink
from spotsafe.testing.watchers import ScriptedWatcher


def notice(
    *,
    source: str = "scripted",
    deadline: float | None = None,
    received: float = 1000.0,
    kind: NoticeKind = NoticeKind.RECLAIM,
    action: str = "terminate",
) -> ReclaimNotice:
    return ReclaimNotice(source=source, kind=kind, action=action, deadline=deadline, received=received)


RISK = notice(kind=NoticeKind.RISK, action="rebalance")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def sink() -> RecordingSink:
    return RecordingSink()


class Watching:
    """A started watch, whose threads wait on the manual clock between polls."""

    def __init__(
        self, *watchers: Watcher, clock: ManualClock, sink: RecordingSink, grace_s: float | None = None
    ):
        self.clock, self.waiters = clock, len(watchers)
        self.watch = Watch(watchers, emit=sink.emit, clock=clock, grace_s=grace_s)

    def __enter__(self) -> Watching:
        self.watch.start()
        self.settle()
        return self

    def __exit__(self, *_: object) -> None:
        self.watch.stop()

    def settle(self) -> None:
        """Until every watcher has been polled and waits for its next time."""
        self.clock.await_waiters(self.waiters)

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.settle()


def polled(watcher: ScriptedWatcher, watching: Watching, seconds: float, *, times: int) -> None:
    """Let `seconds` pass, until the watcher has been polled `times` times in all."""
    watching.clock.advance(seconds)
    deadline = time.monotonic() + 30
    while watcher.polls < times and time.monotonic() < deadline:
        time.sleep(0.001)
    assert watcher.polls == times
    watching.settle()


def test_a_notice_is_in_force_until_it_is_taken_back(clock: ManualClock, sink: RecordingSink):
    """What a poll returns is readable as an attribute; None at a later poll withdraws it."""
    watcher = ScriptedWatcher(None)
    with Watching(watcher, clock=clock, sink=sink) as on:
        assert on.watch.notice is None
        said = notice(deadline=1120.0)
        watcher.then(said)
        polled(watcher, on, 1.0, times=2)
        assert on.watch.notice == said
        [received] = sink.wait_for(NoticeReceived)
        assert (received.source, received.kind, received.action) == ("scripted", "reclaim", "terminate")
        assert received.seconds_left == 119.0
        watcher.then(None)
        polled(watcher, on, 1.0, times=3)
        assert on.watch.notice is None
        assert sink.wait_for(NoticeCancelled) == [NoticeCancelled(source="scripted")]


def test_the_same_notice_is_told_once(clock: ManualClock, sink: RecordingSink):
    """A source that repeats itself every second makes one event."""
    watcher = ScriptedWatcher(notice())
    with Watching(watcher, clock=clock, sink=sink) as on:
        for times in range(2, 6):
            polled(watcher, on, 1.0, times=times)
    assert len(sink.of(NoticeReceived)) == 1


def test_a_changed_notice_is_told_again_and_not_as_cancelled(clock: ManualClock, sink: RecordingSink):
    """A source that moves its deadline sharpens its notice; it withdraws nothing."""
    watcher = ScriptedWatcher(notice(deadline=1120.0), notice(deadline=1030.0))
    with Watching(watcher, clock=clock, sink=sink) as on:
        polled(watcher, on, 1.0, times=2)
        assert on.watch.notice is not None
        assert on.watch.notice.deadline == 1030.0
    assert len(sink.of(NoticeReceived)) == 2
    assert sink.of(NoticeCancelled) == []


def test_a_risk_stops_nothing(clock: ManualClock, sink: RecordingSink):
    """A RISK stands in its own attribute; `notice` stays None."""
    with Watching(ScriptedWatcher(RISK), clock=clock, sink=sink) as on:
        assert on.watch.notice is None
        assert on.watch.risk == RISK


def test_a_risk_that_becomes_certain_is_not_cancelled(clock: ManualClock, sink: RecordingSink):
    """From RISK to RECLAIM nothing is taken back; from RECLAIM to RISK the reclaim is."""
    watcher = ScriptedWatcher(RISK, notice(), RISK)
    with Watching(watcher, clock=clock, sink=sink) as on:
        polled(watcher, on, 1.0, times=2)
        assert (on.watch.notice, on.watch.risk) == (notice(), None)
        assert sink.of(NoticeCancelled) == []
        polled(watcher, on, 1.0, times=3)
        assert (on.watch.notice, on.watch.risk) == (None, RISK)
        sink.wait_for(NoticeReceived, count=3)
    assert sink.names == ["NoticeReceived", "NoticeReceived", "NoticeCancelled", "NoticeReceived"]


def test_the_most_urgent_of_several_sources_is_in_force(clock: ManualClock, sink: RecordingSink):
    """Two sources announce: the earlier deadline counts, and the other one when that is gone."""
    late = ScriptedWatcher(notice(source="late", deadline=1120.0), name="late")
    soon = ScriptedWatcher(notice(source="soon", deadline=1030.0), name="soon")
    with Watching(late, soon, clock=clock, sink=sink) as on:
        assert on.watch.sources == ("late", "soon")
        assert on.watch.notice is not None
        assert on.watch.notice.source == "soon"
        soon.then(None)
        polled(soon, on, 1.0, times=2)
        assert on.watch.notice.source == "late"


def test_two_watchers_of_one_name_do_not_disturb_each_other(clock: ManualClock, sink: RecordingSink):
    """Two files to watch: the silence of one does not cancel the notice of the other."""
    silent, loud = ScriptedWatcher(None, name="file"), ScriptedWatcher(notice(source="file"), name="file")
    with Watching(loud, silent, clock=clock, sink=sink) as on:
        polled(silent, on, 1.0, times=2)
        assert on.watch.notice is not None


@pytest.mark.parametrize(
    "error",
    [
        WatcherUnavailable("no answer", source="scripted"),
        ZeroDivisionError("a bug"),
        MemoryError(),
        SystemExit(3),
        KeyboardInterrupt(),
        GeneratorExit(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_nothing_that_a_watcher_raises_ends_the_watching(
    error: BaseException, clock: ManualClock, sink: RecordingSink
):
    """Whatever is raised, the source is asked again, and its notice is seen when it comes."""
    watcher = ScriptedWatcher(error)
    with Watching(watcher, clock=clock, sink=sink) as on:
        [blind] = sink.wait_for(WatcherBlind)
        assert blind.source == "scripted"
        assert type(error).__name__ in blind.error
        watcher.then(notice())
        polled(watcher, on, 0.5, times=2)
        assert on.watch.notice == notice()
        assert sink.wait_for(WatcherRecovered) == [WatcherRecovered(source="scripted")]


def test_blindness_is_told_once_however_long_it_lasts(clock: ManualClock, sink: RecordingSink):
    """Many failures in a row are one event, and one more when it is over; a second time is told again."""
    broken = WatcherUnavailable("503", source="scripted")
    watcher = ScriptedWatcher(broken)
    with Watching(watcher, clock=clock, sink=sink) as on:
        for times in range(2, 12):
            polled(watcher, on, LONGEST_RETRY_S, times=times)
        assert len(sink.of(WatcherBlind)) == 1
        health = on.watch.health()["scripted"]
        assert (health.failures, health.failures_in_a_row, health.answers) == (11, 11, 0)
        assert health.last_error == "WatcherUnavailable: 503"
        watcher.then(None, broken, None)
        for times in range(12, 15):
            polled(watcher, on, LONGEST_RETRY_S, times=times)
        sink.wait_for(WatcherRecovered, count=2)
        health = on.watch.health()["scripted"]
        assert (health.failures, health.failures_in_a_row, health.answers) == (12, 0, 2)
    assert sink.names == ["WatcherBlind", "WatcherRecovered"] * 2


def test_a_failing_source_is_asked_less_and_less_often_but_never_less_than_every_five_seconds(
    clock: ManualClock, sink: RecordingSink
):
    """Retries come after 0.5, 1, 2, 4, 5, 5 ... seconds, not earlier and not later."""
    watcher = ScriptedWatcher(WatcherUnavailable("no", source="scripted"))
    with Watching(watcher, clock=clock, sink=sink) as on:
        for times, pause in enumerate([0.5, 1.0, 2.0, 4.0, 5.0, 5.0, 5.0], start=1):
            on.pass_time(pause - 0.01)
            assert watcher.polls == times
            polled(watcher, on, 0.011, times=times + 1)


def test_a_failure_does_not_cancel_a_notice(clock: ManualClock, sink: RecordingSink):
    """A source that goes blind after its notice has not taken it back."""
    watcher = ScriptedWatcher(notice(), WatcherUnavailable("gone", source="scripted"))
    with Watching(watcher, clock=clock, sink=sink) as on:
        polled(watcher, on, 1.0, times=2)
        sink.wait_for(WatcherBlind)
        assert on.watch.notice == notice()
        assert sink.of(NoticeCancelled) == []


class HangingWatcher:
    """A poll that blocks until the watcher is closed, like a hanging GET."""

    name = "hanging"
    interval_s = 0.0

    def __init__(self) -> None:
        self.entered, self.released = threading.Event(), threading.Event()
        self.late: ReclaimNotice | None = None

    def poll(self) -> ReclaimNotice | None:
        self.entered.set()
        self.released.wait()
        return self.late

    def close(self) -> None:
        self.released.set()


def test_a_source_that_hangs_delays_no_other(clock: ManualClock, sink: RecordingSink):
    """While one poll blocks, the notice of another source is seen."""
    hanging, other = HangingWatcher(), ScriptedWatcher(notice())
    watch = Watch([hanging, other], emit=sink.emit, clock=clock)
    watch.start()
    sink.wait_for(NoticeReceived)
    assert hanging.entered.wait(30)
    assert watch.notice == notice()
    watch.stop()


def test_stop_ends_a_hanging_poll_and_what_it_still_says_is_ignored(clock: ManualClock, sink: RecordingSink):
    """Stopping closes the source, waits for it, and takes no news after."""
    hanging = HangingWatcher()
    hanging.late = notice(source="hanging")
    watch = Watch([hanging], emit=sink.emit, clock=clock)
    watch.start()
    assert hanging.entered.wait(30)
    watch.stop()
    assert watch.notice is None
    assert sink.events == []


def test_stop_leaves_behind_a_source_that_cannot_be_ended(clock: ManualClock, sink: RecordingSink):
    """A poll that ignores `close` delays the end by a second, not for ever."""

    class Deaf(HangingWatcher):
        def close(self) -> None:
            raise RuntimeError("not now")

    deaf = Deaf()
    watch = Watch([deaf], emit=sink.emit, clock=clock)
    watch.start()
    assert deaf.entered.wait(30)
    began = time.monotonic()
    watch.stop()
    assert time.monotonic() - began < 10
    deaf.released.set()


def test_starting_and_stopping_twice_is_no_error(clock: ManualClock, sink: RecordingSink):
    """A second start starts nothing, a second stop stops nothing, and a stopped watch stays stopped."""
    watcher = ScriptedWatcher(None)
    watch = Watch([watcher], emit=sink.emit, clock=clock)
    before = set(threading.enumerate())
    watch.start()
    clock.await_waiters(1)
    watch.start()
    ours = set(threading.enumerate()) - before
    assert len(ours) == 2, "one for the events and one for the source"
    watch.stop()
    watch.stop()
    watch.start()
    assert not [thread for thread in threading.enumerate() if thread not in before]
    assert not any(thread.is_alive() for thread in ours)
    assert watcher.closed
    assert watcher.polls == 1


def test_a_source_without_pause_does_not_spin(clock: ManualClock, sink: RecordingSink):
    """interval_s of 0 is for polls that wait by themselves; one that returns at once is held back."""
    watcher = ScriptedWatcher(None, interval_s=0.0)
    with Watching(watcher, clock=clock, sink=sink):
        assert watcher.polls == 1


class TestReport:
    """Notices that are pushed: by signals, by tests, by the run itself."""

    def test_it_is_in_force_at_once(self, clock: ManualClock, sink: RecordingSink):
        """When `report` returns, the attribute is set, started or not."""
        watch = Watch([], emit=sink.emit, clock=clock)
        watch.report(notice(source="SIGTERM"))
        assert watch.notice == notice(source="SIGTERM")
        assert sink.events == [], "no sink may be called by whoever reports"
        watch.start()
        assert sink.wait_for(NoticeReceived)[0].source == "SIGTERM"
        watch.stop()

    def test_what_was_reported_before_a_stop_is_told_even_without_a_start(
        self, clock: ManualClock, sink: RecordingSink
    ):
        """A notice in the middle of start-up is in the log even if the start fails after it."""
        watch = Watch([], emit=sink.emit, clock=clock)
        watch.report(notice(source="SIGTERM"))
        watch.stop()
        assert sink.names == ["NoticeReceived"]

    def test_a_repetition_changes_nothing_and_a_nearer_deadline_does(
        self, clock: ManualClock, sink: RecordingSink
    ):
        """The same source again: only what is more urgent counts and is told."""
        watch = Watch([], emit=sink.emit, clock=clock)
        watch.report(notice(received=1000.0))
        watch.report(notice(received=1001.0))
        watch.report(notice(received=1002.0, deadline=1007.0))
        watch.report(notice(received=1003.0, deadline=1008.0))
        watch.report(notice(received=1004.0))
        assert watch.notice is not None
        assert watch.notice.deadline == 1007.0
        watch.stop()
        assert [event.seconds_left for event in sink.of(NoticeReceived)] == [None, 7.0]

    def test_a_poll_that_sees_nothing_does_not_cancel_it(self, clock: ManualClock, sink: RecordingSink):
        """A signal cannot be taken back by the silence of a metadata service."""
        watcher = ScriptedWatcher(None)
        with Watching(watcher, clock=clock, sink=sink) as on:
            on.watch.report(notice(source="SIGTERM"))
            watcher.then(notice(deadline=1010.0), None)
            polled(watcher, on, 1.0, times=2)
            assert on.watch.notice is not None
            assert on.watch.notice.source == "scripted"
            polled(watcher, on, 1.0, times=3)
            assert on.watch.notice.source == "SIGTERM"

    def test_a_reported_risk_is_a_risk(self, clock: ManualClock, sink: RecordingSink):
        """The kind decides which attribute it stands in."""
        watch = Watch([], emit=sink.emit, clock=clock)
        watch.report(RISK)
        assert (watch.notice, watch.risk) == (None, RISK)
        watch.stop()

    def test_many_threads_at_once_leave_the_most_urgent_in_force(
        self, clock: ManualClock, sink: RecordingSink
    ):
        """Reports need no lock: whatever the order, the earliest deadline is what stays."""
        for round_ in range(20):
            watch = Watch([], emit=sink.emit, clock=clock)
            gate = threading.Barrier(4)

            def push(first: int, watch: Watch = watch, gate: threading.Barrier = gate) -> None:
                gate.wait()
                for each in range(first, 40, 4):
                    watch.report(notice(source=f"s{each}", deadline=2000.0 + (each * 7 + 3) % 40))

            threads = [threading.Thread(target=push, args=(first,)) for first in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(30)
            assert watch.notice is not None, round_
            assert watch.notice.deadline == 2000.0, round_
            watch.stop()

    def test_names_of_sources_that_push_are_listed_once(self, clock: ManualClock, sink: RecordingSink):
        """`sources` names everything that can announce."""
        watch = Watch([ScriptedWatcher(name="aws")], emit=sink.emit, clock=clock)
        watch.add_source("SIGTERM")
        watch.add_source("SIGTERM")
        assert watch.sources == ("aws", "SIGTERM")
        watch.stop()


class TestGrace:
    """What the user knows about the time left limits what sources say."""

    def test_it_limits_polled_and_reported_reclaims(self, clock: ManualClock, sink: RecordingSink):
        """A deadline further away, or unknown, becomes received + grace; a nearer one stays."""
        watcher = ScriptedWatcher(notice(deadline=1120.0))
        with Watching(watcher, clock=clock, sink=sink, grace_s=30.0) as on:
            assert on.watch.notice is not None
            assert on.watch.notice.deadline == 1030.0
            on.watch.report(notice(source="SIGTERM", received=990.0))
            assert on.watch.notice.deadline == 1020.0
            on.watch.report(notice(source="SIGTERM", received=990.0, deadline=1001.0))
            assert on.watch.notice.deadline == 1001.0

    def test_it_says_nothing_about_a_risk(self, clock: ManualClock, sink: RecordingSink):
        """A risk has no end that a grace could bring nearer."""
        with Watching(ScriptedWatcher(RISK), clock=clock, sink=sink, grace_s=30.0) as on:
            assert on.watch.risk == RISK

    def test_a_limited_notice_is_still_told_once(self, clock: ManualClock, sink: RecordingSink):
        """The limit does not make each repetition look new."""
        watcher = ScriptedWatcher(notice(deadline=1120.0))
        with Watching(watcher, clock=clock, sink=sink, grace_s=30.0) as on:
            polled(watcher, on, 1.0, times=2)
        assert len(sink.of(NoticeReceived)) == 1


def test_a_sink_that_fails_does_not_stop_the_events(clock: ManualClock):
    """Whatever `emit` raises, the next event is handed over too."""
    seen: list[Event] = []

    def emit(event: Event) -> None:
        seen.append(event)
        raise OSError("disk full")

    watch = Watch([], emit=emit, clock=clock)
    watch.report(notice(source="one"))
    watch.report(notice(source="two"))
    watch.stop()
    assert len(seen) == 2


def test_a_sink_that_blocks_does_not_delay_the_notice(clock: ManualClock, sink: RecordingSink):
    """The attribute is set by the poller itself, not behind the queue of events."""
    entered, go_on = threading.Event(), threading.Event()

    def emit(event: Event) -> None:
        entered.set()
        go_on.wait()

    broken, good = ScriptedWatcher(ValueError("x"), name="broken"), ScriptedWatcher(None)
    watch = Watch([broken, good], emit=emit, clock=clock)
    watch.start()
    assert entered.wait(30)
    clock.await_waiters(2)
    good.then(notice())
    clock.advance(1.0)
    deadline = time.monotonic() + 30
    while watch.notice is None and time.monotonic() < deadline:
        time.sleep(0.001)
    assert watch.notice == notice()
    go_on.set()
    watch.stop()


def test_reading_the_notice_costs_next_to_nothing(sink: RecordingSink):
    """Training reads it at every step: well below a microsecond, the loop around it included."""
    watch = Watch([], emit=sink.emit)
    best = min(timeit.repeat("watch.notice", globals={"watch": watch}, number=100_000, repeat=5)) / 100_000
    watch.stop()
    assert best < 500e-9


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_stop_in_a_forked_child_leaves_the_parents_watch_alone(clock: ManualClock, sink: RecordingSink):
    """A child that inherited the object and cleans up neither hangs nor closes what the parent uses."""
    watcher = ScriptedWatcher(None)
    with Watching(watcher, clock=clock, sink=sink) as on:
        pid = os.fork()
        if pid == 0:
            on.watch.stop()
            os._exit(7 if watcher.closed else 0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        polled(watcher, on, 1.0, times=2)
