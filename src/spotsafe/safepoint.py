"""What happens at a safe point: save, or leave, or go on. The `Engine` behind the loops of one process."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from spotsafe import events, human
from spotsafe.clock import Clock
from spotsafe.errors import Reclaimed, SaveFailed
from spotsafe.events import Event, SaveAwaited
from spotsafe.flight import Flight
from spotsafe.metrics import merged
from spotsafe.moments import Moments
from spotsafe.options import OnReclaim
from spotsafe.policy.deadline import Plan, Situation, plan
from spotsafe.positions import MANUAL
from spotsafe.reclaim.children import child_deaths_deferred
from spotsafe.reclaim.notice import ReclaimNotice
from spotsafe.reclaim.watcher import Watch
from spotsafe.saver import Saver
from spotsafe.startup import STEPPED, Startup
from spotsafe.telling import Telling

_PATIENT_ONCE = frozenset({"asked", "risk"})
"""Reasons to save whose state is of now, with metrics of it: they wait for the writer. But only once, so that a store
that hangs does not stop training at every step."""
_LOOK_S = 0.5
"""Seconds between two looks at the notice while the writer is waited for."""


@dataclass(slots=True, eq=False)
class SafePoints:
    """Decides and acts at each safe point of one process."""

    moments: Moments
    saver: Saver
    flight: Flight
    """A sink of the same events."""
    watch: Watch
    clock: Clock
    emit: Callable[[Event], None]
    on_reclaim: OnReclaim
    exit_code: int
    drain_timeout_s: float
    startup: Startup
    leaving: bool = False
    """The final save is made and the loops only have to end (``on_reclaim="return"``)."""
    _asked: dict[str, float] | None = None
    """The metrics of the save that was asked for; None if none was."""
    _waited_in_vain: bool = False
    """A save that was asked for has waited for the writer, and was put off."""
    _risk_met: ReclaimNotice | None = None
    _first_step: int = field(init=False)
    _first_step_said: bool = False

    def __post_init__(self) -> None:
        self._first_step = self._step

    # -- the Engine protocol -----------------------------------------------------------------------------------

    @property
    def notice_pending(self) -> bool:
        """Whether a reclaim has been announced."""
        return self.watch.notice is not None

    def before_first_body(self) -> None:
        """Everything is tracked by now: judge it."""
        tracker = self.moments.tracker
        tracker.judge()
        self.moments.activity.track(tracker.optimizers)
        self.saver.overlap.start()
        for name in tracker.without_schedulers():
            text = f"{name} has a learning rate schedule, but no scheduler of it is tracked: a resume starts it anew"
            self.emit(events.Warned(message=f"{text}. Give it to the session, scheduler=..."))
        self.emit(events.IntervalChosen(text=self.saver.policy.describe(self.saver.cost)))
        self.moments.mark_safe()

    def restore_rng(self) -> None:
        """Set the generators to where they were; once."""
        self.moments.restore_rng()

    def random_numbers_drawn(self) -> bool:
        """Whether a random number was drawn since the last safe point."""
        return self.moments.random_numbers_drawn()

    def mark_safe(self) -> None:
        """Remember this moment."""
        self.moments.mark_safe()

    def before_unsafe_commit(self) -> None:
        """Keep the positions of the last safe point before they move."""
        self.moments.keep_positions()

    def at_safe_point(self, *, epoch_ended: bool) -> None:
        """Save or leave if there is a reason to."""
        self.settle()
        self.saver.overlap.at_safe_point(self._step)
        self._say_first_step()
        if not self.notice_pending:
            self.saver.poll()
            reason = self._reason_to_save(epoch_ended=epoch_ended)
            if reason is not None:
                # Nobody sees the end of a loop of the program's own, and the code behind it may write.
                self._save_now(reason, beside=self.moments.positions.where != MANUAL)
            elif (
                self.did_something and not self.saver.ready
            ):  # with the first step an optimizer has its state
                self._get_ready()
        notice = self.watch.notice  # also one that came while a save waited for the writer
        if notice is not None:
            self._take_results()
            self._leave(notice, self._save_now)

    def at_loop_end(self) -> None:
        """A loop came to its end: the code behind it may change what a save of this moment needs."""
        self.settle()
        self.moments.keep_state()

    def settle(self) -> None:
        """The program may write to what is tracked from here on."""
        with child_deaths_deferred():
            self.saver.overlap.settle()

    def at_interruption(self) -> None:
        """Inside a long phase: the last safe point if it is still whole, else what is already staged."""
        notice = self.watch.notice
        assert notice is not None, "interrupted without a notice"
        self._take_results()
        self._leave(notice, self._save_if_whole)

    # -- what the run asks for ---

    def ask(self, metrics: Mapping[str, float]) -> None:
        """Save at the next safe point, with these metrics beside those asked for before.

        Raises:
            ValueError: a manifest cannot hold them.
        """
        self._asked = merged(self._asked, metrics)

    def save_asked(self, *, whole: bool) -> None:
        """Save at once what was asked for: the present if it is `whole`, else the last safe point."""
        if whole:
            self.moments.mark_between_loops()
            self._save_now("asked")
        else:
            self._save_before_body("asked")

    def save_end(self) -> None:
        """All loops came to their ends: save what there is now, unless exactly that is saved."""
        if self._settled() and (self._owes_save or self.moments.changed_since_save()):
            self._save_now("end")

    def save_left(self, *, body_open: bool) -> None:
        """A loop was left early: save the last safe point if it can be had and is not saved."""
        if not self._settled() or not self._owes_save:
            return
        if body_open:
            self._save_before_body("left")
        else:
            self._save_last_safe("left")

    @property
    def did_something(self) -> bool:
        """Whether this attempt committed any step."""
        return self._step > self._first_step

    def drain(self) -> bool:
        """Wait for what is in flight, `drain_timeout` or as long as a notice leaves; false if that is not enough."""
        return self._wait(self.saver.drain)

    def reclaimed(self, notice: ReclaimNotice) -> Reclaimed:
        """The exit for this notice."""
        return Reclaimed(  # the last line says which checkpoint: the final save may be on its way still
            f"reclaimed ({notice.source}: {notice.action}) after step {self._step}; "
            "the same command goes on from the newest checkpoint",
            code=self.exit_code,
        )

    # -- inside ---

    def _wait(self, until: Callable[[float], bool], *, until_notice: bool = False) -> bool:
        """Wait, for `drain_timeout` or as long as a notice leaves. What takes long is told.

        Args:
            until: waits for so many seconds at most; whether that was enough.
            until_notice: do not wait any more when a notice comes: there is better to do.
        """
        end = self.clock.monotonic() + self.drain_timeout_s

        def awaited(waited_s: float, over: bool) -> SaveAwaited:
            left = max(0.0, self._time_left_s(end, until_notice=until_notice))
            return self.flight.awaited(waited_s=waited_s, limit_s=waited_s + left, over=over)

        with child_deaths_deferred(), Telling(awaited, emit=self.emit, clock=self.clock) as telling:
            while True:  # a notice may come while this waits, or a second signal may cut it short
                left = self._time_left_s(end, until_notice=until_notice)
                if until(min(left, _LOOK_S)):
                    return True
                if left <= _LOOK_S:
                    return False
                telling.look()

    @property
    def _step(self) -> int:
        return self.moments.positions.total

    @property
    def _unsaved_steps(self) -> int:
        return max(0, self._step - self.saver.held_step)

    @property
    def _owes_save(self) -> bool:
        """Whether there are steps that no save holds, or a save was asked for and not made yet, or is lost."""
        return self._unsaved_steps > 0 or self._asked is not None or self.saver.owes

    def _reason_to_save(self, *, epoch_ended: bool) -> str | None:
        if self._asked is not None:
            return "asked"
        risk = self.watch.risk
        if risk is not None and risk != self._risk_met and self._unsaved_steps:
            self._risk_met = risk
            return "risk"
        if self.saver.due(self._step, epoch_ended=epoch_ended):
            return "interval"
        return None

    def _save_now(self, reason: str, *, beside: bool = False) -> None:
        """Save the state of now, which is a safe point; while the writer is busy, perhaps that of a later one.

        Args:
            reason: for the manifest.
            beside: whether the copy may run on after this returns.
        """
        once = reason in _PATIENT_ONCE
        patient = reason != "interval" and not (once and self._waited_in_vain)
        room = patient and self._wait(self.saver.await_room, until_notice=once)
        with child_deaths_deferred():
            session = self.moments.present(nonfinite=self.saver.lineage.nonfinite_before)
            if self._save(session, self._step, reason, room=room, until_notice=once, beside=beside):
                self._asked, self._waited_in_vain = None, False
                self.moments.note_saved()
            elif once and patient and not self.notice_pending:
                self._waited_in_vain = True
                self._say_late()

    def _get_ready(self) -> None:
        with child_deaths_deferred():
            self.saver.get_ready(lambda: self.moments.present(nonfinite=self.saver.lineage.nonfinite_before))

    def _save(
        self,
        session: Mapping[str, Any],
        step: int,
        reason: str,
        *,
        room: bool,
        until_notice: bool = False,
        beside: bool = False,
    ) -> bool:
        """Make a save; false if it is put off.

        Args:
            session: the session's own state.
            step: the step it is of.
            reason: for the manifest.
            room: whether there should be room. If its state has outgrown the slots, there is when nothing is in flight.
            until_notice: do not wait for that any more when a notice comes.
            beside: as of `Saver.save`.
        """

        def save() -> bool:
            return self.saver.save(session, step=step, reason=reason, metrics=self._asked, beside=beside)

        return save() or (room and self._wait(self.saver.drain, until_notice=until_notice) and save())

    def _save_before_body(self, reason: str) -> None:
        """The body that was left is made again after a resume: what it changed must not count twice."""
        if not self.moments.surely_touched:
            self._save_last_safe(reason)
            return
        lost = (
            f"the last {human.count(self._unsaved_steps, 'step')}"
            if self._unsaved_steps
            else "what was asked for"
        )
        text = f"{lost} cannot be saved: the body that was left had changed state besides the tensors"
        self.emit(events.Warned(message=f"{text}; {self.saver.newest or 'nothing'} stands"))

    def _save_if_whole(self, reason: str) -> None:
        """Save the last safe point with everything as it was, a scheduler or a value too, or not at all.

        The body is repeated after the resume: a scheduler that has stepped in it would step twice.
        """
        with self.moments.last_in_place() as whole:
            if whole:
                self._save_last_safe(reason)

    def _save_last_safe(self, reason: str) -> None:
        """Save the last safe point, if its tensors are untouched since."""
        if self.moments.tensors_moved:
            return
        room = self._wait(self.saver.await_room)
        with child_deaths_deferred():
            session = self.moments.last(nonfinite=self.saver.lineage.nonfinite_before)
            if self._save(session, self.moments.last_step, reason, room=room):
                self._asked = None

    def _settled(self) -> bool:
        """Wait for what is in flight: only then is it known what is saved. False if that takes too long."""
        drained = self.drain()
        self.saver.poll()
        return drained

    def _leave(self, notice: ReclaimNotice, save: Callable[[str], None]) -> None:
        """Do what the remaining time allows, then end the loops."""
        while True:
            lost = self.saver.lost
            self._act_on(notice, save)
            self.drain()
            self._take_results()
            if self.saver.lost == lost:  # else there is no later safe point that would make it again
                break
        if self.on_reclaim == "exit":
            raise self.reclaimed(notice)
        self.leaving = True

    def _act_on(self, notice: ReclaimNotice, save: Callable[[str], None]) -> None:
        """A save whose time was never measured is asked about again when the one in flight is done."""
        for _ in range(2):
            decision = plan(self._situation(notice))
            if decision is Plan.SAVE:
                self._save_or_tell(save)
                return
            if decision is Plan.NOTHING:
                return
            self.drain()
            self._take_results()

    def _situation(self, notice: ReclaimNotice) -> Situation:
        cost = self.saver.cost
        return Situation(
            seconds_left=notice.seconds_left(self.clock.monotonic()),
            save_s=None if cost is None else cost.blocking_s + cost.write_s,
            in_flight=self.saver.busy,
            finish_in_flight_s=self.saver.rest_of_flight_s,
            unsaved_steps=self._unsaved_steps + (self._asked is not None or self.saver.owes),
        )

    def _save_or_tell(self, save: Callable[[str], None]) -> None:
        """The exit code of a reclaim is worth more than the error: the launcher has to start this again."""
        try:
            save("notice")
        except Exception as error:  # noqa: BLE001 - see above
            self.saver.note_failure(error, step=self._step)

    def _take_results(self) -> None:
        with contextlib.suppress(SaveFailed):  # it is in `run.failures`; the machine goes anyway
            self.saver.poll()

    def _time_left_s(self, end: float, *, until_notice: bool) -> float:
        now, notice = self.clock.monotonic(), self.watch.notice
        if notice is None:
            return end - now
        left = notice.seconds_left(now)
        return 0.0 if until_notice else min(end - now, math.inf if left is None else left)

    def _say_late(self) -> None:
        waited = human.duration(self.drain_timeout_s)
        text = f"the save of step {self._step} is put off: after {waited} the one before"
        self.emit(
            events.Warned(message=f"{text} is still being written. The next safe point behind it saves")
        )

    def _say_first_step(self) -> None:
        if not self._first_step_said and self.did_something:
            self._first_step_said = True
            self.startup.done(STEPPED)
            seconds, parts = self.startup.seconds, self.startup.parts
            self.emit(events.FirstStep(step=self._step, seconds_since_start=seconds, parts=parts))
