"""Micro-batches, positions, ends of epochs, and the state of a position."""

from __future__ import annotations

import json
import time
import tracemalloc
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils.data import BatchSampler, SequentialSampler

from spotsafe.data.order import Cursor, EpochOrder, OrderSpec
from spotsafe.data.permutation import BLOCK
from spotsafe.errors import StateMismatch, UnsupportedFormat


def delivered(spec: OrderSpec, cursor: Cursor) -> list[tuple[int, ...]]:
    return [batch.indices for batch in spec.batches(cursor)]


@settings(max_examples=200, deadline=None)
@given(length=st.integers(0, 60), batch_size=st.integers(1, 20), drop_last=st.booleans())
def test_batches_are_cut_as_torch_cuts_them(length: int, batch_size: int, drop_last: bool) -> None:
    """Without shuffle the micro-batches are those of torch's BatchSampler, and so is their number."""
    spec = OrderSpec(length=length, batch_size=batch_size, drop_last=drop_last)
    torch_batches = list(BatchSampler(SequentialSampler(range(length)), batch_size, drop_last))
    assert [list(batch) for batch in delivered(spec, Cursor())] == torch_batches
    assert spec.batches_per_epoch == len(torch_batches)
    assert spec.samples_per_epoch == sum(len(batch) for batch in torch_batches)


@settings(max_examples=200, deadline=None)
@given(
    length=st.integers(1, 60),
    batch_size=st.integers(1, 20),
    drop_last=st.booleans(),
    epoch=st.integers(0, 3),
    data=st.data(),
)
def test_any_position_continues_the_whole_epoch(
    length: int, batch_size: int, drop_last: bool, epoch: int, data: st.DataObject
) -> None:
    """Cut anywhere, an epoch delivers the same micro-batches with the same seeds; all samples once."""
    spec = OrderSpec(length=length, batch_size=batch_size, drop_last=drop_last, shuffle=True, seed=5)
    whole = list(spec.batches(Cursor(epoch=epoch)))
    done = data.draw(st.integers(0, len(whole)))
    cursor = spec.advance(Cursor(epoch=epoch), batches=done)
    assert list(spec.batches(cursor)) == whole[done:]
    assert spec.remaining(cursor) == len(whole) - done
    assert spec.ended(cursor) == (done == len(whole))
    indices = [index for batch in whole for index in batch.indices]
    assert len(set(indices)) == len(indices) == spec.samples_per_epoch
    assert spec.following(cursor) == Cursor(epoch=epoch + 1)


def test_advancing_past_the_end_is_an_error() -> None:
    """A count that the epoch cannot have hides no mistake."""
    spec = OrderSpec(length=10, batch_size=4)
    assert spec.advance(Cursor(), batches=3) == Cursor(position=10)
    for batches in (-1, 4):
        with pytest.raises(ValueError, match="3 left"):
            spec.advance(Cursor(), batches=batches)


def test_a_shuffled_epoch_differs_from_the_next_and_from_other_seeds_and_streams() -> None:
    """Seed, epoch and stream each make another order; seed + epoch means nothing."""
    orders = [
        tuple(
            EpochOrder(spec=OrderSpec(length=50, shuffle=True, seed=s, stream=t), epoch=e).samples(0, 50)[0]
        )
        for s, e, t in ((0, 0, 0), (0, 1, 0), (1, 0, 0), (0, 0, 1), (1, 1, 0))
    ]
    assert len(set(orders)) == len(orders)
    assert all(sorted(order) == list(range(50)) for order in orders)


def test_seeds_of_samples_depend_on_place_and_epoch_only() -> None:
    """No two samples of an epoch share a seed, nor do epochs; batch size and shuffle do not matter."""
    spec = OrderSpec(length=3 * BLOCK, batch_size=7)
    other = OrderSpec(length=3 * BLOCK, batch_size=1000, shuffle=True)
    seeds = EpochOrder(spec=spec, epoch=0).samples(0, 3 * BLOCK)[1]
    assert seeds == EpochOrder(spec=other, epoch=0).samples(0, 3 * BLOCK)[1]
    later = EpochOrder(spec=spec, epoch=1).samples(0, 3 * BLOCK)[1]
    assert len(set(seeds) | set(later)) == 6 * BLOCK
    assert all(0 <= seed < 2**64 for seed in seeds[:100])


