"""Typed JSON: what goes in comes back as the same value of the same type, or the error says where and what to do."""

from __future__ import annotations

import itertools
import math
import sys
import threading
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field, make_dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, Flag, IntEnum
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import SimpleNamespace
from typing import Any, NamedTuple
from uuid import UUID

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from spotsafe.checkpoint import strict_json, typed
from spotsafe.errors import StateMismatch, UnsupportedFormat, UnsupportedState


class Phase(Enum):
    WARM = "warm"
    MAIN = 2


class Level(IntEnum):
    LOW = 1


class Right(Flag):
    READ = 1
    WRITE = 2


@dataclass(frozen=True)
class Point:
    x: float
    tags: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        COUNTED.append(self)


COUNTED: list[Point] = []


class Pair(NamedTuple):
    left: Any
    right: Any


class Plain:
    """No state_dict, nothing."""


def around(value: object, *, live: object = typed.MISSING, **options: Any) -> Any:
    """Through real bytes and back."""
    data = strict_json.dump(typed.encode(value, path="state"))
    return typed.decode(strict_json.parse(data), live=live, path="state", **options)


def form(value: Any) -> Any:  # noqa: C901 - one branch for each kind
    """What tells two values apart: exact type, value, order, sign of zero; all NaN are alike."""
    kind = type(value)
    parts: Any = value
    if isinstance(value, (float, np.floating)):
        parts = "nan" if math.isnan(value) else (value, math.copysign(1, value))
    elif isinstance(value, (complex, np.complexfloating)):
        parts = (form(value.real), form(value.imag))
    elif isinstance(value, dict):
        parts = [(form(key), form(item)) for key, item in value.items()]
    elif isinstance(value, (set, frozenset)):
        parts = sorted(repr(form(item)) for item in value)
    elif isinstance(value, (list, tuple, deque)):
        parts = [*map(form, value), getattr(value, "maxlen", None)]
    elif isinstance(value, slice):
        parts = (form(value.start), form(value.stop), form(value.step))
    elif isinstance(value, SimpleNamespace):
        parts = form(vars(value))
    elif isinstance(value, Decimal):
        parts = value.as_tuple()
    elif isinstance(value, (datetime, time)):
        parts = (value.replace(tzinfo=None), value.fold, repr(value.tzinfo))
    elif isinstance(value, np.generic):
        parts = (value.dtype, value.tobytes())
    return kind, parts


def same(left: Any, right: Any) -> bool:
    """Whether nothing tells the two apart."""
    return bool(form(left) == form(right))


