"""Makes saves: sees that there is memory for one, lets a consistent moment be copied, and keeps count of how it went.

When to save is `policy.interval`'s decision, what can be saved is known in `moments`, and `copying` copies.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from spotsafe import events, human
from spotsafe.checkpoint.attempts import AttemptRecord
from spotsafe.checkpoint.index_values import FileEntry
from spotsafe.checkpoint.layout import CheckpointName
from spotsafe.clock import Clock
from spotsafe.copying import Copier, Due
from spotsafe.errors import SaveFailed, StorageNotFound, Superseded, WriterDied
from spotsafe.events import Event
from spotsafe.identity import Identity
from spotsafe.metrics import BestWatch, merged
from spotsafe.overlap import Overlap
from spotsafe.policy.cost import SaveCost
from spotsafe.policy.interval import Progress, SavePolicy
from spotsafe.policy.retention import Keep
from spotsafe.policy.staging_memory import SlotChoice
from spotsafe.slots import Slots
from spotsafe.tensors.frozen import FrozenTensors, StagedFrozen
from spotsafe.tensors.plan import PlanCache, SavePlan
from spotsafe.tensors.tree import Capture
from spotsafe.tracking import Tracker
from spotsafe.writer.job import SaveJob, SaveResult
from spotsafe.writer.lending import HeldFiles
from spotsafe.writer.process import ProcessWriter
from spotsafe.writer.thread import WriterThread

FAILURES_IN_A_ROW = 3
"""So many failed saves in a row raise at once: by then it is no accident."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """What is the same for all saves of an attempt."""

    record: AttemptRecord
    resumed_from: str | None
    passed_over: frozenset[str]
    nonfinite_before: frozenset[str]
    frozen: tuple[FileEntry, ...] = ()
    """Files with frozen tensors of the checkpoint resumed from, if they may be referred to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What a save is made for, and what the one that is made in its place is made for too."""

    reason: str
    metrics: dict[str, float]


@dataclass(slots=True)
class _Flight:
    """A save that was copied, or is being copied, until its result is taken."""

    step: int
    asked: _Asked
    since: float
    """When its writing probably began, on the monotonic clock."""
    blocked: float = 0.0


@dataclass(slots=True, eq=False)
class Saver:
    """Begins saves, at most one while another is being written, and takes their results."""

    tracker: Tracker
    writer: WriterThread | ProcessWriter
    overlap: Overlap
    policy: SavePolicy
    keep: Keep
    identity: Identity
    lineage: Lineage
    clock: Clock
    emit: Callable[[Event], None]
    choose_slots: Callable[[int, int], SlotChoice]
    """From the bytes of a state, and those of what is frozen, to the memory that saves are staged in."""
    last_step: int
    """Step of the newest state that was staged or restored: where the policy counts from."""
    failures: list[str] = field(default_factory=list)
    """One line for each save of this attempt that failed."""
    newest: str | None = field(init=False)
    """Name of the newest checkpoint that this attempt published; before that, of the one it resumed from."""
    ready: bool = False
    """Whether the first save was planned, or made."""
    cost: SaveCost | None = None
    """What the last published save cost."""
    _overdue: bool = False
    """One was due while there was no room for it, or one failed that would not fail again; none was made since."""
    lost: int = 0
    """So many saves of this attempt were lost since the process that wrote them ended. Each is made again."""
    _again: _Asked | None = None
    """Saves whose copy was overtaken or whose writer has died: they are made again, as one new save."""
    _durable_step: int = field(init=False)
    _plans: PlanCache = field(default_factory=PlanCache)
    _piece_plans: PlanCache | None = None
    _streaming_said: bool = False
    _slots: Slots = field(init=False)
    _frozen: FrozenTensors = field(init=False)
    _copier: Copier = field(init=False)
    _flights: dict[CheckpointName, _Flight] = field(default_factory=dict)
    """In the order in which they are written."""
    _saves: int = 0
    _last_time: float = field(init=False)
    _in_a_row: int = 0
    _unreported: int = 0
    _last_error: BaseException | None = None
    _best: BestWatch = field(init=False)
    _sick_said: bool = False

    def __post_init__(self) -> None:
        self._best = BestWatch(self.keep)
        self._slots = Slots(choose=self.choose_slots, shared=self.writer.shares)
        self._frozen = self._remember_frozen()
        self._copier = Copier(
            writer=self.writer,
            overlap=self.overlap,
            slots=self._slots,
            frozen=self._frozen,
            clock=self.clock,
            job=self._job,
            hears=self,
        )
        self._last_time = self.clock.monotonic()
        self.newest = self.lineage.resumed_from
        self._durable_step = self.last_step

    # -- deciding ---

    def due(self, step: int, *, epoch_ended: bool) -> bool:
        """Whether a save is to be made at this safe point: the policy asks for one, or did when there was no room.

        A policy remembers nothing, and the end of an epoch does not come back with the next step.
        """
        now = self.clock.monotonic()
        return self._overdue or self.policy.due(
            Progress(
                step=step,
                now_s=now,
                steps_since_save=step - self.last_step,
                seconds_since_save=now - self._last_time,
                saves=self._saves,
                epoch_ended=epoch_ended,
                blocking_s=None if self.cost is None else self.cost.blocking_s,
                write_s=None if self.cost is None else self.cost.write_s,
            )
        )

    @property
    def busy(self) -> bool:
        """Whether a save is being written."""
        return self.overlap.copying or not self.writer.idle

    @property
    def owes(self) -> bool:
        """Whether a save is to be made again."""
        return self._again is not None

    @property
    def in_flight(self) -> bool:
        """Whether something may still be written: a save, or the manifest of one that failed."""
        return self.busy or self.writer.undecided

    @property
    def held_step(self) -> int:
        """Step of the newest state that a checkpoint holds, or will when the saves in flight are published."""
        return next((one.step for one in reversed(self._flights.values())), self._durable_step)

    @property
    def has_room(self) -> bool:
        """Whether a save can be begun now, as far as is known before its state is looked at."""
        return self._slots.free > 0 and not (self._frozen.awaits_result or self.overlap.copying)

    @property
    def rest_of_flight_s(self) -> float | None:
        """Seconds that the saves in flight probably still need; None if none was measured yet."""
        if self.cost is None:
            return None
        first = next(iter(self._flights.values()), None)
        if first is None:
            return 0.0
        rest = max(0.0, first.since + self.cost.write_s - self.clock.monotonic())
        return rest + self.cost.write_s * (len(self._flights) - 1)

    # -- doing ---

    def tracked_more(self, names: Collection[str]) -> None:
        """State was tracked late: what the program made not finite is no decay. What was loaded is judged already."""
        made = self.tracker.nonfinite(self.tracker.as_made.intersection(names))
        before = self.lineage.nonfinite_before | made
        self.lineage = replace(self.lineage, nonfinite_before=before)

    def get_ready(self, session: Callable[[], Mapping[str, Any]]) -> None:
        """Plan the first save and let its memory be touched in the background: it blocks no longer than later ones.

        Args:
            session: the session's own state, as of `save`.
        """
        self.ready = True
        with contextlib.suppress(Exception):  # whatever cannot be saved, the save itself tells of
            capture, idle = self._frozen.split(self.tracker.capture(session=session()))
            plan = self._plans.plan(capture.tensors, rank=self.identity.rank)
            if self._slots.prepare(plan.arena_size, beside=self._frozen.size_of(idle)) is not None:
                self._slots.touch()

    def save(
        self,
        session: Mapping[str, Any],
        *,
        step: int,
        reason: str,
        metrics: Mapping[str, float] | None = None,
        beside: bool = False,
    ) -> bool:
        """Copy the state of now and let it be written.

        Args:
            session: the session's own state at this moment, plain values.
            step: the step it is the state of.
            reason: for the manifest.
            metrics: for the manifest.
            beside: whether parts of the copy may go on beside training, until `Overlap.settle`.

        Returns:
            False if it is postponed, since saves are still in flight, whose memory it needs.
        """
        self.poll()
        self.ready = True
        began = self.clock.monotonic()
        if not self.has_room:
            self._postpone(step, reason=reason)
            return False
        captured = self.tracker.capture(session=session)
        capture, idle = self._frozen.split(captured)
        plan = self._plans.plan(capture.tensors, rank=self.identity.rank)
        slots = self._slots.prepare(plan.arena_size, beside=self._frozen.size_of(idle))
        if slots is None:
            self._postpone(step, reason=reason)  # it has outgrown the slots, one of which is in use
            return False
        if slots.streams:  # what is frozen too: there is no memory to stage that in either
            capture, idle = captured, ()
            plan = self._plan_pieces(capture, most=slots.size)
        name = CheckpointName(self.lineage.record.attempt, step, self._saves + 1, self.lineage.record.nonce)
        self._saves += 1
        self.emit(events.SaveStarted(checkpoint=str(name), step=step, reason=reason))
        due = Due(
            name=name,
            capture=capture,
            plan=plan,
            idle=idle,
            reason=reason,
            metrics=dict(metrics or {}),
            began=began,
            streamed=slots.streams,
        )
        due = self._with_what_was_asked(due)
        try:
            self._copier.copy(due, beside=beside)
        except BaseException:  # Ctrl-C: the program may go on
            self._ask_again_for(due)
            raise
        return True

    def poll(self) -> None:
        """Take what the writer has finished.

        Raises:
            Superseded: a newer attempt of the run exists.
            SaveFailed: the third save in a row failed.
        """
        newer, stray = None, self._stray()
        for result in self.writer.poll():
            self._take(result)
            newer = result.superseded_by or newer
        self._forget(stray)
        if newer is not None:
            other = "another attempt" if newer == self.lineage.record.attempt else "attempt"
            raise Superseded(
                f"{other} {newer} of run {self.lineage.record.run} has been started; "
                f"attempt {self.lineage.record.attempt} ends here and must not be restarted"
            )
        if self._in_a_row >= FAILURES_IN_A_ROW:
            self._in_a_row = 0
            self.raise_failures()

    def note_failure(self, error: Exception, *, step: int) -> None:
        """Count a save that failed before it came to the writer."""
        self._count_failure(f"step {step}", error)
        self.emit(events.SaveFailed(checkpoint="", step=step, error=str(error)))

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is in flight; false if that took longer."""
        self.overlap.settle()
        return self.writer.drain(timeout_s)

    def await_room(self, timeout_s: float) -> bool:
        """Wait until a save can be begun, after `poll`; false if that took longer."""
        self.overlap.settle()
        left = 0 if self._frozen.awaits_result else self._slots.count - 1
        return self.writer.drain(timeout_s, left=left)

    def raise_failures(self) -> None:
        """Raise `SaveFailed`, caused by the last error, if saves failed since one was published or this was raised."""
        if self._unreported:
            recent = self.failures[-self._unreported :]
            self._unreported = 0
            raise SaveFailed(
                f"{len(recent)} save(s) failed; the newest checkpoint is {self.newest or 'none'}. "
                f"The last one: {recent[-1]}",
                failures=recent,
            ) from self._last_error

    def close(self) -> None:
        """Give back the memory that saves are staged in, unless one is still being written from it."""
        self._slots.close(idle=self.writer.idle)

    # -- what the copier tells ---

    def copying(self, due: Due) -> None:
        """The state of this step will be held, unless something fails."""
        self._say_best_finds_nothing(due.metrics)
        self.last_step, self._last_time, self._overdue = due.name.step, due.began, False
        asked = _Asked(reason=due.reason, metrics=due.metrics)
        self._flights[due.name] = _Flight(step=due.name.step, asked=asked, since=self.clock.monotonic())

    def staged(self, job: SaveJob, frozen_bytes: int, *, blocked: float) -> None:
        """All of it is copied."""
        flight = self._flights[job.name]
        flight.blocked, flight.since = blocked, self.clock.monotonic()
        total = sum(file.size for file in job.files) + frozen_bytes
        self.emit(events.SaveStaged(checkpoint=str(job.name), total_bytes=total, blocked_s=blocked))

    def given_up(self, due: Due) -> None:
        """A save of which `copying` was told is not to be: nothing holds that step."""
        self._flights.pop(due.name, None)
        self._overdue = True
        self._ask_again_for(due)

    def discarded(self, due: Due) -> None:
        """The copy is no state of any step."""
        self.given_up(due)
        self.emit(events.SaveDiscarded(checkpoint=str(due.name), step=due.name.step))

    # -- inside ---

    def _stray(self) -> list[CheckpointName]:
        """Saves that are nobody's, or whose result has just come: Ctrl-C may cut off one anywhere."""
        awaited = () if self._frozen.awaited is None else (self._frozen.awaited,)
        mine = () if self.overlap.copying else dict.fromkeys((*self._flights, *self._slots.saves, *awaited))
        return [save for save in mine if not self.writer.has(save)]

    def _forget(self, saves: Collection[CheckpointName]) -> None:
        """Those whose result did not come are not to be: nothing holds their steps, and what they were for is due."""
        for save in saves:
            if save in self._slots.saves or save == self._frozen.awaited:
                self._frozen.forget_staged(save)
                self._slots.give_back(save)
            flight = self._flights.pop(save, None)
            if flight is not None:
                self._ask_again(flight.asked)
                self._overdue = True

    def _plan_pieces(self, capture: Capture, *, most: int) -> SavePlan:
        """A plan whose files fit into a slot of so many bytes."""
        if self._piece_plans is None or self._piece_plans.max_file_bytes != most:
            self._piece_plans = PlanCache(max_file_bytes=most)
        plan = self._piece_plans.plan(capture.tensors, rank=self.identity.rank)
        if not self._streaming_said:
            self._streaming_said = True
            text = f"{human.size(plan.total_bytes)} of state do not fit in the memory that is left to stage saves in"
            way = f"they are written through {human.size(most)}, piece by piece, while training waits"
            self.emit(events.Warned(message=f"{text}: {way}. staging_memory= sets how much there is"))
        return plan

    def _ask_again_for(self, due: Due) -> None:
        """The same for a save that was given up; not if the writer has it all the same."""
        if not self.writer.has(due.name):
            self._ask_again(_Asked(reason=due.reason, metrics=due.metrics))

    def _ask_again(self, asked: _Asked) -> None:
        """A save is to be made again, together with others that are."""
        before = self._again or _Asked(reason="interval", metrics={})
        reason = before.reason if asked.reason == "interval" else asked.reason
        self._again = _Asked(reason=reason, metrics=merged(before.metrics, asked.metrics))

    def _with_what_was_asked(self, due: Due) -> Due:
        """With what was asked of the saves in whose place it is made, if there are some."""
        before, self._again = self._again, None
        if before is None:
            return due
        reason = before.reason if due.reason == "interval" else due.reason
        return replace(due, reason=reason, metrics=merged(before.metrics, due.metrics))

    def _job(self, due: Due, frozen: StagedFrozen) -> SaveJob:
        return SaveJob(
            name=due.name,
            run=self.lineage.record.run,
            parent=self.lineage.resumed_from,
            reason=due.reason,
            created=self.clock.wall(),
            world_size=self.identity.world_size,
            rank=self.identity.rank,
            metrics=due.metrics,
            files=due.plan.files,
            frozen=frozen.files,
            tensors=(*due.plan.tensors, *frozen.tensors),
            state=due.capture.state,
            session=due.capture.session,
            health=due.plan.health,
            nonfinite_before=self.lineage.nonfinite_before,
            keep=self.keep,
            resumed_from=self.lineage.resumed_from,
            passed_over=self.lineage.passed_over,
            rollbacks=self.lineage.record.rollbacks,
            streamed=due.streamed,
        )

    def _remember_frozen(self) -> FrozenTensors:
        held = HeldFiles(self.clock.monotonic)
        origin = CheckpointName.parse(self.lineage.resumed_from or "")
        if origin is not None:
            held.note(origin, self.lineage.frozen)

        def warn(text: str) -> None:
            self.emit(events.Warned(message=text))

        return FrozenTensors(held, rank=self.identity.rank, warn=warn, arena=self._slots.new)

    def _take(self, result: SaveResult) -> None:
        flight = self._flights.pop(result.name, None)
        self._frozen.take(result)
        self._slots.give_back(result.name)
        following = next(iter(self._flights.values()), None)
        if flight is not None and following is not None:
            following.since = max(following.since, flight.since + result.write_s)
        if result.published:
            self.newest = str(result.name)
            self._durable_step = result.name.step
            self.cost = SaveCost(blocking_s=0.0 if flight is None else flight.blocked, write_s=result.write_s)
            self._in_a_row = self._unreported = 0
            self._say_health(result)
            return
        if result.superseded_by is not None and result.error is None:
            return
        if result.abandoned:  # `save` raised why
            self._overdue = True
            if flight is not None:
                self._ask_again(flight.asked)
            return
        # A file that checkpoints refer to is gone: all of them lack it, so do not wait for the next interval. Nor is
        # it the store's fault if a writer process ended: that has been told, and how often it may is counted there.
        self._overdue = self._overdue or isinstance(result.error, StorageNotFound | WriterDied)
        if isinstance(result.error, WriterDied):
            self.lost += 1
            if flight is not None:
                self._ask_again(flight.asked)
            return
        self._count_failure(str(result.name), result.error)

    def _count_failure(self, what: str, error: BaseException | None) -> None:
        self._in_a_row += 1
        self._unreported += 1
        self._last_error = error
        self.failures.append(f"{what}: {type(error).__name__}: {error}")

    def _say_health(self, result: SaveResult) -> None:
        """Once when values stop being finite, and again only after they were."""
        if not result.healthy and not self._sick_said:
            text = f"checkpoint {result.name} holds values that are not finite"
            self.emit(events.Warned(message=f"{text}; a resume prefers the newest one before that"))
        self._sick_said = not result.healthy

    def _say_best_finds_nothing(self, metrics: Collection[str]) -> None:
        text = self._best.saved(metrics)
        if text is not None:
            self.emit(events.Warned(message=text))

    def _postpone(self, step: int, *, reason: str) -> None:
        if not self._overdue:
            self._overdue = True
            self.emit(events.SavePostponed(step=step, reason=reason))
