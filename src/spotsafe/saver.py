"""Carries out saves: stages a consistent moment in memory, hands it to the writer, and keeps count of how it went.

When to save is `policy.interval`'s decision and what can be saved is known in `moments`; this file only does it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from spotsafe import events
from spotsafe.checkpoint.attempts import AttemptRecord
from spotsafe.checkpoint.index_values import FileEntry
from spotsafe.checkpoint.layout import CheckpointName
from spotsafe.clock import Clock
from spotsafe.errors import SaveFailed, StorageNotFound, Superseded, WriterDied
from spotsafe.events import Event
from spotsafe.identity import Identity
from spotsafe.metrics import BestWatch, merged
from spotsafe.overlap import Overlap
from spotsafe.policy.cost import SaveCost
from spotsafe.policy.interval import Progress, SavePolicy
from spotsafe.policy.retention import Keep
from spotsafe.tensors.frozen import FrozenTensors, StagedFrozen
from spotsafe.tensors.plan import PlanCache, SavePlan
from spotsafe.tensors.staging import stage
from spotsafe.tensors.tree import Capture, NamedTensor
from spotsafe.tracking import Tracker
from spotsafe.writer.arena import Arena
from spotsafe.writer.copied import Staging
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
class _Due:
    """A save that is to be made."""

    name: CheckpointName
    capture: Capture
    plan: SavePlan
    reason: str
    metrics: dict[str, float]
    began: float
    """On the monotonic clock, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What a save is made for, and what the one that is made in its place is made for too."""

    reason: str
    metrics: dict[str, float]


@dataclass(slots=True, eq=False)
class Saver:
    """Stages and submits saves, one at a time, and takes back their results."""

    tracker: Tracker
    writer: WriterThread | ProcessWriter
    overlap: Overlap
    policy: SavePolicy
    keep: Keep
    identity: Identity
    lineage: Lineage
    clock: Clock
    emit: Callable[[Event], None]
    last_step: int
    """Step of the newest state that was staged or restored: where the policy counts from."""
    failures: list[str] = field(default_factory=list)
    """One line for each save of this attempt that failed."""
    newest: str | None = field(init=False)
    """Name of the newest checkpoint that this attempt published; before that, of the one it resumed from."""
    cost: SaveCost | None = None
    """What the last published save cost."""
    held_step: int = field(init=False)
    """Step of the newest state that a checkpoint holds, or will when the save in flight is published."""
    _overdue: bool = False
    """One was due while the writer was busy, or one failed that would not fail again; none was made since."""
    lost: int = 0
    """So many saves of this attempt were lost since the process that wrote them ended. Each is made again."""
    _made: _Asked | None = None
    """The last save."""
    _again: _Asked | None = None
    """The last save, if its copy was overtaken or its writer has died: it is made again, as a new save."""
    _durable_step: int = field(init=False)
    _plans: PlanCache = field(default_factory=PlanCache)
    _arena: Arena | None = None
    _frozen: FrozenTensors = field(init=False)
    _frozen_arena: Arena | None = None
    _saves: int = 0
    _last_time: float = field(init=False)
    _in_a_row: int = 0
    _blocked: dict[CheckpointName, float] = field(default_factory=dict)
    _submitted_at: float = 0.0
    _unreported: int = 0
    _last_error: BaseException | None = None
    _best: BestWatch = field(init=False)
    _sick_said: bool = False

    def __post_init__(self) -> None:
        self._best = BestWatch(self.keep)
        self._frozen = self._remember_frozen()
        self._last_time = self.clock.monotonic()
        self.newest = self.lineage.resumed_from
        self.held_step = self._durable_step = self.last_step

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
    def rest_of_flight_s(self) -> float | None:
        """Seconds that the save in flight probably still needs; None if none was measured yet."""
        if self.cost is None:
            return None
        return max(0.0, self._submitted_at + self.cost.write_s - self.clock.monotonic())

    # -- doing ---

    def tracked_more(self, names: Collection[str]) -> None:
        """State was tracked late: what the program made not finite is no decay. What was loaded is judged already."""
        made = self.tracker.nonfinite(self.tracker.as_made.intersection(names))
        before = self.lineage.nonfinite_before | made
        self.lineage = replace(self.lineage, nonfinite_before=before)

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
            False if it is postponed, since a save is still in flight, whose memory it needs.
        """
        if self.busy:
            self._postpone(step, reason=reason)
            return False
        self.poll()
        began = self.clock.monotonic()
        name = CheckpointName(self.lineage.record.attempt, step, self._saves + 1, self.lineage.record.nonce)
        self._saves += 1
        self.emit(events.SaveStarted(checkpoint=str(name), step=step, reason=reason))
        capture, idle = self._frozen.split(self.tracker.capture(session=session))
        plan = self._plans.plan(capture.tensors, rank=self.identity.rank)
        what = _Due(
            name=name, capture=capture, plan=plan, reason=reason, metrics=dict(metrics or {}), began=began
        )
        due = self._with_what_was_asked(what)
        self._made = _Asked(reason=due.reason, metrics=due.metrics)
        self._copy(due, idle, beside=beside)
        return True

    def poll(self) -> None:
        """Take what the writer has finished.

        Raises:
            Superseded: a newer attempt of the run exists.
            SaveFailed: the third save in a row failed.
        """
        newer = None
        for result in self.writer.poll():
            self._take(result)
            newer = result.superseded_by or newer
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
        if self._arena is not None and self.writer.idle:
            self._arena.close()
            self._arena = None
        self._free_frozen()

    # -- inside ---

    def _copy(self, due: _Due, idle: Sequence[NamedTensor], *, beside: bool) -> None:
        chosen = self.overlap.choose(due.plan, due.capture) if beside else frozenset()
        if chosen and not self.overlap.probes:
            self._copy_beside(due, idle, chosen)
            return
        # A process finishes what is staged even if this one is killed right then: so it is told before the copy.
        first = self.writer.shares or len(due.plan.files) > 1
        (self._write_while_copying if first else self._copy_then_write)(due, idle)
        if chosen and self._arena is not None:
            self.overlap.probe(due.plan, due.capture, self._arena.view, chosen)

    def _copy_beside(self, due: _Due, idle: Sequence[NamedTensor], chosen: frozenset[int]) -> None:
        """Copy what has not earned more, and let the rest be copied while training goes on."""
        arena, frozen = self._room_for(due.plan), self._frozen.stage(idle)
        job = self._job(due, frozen)
        self._note_copying(due)
        blocked = 0.0

        def then(whole: bool, waited_s: float) -> None:
            if whole:
                self._hand_over(job, arena, frozen, blocked=lambda: blocked + waited_s)
            else:
                self._discard(due, frozen)

        try:
            self.overlap.begin(due.plan, due.capture, arena.view, chosen, then=then)
        except RuntimeError:  # no thread to be had
            chosen = frozenset()
        try:
            stage(due.plan, due.capture, arena.view, skip=chosen)
        except BaseException:
            self.overlap.give_up()
            self._note_lost()
            raise
        blocked = self.clock.monotonic() - due.began
        if not chosen:
            then(True, 0.0)

    def _discard(self, due: _Due, frozen: StagedFrozen) -> None:
        """The copy is no state of any step. Nothing of it was given to the writer."""
        self._again = self._made
        if frozen.arena is not None:
            frozen.arena.close()
        self._note_lost()
        self.emit(events.SaveDiscarded(checkpoint=str(due.name), step=due.name.step))

    def _with_what_was_asked(self, due: _Due) -> _Due:
        """With what was asked of the save in whose place it is made, if there is one."""
        before, self._again = self._again, None
        if before is None:
            return due
        reason = before.reason if due.reason == "interval" else due.reason
        return replace(due, reason=reason, metrics=merged(before.metrics, due.metrics))

    def _copy_then_write(self, due: _Due, idle: Sequence[NamedTensor]) -> None:
        arena = self._room_for(due.plan)
        stage(due.plan, due.capture, arena.view)
        frozen = self._frozen.stage(idle)
        job = self._job(due, frozen)
        self._note_copying(due)
        self._hand_over(job, arena, frozen, blocked=lambda: self.clock.monotonic() - due.began)

    def _write_while_copying(self, due: _Due, idle: Sequence[NamedTensor]) -> None:
        """Hand the save over before its files are filled: each is written when it is there."""
        arena, frozen, staging = self._room_for(due.plan), self._frozen.stage(idle), self.writer.staging()
        job = self._job(due, frozen)
        try:
            self._submit(job, arena, frozen, staging)
            stage(due.plan, due.capture, arena.view, reached=staging.reached)
            if self.writer.shares:
                staging.finish()
            self._note_copying(due)
            self._note_staged(job, frozen.staged_bytes, blocked=self.clock.monotonic() - due.began)
            staging.finish()
        except BaseException:  # Ctrl-C too, anywhere: else the writer would wait for ever
            staging.fail()
            raise

    def _hand_over(
        self, job: SaveJob, arena: Arena, frozen: StagedFrozen, *, blocked: Callable[[], float]
    ) -> None:
        """Everything is copied. What a process has been given it finishes: so it is given before anybody is told."""
        try:
            if self.writer.shares:
                self._submit(job, arena, frozen)
            self._note_staged(job, frozen.staged_bytes, blocked=blocked())
            if not self.writer.shares:
                self._submit(job, arena, frozen)
        except BaseException:  # Ctrl-C, as in a slow sink: the program may go on
            self._note_lost()
            raise

    def _submit(
        self, job: SaveJob, arena: Arena, frozen: StagedFrozen, staging: Staging | None = None
    ) -> None:
        self._frozen_arena = frozen.arena
        memory = None if frozen.arena is None else frozen.arena.view
        self.writer.submit(job, arena.view, memory, staging=staging)

    def _job(self, due: _Due, frozen: StagedFrozen) -> SaveJob:
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
        )

    def _note_copying(self, due: _Due) -> None:
        """The state of this step will be held, unless something fails."""
        self._say_best_finds_nothing(due.metrics)
        self.last_step, self._last_time, self._overdue = due.name.step, due.began, False
        self.held_step = due.name.step
        self._submitted_at = self.clock.monotonic()

    def _note_lost(self) -> None:
        """A save of which `_note_copying` was told is not to be: nothing holds that step."""
        self._frozen.forget_staged()
        self.held_step, self._overdue = self._durable_step, True

    def _note_staged(self, job: SaveJob, frozen_bytes: int, *, blocked: float) -> None:
        self._blocked[job.name] = blocked
        self._submitted_at = self.clock.monotonic()
        total = sum(file.size for file in job.files) + frozen_bytes
        self.emit(events.SaveStaged(checkpoint=str(job.name), total_bytes=total, blocked_s=blocked))

    def _remember_frozen(self) -> FrozenTensors:
        held = HeldFiles(self.clock.monotonic)
        origin = CheckpointName.parse(self.lineage.resumed_from or "")
        if origin is not None:
            held.note(origin, self.lineage.frozen)

        def warn(text: str) -> None:
            self.emit(events.Warned(message=text))

        return FrozenTensors(held, rank=self.identity.rank, warn=warn, arena=self._new_arena)

    def _free_frozen(self) -> None:
        """Memory for frozen tensors is needed once in many saves: it is not kept."""
        if self._frozen_arena is not None and self.writer.idle:
            self._frozen_arena.close()
            self._frozen_arena = None

    def _room_for(self, plan: SavePlan) -> Arena:
        if self._arena is None or self._arena.size < plan.arena_size:
            self._arena = self._new_arena(plan.arena_size)
        return self._arena

    def _new_arena(self, size: int) -> Arena:
        return Arena(size, shared=self.writer.shares)

    def _take(self, result: SaveResult) -> None:
        blocked = self._blocked.pop(result.name, 0.0)
        self._frozen.take(result)
        self._free_frozen()
        if result.published:
            self.newest = str(result.name)
            self._durable_step = result.name.step
            self.cost = SaveCost(blocking_s=blocked, write_s=result.write_s)
            self._in_a_row = self._unreported = 0
            self._say_health(result)
            return
        if result.superseded_by is not None and result.error is None:
            return
        self.held_step = self._durable_step  # one save at a time: nothing later is staged
        if result.abandoned:
            return  # `save` raised why
        # A file that checkpoints refer to is gone: all of them lack it, so do not wait for the next interval. Nor is
        # it the store's fault if a writer process ended: that has been told, and how often it may is counted there.
        self._overdue = self._overdue or isinstance(result.error, StorageNotFound | WriterDied)
        if isinstance(result.error, WriterDied):
            self.lost, self._again = self.lost + 1, self._made
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
