"""Rows of tensors of one kind: where they begin and end, and views of them."""

from __future__ import annotations

import torch

from spotsafe.checkpoint.dtypes import DTYPES
from spotsafe.checkpoint.index import Slice, TensorEntry
from spotsafe.tensors.runs import Placed, only_piece, runs

DATA = torch.arange(1 << 12).to(torch.uint8)


def entry(name: str, start: int, shape: tuple[int, ...] = (2,), dtype: str = "uint8") -> TensorEntry:
    """A tensor in one piece."""
    nbytes = torch.Size(shape).numel() * DTYPES[dtype].item_bytes
    piece = Slice(offsets=(0,) * len(shape), lengths=shape, file="a", start=start, nbytes=nbytes)
    return TensorEntry(name=name, dtype=dtype, shape=shape, slices=(piece,))


def placed(*entries: TensorEntry) -> list[Placed]:
    """As the one piece of each says."""
    return [(one.slices[0].start, one.slices[0].nbytes, one.name, one) for one in entries]


def test_a_run_ends_at_a_gap_another_shape_and_another_dtype() -> None:
    """And nowhere else."""
    row = placed(
        *(entry("a", 0), entry("b", 2), entry("gap", 5), entry("c", 7)),
        *(entry("shape", 9, (1, 2)), entry("dtype", 11, (1, 2), "int8"), entry("d", 13, (1, 2), "int8")),
    )
    assert [run.names for run in runs(row)] == [["a", "b"], ["gap", "c"], ["shape"], ["dtype", "d"]]
    assert [(run.start, run.end) for run in runs(row)] == [(0, 4), (5, 9), (9, 11), (11, 15)]
    assert list(runs([])) == []


def test_only_what_is_whole_in_one_piece_has_an_only_piece() -> None:
    """Not what several ranks hold, nor a box that is a part."""
    one = entry("a", 0)
    half = TensorEntry(name="a", dtype="uint8", shape=(4,), slices=one.slices)
    assert only_piece([one]) is one.slices[0]
    assert only_piece([one, one]) is None
    assert only_piece([half]) is None
    assert only_piece([TensorEntry(name="a", dtype="uint8", shape=(0,), slices=())]) is None
