"""The memory that saves are staged in: one slot, or two, so that one can be filled while the other is being written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from spotsafe.checkpoint.layout import CheckpointName
from spotsafe.policy.staging_memory import SlotChoice
from spotsafe.writer.arena import Arena

Choose = Callable[[int, int], SlotChoice]
"""From the bytes that a slot must have, and those needed beside it once, to the slots there are to be."""


@dataclass(slots=True, eq=False)
class Lease:
    """The memory of one save."""

    arena: Arena
    beside: Arena | None = None
    """What is frozen, if it was staged too."""

    @property
    def view_beside(self) -> memoryview | None:
        """What lies in it."""
        return None if self.beside is None else self.beside.view


@dataclass(slots=True, eq=False)
class Slots:
    """Lends each save a slot.

    INVARIANT: two saves never share a slot, so two steps never do. From `take` on a slot belongs to one save, until
    `give_back`, which comes when its result was taken, or when it was given up and the writer does not have it.
    """

    choose: Choose
    """Is asked when nothing is staged, and again when a state has outgrown its slot."""
    shared: bool
    """Whether another process is to read them."""
    choice: SlotChoice | None = None
    _leases: dict[CheckpointName, Lease] = field(default_factory=dict)
    _unused: list[Arena] = field(default_factory=list)

    @property
    def free(self) -> int:
        """How many saves may be staged now."""
        return (1 if self.choice is None else self.choice.count) - len(self._leases)

    @property
    def saves(self) -> tuple[CheckpointName, ...]:
        """Those that have one."""
        return tuple(self._leases)

    @property
    def count(self) -> int:
        """How many slots there are; before the first save, one."""
        return 1 if self.choice is None else self.choice.count

    def prepare(self, size: int, *, beside: int = 0) -> SlotChoice | None:
        """See that a save of this size can be staged.

        Args:
            size: bytes that its slot must have.
            beside: bytes that are needed once beside it.

        Returns:
            What it is to be staged in; None if another save has to be written before.

        Raises:
            MemoryError: the system does not grant even the smallest.
        """
        if self.choice is None or self.choice.streams or self.choice.size < size:
            if self._leases:
                return None
            self._close_unused()
            self.choice = self.choose(size, beside)
        return self._granted(self.choice) if self.free > 0 else None

    def take(self, save: CheckpointName, *, size: int = 0) -> Lease:
        """A slot for a save, after `prepare`.

        Args:
            save: its name.
            size: bytes that it must have at least, where the largest piece of a save that is streamed is larger.

        Raises:
            MemoryError: the system does not grant so much.
        """
        assert self.choice is not None, "prepared"
        assert self.free > 0, "two saves never share a slot"
        if self._unused and self._unused[-1].size < size:
            self._close_unused()
        arena = self._unused.pop() if self._unused else self.new(max(self.choice.size, size))
        lease = self._leases[save] = Lease(arena)
        return lease

    def touch(self) -> None:
        """After `prepare`: have the memory of the first save there before it is needed."""
        assert self.choice is not None, "prepared"
        if self._unused and not self._leases and not self.choice.streams:
            self._unused[-1].touch()

    def new(self, size: int) -> Arena:
        """Memory of the same kind that is no slot."""
        return Arena(size, shared=self.shared)

    def give_back(self, save: CheckpointName) -> None:
        """The save has ended, or never came to the writer: nobody reads its memory any more."""
        lease = self._leases.pop(save, None)
        if lease is None:
            return
        self._unused.append(lease.arena)
        if lease.beside is not None:  # needed once in many saves: it is not kept
            lease.beside.close()

    def close(self, *, idle: bool) -> None:
        """Give all memory back, but for what is still being written from.

        Args:
            idle: whether nothing is being written, though the results may not have been taken.
        """
        for save in list(self._leases) if idle else ():
            self.give_back(save)
        self._close_unused()

    def _granted(self, choice: SlotChoice) -> SlotChoice | None:
        """Make the next slot if there is none: a smaller one where the system does not grant as much as was chosen."""
        while not self._unused:
            try:
                self._unused.append(self.new(choice.size))
            except MemoryError:
                if self._leases:  # one has to do
                    self.choice = replace(choice, count=len(self._leases))
                    return None
                smaller = choice.smaller
                if smaller is None:
                    raise
                self.choice = choice = smaller
        return choice

    def _close_unused(self) -> None:
        while self._unused:
            self._unused.pop().close()
