"""The copy into the arena."""

from __future__ import annotations

import math
import pathlib

import pytest
import safetensors.torch
import torch
from hypothesis import given, strategies as st

from spotsafe.tensors.plan import PlanCache, pieces_of
from spotsafe.tensors.staging import stage
from spotsafe.tensors.tree import Capture, Collector, NamedTensor, as_bytes
from spotsafe.writer.arena import Arena

# A dtype, and whether the tensor is transposed. Bits are random, so there are NaN of every kind.
KINDS = [
    (torch.float32, False),
    (torch.float32, True),
    (torch.bfloat16, False),
    (torch.float16, False),
    (torch.float64, False),
    (torch.int64, False),
    (torch.uint8, False),
    (torch.complex64, False),
    (torch.float8_e4m3fn, False),
]
SHAPES = [(), (1,), (0,), (3,), (4, 5), (5, 4), (2, 1, 3), (100, 200)]


def clone_bits(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy; also of dtypes for which torch has no copy kernel."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.view(words).contiguous().view(tensor.dtype)


def named(**tensors: torch.Tensor) -> tuple[NamedTensor, ...]:
    return tuple(NamedTensor(name=name, tensor=tensor) for name, tensor in tensors.items())


def capture(**tensors: torch.Tensor) -> Capture:
    return Capture(state={}, tensors=named(**tensors))


def test_the_arena_is_the_files(tmp_path: pathlib.Path) -> None:
    """What lies in the arena opens in safetensors itself."""
    tensors = {
        "a": torch.rand(3, 4).t(),
        "b": torch.arange(5),
        "c": torch.rand(7).to(torch.bfloat16),
        "d": torch.tensor(2.0),
    }
    taken = capture(**tensors)
    plan = PlanCache(max_file_bytes=600).plan(taken.tensors)
    arena = Arena(plan.arena_size)
    stage(plan, taken, arena.view)
    loaded = {}
    for file in plan.files:
        path = tmp_path / file.name
        path.write_bytes(arena.view[file.arena_offset : file.arena_offset + file.size])
        loaded |= safetensors.torch.load_file(path)
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_staging_twice_leaves_nothing_of_the_first_time() -> None:
    """An arena may be used again; every byte of the files is written anew."""
    first, second = (
        capture(a=torch.full((100,), 7.0), b=torch.ones(3)),
        capture(a=torch.zeros(100), b=torch.zeros(3)),
    )
    plan = PlanCache().plan(first.tensors)
    arenas = [Arena(plan.arena_size), Arena(plan.arena_size)]
    stage(plan, first, arenas[0].view)
    stage(plan, second, arenas[0].view)
    stage(plan, second, arenas[1].view)
    size = plan.files[0].size
    assert bytes(arenas[0].view[:size]) == bytes(arenas[1].view[:size])


def test_pieces_one_after_the_other_are_the_whole() -> None:
    """Rows, cut tensors, empty ones: what each piece holds is what that file would hold in a whole arena."""
    one = capture(
        wide=torch.arange(3 << 16).view(3, 1 << 16),
        empty=torch.zeros(0),
        **{f"small{number:02}": torch.full((1000,), float(number)) for number in range(60)},
        zero=torch.zeros(2, 0),
    )
    plan = PlanCache(max_file_bytes=1 << 16).plan(one.tensors)
    assert len(plan.files) > 10
    assert plan.rows
    whole = Arena(plan.arena_size)
    stage(plan, one, whole.view)
    pieces = list(pieces_of(plan))
    slot = Arena(max(piece.arena_size for piece in pieces))
    for piece, file in zip(pieces, plan.files, strict=True):
        slot.view[:] = b"\xff" * len(slot.view)
        stage(piece, one, slot.view)
        assert slot.view[: file.size] == whole.view[file.arena_offset : file.arena_offset + file.size]
    assert sum(len(piece.placements) for piece in pieces) == len(plan.placements)
    assert sum(len(row) for piece in pieces for row in piece.rows) == sum(map(len, plan.rows))


def test_staging_copies_now() -> None:
    """What happens to a tensor after staging is not in the arena."""
    tensor = torch.ones(4)
    taken = capture(a=tensor)
    plan = PlanCache().plan(taken.tensors)
    arena = Arena(plan.arena_size)
    stage(plan, taken, arena.view)
    before = bytes(arena.view)
    tensor.fill_(9)
    assert bytes(arena.view) == before


def test_staging_checks_what_it_is_given() -> None:
    """A small or read-only arena, and tensors of another plan, are refused before anything is written."""
    taken = capture(a=torch.ones(4))
    plan = PlanCache().plan(taken.tensors)
    with pytest.raises(ValueError, match="arena"):
        stage(plan, taken, memoryview(bytearray(plan.arena_size - 1)))
    with pytest.raises(ValueError, match="writable"):
        stage(plan, taken, memoryview(bytes(plan.arena_size)))
    arena = memoryview(bytearray(plan.arena_size))
    for other in (
        capture(b=torch.ones(4)),
        capture(a=torch.ones(5)),
        capture(a=torch.ones(4).int()),
        capture(),
    ):
        with pytest.raises(ValueError, match="plan"):
            stage(plan, other, arena)


def test_staging_needs_no_grad_and_moves_no_version() -> None:
    """Trained parameters are read without a trace in autograd, inference tensors too."""
    weight = torch.nn.Parameter(torch.rand(3))
    with torch.inference_mode():
        frozen = torch.rand(3)
    version = weight._version
    taken = capture(a=weight, b=frozen)
    plan = PlanCache().plan(taken.tensors)
    stage(plan, taken, Arena(plan.arena_size).view)
    assert weight._version == version
    assert weight.requires_grad


def test_many_small_tensors_make_few_files() -> None:
    """20,000 tensors of 8 floats lie in one file."""
    tensors = torch.rand(20_000, 8)
    collector = Collector()
    collector.encode(list(tensors), "x")
    plan = PlanCache().plan(collector.tensors)
    assert len(plan.files) == 1
    arena = Arena(plan.arena_size)
    stage(plan, Capture(state={}, tensors=collector.tensors), arena.view)
    place = plan.placements[777]
    data = torch.frombuffer(arena.view, dtype=torch.float32, count=8, offset=place.arena_offset)
    assert torch.equal(data, tensors[place.tensor])
    assert math.prod(tensors.shape) * 4 <= plan.total_bytes


@given(
    st.lists(st.tuples(st.sampled_from(range(len(KINDS))), st.sampled_from(range(len(SHAPES)))), max_size=12)
)
def test_small_tensors_are_copied_together_bit_for_bit(chosen: list[tuple[int, int]]) -> None:
    """Whatever lies beside each other: dtypes, shapes, strides, large among small; each keeps every bit."""
    random = torch.Generator().manual_seed(0)
    tensors = {}
    for number, (kind, shape) in enumerate(chosen):
        dtype, strided = KINDS[kind]
        size = (*SHAPES[shape], dtype.itemsize)
        bits = torch.randint(0, 256, size, generator=random, dtype=torch.uint8)
        tensor = bits.view(dtype).squeeze(-1)
        tensors[f"t{number}"] = tensor.t() if strided and tensor.dim() == 2 else tensor
    taken = capture(**tensors)
    plan = PlanCache().plan(taken.tensors)
    arena = Arena(plan.arena_size)
    stage(plan, taken, arena.view)
    for place in plan.placements:
        expected = as_bytes(clone_bits(tensors[taken.tensors[place.tensor].name])).numpy().tobytes()
        assert bytes(arena.view[place.arena_offset : place.arena_offset + place.nbytes]) == expected


def test_parameters_that_need_gradients_are_joined() -> None:
    """The copy records nothing, and warns of nothing."""
    model = torch.nn.ParameterList([torch.full((3,), float(i)) for i in range(10)])
    taken = capture(**{f"p{i}": parameter for i, parameter in enumerate(model)})
    plan = PlanCache().plan(taken.tensors)
    arena = Arena(plan.arena_size)
    stage(plan, taken, arena.view)
    for place in plan.placements:
        copied = torch.frombuffer(arena.view, dtype=torch.float32, offset=place.arena_offset, count=3)
        assert torch.equal(copied, taken.tensors[place.tensor].tensor.detach())
    assert all(parameter.grad_fn is None for parameter in model)


def test_it_is_told_of_each_file_when_all_of_it_is_there() -> None:
    """At that moment the arena holds what it holds in the end, up to the place that was told."""
    taken = capture(
        **{f"t{number}": torch.rand(number % 5, 7) for number in range(12)}, z=torch.rand(9, 9).t()
    )
    plan = PlanCache(max_file_bytes=600).plan(taken.tensors)
    arena, told = Arena(plan.arena_size), []
    stage(plan, taken, arena.view, reached=lambda end: told.append((end, bytes(arena.view[:end]))))
    ends = [file.arena_offset + file.size for file in plan.files]
    assert len(ends) > 3
    assert [end for end, _ in told] == ends[: len(told)]
    assert len(told) >= len(ends) - 1  # of the last one, the return tells
    assert all(data == arena.view[:end] for end, data in told)


class Own(torch.Tensor):
    """A subclass that tells nothing of itself."""


def _bits(dtype: torch.dtype) -> torch.Tensor:
    """600 tensors of 2 x 3 with random bits."""
    random = torch.Generator().manual_seed(1)
    bits = torch.randint(0, 256, (600, 2, 3, dtype.itemsize), generator=random, dtype=torch.uint8)
    return (bits & 1 if dtype is torch.bool else bits).view(dtype).squeeze(-1)


ROWS = {
    **{
        str(dtype): lambda dtype=dtype: list(_bits(dtype))
        for dtype in {one for one, _ in KINDS} | {torch.bool}
    },
    "transposed": lambda: list(_bits(torch.float32).transpose(1, 2)),
    "of no dimension": lambda: list(_bits(torch.bfloat16).flatten()),
    "negated": lambda: [one.conj().imag for one in _bits(torch.complex64)],
    "conjugated": lambda: [one.conj() for one in _bits(torch.complex64)],
    "parameters": lambda: [torch.nn.Parameter(one) for one in _bits(torch.float32)],
    "among others": lambda: [one.as_subclass(Own) for one in _bits(torch.float32)],
    "with a gap": lambda: [*_bits(torch.float32)[:9], torch.ones(5), *_bits(torch.float32)[9:]],
}


@pytest.mark.parametrize("what", sorted(ROWS))
def test_rows_of_one_kind_are_copied_bit_for_bit(what: str) -> None:
    """Many small tensors of one dtype and shape go by one call; each is the file's bytes as if it had gone alone."""
    tensors = {f"t{number:04}": one for number, one in enumerate(ROWS[what]())}
    taken = capture(**tensors)
    plan = PlanCache().plan(taken.tensors)
    assert sum(map(len, plan.rows)) >= 600
    arena = Arena(plan.arena_size)
    stage(plan, taken, arena.view)
    for place in plan.placements:
        one = tensors[taken.tensors[place.tensor].name].detach().as_subclass(torch.Tensor)
        expected = as_bytes(clone_bits(one.resolve_conj().resolve_neg())).numpy().tobytes()
        assert bytes(arena.view[place.arena_offset : place.arena_offset + place.nbytes]) == expected


def test_what_somebody_else_copies_is_left_alone_in_a_row() -> None:
    """Its place keeps its bytes, and its neighbours get theirs."""
    taken = capture(**{f"t{number}": torch.ones(2) for number in range(6)})
    plan = PlanCache().plan(taken.tensors)
    arena = Arena(plan.arena_size)
    stage(plan, taken, arena.view, skip={2})
    values = [
        arena.view[place.arena_offset] + arena.view[place.arena_offset + 2] for place in plan.placements
    ]
    assert [place.tensor for place, value in zip(plan.placements, values, strict=True) if value == 0] == [2]