any_text = st.text(st.characters(codec=None) | st.characters(categories=["Cs"]), max_size=8)
zones = st.builds(
    timezone, st.timedeltas(timedelta(hours=-23), timedelta(hours=23)), any_text
) | st.sampled_from([timezone.utc, timezone(timedelta(hours=2))])
numpy_scalars = st.one_of(
    st.floats(width=16).map(np.float16),
    st.floats(width=32).map(np.float32),
    st.floats().map(np.float64),
    st.integers(-(1 << 63), (1 << 63) - 1).map(np.int64),
    st.integers(0, (1 << 64) - 1).map(np.uint64),
    st.integers(-128, 127).map(np.int8),
    st.booleans().map(np.bool_),
    st.complex_numbers(width=64).map(np.complex64),
    st.complex_numbers().map(np.complex128),
    any_text.map(np.str_),
    st.binary(max_size=5).map(np.bytes_),
    st.builds(
        np.datetime64, st.integers(-(1 << 62), 1 << 62), st.sampled_from(["Y", "D", "s", "ns", "as", "25s"])
    ),
    st.builds(np.timedelta64, st.integers(-(1 << 62), 1 << 62), st.sampled_from(["W", "h", "ms", "10us"])),
)
hashables = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-3, 3),
    st.floats(),
    st.complex_numbers(),
    any_text,
    st.binary(max_size=5),
    st.just(...),
    st.just("$"),
    st.dates(),
    st.datetimes(timezones=st.none() | zones),
    st.times(timezones=st.none() | zones),
    st.timedeltas(),
    zones,
    st.decimals().filter(lambda number: not number.is_snan()),
    st.fractions(),
    st.uuids(),
    st.builds(range, st.integers(), st.integers(), st.integers(1, 9)),
    st.text("ab./", max_size=6).map(Path),
    st.text("ab./", max_size=6).map(PurePosixPath),
    st.text("ab.\\:", max_size=6)
    .map(PureWindowsPath)
    .filter(lambda path: PureWindowsPath(str(path)) == path),
    numpy_scalars,
)
keys = st.recursive(
    hashables, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=4
)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Every container that comes back without the help of a live object."""
    some = st.lists(inner, max_size=4)
    pairs = st.dictionaries(keys, inner, max_size=4)
    names = st.text("abc", min_size=1, max_size=3)
    return st.one_of(
        some,
        some.map(tuple),
        st.sets(keys, max_size=4),
        st.frozensets(keys, max_size=4),
        pairs,
        st.dictionaries(any_text, inner, max_size=4),
        pairs.map(OrderedDict),
        pairs.map(Counter),
        some.map(deque),
        some.map(lambda items: deque(items, maxlen=7)),
        st.builds(slice, inner, inner, inner),
        st.dictionaries(names, inner, max_size=3).map(lambda members: SimpleNamespace(**members)),
        st.binary(max_size=5).map(bytearray),
    )


@given(st.recursive(hashables, containers, max_leaves=12))
@settings(max_examples=250)
def test_whatever_is_supported_comes_back_exactly(value: Any) -> None:
    """Value, exact type, types and order of keys, NaN and the sign of zero survive a trip through bytes."""
    assert same(around(value), value)


@given(st.recursive(hashables, containers, max_leaves=8))
@settings(max_examples=80)
def test_a_result_shares_nothing_with_what_it_was_made_from(value: Any) -> None:
    """Changing the live value after the encoding does not change the node: the node is the snapshot."""
    node = typed.encode([value, [1, 2], [0.5]], path="state")
    before = strict_json.dump(node)
    decoded = typed.decode(node)
    decoded[1].append(3)
    decoded[2].clear()
    if isinstance(decoded[0], (list, deque)):
        decoded[0].append("x")
    assert strict_json.dump(node) == before


@pytest.mark.parametrize(
    "value",
    [
        {"lr": 0.1, "steps": [1, 2, 3], "on": True, "none": None, "deep": {"": [[]]}},
        [-(1 << 63), (1 << 63) - 1, 1e300, -0.0, 5e-324],
        "\x00\u2028\U0001f600",
    ],
)
def test_plain_json_stays_plain(value: Any) -> None:
    """What JSON can say is said in JSON: a reader of another language needs nothing of ours for it."""
    node = typed.encode(value, path="state")
    assert same(node, value)
    assert "$" not in strict_json.dump(node).decode()


@pytest.mark.parametrize(
    ("value", "node"),
    [
        (1 << 64, {"$": "int", "hex": "0x10000000000000000"}),
        (-(1 << 63) - 1, {"$": "int", "hex": "-0x8000000000000001"}),
        (math.inf, {"$": "float", "value": "inf"}),
        ((1, "a"), {"$": "tuple", "items": [1, "a"]}),
        ({1: 2}, {"$": "dict", "items": [[1, 2]]}),
        ({"$": "tensor"}, {"$": "dict", "items": [["$", "tensor"]]}),
        ({3, 1, 2}, {"$": "set", "items": [1, 2, 3]}),
        (np.float16(1), {"$": "numpy", "dtype": "<f2", "hex": "003c"}),
        (np.datetime64(1, "ns"), {"$": "numpy", "dtype": "<M8[ns]", "hex": "0100000000000000"}),
        (b"\xff", {"$": "bytes", "base64": "/w=="}),
        (timedelta(1, 2, 3), {"$": "timedelta", "fields": [1, 2, 3]}),
        (typed.TensorRef("w"), {"$": "tensor", "name": "w"}),
    ],
)
def test_the_form_of_a_node_is_fixed(value: Any, node: Any) -> None:
    """These documents lie on people's disks: the form of version 1 must not drift."""
    assert typed.encode(value, path="state") == node


