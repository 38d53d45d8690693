"""Live values to typed JSON with named tensors, and back in memory of their own."""

from __future__ import annotations

import copy
import datetime as dt
import decimal
import enum
import math
import pathlib
import sys
import uuid
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from spotsafe.checkpoint.dtypes import DTYPES
from spotsafe.errors import StateMismatch, UnsupportedState
from spotsafe.tensors.source import Source
from spotsafe.tensors.tree import Capture, Collector, dtype_name, overlaps_itself, torch_dtype
from spotsafe.testing.states import through_checkpoint
from tests.tensors.look_alikes import Doubly, Scaled
from tests.tensors.same import bits, differences


def round_trip(value: object, *, live: object = None, max_file_bytes: int = 1 << 30) -> Any:
    """The value as it comes out of a checkpoint on storage."""
    collector = Collector()
    node = collector.encode(value, "x")
    saved = through_checkpoint(
        Capture(state={"x": node}, tensors=collector.tensors), max_file_bytes=max_file_bytes
    )
    return Source(saved.tensors).decode(saved.state["x"], value if live is None else live)


def same(one: Any, other: Any) -> bool:
    """Equal in type and value, tensors and arrays bit for bit, NaN equal to itself."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bits(one) == bits(other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other) or (isinstance(one, float) and math.isnan(one) and math.isnan(other))


ALL_DTYPES = [name for name in DTYPES if hasattr(torch, name)]


@pytest.mark.parametrize("name", ALL_DTYPES)
def test_every_dtype_comes_back_bit_for_bit(name: str) -> None:
    """All 256 byte values survive in every dtype that torch has, NaN payloads too."""
    dtype = torch_dtype(name)
    raw = torch.arange(256, dtype=torch.uint8).repeat(4)
    if name == "bool":
        raw = raw % 2
    for tensor in (raw.view(dtype), raw.view(dtype)[:1], raw.view(dtype)[0:0]):
        result = round_trip(tensor)
        assert dtype_name(result.dtype) == name
        assert result.shape == tensor.shape
        assert bits(result) == bits(tensor)


def test_a_dtype_that_torch_has_not_is_named() -> None:
    """A checkpoint of a newer torch says which dtype is missing."""
    with pytest.raises(UnsupportedState, match="float1"):
        torch_dtype("float1")


BASE = torch.arange(24.0).reshape(2, 3, 4)
WAVES = torch.complex(BASE, BASE + 1)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5),
        torch.zeros(0, 3),
        torch.zeros(2, 0, dtype=torch.int8),
        BASE.transpose(0, 2),
        BASE[:, ::2],
        BASE[1:, 1, 2:],
        BASE[0, 0].expand(5, 4),
        torch.tensor(2.0).expand(3, 2),
        BASE.to(torch.bfloat16).transpose(0, 1),
        BASE.to(torch.bool)[:, :, ::3],
        WAVES.conj(),
        WAVES.conj().transpose(0, 1),
        WAVES.conj().imag,
        torch._neg_view(BASE),
        torch.view_as_real(WAVES),
        WAVES.to(torch.complex128).mT,
        BASE.to(torch.float8_e4m3fn).transpose(0, 1),
        BASE.clone().requires_grad_(),
        BASE.contiguous(memory_format=torch.contiguous_format)
        .unsqueeze(0)
        .to(memory_format=torch.channels_last),
    ],
)
def test_every_layout_comes_back_row_major(tensor: torch.Tensor) -> None:
    """Whatever strides, conjugation or negation a tensor has, its elements survive."""
    result = round_trip(tensor)
    assert result.is_contiguous()
    assert result.dtype == tensor.dtype
    assert result.shape == tensor.shape
    assert bits(result) == bits(tensor)
    assert result.requires_grad is (tensor.requires_grad and tensor.is_leaf)


@pytest.mark.parametrize("limit", [1, 40, 100, 333])
def test_tensors_larger_than_a_file_are_put_together_again(limit: int) -> None:
    """Cuts into many files change nothing."""
    value = {"big": torch.rand(5, 7, 3), "t": BASE.transpose(0, 2), "z": torch.tensor(1), "c": WAVES.conj()}
    assert same(
        round_trip(value, max_file_bytes=limit),
        {**value, "t": value["t"].contiguous(), "c": value["c"].resolve_conj()},
    )


def coo(*, coalesced: bool) -> torch.Tensor:
    indices = torch.tensor([[0, 0, 1], [2, 2, 0]])
    tensor = torch.sparse_coo_tensor(indices, torch.tensor([1.0, 2.0, 3.0]), (2, 3), check_invariants=True)
    return tensor.coalesce() if coalesced else tensor


@pytest.mark.parametrize("coalesced", [True, False])
def test_sparse_coordinates(coalesced: bool) -> None:
    """A COO tensor keeps its components as they are, coalesced or not."""
    tensor = coo(coalesced=coalesced)
    result = round_trip(tensor)
    assert result.is_sparse
    assert result.is_coalesced() is coalesced
    assert same(result._indices(), tensor._indices())
    assert same(result._values(), tensor._values())
    empty = round_trip(torch.sparse_coo_tensor(size=(3, 4), check_invariants=True))
    assert (empty._nnz(), empty.shape) == (0, (3, 4))


@pytest.mark.parametrize("layout", ["csr", "csc", "bsr", "bsc"])
def test_sparse_compressed(layout: str) -> None:
    """The compressed sparse layouts are kept as components."""
    dense = torch.tensor([[0.0, 1.0, 0, 2], [3, 0, 0, 0]])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says at the first use that these layouts are in beta state
        tensor = getattr(dense, f"to_sparse_{layout}")(*([(1, 2)] if layout.startswith("b") else []))
        result = round_trip(tensor)
        assert result.layout == tensor.layout
        assert torch.equal(result.to_dense(), dense)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0).reshape(2, 3),
        np.arange(6, dtype=">i4"),
        np.array(3, dtype=np.uint16),
        np.zeros((0, 2), dtype=np.complex128),
        np.array(["ab", "c\u00e4"]),
        np.array([b"ab", b"c"]),
        np.array(["2026-01-01", "NaT"], dtype="datetime64[D]"),
        np.array([True, False]),
        np.arange(12).reshape(3, 4).T,
        np.arange(10)[::-2],
        np.array([np.nan, -0.0, np.inf], dtype=np.float16),
        np.array([1.5, 2.5], dtype=np.longdouble),
    ],
)
def test_arrays_come_back_exactly(array: np.ndarray[Any, Any]) -> None:
    """Arrays keep dtype (byte order too), shape and bits, and own their memory."""
    result = round_trip(array)
    assert (result.dtype, result.shape) == (array.dtype, array.shape)
    assert result.tobytes() == array.tobytes()
    assert result.flags.owndata
    assert result.flags.writeable


def test_a_read_only_array_is_saved() -> None:
    """An array that cannot be written is no reason for a warning or an error."""
    array = np.arange(3)
    array.flags.writeable = False
    assert same(round_trip(array), np.arange(3))


@pytest.mark.parametrize(
    "array",
    [
        np.array([object()]),
        np.array([(1, object())], dtype=[("a", int), ("b", object)]),
        np.rec.array([(1, 2.0)]),
        np.ma.masked_array([1, 2], [0, 1]),
    ],
)
def test_arrays_that_would_lose_something_are_refused(array: np.ndarray[Any, Any]) -> None:
    """Objects in arrays, records and masks are errors that name the path."""
    with pytest.raises(UnsupportedState, match=r"x\['deep'\]\[0\] is a"):
        round_trip({"deep": [array]})


@pytest.mark.parametrize(
    "value",
    [
        torch.float32,
        torch.bfloat16,
        torch.device("cpu"),
        torch.device("cuda:3"),
        torch.Size([2, 3]),
        torch.strided,
        torch.channels_last,
    ],
)
def test_words_of_torch(value: object) -> None:
    """dtypes, devices, sizes, layouts and memory formats are values."""
    result = round_trip({"value": value})["value"]
    assert result == value
    assert type(result) is type(value)


class Colour(enum.Enum):
    RED = 1


@dataclass
class Point:
    x: int
    y: torch.Tensor


def test_everything_that_a_state_dict_may_hold() -> None:
    """The typed JSON and the tensors together bring back every kind of value."""
    value = {
        "numbers": (1, 1 << 80, -0.0, float("nan"), float("inf"), 2j, np.float64(3), np.int8(4), True, None),
        "texts": ["", "\0", "a/..//%2F: b", "\U0001f600", "\ud800", b"\xff", bytearray(b"x")],
        3: {(1, "a"): [torch.ones(2)], None: set()},
        "ordered": OrderedDict([("b", 1), ("a", torch.zeros(1))]),
        "deque": deque([1, 2], maxlen=4),
        "counter": Counter("aab"),
        "path": pathlib.PurePosixPath("/a"),
        "time": [dt.datetime(2026, 1, 1, tzinfo=dt.timezone.utc), dt.timedelta(1)],
        "exact": [decimal.Decimal("1.10"), Fraction(1, 3), uuid.UUID(int=5)],
        "range": range(3),
    }
    assert same(round_trip(value), value)


def test_classes_of_the_program_come_from_the_live_object() -> None:
    """Enum members, dataclasses and default factories are rebuilt only into what the program holds there."""
    value = {"c": Colour.RED, "p": Point(1, torch.ones(2)), "d": defaultdict(list, {"a": [1]})}
    result = round_trip(value)
    assert result["c"] is Colour.RED
    assert same(result["p"].y, value["p"].y)
    assert result["d"]["new"] == []
    with pytest.raises(StateMismatch):
        round_trip(value, live={})


def test_paths_that_read_the_same_stay_apart() -> None:
    """Keys with dots, brackets or a suffix of ours never make two tensors one."""
    ones = [torch.full((2,), float(number)) for number in range(6)]
    value = {
        "a.b": ones[0],
        "a": {"b": ones[1]},
        "x['a']": ones[2],
        "A.B": ones[3],
        "a.b#2": ones[4],
        "": ones[5],
    }
    collector = Collector()
    nodes = {key: collector.members(item, f"x.{key}") for key, item in value.items()}
    names = [one.name for one in collector.tensors]
    assert len(set(names)) == 6
    saved = through_checkpoint(Capture(state={"x": list(nodes.values())}, tensors=collector.tensors))
    result = Source(saved.tensors).decode(saved.state["x"])
    assert same(result, list(value.values()))


def test_a_tensor_called_like_the_metadata_of_a_file() -> None:
    """``__metadata__`` and the empty name are names like others."""
    for name in ("__metadata__", "", "\ud800", "n" * 300, "a\0b", "../x"):
        collector = Collector()
        node = collector.encode(torch.ones(2), name)
        saved = through_checkpoint(Capture(state={"x": node}, tensors=collector.tensors))
        assert same(Source(saved.tensors).decode(saved.state["x"]), torch.ones(2))


def test_aliases_are_stored_once_and_stay_aliases() -> None:
    """Two references to one tensor are one tensor afterwards; equal but separate tensors stay separate."""
    weight = torch.rand(3, 3)
    value = {
        "a": weight,
        "b": [weight],
        "c": weight.detach(),
        "d": weight.clone(),
        "t": weight.t(),
        "h": weight[:1],
    }
    collector = Collector()
    collector.encode(value, "x")
    assert [one.name for one in collector.tensors] == ["x['a']", "x['d']", "x['t']", "x['h']"]
    result = round_trip(value)
    assert result["a"] is result["b"][0]
    assert result["a"] is result["c"]
    result["a"].zero_()
    assert same(result["d"], weight)


def test_empty_tensors_are_never_aliases() -> None:
    """Tensors without elements have no memory to share."""
    value = [torch.zeros(0), torch.zeros(0), torch.zeros(0, 2)]
    assert same(round_trip(value), value)


def test_the_strongest_role_wins() -> None:
    """A tensor that is a buffer here and a trained parameter there counts as a parameter."""
    weight = torch.rand(2)
    collector = Collector()
    collector.encode(weight, "a", role="other")
    collector.encode(weight, "b", role="parameter")
    collector.encode(weight, "c", role="buffer")
    assert [(one.name, one.role) for one in collector.tensors] == [("a", "parameter")]


def test_each_object_gets_memory_of_its_own() -> None:
    """What one decode returned can be changed without the next one seeing it."""
    collector = Collector()
    node = collector.encode({"t": torch.ones(2), "l": [1]}, "x")
    saved = through_checkpoint(Capture(state={"x": node}, tensors=collector.tensors))
    first = Source(saved.tensors).decode(saved.state["x"])
    first["t"].zero_()
    first["l"].clear()
    first.clear()
    assert same(Source(saved.tensors).decode(saved.state["x"]), {"t": torch.ones(2), "l": [1]})


def test_a_subclass_made_of_tensors() -> None:
    """A wrapper subclass is stored as its inner tensors and rebuilt in the class of the live one."""
    value = Scaled(torch.tensor([1, -2], dtype=torch.int8), torch.tensor(0.5), "m")
    live = Doubly(torch.zeros(2, dtype=torch.int8), torch.tensor(1.0), "")
    for present, kind in ((value, Scaled), (live, Doubly)):
        result = round_trip({"w": value}, live={"w": present})["w"]
        assert type(result) is kind
        assert (result.unit, result.values.tolist(), result.scale.item()) == ("m", [1, -2], 0.5)


def test_a_subclass_without_a_live_one_is_found_among_the_classes_that_exist() -> None:
    """State that a fresh optimizer has not got yet is rebuilt in a class the program made; none is imported."""
    value = Doubly(torch.tensor([7], dtype=torch.int8), torch.tensor(0.5), "m")
    assert list(differences(value, round_trip([value], live=[])[0])) == []
    collector = Collector()
    node = collector.encode(value, "x") | {"class": "antigravity:Tensor"}
    tensors = {one.name: one.tensor for one in collector.tensors}
    with pytest.raises(StateMismatch, match=r"there: .*antigravity:Tensor.*import the library"):
        Source(tensors).decode(node, path="there")
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize("parameter", [True, False])
@pytest.mark.parametrize("trained", [True, False])
def test_what_is_trained_comes_back_trained(parameter: bool, trained: bool) -> None:
    """A Parameter in a state stays one, and a leaf that requires a gradient still does, also in the aliases."""
    base = torch.rand(3)
    value = nn.Parameter(base, requires_grad=trained) if parameter else base.requires_grad_(trained)
    first, second, plain = round_trip([value, value, value.detach()])
    assert first is second
    assert isinstance(first, nn.Parameter) is parameter
    assert first.requires_grad is trained
    assert not plain.requires_grad
    assert plain.data_ptr() == first.data_ptr()


def test_composed_tensors_and_arrays_stay_aliases() -> None:
    """Sparse tensors, wrappers, arrays and empty tensors that stand at two places are one afterwards."""
    wrapper = Scaled(torch.ones(2, dtype=torch.int8), torch.tensor(2.0), "m")
    for value in (coo(coalesced=False), wrapper, np.arange(3.0), np.array(["a"]), torch.zeros(0)):
        one, other = round_trip([value, value])
        assert one is other
        first, second = round_trip([value, copy.deepcopy(value)]) if value is not wrapper else (0, 1)
        assert first is not second


def test_views_come_back_as_tensors_of_their_own() -> None:
    """Only the same elements are aliases: parts, transposed views and the real part are stored by their values."""
    wave = torch.tensor([1 + 2j, 3 - 4j])
    whole, real, part = round_trip([wave, wave.real, wave[:1]])
    assert real.tolist() == [1, 3]
    whole.zero_()
    assert real.tolist() == [1, 3]
    assert part.tolist() == [1 + 2j]


class Named(torch.Tensor):
    """A subclass with ordinary memory."""


def test_a_subclass_with_memory_of_its_own() -> None:
    """A plain subclass is stored as its values; the live object lends the class."""
    value = torch.arange(3.0).as_subclass(Named)
    result = round_trip([value])[0]
    assert type(result) is Named
    assert result.tolist() == [0, 1, 2]


class Opaque(torch.Tensor):
    """A wrapper subclass that does not say what it is made of."""

    @staticmethod
    def __new__(cls) -> Opaque:
        return torch.Tensor._make_wrapper_subclass(cls, (2,), dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(str(func))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (torch.nn.parameter.UninitializedParameter, "run one forward"),
        (lambda: torch.empty(2, device="meta"), "materialise"),
        (Opaque, "__tensor_flatten__"),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), "offsets"),
        (lambda: torch.ones(2, 2).to_mkldnn(), "dense copy"),
    ],
)
def test_tensors_without_values_are_refused(make: Any, words: str) -> None:
    """Tensors that hold nothing are errors that name the path and the way out."""
    with pytest.raises(UnsupportedState, match=words) as caught:
        Collector().encode({"a": [make()]}, "x")
    assert caught.value.path == "x['a'][0]"


def test_quantized_tensors_are_refused() -> None:
    """A quantized tensor's scale would be lost."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates making them
        tensor = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    with pytest.raises(UnsupportedState, match="int_repr"):
        Collector().encode(tensor, "x")


