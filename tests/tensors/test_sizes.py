"""Very many tensors, and very large ones."""

from __future__ import annotations

import faulthandler
import math
import time
from pathlib import Path

import pytest
import torch

from spotsafe.checkpoint.digest import BLOCK, block_count
from spotsafe.checkpoint.image import parse_header
from spotsafe.checkpoint.index import FileEntry, Index, decode_index, encode_index
from spotsafe.storage.local import LocalStore
from spotsafe.tensors.plan import TensorSpec, plan_save
from spotsafe.testing.states import read_newest, through_checkpoint, write_checkpoint
from spotsafe.tracking import Tracker
from tests import proof
from tests.tensors.same import bits

GIB = 1 << 30


class Many:
    """Fifty thousand tensors of 64 bytes."""

    def __init__(self, first: float, count: int = 50_000) -> None:
        values = torch.arange(16.0 * count) + first
        self.tensors = {f"layer.{at // 500}.{at % 500}": one for at, one in enumerate(values.split(16))}

    def state_dict(self) -> dict[str, torch.Tensor]:
        return self.tensors

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.tensors = state


def tracked(obj: object) -> Tracker:
    tracker = Tracker(warn=print)
    tracker.add("x", obj)
    return tracker


@pytest.mark.slow
def test_fifty_thousand_small_tensors() -> None:
    """They are saved and loaded in seconds of this process, in one file."""
    one, other = Many(0.0), Many(1.0)
    began = time.process_time()
    saved = through_checkpoint(tracked(one).capture())
    between = time.process_time()
    tracked(other).restore(saved)
    ended = time.process_time()
    assert other.tensors.keys() == one.tensors.keys()
    assert all(torch.equal(value, other.tensors[name]) for name, value in one.tensors.items())
    assert between - began < 30
    assert ended - between < 30


def test_offsets_beyond_32_bits() -> None:
    """A tensor of 9 GiB in one file, or cut into several, is described without a byte of it being there."""
    specs = [
        TensorSpec("big", "float32", (9, 1 << 28), "parameter"),
        TensorSpec("small", "int8", (3,), "other"),
    ]
    for limit in (2 * GIB, 16 * GIB):
        plan = plan_save(specs, max_file_bytes=limit)
        assert sum(place.nbytes for place in plan.placements) == 9 * GIB + 3
        for (_, header), file in zip(plan.headers, plan.files, strict=True):
            assert parse_header(header, file_size=file.size)
        files = tuple(
            FileEntry(name=one.name, size=one.size, digests=("0" * 32,) * block_count(one.size))
            for one in plan.files
        )
        index = Index(rank=0, block_size=BLOCK, files=files, tensors=plan.tensors)
        read = decode_index(encode_index(index), checkpoint="c", file="i")
        assert read.tensors[0].shape == (9, 1 << 28)
        assert math.prod(read.tensors[0].shape) * 4 == sum(piece.nbytes for piece in read.tensors[0].slices)


@pytest.mark.prove
@pytest.mark.parametrize("limit", [2 * GIB, 8 * GIB])
def test_more_than_four_gib(limit: int, tmp_path: Path) -> None:
    """A tensor beyond every 32-bit offset comes back, from several files and from one.

    Its pages are zero but for a few, so that it takes no memory; the arena, and what is loaded, take 4 GiB each, one
    after the other (twice that where boxes are put together).
    """
    faulthandler.cancel_dump_traceback_later()  # on a busy machine this takes longer than any other test
    size = 4 * GIB + 13
    big = torch.zeros(size, dtype=torch.uint8)
    places = [0, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 32) + 1, size - 1]
    for number, place in enumerate(places, 1):
        big[place] = number
    store = LocalStore(tmp_path)
    write_checkpoint(store, tracked(big).capture(), max_file_bytes=limit)
    loaded = read_newest(store).saved.tensors["x"]
    assert loaded.shape == (size,)
    assert [int(loaded[place]) for place in places] == [1, 2, 3, 4, 5, 6]
    assert int(torch.count_nonzero(loaded)) == len(places)
    assert bits(loaded[-3:]) == b"\0\0\6"
    proof.record("a tensor of more than 4 GiB", bytes=size, files=-(-size // limit))