def test_values_of_every_listed_kind_come_back() -> None:
    """Kinds that random generation reaches rarely are each tried once."""
    values = [
        timezone(timedelta(hours=1), "X"),
        datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=timezone.utc),
        time(1, 2, 3, 4, tzinfo=timezone(timedelta(minutes=-5))),
        date.max,
        timedelta.min,
        Decimal("-sNaN123"),
        Decimal("-0E+5"),
        Fraction(-(10**40), 3),
        UUID(int=5),
        range(10**30, 0, -7),
        np.timedelta64("NaT", "s"),
        np.datetime64("NaT"),
        np.str_("a\x00"),
        np.bytes_(b"a\x00"),
        "\ud83d\ude00",
        {"\udc80": 1},
        {True: 1, 0: 2, None: 3, (): 4},
        deque(maxlen=0),
        SimpleNamespace(),
        {float("nan"): 1},
    ]
    for value in values:
        assert same(around(value), value), value


def test_sets_of_equal_content_give_equal_bytes() -> None:
    """The order of a set of text differs between processes; the bytes of a checkpoint must not."""
    words = [f"word-{number}" for number in range(50)]
    forward: set[str] = set()
    backward: set[str] = set()
    forward.update(words)
    backward.update(reversed(words))
    assert strict_json.dump(typed.encode(forward, path="s")) == strict_json.dump(
        typed.encode(backward, path="s")
    )


def test_attributes_of_an_ordered_dict_are_kept() -> None:
    """A module's state_dict carries `_metadata`, which decides how it is loaded."""
    state: Any = OrderedDict(weight=1)
    state._metadata = OrderedDict({"": {"version": 2}})
    back = around(state)
    assert back == state
    assert same(back._metadata, state._metadata)


