"""Asks every source for notices in the background, for as long as the process lives.

Each source has a daemon thread of its own: one that hangs (a hanging GET, a first call that takes two
minutes) delays no other, and whatever it raises is counted, reported once, and answered by asking again.
`Watch` holds the result in two plain attributes, which a training loop reads at no cost.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from spotsafe.clock import Clock, SystemClock
from spotsafe.events import Event, NoticeCancelled, NoticeReceived, WatcherBlind, WatcherRecovered
from spotsafe.reclaim.notice import NoticeKind, ReclaimNotice, is_more_urgent, most_urgent

FIRST_RETRY_S = 0.5
"""Seconds until a source that failed is asked again. Doubled at each failure in a row."""
LONGEST_RETRY_S = 5.0
"""Seconds between two tries at most: longer than this must no source stay unasked."""
SHORTEST_PAUSE_S = 0.05
"""Seconds between two polls at least, so that a hanging GET that does not hang cannot eat a core."""
_JOIN_S = 1.0


@runtime_checkable
class Watcher(Protocol):
    """One source of notices. `spotsafe.testing.watchers.WatcherConformance` proves an implementation.

    All calls of `poll` come from one thread. It may take as long as the source needs: nothing waits for it.
    """

    name: str
    """Short and stable; stands in notices, events and the start line."""
    interval_s: float
    """Seconds between the end of one poll and the next; 0 for a source whose poll itself waits for news."""

    def poll(self) -> ReclaimNotice | None:
        """Ask once. None: nothing is announced now, and what was announced before is cancelled.

        A notice that has not changed since the last poll is returned equal to the last one: `received` and
        `deadline` stay what they were when it was first seen.

        Raises:
            WatcherUnavailable: the source could not be asked, or gave an answer that makes no sense.
        """
        ...

    def close(self) -> None:
        """Give up what is held, and end a poll in progress. Called by any thread, maybe more than once."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WatcherHealth:
    """How the asking of one source goes."""

    answers: int
    failures: int
    failures_in_a_row: int
    """0: the last try was answered."""
    last_error: str | None


class Watch:
    """Owns the threads that poll, and the notices in force.

    Attributes:
        notice: the RECLAIM that ends first, else None. A plain attribute, to be read at any rate by any
            thread.
        risk: the same for RISK.
        sources: names of what can announce a notice, in the order in which it was added.
    """

    notice: ReclaimNotice | None
    risk: ReclaimNotice | None
    sources: tuple[str, ...]

    def __init__(
        self,
        watchers: Sequence[Watcher],
        *,
        emit: Callable[[Event], None],
        clock: Clock | None = None,
        grace_s: float | None = None,
    ) -> None:
        """Nothing runs before `start`.

        Args:
            watchers: the sources to poll.
            emit: receives the events, in a thread of this object's own and in their order.
            clock: for intervals and deadlines.
            grace_s: seconds that the user knows to remain after any RECLAIM; limits every deadline.
        """
        self.notice = None
        self.risk = None
        self.sources = tuple(each.name for each in watchers)
        self._emit = emit
        self._clock: Clock = SystemClock() if clock is None else clock
        self._grace_s = grace_s
        # SimpleQueue.put is the one hand-over that a signal handler may use: it is reentrant and never waits.
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._polls = [
            _Poll(each, answered=self._answered, post=self._events.put, clock=self._clock)
            for each in watchers
        ]
        self._stopped = threading.Event()
        self._lock = threading.Lock()  # between pollers only; `report` must do without
        self._polled: dict[int, ReclaimNotice] = {}
        self._pushed: dict[tuple[str, NoticeKind], ReclaimNotice] = {}
        self._numbers = itertools.count(1)
        self._change = 0
        self._pid = os.getpid()
        self._threads: list[threading.Thread] = []

    def add_source(self, name: str) -> None:
        """Name a source that is not polled but calls `report`, like a signal."""
        if name not in self.sources:
            self.sources = (*self.sources, name)

    def start(self) -> None:
        """Start polling, and return at once. A second call does nothing."""
        if self._threads or self._stopped.is_set():
            return
        self._threads = [threading.Thread(target=self._run_events, name="spotsafe-watch", daemon=True)]
        for each in self._polls:
            name = f"spotsafe-watch-{each.watcher.name}"
            self._threads.append(
                threading.Thread(target=each.run, args=(self._stopped,), name=name, daemon=True)
            )
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop polling; notices in force stay readable. A source that hangs on is left behind after a second.

        Does nothing in a forked child, where the threads do not exist.
        """
        if self._stopped.is_set() or os.getpid() != self._pid:
            return
        self._stopped.set()
        for each in self._polls:
            each.close()
        self._events.put(None)
        if not self._threads:
            self._run_events()
        give_up = time.monotonic() + _JOIN_S
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, give_up - time.monotonic()))

    def report(self, notice: ReclaimNotice) -> None:
        """Take a notice that a source pushes. It is in force when this returns, and is never cancelled.

        May be called by a signal handler: it takes no lock and calls no sink. A notice that is not more
        urgent than the last one of the same source and kind changes nothing.
        """
        notice = self._limited(notice)
        key = (notice.source, notice.kind)
        if is_more_urgent(notice, self._pushed.get(key)):
            self._pushed[key] = notice
            self._settle()
            self._events.put(self._received(notice))

    @property
    def signalled(self) -> bool:
        """Whether a RECLAIM was pushed, as by a signal: whoever ends this process knows of it."""
        return any(kind is NoticeKind.RECLAIM for _, kind in self._pushed.copy())

    def health(self) -> Mapping[str, WatcherHealth]:
        """For each polled source, how often it answered and failed."""
        return {each.watcher.name: each.health for each in self._polls}

    def _answered(self, poll: _Poll, notice: ReclaimNotice | None) -> None:
        """Take what a poll returned: a new notice, the same again, or nothing."""
        with self._lock:
            before = self._polled.get(id(poll))
            if notice is not None:
                notice = self._limited(notice)
            if self._stopped.is_set() or notice == before:
                return
            if notice is None:
                del self._polled[id(poll)]
            else:
                self._polled[id(poll)] = notice
            self._settle()
            if before is not None and _is_taken_back(before, notice):
                self._events.put(NoticeCancelled(source=before.source))
            if notice is not None:
                self._events.put(self._received(notice))

    def _settle(self) -> None:
        """Work out what is in force after a change, without a lock.

        Threads and signal handlers may do so at the same time. Each numbers its change first, and starts
        again when another number has appeared meanwhile, so the last one to write has seen every change.
        """
        mine = self._change = next(self._numbers)
        while True:
            known = [*self._polled.copy().values(), *self._pushed.copy().values()]
            self.notice = most_urgent(known, NoticeKind.RECLAIM)
            self.risk = most_urgent(known, NoticeKind.RISK)
            if self._change == mine:
                return
            mine = self._change

    def _limited(self, notice: ReclaimNotice) -> ReclaimNotice:
        if self._grace_s is None or notice.kind is NoticeKind.RISK:
            return notice
        return notice.ending_by(notice.received + self._grace_s)

    def _received(self, notice: ReclaimNotice) -> NoticeReceived:
        return NoticeReceived(
            source=notice.source,
            kind=notice.kind.value,
            action=notice.action,
            seconds_left=notice.seconds_left(self._clock.monotonic()),
        )

    def _run_events(self) -> None:
        """Hand events to `emit` until a None comes. A sink that fails is `Fanout`'s to report."""
        while (event := self._events.get()) is not None:
            with contextlib.suppress(Exception):
                self._emit(event)


