"""Random state trees for hypothesis: every kind of value, at least five containers deep.

`trees(kinds)` draws a tree that holds each of the given kinds, and says which kinds are in it.
"""

from __future__ import annotations

import datetime as dt
import enum
import pathlib
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st
from torch import nn

from spotsafe.checkpoint.dtypes import DTYPES
from spotsafe.tensors.tree import torch_dtype
from tests.tensors.look_alikes import Doubly, Scaled

Draw = Callable[[st.SearchStrategy[Any]], Any]
DEPTH = 5
"""Containers around every leaf, at least."""


class Colour(enum.Enum):
    """Values that look like others'."""

    RED = 1
    BLUE = "b"


class Level(enum.IntEnum):
    """Equal to numbers, but no numbers."""

    LOW = 1
    HIGH = 9


class Access(enum.Flag):
    """Combinations have no name of their own."""

    READ = 1
    WRITE = 2
    SHARE = 4


class Pair(NamedTuple):
    """A tuple with names."""

    first: Any
    second: Any


@dataclass
class Settings:
    """A plain dataclass."""

    rate: Any
    history: Any = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Fixed:
    """A dataclass without a dict."""

    value: Any


# -- leaves ------------------------------------------------------------------------------------------------------

ODD_KEYS = (
    *(
        "a.b",
        "a/b",
        "",
        "a",
        "A",
        "%2F",
        "\0",
        "x" * 300,
        "__metadata__",
        "\u00e9\u2603",
        "../x",
        "$",
        "\ud800",
    ),
    *("a b:*?[]", "/", "#2", "it's", 'say "it"', "\\", "\n", "\U0001f600", "None", "0"),
)
OFFSETS = st.integers(-1439, 1439).map(lambda minutes: dt.timezone(dt.timedelta(minutes=minutes)))
PATHS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8)
NUMPY_SCALARS = (
    *("?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"),
    *("M8[ns]", "M8[D]", "m8[25s]"),
)

SCALARS: Mapping[str, st.SearchStrategy[Any]] = {
    "none": st.none(),
    "bool": st.booleans(),
    "int": st.integers(-(1 << 63), (1 << 63) - 1),
    "big int": st.integers(1 << 64, 1 << 300).flatmap(lambda number: st.sampled_from([number, -number])),
    "float": st.floats(allow_nan=False, allow_infinity=False),
    "nan": st.just(float("nan")),
    "inf": st.sampled_from([float("inf"), float("-inf")]),
    "-0.0": st.just(-0.0),
    "complex": st.complex_numbers(),
    "str": st.text(max_size=8),
    "lone surrogate": st.sampled_from(["\ud800", "a\udfffb", "\udc80"]),
    "bytes": st.binary(max_size=8),
    "bytearray": st.binary(max_size=8).map(bytearray),
    "path": PATHS.map(pathlib.Path),
    "pure path": st.one_of(PATHS.map(pathlib.PurePosixPath), PATHS.map(pathlib.PureWindowsPath)),
    "date": st.dates(),
    "time": st.times(timezones=st.none() | OFFSETS),
    "datetime": st.datetimes(timezones=st.none() | OFFSETS),
    "timedelta": st.timedeltas(),
    "timezone": OFFSETS,
    "decimal": st.decimals(allow_nan=True).filter(lambda number: not number.is_snan()),
    "fraction": st.fractions(),
    "uuid": st.uuids(),
    "range": st.builds(range, st.integers(), st.integers(), st.integers(1, 9)),
    "slice": st.builds(slice, st.none() | st.integers(), st.integers(), st.none() | st.integers()),
    "ellipsis": st.just(...),
    "enum": st.sampled_from(Colour),
    "int enum": st.sampled_from(Level),
    "flag": st.integers(0, 7).map(Access),
    "numpy.str_": st.text(max_size=5).map(np.str_),
    "numpy.bytes_": st.binary(max_size=5).map(np.bytes_),
    "set": st.sets(st.integers() | st.text(max_size=3), max_size=4),
    "frozenset": st.frozensets(st.binary(max_size=3), max_size=4),
    "dict of nan": st.just({float("nan"): 1, float("nan"): [2]}),
    "set of nan": st.just({float("nan"), float("nan"), 1.5}),
    "counter": st.dictionaries(st.text(max_size=3), st.integers(), max_size=3).map(Counter),
    "torch.dtype": st.sampled_from([torch.float32, torch.int4, torch.complex64]),
    "torch.device": st.sampled_from(["cpu", "cuda:1", "meta"]).map(torch.device),
    "torch.Size": st.lists(st.integers(0, 9), max_size=3).map(torch.Size),
    "torch.layout": st.sampled_from([torch.strided, torch.sparse_csr]),
    "torch.memory_format": st.sampled_from([torch.channels_last, torch.preserve_format]),
    "python random state": st.integers().map(lambda seed: random.Random(seed).getstate()),
    "numpy random state": st.integers(0, 99).map(lambda seed: np.random.RandomState(seed).get_state()),
    "numpy bit generator": st.integers(0, 99).map(
        lambda seed: np.random.Generator(np.random.PCG64(seed)).bit_generator.state
    ),
}


