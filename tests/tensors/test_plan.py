"""Where tensors go: files, boxes, places in the arena."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from hypothesis import given, settings, strategies as st

from spotsafe.checkpoint.digest import BLOCK, block_count
from spotsafe.checkpoint.dtypes import DTYPES
from spotsafe.checkpoint.image import parse_header
from spotsafe.checkpoint.index import FileEntry, Index, decode_index, encode_index
from spotsafe.errors import UnsupportedState
from spotsafe.tensors.plan import PlanCache, SavePlan, TensorSpec, plan_save
from spotsafe.tensors.staging import stage
from spotsafe.tensors.tree import Capture, NamedTensor


def spec(name: str, *shape: int, dtype: str = "float32", role: str = "other") -> TensorSpec:
    return TensorSpec(name, dtype, shape, role)


def check(plan: SavePlan) -> None:
    """What must hold of every plan, by the format's own strict decoder."""
    files = tuple(
        FileEntry(name=one.name, size=one.size, digests=("0" * 32,) * block_count(one.size))
        for one in plan.files
    )
    index = Index(rank=0, block_size=BLOCK, files=files, tensors=plan.tensors)
    decode_index(encode_index(index), checkpoint="c", file="i")
    assert all(one.arena_offset % 4096 == 0 for one in plan.files)
    ends = [one.arena_offset + one.size for one in plan.files]
    starts = [one.arena_offset for one in plan.files]
    assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
    assert plan.arena_size % 4096 == 0
    assert plan.arena_size >= max(ends, default=0)
    at = 0
    for place in plan.placements:
        assert at <= place.arena_offset
        at = place.arena_offset + place.nbytes
        assert at <= plan.arena_size
        assert place.arena_offset % DTYPES[plan.specs[place.tensor].dtype].item_bytes == 0
    for (offset, header), file in zip(plan.headers, plan.files, strict=True):
        assert offset == file.arena_offset
        parse_header(header, file_size=file.size)


SPECS = st.lists(
    st.builds(
        lambda dtype, shape, role: (dtype, tuple(shape), role),
        st.sampled_from(["float32", "float64", "uint8", "bfloat16", "complex128", "bool", "float8_e4m3fn"]),
        st.lists(st.integers(0, 6), max_size=4),
        st.sampled_from(["parameter", "moment", "buffer", "other"]),
    ),
    max_size=12,
)


@settings(max_examples=60)
@given(SPECS, st.integers(1, 5000))
def test_every_plan_is_what_the_format_demands(
    drawn: list[tuple[str, tuple[int, ...], str]], limit: int
) -> None:
    """Slices tile every tensor, nothing overlaps, everything is aligned, files keep the limit."""
    specs = [TensorSpec(f"t{number}", *one) for number, one in enumerate(drawn)]
    plan = plan_save(specs, max_file_bytes=limit)
    check(plan)
    for file in plan.files:
        pieces = [piece for entry in plan.tensors for piece in entry.slices if piece.file == file.name]
        total = sum(piece.nbytes for piece in pieces)
        single = max(DTYPES[entry.dtype].item_bytes for entry in plan.tensors)
        assert total <= max(limit, single)


def test_a_large_tensor_is_cut_evenly_along_its_first_long_dimension() -> None:
    """Boxes are rows of the first dimension longer than 1, of nearly equal size."""
    plan = plan_save([spec("w", 1, 10, 100)], max_file_bytes=1500)
    check(plan)
    lengths = [piece.lengths for piece in plan.tensors[0].slices]
    assert lengths == [(1, 2, 100), (1, 3, 100), (1, 2, 100), (1, 3, 100)]
    assert [piece.offsets[1] for piece in plan.tensors[0].slices] == [0, 2, 5, 7]


def test_rows_that_are_too_large_are_cut_again() -> None:
    """A box goes on being cut along the next dimension until it fits."""
    plan = plan_save([spec("w", 2, 2, 100)], max_file_bytes=200)
    check(plan)
    assert {piece.lengths for piece in plan.tensors[0].slices} == {(1, 1, 50)}
    assert len(plan.tensors[0].slices) == 8


