"""Rows of tensors of one kind: where they begin and end, and views of them."""

from __future__ import annotations

import pytest
import torch

from spotsafe.checkpoint.dtypes import DTYPES
from spotsafe.checkpoint.index import Slice, TensorEntry
from spotsafe.tensors.runs import Placed, Run, only_piece, runs
from spotsafe.tensors.tree import torch_dtype

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


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")  # of the dtype itself
@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("shape", [(), (3,), (2, 1, 3), (0, 4)])
def test_views_are_the_bytes_where_they_lie(dtype: str, shape: tuple[int, ...]) -> None:
    """Of every dtype, those without a byte too."""
    nbytes = torch.Size(shape).numel() * DTYPES[dtype].item_bytes
    entries = [entry(f"{n}", 256 + n * nbytes, shape, dtype) for n in range(20)]
    [run] = runs(placed(*entries))
    views = run.views(DATA)
    assert views is not None
    found = dict(views)
    assert list(found) == [one.name for one in entries]
    for one in entries:
        view = found[one.name]
        assert (view.dtype, tuple(view.shape)) == (torch_dtype(dtype), shape)
        assert view.untyped_storage().data_ptr() == DATA.untyped_storage().data_ptr()
        assert view.is_contiguous()
        assert not nbytes or view.data_ptr() == DATA.data_ptr() + one.slices[0].start


def test_there_are_no_views_of_what_lies_askew_or_alone() -> None:
    """The caller then makes each by itself."""
    names = ["a", "b", "c", "d"]
    assert Run("int32", (1,), 8, 24, names).views(DATA) is not None
    assert Run("int32", (1,), 6, 22, names).views(DATA) is None
    assert Run("int32", (1,), 8, 20, names[:3]).views(DATA) is None


def test_only_what_is_whole_in_one_piece_has_an_only_piece() -> None:
    """Not what several ranks hold, nor a box that is a part."""
    one = entry("a", 0)
    half = TensorEntry(name="a", dtype="uint8", shape=(4,), slices=one.slices)
    assert only_piece([one]) is one.slices[0]
    assert only_piece([one, one]) is None
    assert only_piece([half]) is None
    assert only_piece([TensorEntry(name="a", dtype="uint8", shape=(0,), slices=())]) is None