class TestLiveObject:
    """What only the running program can give: classes of its own, and factories."""

    @pytest.mark.parametrize("value", [Phase.MAIN, Level.LOW, Right.READ | Right.WRITE, Right(0)])
    def test_an_enum_comes_back_as_the_live_class(self, value: Enum) -> None:
        """A member of an Enum, or a combination of flags, where the program has one of the same class."""
        live = next(iter(type(value)))
        assert same(around({"at": value}, live={"at": live})["at"], value)

    def test_a_dataclass_comes_back_without_running_its_code(self) -> None:
        """Fields are set as they were; `__post_init__` and `__setattr__` are not called."""
        value, live = Point(1.5, [Phase.WARM, (1,)]), Point(0.0, [Phase.MAIN])
        COUNTED.clear()
        back = around(value, live=live)
        assert back == value
        assert type(back) is Point
        assert not COUNTED

    def test_a_dataclass_with_slots_comes_back(self) -> None:
        """Slots leave no `__dict__`, and must not need one."""
        kind = make_dataclass("Slotted", ["a", "b"], slots=True)
        back = around(kind(1, (2,)), live=kind(0, 0))
        assert (back.a, back.b) == (1, (2,))

    def test_a_namedtuple_takes_the_live_class_or_becomes_a_tuple(self) -> None:
        """A reader without the program still gets the values."""
        assert same(around(Pair(1, [2]), live=Pair(0, 0)), Pair(1, [2]))
        assert same(around(Pair(1, [2])), (1, [2]))
        assert same(around(Pair(1, 2), live=namedtuple("Other", "a b")(0, 0)), (1, 2))  # noqa: PYI024 - on purpose

    def test_a_defaultdict_takes_the_live_factory_or_becomes_a_dict(self) -> None:
        """The factory is code, so it is never in the checkpoint."""
        value = defaultdict(list, {1: [2]})
        back = around(value, live=defaultdict(list))
        assert same(back, value)
        assert back["new"] == []
        assert same(around(value), {1: [2]})

    def test_looking_at_the_live_object_does_not_change_it(self) -> None:
        """A lookup in a live defaultdict must not create the key."""
        live: Any = {"d": defaultdict(list)}
        around({"d": defaultdict(list, {"k": [1]})}, live=live)
        assert live == {"d": {}}

    def test_neighbours_tell_the_class_of_new_places(self) -> None:
        """A list that has grown, new keys, keys themselves and items of sets find their class beside them."""
        live = {"h": [Phase.WARM], "k": {Phase.WARM: 1}, "s": {Phase.WARM}, "v": {"a": Phase.WARM}}
        value = {
            "h": [Phase.WARM, Phase.MAIN, Phase.MAIN],
            "k": {Phase.MAIN: 1, Phase.WARM: 2},
            "s": {Phase.MAIN},
            "v": {"b": Phase.MAIN},
        }
        assert same(around(value, live=live), value)

    @pytest.mark.parametrize("live", [typed.MISSING, {}, {"at": None}, {"at": Level.LOW}, {"at": Phase}])
    def test_without_the_class_at_that_path_there_is_an_error(self, live: object) -> None:
        """Nothing is imported by name; the error says where, what, and what to do."""
        with pytest.raises(StateMismatch, match=r"state\['at'\].*Phase.*have such a value there") as caught:
            around({"at": Phase.MAIN}, live=live)
        assert caught.value.problems == (str(caught.value),)

    def test_a_member_that_is_gone_is_an_error(self) -> None:
        """A renamed member must not become another one."""
        node = {"$": "enum", "class": "m:Phase", "name": "GONE"}
        with pytest.raises(StateMismatch, match="no member 'GONE'"):
            typed.decode(node, live=Phase.WARM)

    def test_fields_that_changed_are_an_error(self) -> None:
        """A dataclass with other fields is named with the fields that differ."""
        node = typed.encode(Point(1.0), path="p")
        node["fields"]["y"] = 1
        with pytest.raises(StateMismatch, match="y"):
            typed.decode(node, live=Point(0.0))

    def test_lenient_gives_values_to_look_at(self) -> None:
        """`spotsafe show` has no program beside it."""
        shown = around({"e": Phase.MAIN, "p": Point(1.0), "f": Right.READ}, lenient=True)
        assert shown["e"] == typed.Unbound(class_name=f"{__name__}:Phase", value="MAIN")
        assert shown["p"].value == {"x": 1.0, "tags": []}
        assert shown["f"].value == 1


class TestLeaf:
    """What the caller adds: arrays and tensors in the real program, a small class here."""

    @staticmethod
    def encode_leaf(value: object, path: str) -> Any:
        """A node for Plain, which tells its path."""
        return {"$": "plain", "path": path} if isinstance(value, Plain) else None

    def test_a_leaf_gets_the_path_of_its_value(self) -> None:
        """Names of tensors are made of it."""
        node = typed.encode({"a": [0, (Plain(),)], 3: {"x": Plain()}}, path="opt", leaf=self.encode_leaf)
        assert "opt['a'][1][0]" in str(node)
        assert "opt[3]['x']" in str(node)

    def test_a_leaf_decodes_its_own_tags_with_the_live_value(self) -> None:
        """Devices and places follow the live object."""
        seen = []

        def decode_leaf(node: Any, live: object, path: str) -> object:
            seen.append((node, live, path))
            return "value"

        node = [0, {"$": "plain", "n": 1}, {"$": "tensor", "name": "w"}]
        assert typed.decode(node, leaf=decode_leaf, live=[0, "here"], path="x") == [0, "value", "value"]
        assert seen == [(node[1], "here", "x[1]"), (node[2], typed.MISSING, "x[2]")]

    def test_a_tag_that_nobody_knows_is_a_newer_format(self) -> None:
        """It is not damage: the bytes are what somebody wrote, so no older checkpoint is taken instead."""
        with pytest.raises(UnsupportedFormat, match=r"c/index.json.*'teapot'.*upgrade"):
            typed.decode([{"$": "teapot"}], checkpoint="c", file="index.json")

    def test_names_of_tensors_are_found_wherever_they_are(self) -> None:
        """Also below tags of the caller's."""
        tree = {"a": [{"$": "tensor", "name": "x"}], "b": {"$": "nd", "of": {"$": "tensor", "name": "y"}}}
        assert sorted(typed.tensor_names(tree)) == ["x", "y"]
        with pytest.raises(ValueError, match="without a name"):
            list(typed.tensor_names({"$": "tensor"}))