def test_what_cannot_be_cut_goes_alone() -> None:
    """An item larger than the limit still gets a file."""
    plan = plan_save([spec("z", dtype="complex128"), spec("y", 1, 1)], max_file_bytes=1)
    check(plan)
    assert [len(entry.slices) for entry in plan.tensors] == [1, 1]
    assert len(plan.files) == 2


def test_sizes_beyond_four_gigabytes() -> None:
    """Offsets are whole numbers of any size; no tensor has to exist for a plan."""
    plan = plan_save([spec("w", 5, 1 << 30), spec("v", 3, 7)])
    check(plan)
    assert max(place.arena_offset for place in plan.placements) > 1 << 33
    assert all(file.size <= (2 << 30) for file in plan.files)


def test_keys_are_unique_whatever_tensors_are_called() -> None:
    """A piece's key never meets another tensor's name, nor the name that safetensors keeps for itself."""
    names = ["w", "w[0]", "w[2]", "__metadata__", "", "w[0]'"]
    plan = plan_save([spec(name, 4) for name in names], max_file_bytes=8)
    check(plan)
    keys = [set(json.loads(header[8:])) for _, header in plan.headers]
    flat = list(itertools.chain.from_iterable(keys))
    assert len(set(flat)) == len(flat) == 12
    assert not {"", "__metadata__"} & set(flat)


def test_whole_tensors_are_called_by_their_names() -> None:
    """Any safetensors tool finds the tensors of a file under the names of the program."""
    plan = plan_save([spec("model.fc.weight", 2, 3), spec("step")])
    assert set(json.loads(plan.headers[0][1][8:])) == {"model.fc.weight", "step"}


def test_files_are_named_by_rank_and_number() -> None:
    """Two ranks write different files."""
    plan = plan_save([spec("a", 4), spec("b", 4)], rank=3, max_file_bytes=16)
    assert [file.name for file in plan.files] == ["data-00003-000.safetensors", "data-00003-001.safetensors"]


def test_health_is_asked_of_floating_values_alone() -> None:
    """Trained parameters, moments and buffers are searched; whole numbers and other tensors are not."""
    specs = [
        spec("p", 2, role="parameter"),
        spec("m", 2, role="moment", dtype="bfloat16"),
        spec("b", 2, role="buffer", dtype="complex64"),
        spec("n", 2, role="buffer", dtype="int64"),
        spec("o", 2),
        spec("e", 0, role="parameter"),
    ]
    plan = plan_save(specs)
    assert {span.tensor: (span.role, span.dtype, span.nbytes) for span in plan.health} == {
        "p": ("parameter", "float32", 8),
        "m": ("moment", "bfloat16", 4),
        "b": ("buffer", "complex64", 16),
    }


def test_nothing_at_all() -> None:
    """A session without tensors has a plan without files."""
    plan = plan_save([])
    assert (plan.files, plan.arena_size, plan.total_bytes) == ((), 0, 0)
    stage(plan, Capture(state={}, tensors=()), memoryview(bytearray()))


def test_mistakes_are_refused() -> None:
    """A name twice, a limit below one and a dtype that cannot be stored are errors."""
    with pytest.raises(ValueError, match="same name"):
        plan_save([spec("a"), spec("a")])
    with pytest.raises(ValueError, match="positive"):
        plan_save([spec("a")], max_file_bytes=0)
    with pytest.raises(UnsupportedState, match="quantized"):
        plan_save([spec("a", dtype="qint8")])


def named(**tensors: torch.Tensor) -> tuple[NamedTensor, ...]:
    return tuple(NamedTensor(name=name, tensor=tensor) for name, tensor in tensors.items())


def test_a_plan_is_kept_while_nothing_changes() -> None:
    """New values make no new plan; another name, shape, dtype, role or rank does."""
    cache = PlanCache()
    first = cache.plan(named(a=torch.ones(3)))
    assert cache.plan(named(a=torch.zeros(3))) is first
    seen = [first]
    for other in (named(b=torch.ones(3)), named(a=torch.ones(4)), named(a=torch.ones(3, dtype=torch.int32))):
        seen.append(cache.plan(other))
    seen.append(cache.plan([NamedTensor(name="a", tensor=torch.ones(3), role="buffer")]))
    seen.append(cache.plan(named(a=torch.ones(3)), rank=1))
    assert len({id(one) for one in seen}) == len(seen)


