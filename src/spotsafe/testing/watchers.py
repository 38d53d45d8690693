"""The tests that every watcher passes, for whoever writes one.

::

    class TestMyWatcher(WatcherConformance):
        def make_watcher(self):
            return MyWatcher(...)

        def quiet(self):      # the source answers that nothing is announced
        def announce(self):   # the source announces a reclaim
        def break_(self):     # the source cannot be asked

The three set the world that the watcher looks at; the suite calls them in any order. A new world, in which
nothing is announced, must stand at the start of each test (`setup_method`, or a fixture with
``autouse=True``). Needs pytest.
"""

from __future__ import annotations

import threading
import time

import pytest

from spotsafe.clock import Clock, SystemClock
from spotsafe.errors import WatcherUnavailable
from spotsafe.events import NoticeCancelled, NoticeReceived, WatcherBlind, WatcherRecovered
from spotsafe.reclaim.notice import NoticeKind, ReclaimNotice
from spotsafe.reclaim.watcher import Watch, Watcher
from spotsafe.testing.sinks import RecordingSink


class WatcherConformance:
    """What every `Watcher` does."""

    def make_watcher(self) -> Watcher:
        """A new watcher of the world."""
        raise NotImplementedError

    def make_clock(self) -> Clock:
        """The clock that the watchers of `make_watcher` use."""
        return SystemClock()

    def quiet(self) -> None:
        """Make the source answer that nothing is announced; also ends what `break_` did."""
        raise NotImplementedError

    def announce(self) -> None:
        """Make the source announce a reclaim; also ends what `break_` did."""
        raise NotImplementedError

    def break_(self) -> None:
        """Make it impossible to ask the source."""
        raise NotImplementedError

    def test_is_a_watcher(self) -> None:
        """It has the members of the protocol, a name, and an interval of zero or more."""
        watcher = self.make_watcher()
        assert isinstance(watcher, Watcher)
        assert watcher.name
        assert watcher.interval_s >= 0
        watcher.close()

    def test_nothing_is_none(self) -> None:
        """As long as nothing is announced, every poll says so."""
        watcher = self.make_watcher()
        self.quiet()
        assert [watcher.poll() for _ in range(3)] == [None] * 3
        watcher.close()

    def test_a_notice_is_complete(self) -> None:
        """An announcement becomes a notice in the watcher's name, received during the call."""
        watcher, clock = self.make_watcher(), self.make_clock()
        self.announce()
        before = clock.monotonic()
        notice = watcher.poll()
        after = clock.monotonic()
        assert notice is not None
        assert (notice.source, notice.kind) == (watcher.name, NoticeKind.RECLAIM)
        assert notice.action
        assert before <= notice.received <= after
        assert notice.deadline is None or notice.deadline >= notice.received
        watcher.close()

    def test_the_same_announcement_is_the_same_notice(self) -> None:
        """Polling again does not move a deadline: the notice equals the first one."""
        watcher = self.make_watcher()
        self.announce()
        first = watcher.poll()
        assert [watcher.poll() for _ in range(3)] == [first] * 3
        watcher.close()

    def test_what_is_gone_is_cancelled(self) -> None:
        """A withdrawn announcement is None again, and a new one is a notice again."""
        watcher = self.make_watcher()
        self.announce()
        assert watcher.poll() is not None
        self.quiet()
        assert watcher.poll() is None
        self.announce()
        assert watcher.poll() is not None
        watcher.close()

    def test_cannot_ask_is_not_nothing(self) -> None:
        """A source that cannot be asked raises WatcherUnavailable, with the watcher's name and a reason."""
        watcher = self.make_watcher()
        self.break_()
        for _ in range(2):
            with pytest.raises(WatcherUnavailable, match=r".") as caught:
                watcher.poll()
            assert caught.value.source == watcher.name
        watcher.close()

    def test_sees_again_after_being_blind(self) -> None:
        """Nothing of a failure sticks: as soon as the source answers, so does the watcher."""
        watcher = self.make_watcher()
        self.break_()
        with pytest.raises(WatcherUnavailable):
            watcher.poll()
        self.quiet()
        assert watcher.poll() is None
        self.break_()
        with pytest.raises(WatcherUnavailable):
            watcher.poll()
        self.announce()
        assert watcher.poll() is not None
        watcher.close()

    def test_close_may_come_twice_and_from_another_thread(self) -> None:
        """Closing twice, and by a thread that does not poll, is no error."""
        watcher = self.make_watcher()
        self.quiet()
        watcher.poll()
        closer = threading.Thread(target=watcher.close)
        closer.start()
        closer.join(30)
        assert not closer.is_alive()
        watcher.close()

    def test_does_its_work_in_a_watch(self) -> None:
        """Polled in the background: notice, withdrawal, blindness and recovery are all told."""
        self.quiet()
        watcher, sink = self.make_watcher(), RecordingSink()
        watcher.interval_s = 0.01
        watch = Watch([watcher], emit=sink.emit)
        watch.start()
        try:
            self.announce()
            assert sink.wait_for(NoticeReceived)[0].source == watcher.name
            assert watch.notice is not None
            self.break_()
            sink.wait_for(WatcherBlind)
            assert watch.notice is not None, "being blind must not cancel a notice"
            self.announce()
            sink.wait_for(WatcherRecovered)
            assert sink.of(NoticeCancelled) == []
            self.quiet()
            sink.wait_for(NoticeCancelled)
            assert watch.notice is None
        finally:
            watch.stop()

    def test_stops_quickly(self) -> None:
        """A watch that polls it ends within seconds."""
        self.quiet()
        watch = Watch([self.make_watcher()], emit=RecordingSink().emit)
        watch.start()
        began = time.monotonic()
        watch.stop()
        assert time.monotonic() - began < 5


class ScriptedWatcher:
    """A watcher for tests: each poll does what comes next in the script, and the last thing for ever.

    A script holds notices, None, and exceptions to raise.
    """

    def __init__(
        self, *script: ReclaimNotice | BaseException | None, name: str = "scripted", interval_s: float = 1.0
    ) -> None:
        self.name = name
        self.interval_s = interval_s
        self.polls = 0
        """How often it was polled."""
        self.closed = False
        """Whether `close` was called."""
        self._script: list[ReclaimNotice | BaseException | None] = list(script) or [None]

    def then(self, *more: ReclaimNotice | BaseException | None) -> None:
        """Go on with these at the next poll, whatever the script still held."""
        self._script = list(more)

    def poll(self) -> ReclaimNotice | None:
        """What comes next."""
        script = self._script
        said = script.pop(0) if len(script) > 1 else script[0]
        self.polls += 1
        if isinstance(said, BaseException):
            raise said
        return said

    def close(self) -> None:
        """Remember it."""
        self.closed = True
