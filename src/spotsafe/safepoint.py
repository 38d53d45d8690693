"""What happens at a safe point: save, or leave, or go on. The `Engine` behind the loops of one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from spotsafe import events, human
from spotsafe.activity import Activity
from spotsafe.clock import Clock
from spotsafe.errors import EXIT_RECLAIMED, Reclaimed, SaveFailed
from spotsafe.events import Event
from spotsafe.metrics import merged
from spotsafe.policy.deadline import Plan, Situation, plan
from spotsafe.positions import MANUAL, Positions
from spotsafe.reclaim.children import child_deaths_deferred
from spotsafe.reclaim.notice import ReclaimNotice
from spotsafe.reclaim.watcher import Watch
from spotsafe.saver import Saver
from spotsafe.session_state import session_values
from spotsafe.tensors.rng import RngSnapshot, capture_rng
from spotsafe.tracking import Tracker

OnReclaim = Literal["exit", "return"]

_PATIENT_ONCE = frozenset({"asked", "risk"})
"""Reasons to save that wait for the writer, but not at one safe point after the other."""


@dataclass(slots=True)
class _Moment:
    """The last safe point: enough to save it later, as long as nothing has changed since."""

    rng: RngSnapshot
    buffers: Any
    plain: Any
    positions: Mapping[str, Any] | None = None
    """Set when the positions have moved on without a new safe point; else they are those of now."""
    step: int = 0
    kept: Any = None
    """At the end of a loop: the state that code behind it may change, and the resume will change again."""


@dataclass(frozen=True, slots=True)
class _Saved:
    """What the last save of the present held, as far as code behind the loops may still change it."""

    plain: Any
    buffers: Any


@dataclass(slots=True, eq=False)
class SafePoints:
    """Decides and acts at each safe point of one process."""

    tracker: Tracker
    saver: Saver
    watch: Watch
    positions: Positions
    activity: Activity
    clock: Clock
    emit: Callable[[Event], None]
    values: dict[str, Any]
    """`run.values`, the user's plain values."""
    restored_rng: RngSnapshot | None = None
    on_reclaim: OnReclaim = "exit"
    exit_code: int = EXIT_RECLAIMED
    drain_timeout_s: float = 600.0
    entered_at: float = 0.0
    leaving: bool = False
    """The final save is made and the loops only have to end (``on_reclaim="return"``)."""
    _asked: dict[str, float] | None = None
    _waited_in_vain: bool = False
    """A save that was asked for has waited for the writer, and was put off."""
    _risk_met: ReclaimNotice | None = None
    _first_step: int = 0
    _first_step_said: bool = False
    _moment: _Moment = field(init=False)
    _saved: _Saved | None = None

    def __post_init__(self) -> None:
        self._first_step = self.positions.total
        if self.positions.resume_at == MANUAL:
            self.tracker.arrived()
        self.mark_safe()

    # -- the Engine protocol -----------------------------------------------------------------------------------

    @property
    def notice_pending(self) -> bool:
        """Whether a reclaim has been announced."""
        return self.watch.notice is not None

    def before_first_body(self) -> None:
        """Everything is tracked by now: judge it."""
        self.tracker.judge()
        self.activity.track(self.tracker.optimizers)
        for name in self.tracker.without_schedulers():
            text = f"{name} has a learning rate schedule, but no scheduler of it is tracked: a resume starts it anew"
            self.emit(events.Warned(message=f"{text}. Give it to the session, scheduler=..."))
        self._say_interval()
        self.mark_safe()

    def restore_rng(self) -> None:
        """Set the generators to where they were; once."""
        if self.restored_rng is not None:
            self.restored_rng.restore()
            self.restored_rng = None
            self.tracker.arrived()
            self.mark_safe()

    def random_numbers_drawn(self) -> bool:
        """Whether a random number was drawn since the last safe point."""
        return bool(capture_rng().to_state() != self._moment.rng.to_state())

    def mark_safe(self) -> None:
        """Remember this moment."""
        self._mark(self._rng_now())

    def before_unsafe_commit(self) -> None:
        """Keep the positions of the last safe point before they move."""
        if self._moment.positions is None:
            self._moment.positions = self.positions.to_state()

    def at_safe_point(self, *, epoch_ended: bool) -> None:
        """Save or leave if there is a reason to."""
        self.saver.poll()
        self._say_first_step()
        notice = self.watch.notice
        if notice is not None:
            self._leave(notice, self._save_now)
            return
        reason = self._reason_to_save(epoch_ended=epoch_ended)
        if reason is not None:
            self._save_now(reason)

    def at_loop_end(self) -> None:
        """A loop came to its end: the code behind it may change what a save of this moment needs."""
        if self._untouched:
            with contextlib.suppress(Exception):  # a scheduler of the user's that cannot be copied
                self._moment.kept = self.tracker.keep(self.values)

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
            self._mark(self._rng_to_go_on_from())
            self._save_now("asked")
        else:
            self._save_before_body("asked")

    def save_end(self) -> None:
        """All loops came to their ends: save what there is now, unless exactly that is saved."""
        if self._settled() and (self._unsaved_steps or self._asked is not None or self._changed_since_save()):
            self._save_now("end")

    def save_left(self, *, body_open: bool) -> None:
        """A loop was left early: save the last safe point if it can be had and is not saved."""
        if not self._settled() or not (self._unsaved_steps or self._asked is not None):
            return
        if body_open:
            self._save_before_body("left")
        else:
            self._save_last_safe("left")

    @property
    def did_something(self) -> bool:
        """Whether this attempt committed any step."""
        return self.positions.total > self._first_step

    def drain(self) -> bool:
        """Wait for what is in flight, within the time that is left."""
        with child_deaths_deferred():
            return self.saver.drain(self._time_to_drain_s())

    def reclaimed(self, notice: ReclaimNotice) -> Reclaimed:
        """The exit for this notice."""
        newest = self.saver.newest or "none"
        return Reclaimed(
            f"reclaimed ({notice.source}: {notice.action}) after step {self.positions.total}; "
            f"newest checkpoint: {newest}. The same command goes on from there.",
            code=self.exit_code,
        )

    # -- inside ---

    @property
    def _unsaved_steps(self) -> int:
        return max(0, self.positions.total - self.saver.held_step)

    def _reason_to_save(self, *, epoch_ended: bool) -> str | None:
        if self._asked is not None:
            return "asked"
        risk = self.watch.risk
        if risk is not None and risk != self._risk_met and self._unsaved_steps:
            self._risk_met = risk
            return "risk"
        if self.saver.due(self.positions.total, epoch_ended=epoch_ended):
            return "interval"
        return None

    def _save_now(self, reason: str) -> None:
        """Save the state of now, which is a safe point; while the writer is busy, perhaps that of a later one."""
        wait_s = self._patience_s(reason)
        with child_deaths_deferred():
            session = self._session(rng=self._rng_to_go_on_from(), positions=self.positions.to_state())
            if self.saver.save(
                session, step=self.positions.total, reason=reason, metrics=self._asked, wait_s=wait_s
            ):
                self._asked, self._waited_in_vain = None, False
                self._saved = _Saved(plain=self._plain_now(), buffers=self.tracker.buffers_mark())
            elif reason in _PATIENT_ONCE and wait_s is not None:
                self._waited_in_vain = True
                self._say_late(waited_s=wait_s)

    def _patience_s(self, reason: str) -> float | None:
        """How long to wait for a save in flight; None: not at all, a later safe point will do.

        What was asked for is of this very state, with metrics of it, so it waits; but once, that a store that hangs
        does not stop training at every step.
        """
        if reason == "interval" or (reason in _PATIENT_ONCE and self._waited_in_vain):
            return None
        return self._time_to_drain_s()

    def _save_before_body(self, reason: str) -> None:
        """The body that was left is made again after a resume: what it changed must not count twice."""
        if self.tracker.plain_mark(self.values).surely_differs(self._moment.plain):
            text = f"the last {self._unsaved_steps} steps are not saved: the body that was left had changed state"
            self.emit(
                events.Warned(message=f"{text} besides the tensors; {self.saver.newest or 'nothing'} stands")
            )
        else:
            self._save_last_safe(reason)

    @property
    def _untouched(self) -> bool:
        return bool(self.tracker.plain_mark(self.values) == self._moment.plain)

    def _save_if_whole(self, reason: str) -> None:
        """Save the last safe point with everything as it was, a scheduler or a value too, or not at all.

        The body is repeated after the resume: a scheduler that has stepped in it would step twice.
        """
        kept = self._moment.kept
        if self._untouched:
            self._save_last_safe(reason)
        elif kept is not None:
            with kept.in_place() as whole:
                if whole:
                    self._save_last_safe(reason)

    def _save_last_safe(self, reason: str) -> None:
        """Save the last safe point, if what it consists of is untouched since."""
        moment = self._moment
        if self.activity.stepped or self.tracker.buffers_moved(moment.buffers):
            return
        positions = moment.positions if moment.positions is not None else self.positions.to_state()
        with child_deaths_deferred():
            session = self._session(rng=moment.rng, positions=positions)
            if self.saver.save(
                session,
                step=moment.step,
                reason=reason,
                metrics=self._asked,
                wait_s=self._time_to_drain_s(),
            ):
                self._asked = None

    def _settled(self) -> bool:
        """Wait for what is in flight: only then is it known what is saved. False if that takes too long."""
        drained = self.drain()
        self.saver.poll()
        return drained

    def _mark(self, rng: RngSnapshot) -> None:
        self._moment = _Moment(
            rng=rng,
            buffers=self.tracker.buffers_mark(),
            plain=self.tracker.plain_mark(self.values),
            step=self.positions.total,
        )

    def _rng_to_go_on_from(self) -> RngSnapshot:
        """The generators at the end of the last body: a resume begins there and runs again what lies behind it.

        Code between two loops then draws what it drew, such as the first weights of a head. A loop of the
        program's own has no place to come back to: there it is the generators of now.
        """
        if self.positions.where in ("", MANUAL) or self._moment.positions is not None:
            return self._rng_now()
        return self._moment.rng

    def _rng_now(self) -> RngSnapshot:
        """The generators; before the program is back in the loop it was in, as they will be there."""
        ahead = self.restored_rng if self.positions.resume_at is not None else None
        return ahead or capture_rng()

    def _session(self, *, rng: RngSnapshot, positions: Mapping[str, Any]) -> dict[str, Any]:
        return session_values(
            positions=positions, rng=rng, values=self.values, nonfinite=self.saver.lineage.nonfinite_before
        )

    def _changed_since_save(self) -> bool:
        """Whether the code behind the loops changed what the last save holds. Random numbers do not count."""
        saved = self._saved
        if saved is None:
            return False
        return bool(self._plain_now() != saved.plain) or self.tracker.buffers_moved(saved.buffers)

    def _plain_now(self) -> Any:
        return self.tracker.encode({"positions": self.positions.to_state(), "values": self.values})

    def _leave(self, notice: ReclaimNotice, save: Callable[[str], None]) -> None:
        """Do what the remaining time allows, then end the loops."""
        self._act_on(notice, save)
        self.drain()
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
            unsaved_steps=self._unsaved_steps + (self._asked is not None),
        )

    def _save_or_tell(self, save: Callable[[str], None]) -> None:
        """The exit code of a reclaim is worth more than the error: the launcher has to start this again."""
        try:
            save("notice")
        except Exception as error:  # noqa: BLE001 - see above
            self.saver.note_failure(error, step=self.positions.total)

    def _take_results(self) -> None:
        with contextlib.suppress(SaveFailed):  # it is in `run.failures`; the machine goes anyway
            self.saver.poll()

    def _time_to_drain_s(self) -> float:
        notice = self.watch.notice
        left = None if notice is None else notice.seconds_left(self.clock.monotonic())
        return self.drain_timeout_s if left is None else min(left, self.drain_timeout_s)

    def _say_late(self, *, waited_s: float) -> None:
        text = f"the save of step {self.positions.total} is put off: after {human.duration(waited_s)} the one before"
        self.emit(
            events.Warned(message=f"{text} is still being written. The next safe point behind it saves")
        )

    def _say_first_step(self) -> None:
        if not self._first_step_said and self.did_something:
            self._first_step_said = True
            self.emit(
                events.FirstStep(
                    step=self.positions.total, seconds_since_start=self.clock.monotonic() - self.entered_at
                )
            )

    def _say_interval(self) -> None:
        self.emit(events.IntervalChosen(text=self.saver.policy.describe(self.saver.cost)))