def test_the_same_tuple_is_not_looked_into_again() -> None:
    """A capture gives the same tuple only if nothing about it changed; after a refused one the plan is not that."""
    cache = PlanCache()
    good, bad = named(a=torch.ones(3)), (*named(a=torch.ones(3)), *named(a=torch.ones(3)))
    first = cache.plan(good)
    assert cache.plan(good) is first
    assert cache.plan(good, rank=1) is not first
    for _ in range(2):
        with pytest.raises(ValueError, match="same name"):
            cache.plan(bad)


def test_rows_are_small_tensors_of_one_kind() -> None:
    """Whole tensors of one dtype and shape, side by side in one file; few, large and cut ones are in none."""
    specs = [
        *(spec(f"a{number}", 2, 2) for number in range(5)),
        *(spec(f"b{number}", 4) for number in range(3)),
        *(spec(f"c{number}", 0) for number in range(5)),
        *(spec(f"d{number}", 5000) for number in range(5)),
        *(spec(f"e{number}", dtype="int32") for number in range(200)),
    ]
    plan = plan_save(specs, max_file_bytes=19_000)
    assert [len(row) for row in plan.rows if plan.specs[plan.placements[row.start].tensor].name < "e"] == [5]
    for row in plan.rows:
        places = [plan.placements[at] for at in row]
        assert len({plan.specs[place.tensor][1:3] for place in places}) == 1
        assert all(place.lengths == plan.specs[place.tensor].shape for place in places)
        for before, after in itertools.pairwise(places):
            assert before.arena_offset + before.nbytes == after.arena_offset


def test_boxes_of_a_larger_tensor() -> None:
    """What a rank holds of a sharded tensor is placed as boxes of the whole one, cut again where it is too large."""
    specs = [
        TensorSpec("w", "float32", (2, 3), "other", piece_of=(4, 6), offsets=(2, 0)),
        TensorSpec("w", "float32", (2, 3), "other", piece_of=(4, 6), offsets=(0, 3)),
        TensorSpec("b", "float32", (2,), "other"),
    ]
    plan = plan_save(specs, rank=3, max_file_bytes=12)

    b, w = sorted(plan.tensors, key=lambda entry: entry.name)
    assert (w.shape, b.shape) == ((4, 6), (2,))
    boxes = {(piece.offsets, piece.lengths) for piece in w.slices}
    assert boxes == {((2, 0), (1, 3)), ((3, 0), (1, 3)), ((0, 3), (1, 3)), ((1, 3), (1, 3))}
    assert {place.offsets for place in plan.placements if place.tensor == 0} == {(0, 0), (1, 0)}
    keys = {key for _, header in plan.headers for key in json.loads(header[8:])}
    assert keys == {"w[2,0]", "w[3,0]", "w[0,3]", "w[1,3]", "b"}
    assert {file.name[:10] for file in plan.files} == {"data-00003"}


def test_the_same_box_twice_is_refused() -> None:
    """Two boxes at one place would be two values of the same elements."""
    box = TensorSpec("w", "float32", (2, 3), "other", piece_of=(4, 6), offsets=(2, 0))
    with pytest.raises(ValueError, match="same name"):
        plan_save([box, box])


def test_the_first_files_are_smaller() -> None:
    """So that writing begins early: each may be four times the one before, up to the limit; no tensor is cut for it."""
    mebibyte = 1 << 20
    specs = [TensorSpec(f"t{number:03}", "uint8", (16 * mebibyte,), "other") for number in range(100)]
    sizes = [file.size // mebibyte for file in plan_save(specs, max_file_bytes=512 * mebibyte).files]
    assert sizes == [48, 240, 496, 496, 320]
    (large,) = plan_save([TensorSpec("t", "uint8", (500 * mebibyte,), "other")]).files
    assert large.size > 500 * mebibyte
