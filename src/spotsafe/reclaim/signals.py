"""SIGTERM as a notice: what launchers, Kubernetes and most clouds send before they kill.

The handler only counts and reports. It runs when the main thread comes back to Python, which a collective or
a compile can delay beyond any deadline, so a `Listener` hears the same signals in a thread of its own.

The same signal again is somebody who is losing patience: the second leaves a few seconds, and at the third the
process ends there and then, as it would have at the first without us. What is being written then is lost, and swept
by a later attempt; what is published stays. Launchers signal a process group and each process in it besides, so a
signal that follows within a second is the echo of the one before and counts for nothing.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType

from spotsafe.clock import Clock, SystemClock
from spotsafe.events import Event, Warned
from spotsafe.reclaim.listener import Listener
from spotsafe.reclaim.notice import NoticeKind, ReclaimNotice

SECOND_SIGNAL_S = 5.0
"""Seconds that are assumed to be left once the same signal comes again."""
LAST = 3
"""The signal with which whoever sends them gets what they want."""
ECHO_S = 1.0
"""Seconds for which a signal that came again is the echo of the one that counted."""

_Disposition = Callable[[int, FrameType | None], object] | int | signal.Handlers


class SignalWatch:
    """Turns signals into notices while it is installed, and leaves no trace after.

    - A handler that was there before (a Python callable) is called after ours, each time. It is the program's own
      answer to the signal, so with one the third signal ends nothing.
    - Where there was none, the signal no longer ends the process: the notice does, after the save.
    - A forked child gets back the handlers and the wakeup descriptor that it would have without us.
    - A handler that somebody installs later stays when this one is uninstalled; while it stands, only what it
      passes on to ours is seen.

    Attributes:
        sources: the signals' names, like ``SIGTERM``; empty while nothing is installed.
        active: whether it is installed.
    """

    sources: tuple[str, ...]
    active: bool

    def __init__(
        self,
        signals: Sequence[int] = (signal.SIGTERM,),
        *,
        report: Callable[[ReclaimNotice], None],
        emit: Callable[[Event], None],
        clock: Clock | None = None,
        grace_s: float | None = None,
        exit_code: int | None = None,
        leave: Callable[[int], object] = os._exit,
    ) -> None:
        """Nothing is touched before `install`.

        Args:
            signals: their numbers.
            report: takes the notice; called by a signal handler or the listener (`Watch.report`).
            emit: takes a warning, if there is one; called by `install`.
            clock: for deadlines.
            grace_s: seconds from the signal to the kill, where the user knows them.
            exit_code: with which the third signal ends the process; None: 128 and the signal's number.
            leave: ends it, without any clean-up.
        """
        self.sources = ()
        self.active = False
        self._counters = {int(each): _Counter() for each in signals}
        self._report = report
        self._emit = emit
        self._clock: Clock = SystemClock() if clock is None else clock
        self._grace_s = grace_s
        self._exit_code = exit_code
        self._leave = leave
        self._previous: dict[int, _Disposition] = {}
        self._pid = 0
        self._listener: Listener | None = None
        # One object for good: each access makes a bound method anew, and handlers are compared by identity.
        self._handler = self._handle

    @property
    def count(self) -> int:
        """How often the signals have come so far, echoes aside."""
        return sum(each.reached for each in self._counters.values())

    def install(self) -> bool:
        """Put the handlers in place. Only the main thread may; elsewhere this warns and returns False."""
        if self.active:
            return True
        if threading.current_thread() is not threading.main_thread():
            self._emit(Warned(message=self._off_main_thread()))
            return False
        self._pid = os.getpid()
        self._previous = {}
        self.active = True
        for number in self._counters:
            self._take(number)
        self.active = bool(self._previous)
        if self.active:
            self.sources = tuple(_name(number) for number in self._previous)
            _installed.append(self)
            listener = Listener(self._heard)
            self._listener = listener if listener.start() else None
        return self.active

    def uninstall(self) -> None:
        """Put back what was there before, wherever our handler still stands. A second call does nothing.

        Off the main thread nothing can be exchanged. Ours then stay, and do what the ones before would have
        done.
        """
        if not self.active or os.getpid() != self._pid:
            return
        self.active = False
        self.sources = ()
        _installed.remove(self)
        if threading.current_thread() is threading.main_thread():
            self._restore()
            if self._listener is not None:
                self._listener.stop()

    def forget_in_child(self) -> None:
        """In a forked child: hand back handlers and descriptor without waiting for a signal to come."""
        self.active = False
        self._restore()
        if self._listener is not None:
            self._listener.forget_in_child()

    def _off_main_thread(self) -> str:
        names = ", ".join(_name(number) for number in self._counters)
        return (
            f"not on the main thread: {names} will not be noticed, as only that one can handle signals; "
            "start the session there, or let a notice file or the cloud's metadata announce a reclaim"
        )

    def _take(self, number: int) -> None:
        previous = signal.getsignal(number)
        if previous is not None:
            self._previous[number] = previous
            signal.signal(number, self._handler)
            return
        message = (
            f"{_name(number)} has a handler that was not installed from Python and could not be put back; "
        )
        self._emit(Warned(message=message + "it is left alone, and the signal will not be noticed"))

    def _restore(self) -> None:
        for number in self._previous:
            if signal.getsignal(number) is self._handler:
                signal.signal(number, self.before(number))

    def before(self, number: int) -> _Disposition:
        """What stood before us for a signal, leaving out watches that have been uninstalled since."""
        previous = self._previous[number]
        below = _watch_of(previous)
        return previous if below is None or below.active else below.before(number)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """The handler. No lock, no logging: it may have interrupted the holder of any lock."""
        if not self.active or os.getpid() != self._pid:
            self._act_as_before(number, frame)
            return
        self._note(number, self._counters[number].handled(self._clock.monotonic()))
        before = self.before(number)
        if callable(before):
            before(number, frame)

    def _heard(self, number: int) -> None:
        """The listener's side. It counts only what our handler will be called for."""
        if self.active and number in self._previous and self._stands(number):
            self._note(number, self._counters[number].heard(self._clock.monotonic()))

    def _stands(self, number: int) -> bool:
        """Whether our handler is installed, or below other watches of ours that are."""
        above = _watch_of(signal.getsignal(number))
        while above is not None and above is not self:
            above = _watch_of(above.before(number))
        return above is self

    def _note(self, number: int, times: int | None) -> None:
        if times is None or not self._counters[number].first_to_reach(times):
            return
        now = self._clock.monotonic()
        notice = ReclaimNotice(
            source=_name(number),
            kind=NoticeKind.RECLAIM,
            action="terminate",
            deadline=None if self._grace_s is None else now + self._grace_s,
            received=now,
        )
        if times > 1:
            notice = notice.ending_by(now + (SECOND_SIGNAL_S if times < LAST else 0.0))
        self._report(notice)
        if times >= LAST:
            self._obey(number)

    def _obey(self, number: int) -> None:
        """End the process, where nobody but us has kept the signal from doing so."""
        if self.before(number) != signal.SIG_DFL or not self._stands(number):
            return
        text = (
            f"spotsafe: {_name(number)} for the third time: leaving at once; what is not published is lost\n"
        )
        with contextlib.suppress(OSError):
            os.write(2, text.encode())  # not through `sys.stderr`, whose lock the main thread may hold
        self._leave(128 + number if self._exit_code is None else self._exit_code)

    def _act_as_before(self, number: int, frame: FrameType | None) -> None:
        """Do what would happen if we had never been here.

        The default action is the kernel's, so it is due only where ours is the handler that the signal found:
        a later handler that passes on to us has dealt with the signal already.
        """
        before = self.before(number)
        if callable(before):
            before(number, frame)
        elif before == signal.SIG_DFL and signal.getsignal(number) is self._handler:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