def numpy_scalar(draw: Draw) -> Any:
    """A scalar of any bits."""
    dtype = np.dtype(draw(st.sampled_from(NUMPY_SCALARS)))
    return _noise(draw, dtype.itemsize, boolean=dtype.kind == "b").view(dtype)[0]


def _noise(draw: Draw, count: int, *, boolean: bool = False) -> np.ndarray[Any, Any]:
    """Bytes of every kind: NaNs with payloads, infinities and subnormal numbers are among them."""
    seed = draw(st.integers(0, 1 << 32))
    return np.random.default_rng(seed).integers(0, 2 if boolean else 256, count, dtype=np.uint8)


SHAPES = st.sampled_from([(), (1,), (3,), (2, 3), (0,), (2, 0, 3), (1, 1, 4), (5, 1, 2, 2)])


def tensor(draw: Draw, dtype: str, shape: tuple[int, ...] | None = None) -> torch.Tensor:
    """A tensor of any bits."""
    shape = draw(SHAPES) if shape is None else shape
    items, size = int(np.prod(shape)), DTYPES[dtype].item_bytes
    if items == 0:
        return torch.empty(shape, dtype=torch_dtype(dtype))
    raw = torch.from_numpy(_noise(draw, items * size, boolean=dtype == "bool"))
    return raw.view(torch_dtype(dtype)).reshape(shape)


COMMON = st.sampled_from(["float32", "bfloat16", "float64", "int64", "uint8", "complex64", "float8_e5m2"])


def layout(
    make: Callable[[torch.Tensor], torch.Tensor], *, dtype: str = ""
) -> Callable[[Draw], torch.Tensor]:
    """A kind of view of a tensor of 4 by 4."""
    return lambda draw: make(tensor(draw, dtype or draw(COMMON), (4, 4)))


def sparse(make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Draw], torch.Tensor]:
    """A kind of sparse tensor of 4 by 4, of any density."""

    def drawn(draw: Draw) -> torch.Tensor:
        kept = draw(st.lists(st.booleans(), min_size=16, max_size=16))
        dense = tensor(draw, draw(st.sampled_from(["float32", "int64"])), (4, 4)).nan_to_num(1)
        return make(torch.where(torch.tensor(kept).reshape(4, 4), dense, torch.zeros_like(dense)))

    return drawn


def uncoalesced(dense: torch.Tensor) -> torch.Tensor:
    """The same positions several times, in no order."""
    indices = torch.tensor([[3, 0, 3, 1], [2, 1, 2, 0]])
    return torch.sparse_coo_tensor(indices, dense[0], (4, 4), check_invariants=True)


def scaled(kind: type[Scaled]) -> Callable[[Draw], torch.Tensor]:
    """A wrapper subclass; the values of a doubly wrapped one are wrapped themselves."""

    def drawn(draw: Draw) -> torch.Tensor:
        values, scale = tensor(draw, "int8", (3,)), tensor(draw, "float32", ())
        inner = Scaled(values, scale, "inner") if kind is Doubly else values
        return kind(inner, scale, draw(st.text(max_size=3)))

    return drawn


