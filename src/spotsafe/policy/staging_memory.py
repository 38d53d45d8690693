"""In how much memory saves are staged: two slots, one, or a small one that the state is streamed through. Values only.

A save copies the state into a slot and writes it from there. With two slots one is filled while the other is still
being written. Each is as large as the state, so the second is taken only where there is plenty.
"""

from __future__ import annotations

from dataclasses import dataclass

RESERVE_BYTES = 128 << 20
"""Left untouched: a writer process needs about half of it, and a step of training is never the same as the last."""
SHARE_OF_TWO = 2
"""Two slots take at most one part in so many of what is left."""
STREAM_BYTES = 256 << 20
"""What a state that fits in no slot is streamed through, at most: a larger slot writes no faster."""
LEAST_BYTES = 2 << 20
"""The smallest slot: below, a checkpoint would have far too many files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A control group that this process is in, or the process alone, as far as memory goes; in bytes."""

    limit: int
    used: int = 0
    cache: int = 0
    """Of what is used: files in the page cache, which the kernel drops before it kills anybody."""

    @property
    def left(self) -> int:
        """What may still be taken."""
        return max(0, self.limit - max(0, self.used - self.cache))


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What there is for a process and its peers on this machine."""

    free: int | None = None
    """Bytes that the machine can give without swapping; None if nobody knows."""
    groups: tuple[Group, ...] = ()
    """Those that have a limit."""
    own: Group | None = None
    """The limit of this process alone, if it has one."""
    ranks: int = 1
    """Processes of the job on this machine. All of them save at the same time."""

    @property
    def left(self) -> int | None:
        """Bytes for each of them; None if there is no limit that anybody knows of."""
        shared = [group.left for group in self.groups] + ([] if self.free is None else [self.free])
        known = [left // max(1, self.ranks) for left in shared] + (
            [] if self.own is None else [self.own.left]
        )
        return min(known, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotChoice:
    """The memory for staging."""

    count: int
    """1 or 2."""
    size: int
    """Bytes of each."""
    streams: bool = False
    """Whether the state fits in none, and goes through one piece by piece, while training waits."""

    @property
    def smaller(self) -> SlotChoice | None:
        """What to try where the system does not grant this; None if there is nothing to try."""
        size = max(min(_power_below(self.size // 4), STREAM_BYTES), LEAST_BYTES)
        return SlotChoice(count=1, size=size, streams=True) if size < self.size else None


def choose_slots(needed: int, *, beside: int = 0, memory: Memory, given: int | None = None) -> SlotChoice:
    """What a state of this size is staged in.

    Args:
        needed: bytes that one slot must have to hold the state.
        beside: bytes that are needed once, and not in a slot, for what is frozen.
        memory: what there is.
        given: bytes that the user wants to be used; None goes by `memory`: one slot, or two if both fit in half of it.
    """
    room = memory.left if given is None else given
    if room is None:
        return SlotChoice(count=2, size=needed)
    reserve, share = (RESERVE_BYTES, SHARE_OF_TWO) if given is None else (0, 1)
    if 2 * needed + beside <= room // share:
        return SlotChoice(count=2, size=needed)
    if needed + beside + reserve <= room:
        return SlotChoice(count=1, size=needed)
    size = given if given is not None else min(_power_below(room // 4), STREAM_BYTES)
    return SlotChoice(count=1, size=max(size, LEAST_BYTES), streams=True)


def _power_below(number: int) -> int:
    """A power of two, so that files are cut in the same way when a little more or less is left."""
    return 1 << max(number, 1).bit_length() - 1
