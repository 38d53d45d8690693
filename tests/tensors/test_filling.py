"""Tensors that are read from ranges of files: the right bytes, each in memory of its own."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch

from spotsafe.checkpoint.dtypes import DTYPES
from spotsafe.checkpoint.index import Slice, TensorEntry
from spotsafe.tensors.filling import Filling
from spotsafe.tensors.memory import SMALL
from spotsafe.tensors.tree import torch_dtype

FILES = {name: bytes(itertools.islice(itertools.cycle(seed), 1 << 17)) for name, seed in
         (("a", range(251)), ("b", range(3, 256)))}  # fmt: skip


def whole(name: str, file: str, start: int, shape: Sequence[int], dtype: str = "uint8") -> TensorEntry:
    """A tensor in one piece."""
    nbytes = torch.Size(shape).numel() * torch_dtype(dtype).itemsize
    piece = Slice(offsets=(0,) * len(shape), lengths=tuple(shape), file=file, start=start, nbytes=nbytes)
    return TensorEntry(name=name, dtype=dtype, shape=tuple(shape), slices=(piece,))


def filled(*entries: TensorEntry) -> tuple[int, dict[str, torch.Tensor]]:
    """How many ranges were asked for, and the tensors."""
    filling = Filling({entry.name: [entry] for entry in entries})
    count = 0
    for one in filling.ranges():
        one.memory[:] = FILES[one.file][one.start : one.start + len(one.memory)]
        count += 1
    return count, filling.tensors()


ENTRIES = (
    whole("far", "a", 1 << 16, (2, 5), "int16"),
    whole("first", "a", 4096, (3,), "float32"),
    whole("scalar", "a", 4108, (), "float8_e5m2"),
    whole("odd", "a", 4109, (3,), "bfloat16"),
    whole("none", "a", 4115, (0, 7), "float64"),
    whole("other", "b", 4096, (5,), "complex64"),
    whole("large", "b", 8192, (SMALL + 1,)),
    whole("near", "b", 4136, (SMALL,)),
)


def test_every_tensor_has_its_bytes_in_the_order_asked_for() -> None:
    """Small and large ones, of any alignment in the file."""
    _, found = filled(*ENTRIES)
    assert list(found) == [entry.name for entry in ENTRIES]
    for entry in ENTRIES:
        (piece,), tensor = entry.slices, found[entry.name]
        assert (tensor.dtype, tuple(tensor.shape)) == (torch_dtype(entry.dtype), entry.shape)
        data = FILES[piece.file][piece.start : piece.start + piece.nbytes]
        assert bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist()) == data, entry.name


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")  # of the dtype itself
@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("shape", [(), (3,), (2, 1, 3)])
@pytest.mark.parametrize("first", [4096, 4097])
def test_many_of_one_kind_are_what_was_saved_bit_for_bit(
    dtype: str, shape: tuple[int, ...], first: int
) -> None:
    """Of every dtype and any bytes: NaNs keep their payloads, bools that are neither 0 nor 1 stay so."""
    item = DTYPES[dtype].item_bytes
    nbytes = torch.Size(shape).numel() * item
    head = [whole("head", "a", 4096, (1,))][: first - 4096]
    entries = [whole(f"{n}", "a", first + n * nbytes, shape, dtype) for n in range(100)]
    count, found = filled(*head, *entries)
    assert count == 1
    for entry in entries:
        tensor, start = found[entry.name], entry.slices[0].start
        assert (tensor.dtype, tuple(tensor.shape)) == (torch_dtype(dtype), shape)
        assert tensor.is_contiguous()
        assert tensor.untyped_storage().nbytes() == nbytes
        assert bytes(tensor.untyped_storage().tolist()) == FILES["a"][start : start + nbytes]


def test_small_neighbours_are_read_together() -> None:
    """One range for those close to each other; none across files or wide gaps, and one for each large tensor."""
    count, _ = filled(*(entry for entry in ENTRIES if entry.name != "none"))
    assert count == len([["first", "scalar", "odd"], ["far"], ["other", "near"], ["large"]])


def test_no_tensor_holds_the_memory_of_another() -> None:
    """Whoever keeps one, or hands it to `torch.save`, keeps its own bytes only."""
    _, found = filled(*ENTRIES)
    for name, tensor in found.items():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, name
    assert len({tensor.data_ptr() for tensor in found.values() if tensor.numel()}) == len(found) - 1


def test_nothing_is_given_before_it_was_read() -> None:
    """A mistake of the caller, not a tensor of whatever lay in the memory."""
    with pytest.raises(AssertionError, match="nothing was read"):
        Filling({"t": [whole("t", "a", 0, (1,))]}).tensors()
