"""One attempt of a run once it is going: what is asked of it in between, and how it is left.

The way out of the block is always the one that matters most: the body's own exception, else the reclaim, else what
failed in the background.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

from spotsafe import events as ev
from spotsafe.activity import Activity
from spotsafe.errors import SaveFailed, SpotsafeError, StorageUnavailable
from spotsafe.events import Fanout
from spotsafe.identity import job_end, launchers_of
from spotsafe.loops import Loops
from spotsafe.opening import Claimed
from spotsafe.options import Options
from spotsafe.outcomes import FINISHED, LEFT, RECLAIMED, outcome_of
from spotsafe.policy.leaving import Leaving, way_out
from spotsafe.reclaim.children import child_deaths_deferred
from spotsafe.reclaim.watcher import Watch
from spotsafe.safepoint import SafePoints
from spotsafe.saver import Saver

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Attempt:
    """The running parts of one attempt. Made by `assembling.begin_attempt`."""

    claimed: Claimed
    loops: Loops
    activity: Activity
    points: SafePoints
    saver: Saver
    watch: Watch
    fanout: Fanout
    options: Options
    outcome: str = LEFT
    code: int | None = None
    cleanup: ExitStack = field(default_factory=ExitStack)

    # -- in between ---

    def tracked_more(self, names: Collection[str]) -> None:
        """`run.track` was called."""
        self.activity.track(self.saver.tracker.optimizers)
        self.saver.tracked_more(names)
        self.saver.overlap.start()

    def save(self, metrics: Mapping[str, float]) -> None:
        """Save at the next safe point; outside a loop the present is one, unless a body was left in the middle."""
        if self.points.leaving:
            return  # the final save is made; what came after it is repeated after the resume
        self.points.ask(metrics)
        if not self.loops.active:
            self.loops.judge()  # a checkpoint without what is tracked later would be the newest, and unusable
            with child_deaths_deferred():
                self.points.save_asked(whole=not self.loops.body_open)

    def wait(self) -> None:
        """See `Run.wait`."""
        self._drain_and_raise(self._save_between_loops)

    # -- end ---

    def leave(self, error: BaseException | None) -> None:
        """Save what the way out allows and wait for what is in flight.

        Raises:
            Reclaimed: a notice is pending and the run is not finished.
            Superseded: a newer attempt exists, and the block ended cleanly.
            SaveFailed: saves failed, and the block ended cleanly.
        """
        with child_deaths_deferred():
            if error is None:
                self._leave_cleanly()
            elif self.watch.notice is not None and isinstance(error, Exception):
                self._leave_reclaimed(error)
            else:
                self._leave_with(error)

    @property
    def exits_reclaimed(self) -> bool:
        """Whether the way out of the block is the exit of a reclaim; to be asked after `leave`."""
        return self.outcome == RECLAIMED and self.code is not None

    def leaving(self, environ: Mapping[str, str]) -> Leaving:
        """How to leave after a reclaim, which is told if it takes long; to be asked for before `close`.

        Args:
            environ: of this process, where launchers say who they are.
        """
        notice, launchers, clock = self.watch.notice, launchers_of(environ), self.options.clock
        end = job_end(environ)
        leaving = way_out(
            launchers,
            signalled=self.watch.signalled,
            seconds_left=None if notice is None else notice.seconds_left(clock.monotonic()),
            job_ends_in_s=None if end is None else end - clock.wall(),
        )
        if leaving.limit_s:
            names = tuple(launcher.value for launcher in launchers)
            self.fanout.emit(ev.EndAwaited(launchers=names, limit_s=leaving.limit_s))
        return leaving

    def close(self) -> None:
        """Stop all threads and hand back handlers and hooks; report the end."""
        try:
            self.fanout.emit(
                ev.RunEnded(
                    step=self.loops.positions.total,
                    outcome=self.outcome,
                    code=self.code,
                    newest=self.saver.newest,
                    in_flight=self.saver.in_flight,
                    reason=self.loops.stop_reason if self.outcome == FINISHED else None,
                )
            )
        finally:  # an impatient second Ctrl-C leaves no thread and no handler behind
            self.cleanup.close()

    def _leave_cleanly(self) -> None:
        try:
            self._save_and_drain()
        except BaseException as error:
            self._end_as(*outcome_of(error))
            raise

    def _save_and_drain(self) -> None:
        """Save the end, or what can be had of it, and wait for it. Says how the attempt ended, unless it raises."""
        if self.points.leaving:
            self._drain_and_raise()
            self._end_as(RECLAIMED, None)
            return
        notice = self.watch.notice  # one that comes during the last save changes nothing any more
        self.loops.leave_open()
        finished = self.loops.all_ended
        self._say_nothing_counted()

        def save() -> None:
            if finished:
                self.points.save_end()
            else:
                self.points.save_left(body_open=self.loops.body_open)

        try:
            self.loops.judge()
            save()
        except BaseException:
            self._drain_and_log()
            raise
        self._drain_and_raise(save)
        if not finished and notice is not None and self.options.on_reclaim == "exit":
            raise self.points.reclaimed(notice)
        self._end_as(FINISHED if finished else LEFT, None)

    def _leave_reclaimed(self, error: Exception) -> None:
        """Any error while a notice is pending - a dead worker, a broken pipe - means: the machine goes."""
        notice = self.watch.notice
        assert notice is not None, "left as reclaimed without a notice"
        ours = self.options.on_reclaim == "exit"
        self._end_as(RECLAIMED, self.options.exit_code if ours else None)
        self._drain_and_log()
        if ours:
            raise self.points.reclaimed(notice) from error

    def _leave_with(self, error: BaseException) -> None:
        """The body's own exception goes on; what is in flight is finished first."""
        self._end_as(*outcome_of(error))
        self._drain_and_log()

    def _say_nothing_counted(self) -> None:
        if self.activity.ever_stepped and not self.points.did_something and not self.loops.outermost:
            text = "the optimizer stepped, but in no loop of the run, so nothing is counted or saved"
            self.fanout.emit(
                ev.Warned(message=f"{text}: iterate over run.steps(loader, ...) or run.range(n)")
            )

    def _save_between_loops(self) -> None:
        if not self.loops.active:  # else the next safe point does
            with child_deaths_deferred():
                self.points.save_asked(whole=not self.loops.body_open)

    def _drain_and_raise(self, again: Callable[[], None] = lambda: None) -> None:
        """Wait for what is in flight; if its writer dies over it, `again` makes it once more, where that can be."""
        while True:
            lost = self.saver.lost
            drained = self.points.drain()
            self.saver.poll()
            if self.saver.lost == lost:
                break
            again()
        self.saver.raise_failures()
        if not drained:
            raise SaveFailed(
                f"the last save was still being written after {self.options.drain_timeout}; "
                f"the newest checkpoint is {self.saver.newest or 'none'}. A larger drain_timeout= waits longer."
            ) from StorageUnavailable("the store did not take it in time")

    def _drain_and_log(self) -> None:
        drained = self.points.drain()
        try:
            self.saver.poll()
            self.saver.raise_failures()
        except (SpotsafeError, SystemExit) as error:
            _log.error("while leaving: %s", error)
        if not drained:
            _log.error("the last save was not finished in time; newest checkpoint: %s", self.saver.newest)

    def _end_as(self, outcome: str, code: int | None) -> None:
        self.outcome, self.code = outcome, code