def test_a_batch_may_span_blocks_of_the_order() -> None:
    """Where the order is computed in blocks, micro-batches do not notice."""
    spec = OrderSpec(length=4 * BLOCK, batch_size=3 * BLOCK // 2, shuffle=True)
    order = EpochOrder(spec=spec, epoch=0)
    joined = [index for batch in spec.batches(Cursor()) for index in batch.indices]
    assert joined == order.samples(0, 4 * BLOCK)[0]
    assert sorted(joined) == list(range(4 * BLOCK))


@pytest.mark.parametrize("length", [10**9, 10**12])
def test_resuming_deep_inside_a_huge_epoch_is_immediate(length: int) -> None:
    """Ninety percent into a billion samples: well under 50 ms (median of 5) and 4 MB, whatever the size."""
    spec = OrderSpec(length=length, batch_size=32, shuffle=True)
    cursor = spec.advance(Cursor(), batches=length // 32 * 9 // 10)
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        next(spec.batches(cursor))
        times.append(time.perf_counter() - begin)
    assert sorted(times)[2] < 0.05
    tracemalloc.start()
    try:
        next(spec.batches(cursor))
        assert tracemalloc.get_traced_memory()[1] < 4 * 2**20
    finally:
        tracemalloc.stop()


# -- state -----------------------------------------------------------------------------------------------------

SPEC = OrderSpec(length=100, batch_size=8, shuffle=True, seed=3, drop_last=True, stream=2)


def test_a_position_survives_json() -> None:
    """The state is plain and small, and gives the position back."""
    cursor = Cursor(epoch=4, position=48)
    text = json.dumps(SPEC.state(cursor))
    assert len(text) < 160
    assert SPEC.cursor(json.loads(text)) == cursor


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("length", 101),
        ("batch_size", 4),
        ("shuffle", False),
        ("seed", 4),
        ("drop_last", False),
        ("stream", 0),
    ],
)
def test_another_order_is_refused_with_both_values_and_the_choice(name: str, value: Any) -> None:
    """A position of another order means other samples: the error shows what differs and what can be done."""
    state = SPEC.state(Cursor(position=8)) | {name: value}
    with pytest.raises(StateMismatch) as caught:
        SPEC.cursor(state)
    text = str(caught.value)
    assert f"{name}: saved {value!r}, now {getattr(SPEC, name)!r}" in text
    assert caught.value.problems == (f"{name}: saved {value!r}, now {getattr(SPEC, name)!r}",)
    for choice in ('resume_data="epoch"', 'resume_data="fresh"', "new run"):
        assert choice in text


def test_all_differences_are_named_at_once() -> None:
    """Not one per attempt."""
    with pytest.raises(StateMismatch) as caught:
        SPEC.cursor(SPEC.state(Cursor()) | {"seed": 9, "length": 7})
    assert len(caught.value.problems) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"position": -1},
        {"position": 97},
        {"position": 1.5},
        {"position": True},
        {"epoch": -1},
        {"epoch": None},
    ],
)
def test_an_impossible_position_is_refused(change: dict[str, Any]) -> None:
    """A damaged number is never used; with drop_last, 96 of 100 samples exist."""
    with pytest.raises(StateMismatch, match="cannot be right"):
        SPEC.cursor(SPEC.state(Cursor()) | change)


def test_a_state_of_a_later_version_or_of_something_else_is_refused() -> None:
    """A later version may mean other samples under the same numbers."""
    with pytest.raises(UnsupportedFormat, match="version 2"):
        SPEC.cursor(SPEC.state(Cursor()) | {"version": 2})
    with pytest.raises(StateMismatch, match="has no version"):
        SPEC.cursor({"_snapshot": {}})


@pytest.mark.parametrize(
    "options",
    [{"length": -1}, {"length": 2**48 + 1}, {"batch_size": 0}, {"seed": -1}, {"seed": 2**64}, {"stream": -1}],
)
def test_impossible_orders_are_refused(options: dict[str, int]) -> None:
    """With a ValueError that names the option."""
    with pytest.raises(ValueError, match=r"samples|batch_size|seed|stream"):
        OrderSpec(**({"length": 10} | options))


def test_pure_numbers_do_not_touch_the_global_generators() -> None:
    """Making an order neither draws nor seeds."""
    before = torch.get_rng_state()
    list(SPEC.batches(Cursor()))
    assert torch.equal(before, torch.get_rng_state())