TENSORS: Mapping[str, Callable[[Draw], torch.Tensor]] = {
    **{
        f"tensor of {name}": lambda draw, name=name: tensor(draw, name)
        for name in DTYPES
        if hasattr(torch, name)
    },
    "0-dim": lambda draw: tensor(draw, draw(COMMON), ()),
    "empty": lambda draw: tensor(draw, draw(COMMON), (0, 3)),
    "transposed": layout(lambda base: base.t()),
    "sliced": layout(lambda base: base[1:, ::2]),
    "permuted fp4": layout(lambda base: base.t(), dtype="float4_e2m1fn_x2"),
    "permuted int4": layout(lambda base: base[::2].t(), dtype="int4"),
    "expanded": layout(lambda base: base[0].expand(3, 4)),
    "expanded scalar": layout(lambda base: base[0, 0].expand(2, 2)),
    "channels last": layout(lambda base: base.reshape(1, 2, 2, 4).to(memory_format=torch.channels_last)),
    "conjugated": layout(lambda base: base.t().conj(), dtype="complex64"),
    "negated": layout(lambda base: base.conj().imag, dtype="complex128"),
    "real of complex": layout(lambda base: base.real, dtype="complex64"),
    "complex as real": layout(torch.view_as_real, dtype="complex128"),
    "requires grad": layout(lambda base: base.clone().requires_grad_(), dtype="float32"),
    "not a leaf": layout(lambda base: base.clone().requires_grad_() * 2, dtype="float32"),
    "Parameter": layout(nn.Parameter, dtype="bfloat16"),
    "frozen Parameter": layout(lambda base: nn.Parameter(base, requires_grad=False), dtype="uint8"),
    "COO": sparse(lambda dense: dense.to_sparse()),
    "COO uncoalesced": sparse(uncoalesced),
    "COO hybrid": sparse(lambda dense: dense.to_sparse(1)),
    "COO without values": sparse(lambda dense: (dense * 0).to_sparse()),
    "CSR": sparse(lambda dense: dense.to_sparse_csr()),
    "CSC": sparse(lambda dense: dense.to_sparse_csc()),
    "BSR": sparse(lambda dense: dense.to_sparse_bsr((2, 2))),
    "BSC": sparse(lambda dense: dense.to_sparse_bsc((2, 2))),
    "CSR without values": sparse(lambda dense: (dense * 0).to_sparse_csr()),
    "wrapper": scaled(Scaled),
    "wrapper of a wrapper": scaled(Doubly),
}

RECORD = np.dtype([("a", "<i4"), ("b", ">f8", (2,)), ("c", [("x", "u1"), ("y", "S3")])], align=True)


def array(dtype: Any, shape: tuple[int, ...] = (3, 2)) -> Callable[[Draw], np.ndarray[Any, Any]]:
    """A kind of array, of any bits."""
    size = np.dtype(dtype).itemsize * int(np.prod(shape))
    return lambda draw: _noise(draw, size, boolean=dtype == "?").view(dtype).reshape(shape)


def read_only(draw: Draw) -> np.ndarray[Any, Any]:
    """An array that cannot be written."""
    made = array("<f4")(draw)
    made.flags.writeable = False
    return made


TEXTS = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=3), min_size=1, max_size=3)
ARRAYS: Mapping[str, Callable[[Draw], np.ndarray[Any, Any]]] = {
    **{f"array of {dtype}": array(dtype) for dtype in ("?", "<i2", "<u8", "<f2", "<f4", "<f8", "<c16")},
    "array of other byte order": array(">f4"),
    "array of dates": array("<M8[us]"),
    "array of text": lambda draw: np.array(draw(TEXTS)),
    "array of bytes": array("S5"),
    "structured array": array(RECORD),
    "0-dim array": array("<i8", ()),
    "empty array": array("<f4", (0, 2)),
    "Fortran array": lambda draw: np.asfortranarray(array("<f8")(draw)),
    "sliced array": lambda draw: array("<i4", (6,))(draw)[::2],
    "read-only array": read_only,
}
LEAVES: Mapping[str, Callable[[Draw], Any]] = {
    **{kind: lambda draw, values=values: draw(values) for kind, values in SCALARS.items()},
    "numpy scalar": numpy_scalar,
    **TENSORS,
    **ARRAYS,
}

# -- containers --------------------------------------------------------------------------------------------------

NUMBERS = st.integers(-5, 300)
MIXED = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.text(max_size=2), st.binary(max_size=2)),
    *(
        st.floats(allow_nan=False),
        st.tuples(NUMBERS, st.text(max_size=2)),
        st.sampled_from(Colour),
        st.dates(),
    ),
)


def keyed(keys: st.SearchStrategy[Any], make: Callable[[Any], Any]) -> Callable[[Draw, list[Any]], Any]:
    """A kind of dict with keys of some kind."""

    def drawn(draw: Draw, items: list[Any]) -> Any:
        count = len(items)
        names = draw(st.lists(keys, min_size=count, max_size=count, unique=True))
        return make(dict(zip(names, items, strict=True)))

    return drawn


def state_dict(items: Mapping[Any, Any]) -> OrderedDict[Any, Any]:
    """As modules make them, with attributes."""
    made = OrderedDict(items)
    made._metadata = {"": {"version": 2}}  # type: ignore[attr-defined] # as torch does it
    return made


def fixed(draw: Draw, items: list[Any]) -> Any:
    """A frozen dataclass around one of them, or all."""
    return Fixed(items[0] if len(items) == 1 else items)


