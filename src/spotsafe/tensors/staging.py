"""The copy of a captured state into the arena: the only part of a save for which training waits."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

import torch

from spotsafe.tensors.memory import SMALL, copy_bytes, new_bytes
from spotsafe.tensors.pause import collection_paused
from spotsafe.tensors.plan import Placement, SavePlan
from spotsafe.tensors.tree import Capture, NamedTensor, as_bytes, dtype_name

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""What stands for the items of a strided copy, by size."""


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
    _check(plan, tensors, arena)
    for offset, header in plan.headers:
        arena[offset : offset + len(header)] = header
    ends = iter([file.arena_offset + file.size for file in plan.files] if reached else [])
    devices, end = set[torch.device](), next(ends, math.inf)
    with torch.no_grad(), collection_paused():
        memory = memory_of(arena, plan.arena_size)
        base = memory.data_ptr()
        for place in plan.placements:
            if place.tensor in skip:
                continue
            while place.arena_offset >= end and reached is not None:
                _wait_for(devices)  # a copy from a device may still be under way
                reached(int(end))
                end = next(ends, math.inf)
            tensor, start, size = tensors[place.tensor].tensor, place.arena_offset, place.nbytes
            if 0 < size <= SMALL and _is_plain_memory(tensor) and tensor.shape == place.lengths:
                copy_bytes(base + start, tensor.data_ptr(), size)
            elif size:
                _copy(box_of(tensor, place), memory[start : start + size])
                if not tensor.is_cpu:
                    devices.add(tensor.device)
    _wait_for(devices)


def _wait_for(devices: set[torch.device]) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


def _is_plain_memory(tensor: torch.Tensor) -> bool:
    """Whether its bytes are its elements, row-major, and lie on the CPU."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def memory_of(arena: memoryview, size: int) -> torch.Tensor:
    """The first bytes of an arena as a tensor."""
    if size == 0:
        return new_bytes(0)
    return torch.frombuffer(arena, dtype=torch.uint8, count=size)


def _check(plan: SavePlan, tensors: Sequence[NamedTensor], arena: memoryview) -> None:
    if arena.readonly or arena.nbytes < plan.arena_size:
        raise ValueError(f"the arena must be writable and have {plan.arena_size} bytes, not {arena.nbytes}")
    if len(tensors) != len(plan.specs):
        raise ValueError(f"the plan is for {len(plan.specs)} tensors, not {len(tensors)}")
    for one, spec in zip(tensors, plan.specs, strict=True):
        shape, dtype = one.tensor.shape, dtype_name(one.tensor.dtype)
        if one.name != spec.name or shape != spec.shape or dtype != spec.dtype:
            raise ValueError(f"tensor {one.name!r}, {dtype} {list(shape)}, is not the plan's {spec}")


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