def _is_taken_back(before: ReclaimNotice, now: ReclaimNotice | None) -> bool:
    """Whether a source's new answer withdraws its last one, rather than sharpening it."""
    return now is None or (before.kind is NoticeKind.RECLAIM and now.kind is NoticeKind.RISK)


class _Poll:
    """The endless asking of one source."""

    def __init__(
        self,
        watcher: Watcher,
        *,
        answered: Callable[[_Poll, ReclaimNotice | None], None],
        post: Callable[[Event], None],
        clock: Clock,
    ) -> None:
        self.watcher = watcher
        self.health = WatcherHealth(answers=0, failures=0, failures_in_a_row=0, last_error=None)
        self._answered = answered
        self._post = post
        self._clock = clock

    def run(self, stopped: threading.Event) -> None:
        """Poll until `stopped` is set. Nothing that the source does ends this loop."""
        while not stopped.is_set():
            self._clock.wait(stopped, max(self._once(stopped), SHORTEST_PAUSE_S))

    def close(self) -> None:
        """Close the source; one that fails to close must not keep the process from ending."""
        with contextlib.suppress(Exception):
            self.watcher.close()

    def _once(self, stopped: threading.Event) -> float:
        """Poll once; returns the seconds until the next time."""
        try:
            self._answered(self, self.watcher.poll())
            pause = float(self.watcher.interval_s)
        except BaseException as error:  # noqa: BLE001 - even SystemExit in a source must not end the watching
            return 0.0 if stopped.is_set() else self._failed(error)
        self._succeeded()
        return pause

    def _failed(self, error: BaseException) -> float:
        text = f"{type(error).__name__}: {error}"
        row = self.health.failures_in_a_row + 1
        failures = self.health.failures + 1
        self.health = replace(self.health, failures=failures, failures_in_a_row=row, last_error=text)
        if row == 1:
            self._post(WatcherBlind(source=self.watcher.name, error=text))
        return min(FIRST_RETRY_S * 2.0 ** min(row - 1, 10), LONGEST_RETRY_S)

    def _succeeded(self) -> None:
        was_blind = self.health.failures_in_a_row > 0
        self.health = replace(self.health, answers=self.health.answers + 1, failures_in_a_row=0)
        if was_blind:
            self._post(WatcherRecovered(source=self.watcher.name))
