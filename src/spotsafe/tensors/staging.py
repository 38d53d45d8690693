"""The copy of a captured state into the arena: the only part of a save for which training waits."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from operator import attrgetter

import torch

from spotsafe.tensors.memory import AT_ONCE, SMALL, copy_bytes, new_bytes
from spotsafe.tensors.pause import collection_paused
from spotsafe.tensors.plan import Placement, SavePlan
from spotsafe.tensors.tree import PLAIN, Capture, NamedTensor, as_bytes, dtype_name

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""What stands for the items of a strided copy, by size."""
_ROW = 256
"""Tensors of one call, which nobody can interrupt; more of them save nothing."""
_PLAIN, _IS_CPU = frozenset(PLAIN), attrgetter("is_cpu")
_SHAPE, _DTYPE, _NAME = attrgetter("shape"), attrgetter("dtype"), attrgetter("name")


def stage(
    plan: SavePlan,
    capture: Capture,
    arena: memoryview,
    *,
    skip: Collection[int] = (),
    reached: Callable[[int], None] | None = None,
) -> None:
    """Copy every tensor to its place and write the headers; blocking, each byte once.

    Args:
        plan: made for exactly the tensors of the capture.
        capture: the live tensors.
        arena: writable, at least `plan.arena_size` bytes.
        skip: positions of tensors that somebody else copies.
        reached: told the offset in the arena up to which everything is there, whenever a file is.

    Raises:
        ValueError: the arena is too small or read-only, or the tensors are not those of the plan.
    """
    tensors = capture.tensors
    live = [one.tensor for one in tensors]
    with collection_paused():
        _check(plan, tensors, live, arena)
    for offset, header in plan.headers:
        arena[offset : offset + len(header)] = header
    files = _Files([file.arena_offset + file.size for file in plan.files], reached)
    with torch.no_grad(), collection_paused():
        memory = memory_of(arena, plan.arena_size)
        for places, is_row in _stretches(plan):
            mine = [place for place in places if place.tensor not in skip] if skip else places
            whole_row = is_row and len(mine) == len(places)
            if not (whole_row and _copied_at_once(places, live, memory, files)):
                _copy_singly(mine, live, memory, files=files)
    files.finish()


class _Files:
    """Tells how far the copy is, whenever a file is whole.

    Args:
        ends: where each file ends in the arena.
        reached: is told; None if nobody wants to know.
    """

    def __init__(self, ends: Sequence[int], reached: Callable[[int], None] | None) -> None:
        self._ends, self._reached = iter(ends if reached is not None else ()), reached
        self.end = next(self._ends, math.inf)
        self.devices = set[torch.device]()
        """From which a copy may still be under way."""

    def pass_to(self, offset: int) -> None:
        """The next copy goes to `offset`: all files that end before it are whole."""
        while offset >= self.end and self._reached is not None:
            self.finish()
            self._reached(int(self.end))
            self.end = next(self._ends, math.inf)

    def finish(self) -> None:
        """Wait for what was begun."""
        for device in self.devices:
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()


def _stretches(plan: SavePlan) -> Iterator[tuple[Sequence[Placement], bool]]:
    """All placements in order: rows, and what lies between them."""
    places, at = plan.placements, 0
    for row in plan.rows:
        yield places[at : row.start], False
        for begin in range(row.start, row.stop, _ROW):
            yield places[begin : min(begin + _ROW, row.stop)], True
        at = row.stop
    yield places[at:], False


def _copy_singly(
    places: Sequence[Placement],
    live: Sequence[torch.Tensor],
    memory: torch.Tensor,
    *,
    files: _Files,
) -> None:
    base = memory.data_ptr()
    for place in places:
        tensor, start, size = live[place.tensor], place.arena_offset, place.nbytes
        if start >= files.end:
            files.pass_to(start)
        if 0 < size <= SMALL and _is_plain_memory(tensor) and tensor.shape == place.lengths:
            copy_bytes(base + start, tensor.data_ptr(), size)
        elif size:
            _copy(box_of(tensor, place), memory[start : start + size])
            if not tensor.is_cpu:
                files.devices.add(tensor.device)


def _copied_at_once(
    places: Sequence[Placement], live: Sequence[torch.Tensor], memory: torch.Tensor, files: _Files
) -> bool:
    """Copy whole tensors of one dtype and shape, which lie side by side, by one call; false if it cannot be."""
    row, first, last = [live[place.tensor] for place in places], places[0], places[-1]
    dtype = row[0].dtype
    if dtype not in AT_ONCE or not _PLAIN.issuperset(map(type, row)) or not all(map(_IS_CPU, row)):
        return False
    files.pass_to(first.arena_offset)
    target = memory[first.arena_offset : last.arena_offset + last.nbytes].view(dtype)
    torch.stack(row, out=target.view(len(row), *first.lengths))
    return True


def _is_plain_memory(tensor: torch.Tensor) -> bool:
    """Whether its bytes are its elements, row-major, and lie on the CPU."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def memory_of(arena: memoryview, size: int) -> torch.Tensor:
    """The first bytes of an arena as a tensor."""
    if size == 0:
        return new_bytes(0)
    return torch.frombuffer(arena, dtype=torch.uint8, count=size)


def _check(
    plan: SavePlan, tensors: Sequence[NamedTensor], live: Sequence[torch.Tensor], arena: memoryview
) -> None:
    if arena.readonly or arena.nbytes < plan.arena_size:
        raise ValueError(f"the arena must be writable and have {plan.arena_size} bytes, not {arena.nbytes}")
    if len(tensors) != len(plan.specs):
        raise ValueError(f"the plan is for {len(plan.specs)} tensors, not {len(tensors)}")
    # Whole lists at once: a loop takes longer than the copy itself.
    specs = plan.specs
    columns = list(map(_NAME, tensors)), list(map(dtype_name, map(_DTYPE, live))), list(map(_SHAPE, live))
    if columns != (list(map(_NAME, specs)), list(map(_DTYPE, specs)), list(map(_SHAPE, specs))):
        found = next(one for one in zip(*columns, specs, strict=True) if one[:3] != one[3][:3])
        raise ValueError(f"tensor {found[0]!r}, {found[1]} {list(found[2])}, is not the plan's {found[3]}")


def box_of(tensor: torch.Tensor, place: Placement) -> torch.Tensor:
    """The part of a tensor that goes to a place."""
    if tensor.shape == place.lengths:
        return tensor
    for axis, (offset, length) in enumerate(zip(place.offsets, place.lengths, strict=True)):
        if length != tensor.shape[axis]:
            tensor = tensor.narrow(axis, offset, length)
    return tensor


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy into the bytes of `target`, row-major, with conjugation and negation carried out."""
    if source.is_conj() or source.is_neg():
        source = source.resolve_conj().resolve_neg()
    if source.is_contiguous():
        # As bytes: torch has no copy kernel for some dtypes, and warns about others.
        target.copy_(as_bytes(source), non_blocking=True)
    else:
        words = WORDS.get(source.element_size(), source.dtype)
        target.view(words).view(source.shape).copy_(source.view(words), non_blocking=True)