def test_a_value_of_a_newer_version_is_named() -> None:
    """A tag that nobody knows is not taken for damage."""
    with pytest.raises(Exception, match="tesseract"):
        Source({}).decode({"$": "tesseract"})
    with pytest.raises(StateMismatch, match="no_such_dtype"):
        Source({}).decode({"$": "torch.dtype", "value": "no_such_dtype"})
    with pytest.raises(StateMismatch, match="does not hold"):
        Source({}).decode({"$": "tensor", "name": "gone"})


def test_expanded_tensors_overlap_themselves() -> None:
    """Only tensors with several elements in one place count."""
    assert overlaps_itself(torch.ones(1).expand(3))
    assert overlaps_itself(torch.ones(2, 1).expand(2, 3))
    assert not overlaps_itself(torch.arange(3).expand(1, -1))
    assert not overlaps_itself(torch.ones(2, 3).t())
    assert not overlaps_itself(coo(coalesced=True))


@pytest.mark.parametrize(
    "node",
    [
        {"$": "torch.sparse_coo"},
        {"$": "torch.sparse_coo", "indices": [1], "values": [], "shape": [2], "coalesced": True},
        {"$": "torch.sparse_csr", "crow_indices": 1, "col_indices": 2, "values": 3, "shape": [1]},
        {"$": "ndarray", "dtype": "nonsense", "shape": [1], "values": {"$": "tensor", "name": "x"}},
        {"$": "ndarray", "dtype": "<f4", "shape": "x", "values": {"$": "tensor", "name": "x"}},
        {"$": "torch.device", "value": "nowhere"},
        {"$": "torch.Size", "value": ["x"]},
        {"$": "torch.dtype"},
    ],
)
def test_nodes_that_no_program_writes_are_told_with_their_place(node: Any) -> None:
    """Whatever torch or numpy makes of them, the error is ours and says where."""
    with pytest.raises(StateMismatch, match=r"\['a'\]"):
        Source({"x": torch.ones(1)}).decode({"a": node})
