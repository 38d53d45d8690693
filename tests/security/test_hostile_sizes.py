"""Small files that ask for much memory or time: what a file claims is compared with what is there first."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import spotsafe
from spotsafe.checkpoint import typed
from spotsafe.checkpoint.index_values import Index
from spotsafe.checkpoint.layout import CheckpointName, ledger_events, ledger_heartbeat
from spotsafe.checkpoint.naming import contents
from spotsafe.errors import (
    DamagedCheckpoint,
    NoUsableCheckpoint,
    SpotsafeError,
    StateMismatch,
    UnsupportedState,
)
from spotsafe.exchange.exporting import export
from spotsafe.ledger.reading import read_end, read_step
from spotsafe.loading import with_checkpoint
from spotsafe.tensors.source import Source
from spotsafe.testing.memory import MemoryStore
from tests.security.forging import command, forge_index, trained
from tests.session.rig import Program
from tests.test_loading import saved

SECONDS = 20.0
"""Of this process's time; without the limit that a test is about it would be hours."""


@contextmanager
def soon() -> Iterator[None]:
    """What is inside takes little time."""
    start = time.process_time()
    yield
    assert time.process_time() - start < SECONDS


def claims(**changes: Any) -> Callable[[dict[str, Any]], None]:
    """An index whose first file is said to be huge."""

    def change(index: dict[str, Any]) -> None:
        index.update({key: value for key, value in changes.items() if key == "block_size"})
        size = changes.get("size", index["files"][0]["size"])
        index["files"][0]["size"] = size
        count = -(-size // index["block_size"])
        index["files"][0]["digests"] = (index["files"][0]["digests"] * count)[:count]

    return change


@pytest.mark.parametrize(
    "change",
    [
        claims(size=1 << 45, block_size=1 << 30),
        claims(size=1 << 62, block_size=1 << 62),
        claims(block_size=1 << 62),
        lambda index: index.update(block_size=0.5),
        lambda index: index.update(block_size=True),
    ],
    ids=["file", "file and block", "block", "float", "bool"],
)
def test_no_room_is_made_for_what_is_not_there(change, tmp_path):
    """A file of some bytes that an index calls 32 TiB: an error that names it, by every way of reading."""
    run = trained(tmp_path / "run", steps=1)
    forge_index(run, change)
    with soon():
        with pytest.raises(NoUsableCheckpoint, match=r"data-00000-000|frozen-00000-000|index-00000"):
            Program().session(run).__enter__()
        with pytest.raises(DamagedCheckpoint):
            spotsafe.load(run)
        assert command("verify", run, tmp_path / "out.pt")[0] == 1


def index_of(state: dict[str, Any]) -> list[Index]:
    return [Index(rank=0, block_size=1, files=(), tensors=(), state=state)]


@pytest.mark.slow
def test_a_long_key_is_not_repeated_without_end():
    """One key of a megabyte above a million short ones would make names of a terabyte."""
    state = {"x": {"kind": "value", "k": {"k" * (1 << 20): {str(one): 0 for one in range(1_000_000)}}}}
    state["x"]["kind"] = "unknown"
    with soon(), pytest.raises(DamagedCheckpoint, match="characters"):
        contents(index_of(state), checkpoint="c")


def test_names_that_are_alike_are_counted():
    """A name gets an apostrophe for each that is like it; a hundred thousand would take hours."""
    items = [["a", {"kind": "value", "value": 1}]] * 100_000
    with soon(), pytest.raises(DamagedCheckpoint, match="named"):
        contents(index_of({"x": {"kind": "dict", "items": items}}), checkpoint="c")


@pytest.mark.parametrize("kind", ["dict", "set"])
def test_keys_of_one_hash_are_refused(kind):
    """Python's integers hash modulo 2^61 - 1, so that anybody can make ten thousand that collide."""
    numbers = [{"$": "int", "hex": hex((1 << 64) + (one * ((1 << 61) - 1)))} for one in range(20_000)]
    items = [[number, 0] for number in numbers] if kind == "dict" else numbers
    with soon(), pytest.raises(DamagedCheckpoint, match="of one hash"):
        typed.decode({"$": kind, "items": items})


def test_many_keys_that_do_not_collide_are_fine():
    """A limit for liars is none for a dict of numbers."""
    assert len(typed.decode({"$": "dict", "items": [[one, one] for one in range(100_000)]})) == 100_000


def test_a_fraction_has_a_limit_in_both_directions():
    """The divisor of two numbers of a megabyte takes hours; what cannot be read is not saved either."""
    from fractions import Fraction

    huge = {"$": "int", "hex": "0x" + "7" * (1 << 20)}
    with soon(), pytest.raises(DamagedCheckpoint, match="16384 bits"):
        typed.decode({"$": "fraction", "numerator": huge, "denominator": huge})
    with pytest.raises(UnsupportedState, match="two integers"):
        typed.encode(Fraction(1 << 20_000, 3), path="x")
    largest = Fraction((1 << 16_384) - 1, 1 << 16_000)
    assert typed.decode(typed.encode(largest, path="x")) == largest


def test_one_tensor_is_no_two_arrays():
    """Else a thousand nodes of some bytes would be a thousand copies of it."""
    values = {"$": "tensor", "name": "a"}
    nodes = [{"$": "ndarray", "dtype": "<f4", "shape": shape, "values": values} for shape in ([4], [2, 2])]
    source = Source({"a": torch.ones(4)})
    first, again = source.decode([nodes[0], dict(nodes[0])])
    assert first is again
    with pytest.raises(StateMismatch, match="two different arrays"):
        Source({"a": torch.ones(4)}).decode(nodes)


def test_a_tensor_of_many_names_is_not_copied_for_each(tmp_path):
    """A safetensors file would hold it once for each name: some kilobytes would become gigabytes."""
    weight = torch.nn.Parameter(torch.zeros(1 << 20))
    many = torch.nn.ParameterDict({f"p{number}": weight for number in range(100)})
    store = saved(model=many, max_file_bytes=1 << 24)
    with pytest.raises(UnsupportedState, match="tied"):
        with_checkpoint(store, lambda opened: export(opened, str(tmp_path / "x.safetensors")))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("depth", [600, 30_000])
def test_a_deep_ledger_is_no_ledger(depth):
    """The heartbeat and the ledger of an attempt are evidence: one that cannot be read says nothing."""
    deep = b'{"x":' + b"[" * depth + b"]" * depth + b"}"
    store = MemoryStore()
    store.put(ledger_heartbeat(1), deep)
    store.put(ledger_events(1, 1), deep)
    assert read_step(store, 1) == 0
    assert read_end(store, 1) is None


def test_values_too_deep_for_the_stack_are_an_error_of_the_tree():
    """Who calls from far down the stack gets words, and can call from further up."""
    node: Any = 1
    for _ in range(120):
        node = {"$": "tuple", "items": [node, []]}

    def far_down(frames: int) -> Any:
        return far_down(frames - 1) if frames else typed.decode(node, path="model")

    with pytest.raises(StateMismatch, match="model is nested too deeply"):
        far_down(700)


@pytest.mark.parametrize("word", ["_inductor", "_dynamo", "onnx", "nothing"])
@pytest.mark.parametrize("tag", ["torch.dtype", "torch.layout", "torch.memory_format"])
def test_a_word_of_torch_imports_nothing(word, tag, monkeypatch):
    """torch imports some of its modules when they are asked for by name; a file does not ask."""

    def asked(name: str) -> None:
        pytest.fail(f"torch was asked for {name}")

    monkeypatch.setattr(torch, "__getattr__", asked)
    with pytest.raises(StateMismatch, match=word):
        Source({}).decode({"$": tag, "value": word})


@pytest.mark.parametrize("digits", [19, 20, 5000])
def test_names_have_as_many_digits_as_numbers_of_64_bits(digits):
    """Beyond some thousand digits Python refuses to make an integer of them, with an error of its own."""
    name = f"a{'1' * digits}-s000000001-0001-0123abcd"
    assert CheckpointName.parse(name) is None


@pytest.mark.parametrize("shape", [[0, 1 << 62], [1 << 40], [-1], [1 << 63], [1.0], [True], [[1]], [1] * 65])
def test_a_shape_is_believed_only_with_its_bytes(shape, tmp_path):
    """Shapes that nothing stands for, or that overflow."""
    run = trained(tmp_path / "run", steps=1)

    def change(index: dict[str, Any]) -> None:
        index["tensors"][0]["shape"] = shape

    forge_index(run, change)
    with soon():
        for read in (lambda: spotsafe.load(run), lambda: Program().session(run).__enter__()):
            with pytest.raises(SpotsafeError, match="index-00000"):
                read()
