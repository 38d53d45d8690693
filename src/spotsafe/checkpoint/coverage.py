"""Whether boxes tile a tensor: every element in exactly one of them.

Counting elements is not enough (an overlap can make up for a gap) and comparing pairs is quadratic. Here
every box contributes its corners with alternating signs: the differences of its indicator function along all
dimensions. Differences determine a function that is zero outside, so the boxes tile the tensor exactly if
their corners sum to the corners of the whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

Box = tuple[Sequence[int], Sequence[int]]
"""Offsets and lengths, one of each for every dimension."""

MAX_CORNERS = 1 << 22
"""Corners that are looked at for one tensor; only a hostile index has more."""


def tiling_fault(shape: Sequence[int], boxes: Iterable[Box]) -> str | None:
    """Why `boxes` do not tile a tensor of `shape`, or None if they do. Empty boxes count for nothing."""
    solid = [box for box in boxes if all(box[1])]
    for offsets, lengths in solid:
        fault = box_fault(shape, offsets, lengths)
        if fault is not None:
            return fault
    if 0 in shape:
        return None
    dims = [dim for dim, size in enumerate(shape) if any(lengths[dim] != size for _, lengths in solid)]
    if len(solid) << len(dims) > MAX_CORNERS:
        return f"{len(solid)} slices cut along {len(dims)} dimensions"
    total: dict[tuple[int, ...], int] = defaultdict(int)
    for offsets, lengths in solid:
        _add_corners(total, [(offsets[dim], offsets[dim] + lengths[dim]) for dim in dims], sign=1)
    _add_corners(total, [(0, shape[dim]) for dim in dims], sign=-1)
    return "its slices do not cover it exactly once" if any(total.values()) else None


def box_fault(shape: Sequence[int], offsets: Sequence[int], lengths: Sequence[int]) -> str | None:
    """Why a box is no box inside a tensor of `shape`, or None."""
    if not len(offsets) == len(lengths) == len(shape):
        return f"a slice of {len(lengths)} dimensions in a tensor of {len(shape)}"
    for offset, length, size in zip(offsets, lengths, shape, strict=True):
        if offset < 0 or length < 0 or offset + length > size:
            return "a slice that reaches outside the tensor"
    return None


def _add_corners(total: dict[tuple[int, ...], int], edges: Sequence[tuple[int, int]], *, sign: int) -> None:
    corners: list[tuple[tuple[int, ...], int]] = [((), sign)]
    for low, high in edges:
        corners = [
            ((*corner, edge), -weight if edge == high else weight)
            for corner, weight in corners
            for edge in (low, high)
        ]
    for corner, weight in corners:
        total[corner] += weight