CONTAINERS: Mapping[str, Callable[[Draw, list[Any]], Any]] = {
    "dict": keyed(st.text(max_size=3), dict),
    "dict of odd keys": keyed(st.sampled_from(ODD_KEYS), dict),
    "dict of numbers": keyed(NUMBERS, dict),
    "dict of mixed keys": keyed(MIXED, dict),
    "OrderedDict": keyed(st.text(max_size=2), OrderedDict),
    "OrderedDict with attributes": keyed(st.text(max_size=2), state_dict),
    "defaultdict": keyed(NUMBERS, lambda items: defaultdict(list, items)),
    "list": lambda _, items: items,
    "tuple": lambda _, items: tuple(items),
    "deque": lambda draw, items: deque(items, draw(st.none() | st.integers(len(items), 9))),
    "namedtuple": lambda _, items: Pair(items[0], items[1:]),
    "namespace": lambda _, items: SimpleNamespace(**{f"field_{at}": item for at, item in enumerate(items)}),
    "dataclass": lambda _, items: Settings(items[0], items[1:]),
    "frozen dataclass": fixed,
}
ALIASES = ("alias of a tensor", "alias of an array", "alias by detach")
KINDS = (*LEAVES, *CONTAINERS, *ALIASES)


@dataclass(frozen=True, slots=True)
class Tree:
    """A random state. Some tensors in it are of dtypes that torch cannot print."""

    value: Any = field(repr=False)
    kinds: Counter[str]
    depth: int


@st.composite
def trees(draw: Draw, kinds: Sequence[str], *, more: int = 4) -> Tree:
    """A tree with each of these kinds in it, and some others."""
    drawn = [*kinds, *draw(st.lists(st.sampled_from(KINDS), max_size=more))]
    leaves = [LEAVES[kind](draw) for kind in drawn if kind in LEAVES]
    leaves += [leaf for kind in drawn if kind in ALIASES for leaf in _aliases(draw, kind)]
    wanted = [kind for kind in drawn if kind in CONTAINERS]
    counted = Counter(dict.fromkeys(drawn, 1))
    leaves = leaves or [None]
    order = [
        leaves[at] for at in draw(st.permutations(range(len(leaves))))
    ]  # hypothesis prints what it permutes
    depth = DEPTH + draw(st.integers(0, 2))
    value = _grow(draw, order, depth, wanted, counted)
    for kind in wanted:  # whatever did not find its place goes around the whole
        value, depth = CONTAINERS[kind](draw, [value]), depth + 1
    return Tree(value, counted, depth)


def _aliases(draw: Draw, kind: str) -> list[Any]:
    if kind == "alias of an array":
        made: Any = draw(st.sampled_from(sorted(ARRAYS)).map(ARRAYS.get))(draw)
        return [made, made]
    if kind == "alias of a tensor":
        made = draw(st.sampled_from(sorted(TENSORS)).map(TENSORS.get))(draw)
        return [made, made]
    made = tensor(draw, draw(COMMON), (2, 3))
    return [made, made.detach()]


def _grow(draw: Draw, leaves: list[Any], depth: int, wanted: list[str], counted: Counter[str]) -> Any:
    if depth == 0:
        return leaves[0] if len(leaves) == 1 else leaves
    cut = draw(st.integers(1, len(leaves)))
    parts = [part for part in (leaves[:cut], leaves[cut:]) if part]
    items = [_grow(draw, part, depth - 1, wanted, counted) for part in parts]
    kind = wanted.pop() if wanted else draw(st.sampled_from(sorted(CONTAINERS)))
    counted[kind] += 1
    return CONTAINERS[kind](draw, items)


# -- what a fresh program holds in its place ---------------------------------------------------------------------

_BOUND = (enum.Enum, Pair, Settings, Fixed, defaultdict)


def bare(value: Any) -> Any:
    """What a fresh program has in the place of `value`: only what gives classes, and something else elsewhere."""
    if isinstance(value, dict):
        kept = {
            key: bare(item) for key, item in value.items() if is_bound(item) or isinstance(key, enum.Enum)
        }
        return defaultdict(list, kept) if isinstance(value, defaultdict) else kept
    if isinstance(value, (list, tuple, deque)):
        last = max((at for at, item in enumerate(value) if is_bound(item)), default=-1)
        items = [bare(item) for item in value]
        return Pair(*items) if isinstance(value, Pair) else items[: last + 1]
    if isinstance(value, (Settings, Fixed)):
        return type(value)(*(bare(getattr(value, name)) for name in value.__dataclass_fields__))
    if isinstance(value, SimpleNamespace):
        return SimpleNamespace(**{name: bare(item) for name, item in vars(value).items()})
    return value if isinstance(value, enum.Enum) else None


def is_bound(value: Any) -> bool:
    """Whether a value is rebuilt only in the class of a live one, or holds one that is."""
    if isinstance(value, _BOUND):
        return True
    if isinstance(value, dict):
        return any(map(is_bound, value.values())) or any(isinstance(key, enum.Enum) for key in value)
    if isinstance(value, (list, tuple, deque)):
        return any(map(is_bound, value))
    return isinstance(value, SimpleNamespace) and any(map(is_bound, vars(value).values()))
