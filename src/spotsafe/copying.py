"""How a save is copied and comes to the writer: as a whole, file by file, beside training, or through a small slot.

Whichever way, the bytes that are written are those of one step. What is not whole never becomes a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from spotsafe.checkpoint.layout import CheckpointName
from spotsafe.clock import Clock
from spotsafe.overlap import Overlap
from spotsafe.slots import Lease, Slots
from spotsafe.tensors.frozen import FrozenTensors, StagedFrozen
from spotsafe.tensors.plan import SavePlan, pieces_of
from spotsafe.tensors.staging import stage
from spotsafe.tensors.tree import Capture, NamedTensor
from spotsafe.writer.copied import Staging
from spotsafe.writer.job import SaveJob
from spotsafe.writer.process import ProcessWriter
from spotsafe.writer.thread import WriterThread


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """A save that is to be made."""

    name: CheckpointName
    capture: Capture
    plan: SavePlan
    idle: Sequence[NamedTensor]
    """What is frozen, and not in `capture`."""
    reason: str
    metrics: dict[str, float]
    began: float
    """On the monotonic clock, in seconds."""
    streamed: bool = False
    """Whether it fits in no slot, and each of its files goes through one."""


class Hears(Protocol):
    """Who keeps count of saves."""

    def copying(self, due: Due) -> None:
        """The state of this step will be held, unless something fails."""

    def staged(self, job: SaveJob, frozen_bytes: int, *, blocked: float) -> None:
        """All of it is copied."""

    def given_up(self, due: Due) -> None:
        """A save of which `copying` was told is not to be."""

    def discarded(self, due: Due) -> None:
        """The same, since the program wrote to its state while it was copied."""


@dataclass(frozen=True, slots=True, eq=False)
class Copier:
    """Copies saves, each into a slot of its own, and gives them to the writer."""

    writer: WriterThread | ProcessWriter
    overlap: Overlap
    slots: Slots
    frozen: FrozenTensors
    clock: Clock
    job: Callable[[Due, StagedFrozen], SaveJob]
    hears: Hears

    def copy(self, due: Due, *, beside: bool) -> None:
        """Copy a save for which there is a slot, and let it be written.

        Args:
            due: the save.
            beside: whether parts of the copy may go on beside training, until `Overlap.settle`.

        Raises:
            MemoryError: there is no memory to stage it in.
        """
        if due.streamed:
            self._stream(due)
            return
        chosen = self.overlap.choose(due.plan, due.capture) if beside else frozenset()
        lease = self.slots.take(due.name)
        try:
            if chosen and not self.overlap.probes:
                self._copy_beside(due, lease, chosen)
                return
            # A process finishes what is staged even if this one is killed right then: so it is told before the copy.
            first = self.writer.shares or len(due.plan.files) > 1
            (self._write_while_copying if first else self._copy_then_write)(due, lease)
        except BaseException:
            self._give_up(due)
            raise
        if chosen:
            self.overlap.probe(due.plan, due.capture, lease.arena.view, chosen)

    # -- the ways ---

    def _copy_beside(self, due: Due, lease: Lease, chosen: frozenset[int]) -> None:
        """Copy what has not earned more, and let the rest be copied while training goes on."""
        frozen = self._stage_frozen(due, lease)
        job = self.job(due, frozen)
        self.hears.copying(due)
        blocked = 0.0

        def then(whole: bool, waited_s: float) -> None:
            if whole:
                self._hand_over(due, job, lease, frozen, blocked=lambda: blocked + waited_s)
            else:  # it is no state of any step, and nothing of it was given to the writer
                self._give_up(due)
                self.hears.discarded(due)

        try:
            stage(due.plan, due.capture, lease.arena.view, skip=chosen)
            try:  # after that: the two would only wait for each other
                ahead = partial(self.writer.prepare, job, lease.arena.view, lease.view_beside)
                self.overlap.begin(due.plan, due.capture, lease.arena.view, chosen, then=then, ahead=ahead)
            except RuntimeError:  # no thread to be had
                stage(due.plan, due.capture, lease.arena.view)
                chosen = frozenset()
        except BaseException:
            self.overlap.give_up()
            self.hears.given_up(due)
            raise
        blocked = self.clock.monotonic() - due.began
        if not chosen:
            then(True, 0.0)

    def _copy_then_write(self, due: Due, lease: Lease) -> None:
        stage(due.plan, due.capture, lease.arena.view)
        frozen = self._stage_frozen(due, lease)
        job = self.job(due, frozen)
        self.hears.copying(due)
        self._hand_over(due, job, lease, frozen, blocked=lambda: self.clock.monotonic() - due.began)

    def _write_while_copying(self, due: Due, lease: Lease) -> None:
        """Hand the save over before its files are filled: each is written when it is there."""
        frozen = self._stage_frozen(due, lease)
        job, staging = self.job(due, frozen), self.writer.staging()
        try:
            self._submit(job, lease, staging)
            stage(due.plan, due.capture, lease.arena.view, reached=staging.reached)
            if self.writer.shares:
                staging.finish()
            self.hears.copying(due)
            self.hears.staged(job, frozen.staged_bytes, blocked=self.clock.monotonic() - due.began)
            staging.finish()
        except BaseException:  # Ctrl-C too, anywhere: else the writer would wait for ever
            staging.fail()
            raise

    def _stream(self, due: Due) -> None:
        """Copy one file, let it be written, copy the next one to its place; training waits for all but the last."""
        pieces = list(pieces_of(due.plan))
        lease = self.slots.take(due.name, size=max((one.arena_size for one in pieces), default=0))
        try:
            job, staging = self.job(due, StagedFrozen()), self.writer.staging()
            self.hears.copying(due)
            try:
                self._submit(job, lease, staging)
                end = 0
                for piece, file in zip(pieces, job.files, strict=True):
                    if not staging.wait_written(end, lives=lambda: self.writer.has(due.name)):
                        return  # its result tells why
                    stage(piece, due.capture, lease.arena.view)
                    end = file.arena_offset + file.size
                    staging.reached(end)
                if self.writer.shares:
                    staging.finish()
                self.hears.staged(job, 0, blocked=self.clock.monotonic() - due.began)
                staging.finish()
            except BaseException:
                staging.fail()
                self.hears.given_up(due)
                raise
        except BaseException:
            self._give_up(due)
            raise

    # -- their parts ---

    def _stage_frozen(self, due: Due, lease: Lease) -> StagedFrozen:
        frozen = self.frozen.stage(due.idle, save=due.name)
        lease.beside = frozen.arena
        return frozen

    def _hand_over(
        self, due: Due, job: SaveJob, lease: Lease, frozen: StagedFrozen, *, blocked: Callable[[], float]
    ) -> None:
        """Everything is copied. What a process has been given it finishes: so it is given before anybody is told."""
        try:
            if self.writer.shares:
                self._submit(job, lease)
            self.hears.staged(job, frozen.staged_bytes, blocked=blocked())
            if not self.writer.shares:
                self._submit(job, lease)
        except BaseException:  # Ctrl-C, as in a slow sink: the program may go on
            self._give_up(due)
            self.hears.given_up(due)
            raise

    def _submit(self, job: SaveJob, lease: Lease, staging: Staging | None = None) -> None:
        self.writer.submit(job, lease.arena.view, lease.view_beside, staging=staging)

    def _give_up(self, due: Due) -> None:
        """The save is not to be. If the writer has it all the same, its result tells how it ended."""
        if not self.writer.has(due.name):
            self.slots.give_back(due.name)
            self.frozen.forget_staged(due.name)