def generator() -> Any:
    """Something that cannot be saved."""
    yield 1


class MyList(list[int]):
    """A class of the user's that is more than a list."""


def with_extra() -> Point:
    """A dataclass instance that carries more than its fields."""
    point = Point(1.0)
    object.__setattr__(point, "cache", 1)
    return point


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (lambda: 1, "function"),
        (generator(), "generator"),
        (sys, "module"),
        (threading.Lock(), "lock"),
        (Plain(), "Plain"),
        (Plain, "the class Plain"),
        (len, "function len"),
        (object(), "builtins.object"),
        (memoryview(b""), "memoryview"),
        (MyList(), "convert it to list"),
        (ValueError("x"), "ValueError"),
        (with_extra(), "'cache'"),
        (NotImplemented, "NotImplementedType"),
    ],
)
def test_what_cannot_be_saved_is_named_with_its_path_and_a_way_out(value: object, says: str) -> None:
    """The error is what somebody reads at the first save: it must lead to the line to change."""
    with pytest.raises(UnsupportedState) as caught:
        typed.encode({"state": {"fns": [value]}}, path="scheduler")
    message = str(caught.value)
    assert message.startswith("scheduler['state']['fns'][0] ")
    assert says in message
    assert "state_dict/load_state_dict" in message
    assert "(get, set) pair" in message
    assert caught.value.path == "scheduler['state']['fns'][0]"


def test_an_open_file_cannot_be_saved(tmp_path: Path) -> None:
    """A file's position is not state that a restart can have."""
    with (tmp_path / "log").open("w") as stream, pytest.raises(UnsupportedState, match=r"x\.log is .*TextIO"):
        typed.encode(SimpleNamespace(log=stream), path="x")


def test_a_time_zone_with_rules_is_refused() -> None:
    """A zone of a database cannot be kept exactly; a fixed offset can, and the error says so."""
    zoneinfo = pytest.importorskip("zoneinfo")
    try:
        zone = zoneinfo.ZoneInfo("Europe/Vienna")
    except zoneinfo.ZoneInfoNotFoundError:
        pytest.skip("no time zone database on this machine")
    with pytest.raises(UnsupportedState, match=r"x\[0\] has a time zone .*fixed offset"):
        typed.encode([datetime(2024, 1, 1, tzinfo=zone)], path="x")


@pytest.mark.parametrize("value", [np.longdouble(1), np.void(b"ab"), np.array((1, 2), dtype="i4,i4")[()]])
def test_numpy_scalars_that_differ_between_machines_are_refused(value: object) -> None:
    """A long double has 80 bits here and 128 there."""
    with pytest.raises(UnsupportedState, match=r"x\['v'\] is a numpy scalar of dtype"):
        typed.encode({"v": value}, path="x")


