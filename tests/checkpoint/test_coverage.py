"""Tilings: the corner sums against counting every element."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from spotsafe.checkpoint.coverage import MAX_CORNERS, Box, box_fault, tiling_fault

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


def counted(shape: tuple[int, ...], boxes: list[Box]) -> bool:
    """Whether every element lies in exactly one box, by counting."""
    count = np.zeros(shape, dtype=int)
    for offsets, lengths in boxes:
        count[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))] += 1
    return bool((count == 1).all())


def cut(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """A random tiling, by cutting boxes in two again and again."""
    boxes = [(tuple(0 for _ in shape), shape)]
    for _ in range(draw(st.integers(0, 6))):
        offsets, lengths = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dims = [dim for dim, length in enumerate(lengths) if length > 1]
        if not dims:
            boxes.append((offsets, lengths))
            continue
        dim = draw(st.sampled_from(dims))
        at = draw(st.integers(1, lengths[dim] - 1))
        for start, length in ((0, at), (at, lengths[dim] - at)):
            low = (*offsets[:dim], offsets[dim] + start, *offsets[dim + 1 :])
            boxes.append((low, (*lengths[:dim], length, *lengths[dim + 1 :])))
    return boxes


@given(st.data(), shapes)
@settings(max_examples=150)
def test_the_answer_is_that_of_counting(data: st.DataObject, shape: tuple[int, ...]) -> None:
    """Tilings, and tilings in which a box was moved, resized, doubled or dropped."""
    boxes = data.draw(st.composite(cut)(shape))
    assert tiling_fault(shape, boxes) is None
    assert counted(shape, boxes)
    place = data.draw(st.integers(0, len(boxes) - 1))
    kind = data.draw(st.sampled_from(["drop", "double", "change"]))
    if kind == "drop":
        boxes.pop(place)
    elif kind == "double":
        boxes.append(boxes[place])
    else:
        offsets = tuple(data.draw(st.integers(0, size)) for size in shape)
        lengths = tuple(data.draw(st.integers(0, n - o)) for n, o in zip(shape, offsets, strict=True))
        boxes[place] = (offsets, lengths)
    assert (tiling_fault(shape, boxes) is None) == counted(shape, boxes)


def test_an_overlap_that_makes_up_for_a_gap_is_found() -> None:
    """The number of elements is right, and still it is no tiling."""
    boxes = [((0, 0), (2, 2)), ((0, 0), (2, 2))]
    assert tiling_fault((4, 2), boxes) == "its slices do not cover it exactly once"
    assert tiling_fault((4, 2), [((0, 0), (2, 2)), ((2, 0), (2, 2))]) is None


@pytest.mark.parametrize(
    ("shape", "boxes", "fits"),
    [
        ((), [((), ())], True),
        ((), [], False),
        ((), [((), ()), ((), ())], False),
        ((0, 3), [], True),
        ((0, 3), [((0, 0), (0, 3))], True),
        ((3,), [((0,), (3,)), ((1,), (0,))], True),
    ],
)
def test_scalars_and_empty_tensors(shape: tuple[int, ...], boxes: list[Box], fits: bool) -> None:
    """A scalar has one element, an empty tensor none."""
    assert (tiling_fault(shape, boxes) is None) == fits


@pytest.mark.parametrize(
    ("offsets", "lengths", "says"),
    [
        ((0,), (1, 1), "dimensions"),
        ((0, 0, 0), (1, 1, 1), "dimensions"),
        ((-1, 0), (1, 1), "outside"),
        ((0, 0), (-1, 1), "outside"),
        ((3, 0), (2, 1), "outside"),
        ((0, 0), (1, 4), "outside"),
    ],
)
def test_a_box_must_lie_inside(offsets: tuple[int, ...], lengths: tuple[int, ...], says: str) -> None:
    """Offsets and lengths of the right number and sign."""
    assert says in str(box_fault((4, 3), offsets, lengths))
    assert says in str(tiling_fault((4, 3), [(offsets, lengths)]))
    assert box_fault((4, 3), (3, 0), (1, 3)) is None


def test_a_hostile_number_of_corners_is_refused() -> None:
    """64 dimensions have more corners than atoms in a person; nobody counts them."""
    shape = (2,) * 64
    boxes = [((0,) * 64, (1,) * 64), ((1,) * 64, (1,) * 64)]
    assert tiling_fault(shape, boxes) == "2 slices cut along 64 dimensions"
    assert len(boxes) << 64 > MAX_CORNERS


def test_many_slices_take_linear_time() -> None:
    """Comparing 20,000 slices in pairs would take minutes."""
    count = 20_000
    boxes = [((number, 0), (1, 7)) for number in range(count)]
    started = time.process_time()
    assert tiling_fault((count, 7), boxes) is None
    assert time.process_time() - started < 5