class _Counter:
    """Counts one signal that both the handler and the listener see, without waiting for a lock.

    Each of them counts for itself, and neither sees more than have come; the handler may see two as one. So
    the larger count is how often the signal has come.
    """

    def __init__(self) -> None:
        self._handler, self._listener = _Ear(), _Ear()
        self._reached: dict[int, object] = {}

    @property
    def reached(self) -> int:
        """How often the signal has come."""
        return len(self._reached)

    def handled(self, now: float) -> int | None:
        """The handler has been called once more; returns how often it has come, None for an echo."""
        return self._handler.take(now)

    def heard(self, now: float) -> int | None:
        """The listener has heard it once more; returns the same."""
        return self._listener.take(now)

    def first_to_reach(self, times: int) -> bool:
        """True for exactly one caller for each number, however many call at once."""
        mine = object()
        return self._reached.setdefault(times, mine) is mine


class _Ear:
    """What one of the two has seen of a signal."""

    def __init__(self) -> None:
        self._count, self._last = 0, -math.inf
        self._busy = threading.Lock()

    def take(self, now: float) -> int | None:
        """The number of this one, None for an echo.

        A handler may be interrupted by the next signal: that one does not wait, it came at the same time.
        """
        if not self._busy.acquire(blocking=False):
            return None
        try:
            if now - self._last < ECHO_S:
                return None
            self._last = now
            self._count += 1
            return self._count
        finally:
            self._busy.release()


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _watch_of(handler: object) -> SignalWatch | None:
    """The watch whose handler this is."""
    owner = getattr(handler, "__self__", None)
    return owner if isinstance(owner, SignalWatch) else None


_installed: list[SignalWatch] = []


def _after_fork_in_child() -> None:
    """Runs in the child's only thread, which Python makes its main thread."""
    while _installed:
        _installed.pop().forget_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