def test_a_path_comes_back_as_itself_or_is_refused() -> None:
    """Some Pythons make Windows paths whose own text is another path's; that is not saved in silence."""
    for letters in itertools.product("a.:\\", repeat=5):
        path = PureWindowsPath("".join(letters))
        try:
            assert around([path]) == [path]
        except UnsupportedState as error:
            assert PureWindowsPath(str(path)) != path
            assert str(error).startswith("state[0] is a path")  # noqa: PT017 - either outcome is right


def test_the_path_spells_keys_attributes_and_items() -> None:
    """A path reads like the expression that leads to the value."""
    cases = {
        "x['a b'][(1, None)]": {"a b": {(1, None): Plain()}},
        "x.name": SimpleNamespace(name=Plain()),
        "x.tags[0]": Point(0.0, [Plain()]),
        "x[1]": Pair(0, Plain()),
        "x.stop": slice(0, Plain()),
    }
    for path, value in cases.items():
        with pytest.raises(UnsupportedState) as caught:
            typed.encode(value, path="x")
        assert caught.value.path == path


def test_a_key_that_cannot_be_saved_is_named_even_if_its_repr_fails() -> None:
    """The user's own repr must not hide the error."""

    class Key:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    with pytest.raises(UnsupportedState, match=r"x\.keys\(<.*Key>\)"):
        typed.encode({Key(): 1}, path="x")


def test_a_cycle_is_named() -> None:
    """A value inside itself is an error, not an endless walk; the same value twice is not a cycle."""
    cycle: list[Any] = [1]
    cycle.append({"again": cycle})
    with pytest.raises(UnsupportedState, match=r"x\[1\]\['again'\] contains itself"):
        typed.encode(cycle, path="x")
    shared = [1]
    assert around([shared, shared, {"k": shared}]) == [[1], [1], {"k": [1]}]


@pytest.mark.parametrize("wrap", [lambda v: [v], lambda v: (v,), lambda v: {1: v}, lambda v: {"k": v}])
def test_depth_is_bounded_and_the_deepest_value_can_be_read(wrap: Any) -> None:
    """What is written can be read; what is deeper is refused with words, not with a RecursionError."""
    value: Any = 1
    for _ in range(typed.MAX_DEPTH):
        value = wrap(value)
    assert around(value) == value
    with pytest.raises(UnsupportedState, match="nested deeper"):
        typed.encode(wrap(value), path="x")


def test_the_number_of_values_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that share parts can be exponentially many; they are refused instead of filling the memory."""
    monkeypatch.setattr("spotsafe.checkpoint.typed_encode.MAX_VALUES", 1000)
    doubled: Any = [1]
    for _ in range(30):
        doubled = [doubled, doubled]
    with pytest.raises(UnsupportedState, match="more than 1000 values"):
        typed.encode(doubled, path="x")


def test_a_dataclass_field_that_is_not_set_is_named() -> None:
    """An instance in the middle of its construction is no state."""
    point = object.__new__(make_dataclass("Unset", ["value"], slots=True))
    with pytest.raises(UnsupportedState, match="field value is not set"):
        typed.encode(point, path="x")


def test_several_nan_in_one_dict_or_set() -> None:
    """NaN differs from itself, so a dict may hold it many times; each comes back as a key of its own."""
    keys = {float("nan"): 1, float("nan"): 2, math.inf: 3}
    back = typed.decode(typed.encode(keys, path="x"))
    assert list(back.values()) == [1, 2, 3]
    assert sum(math.isnan(key) for key in back) == 2
    assert len(typed.decode(typed.encode({float("nan"), float("nan")}, path="x"))) == 2


@pytest.mark.parametrize("name", ["keys", "__class__", "$", "two words"])
def test_attributes_that_could_not_be_set_again_are_refused(name: str) -> None:
    """An OrderedDict's attribute that hides what the class has is told at the save, not found at the load."""
    value: OrderedDict[str, int] = OrderedDict()
    vars(value)[name] = 1
    with pytest.raises(UnsupportedState, match="has an attribute"):
        typed.encode(value, path="x")
