"""docs/format.md is enough: a reader written from it, with nothing of ours, loads every kind of checkpoint."""

from __future__ import annotations

import ast
import datetime as dt
import enum
import math
import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import SimpleNamespace
from typing import Any, NamedTuple
from uuid import UUID

import numpy as np
import pytest
import torch
from msgspec import structs

import spotsafe
from spotsafe.checkpoint import dtypes, typed_decode, typed_scalars
from spotsafe.checkpoint.candidates import read_index
from spotsafe.checkpoint.catalog import resolve
from spotsafe.checkpoint.digest import sha256_hex
from spotsafe.checkpoint.index import encode_index
from spotsafe.checkpoint.layout import CheckpointName, frozen_file
from spotsafe.checkpoint.manifest import Marker, Reference, encode_manifest, encode_marker
from spotsafe.checkpoint.typed import Unbound
from spotsafe.errors import DamagedCheckpoint
from spotsafe.loading import with_checkpoint
from spotsafe.reader import load_verified
from spotsafe.storage.open import open_store
from spotsafe.tensors import source
from spotsafe.tensors.source import Source
from spotsafe.tensors.tree import as_bytes
from spotsafe.testing.states import write_checkpoint
from spotsafe.tracking import Tracker
from tests import independent_reader
from tests.session.rig import Program
from tests.tensors.test_tree import Scaled

READER = Path(independent_reader.__file__)


class Color(enum.Enum):
    RED = "red"


class Rights(enum.Flag):
    READ = 1
    WRITE = 2


@dataclass
class Point:
    x: float
    tags: tuple[str, ...]


class Pair(NamedTuple):
    left: Any
    right: Any


class Holder:
    """State of the user's own."""

    def __init__(self, **state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def of_every_dtype() -> dict[str, Any]:
    """Tensors of every dtype that this torch has and the format knows."""
    known = {name: getattr(torch, name) for name in dtypes.DTYPES if hasattr(torch, name)}
    data = torch.arange(96, dtype=torch.uint8)
    return {
        name: data.clone().view(dtype).reshape(2, -1) for name, dtype in known.items() if name != "bool"
    } | {"flags": torch.tensor([True, False])}


def modules() -> dict[str, Any]:
    """Tied weights, buffers, empty and 0-dim tensors, a model in a dict."""
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3))
    net[2].weight = net[0].weight
    net.register_buffer("none", torch.empty(0, 4))
    return {"net": net, "heads": {"left": torch.nn.Linear(2, 1), "a b": torch.ones(3)[::2]}}


def optimizers() -> dict[str, Any]:
    """Moments by name, several groups, a scheduler, a scaler."""
    net = torch.nn.Linear(3, 2)
    groups = [{"params": [net.weight], "lr": 0.5}, {"params": [net.bias]}]
    adam, sgd = torch.optim.AdamW(groups, lr=0.1), torch.optim.SGD(net.parameters(), momentum=0.9, lr=0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(adam, [3, 5])
    net(torch.ones(3)).sum().backward()
    for one in (adam, sgd, scheduler):
        one.step()
    return {
        "net": net,
        "adam": adam,
        "sgd": sgd,
        "scheduler": scheduler,
        "scaler": torch.amp.GradScaler("cpu"),
    }


def generators() -> dict[str, Any]:
    """Every kind of random number generator, and a pair of functions."""
    pair = (lambda: {"words": ["a", "b"]}, lambda _: None)
    kinds = {"torch": torch.Generator(), "python": random.Random(1), "old": np.random.RandomState(2)}
    bits = {"pcg": np.random.default_rng(3), "mt": np.random.Generator(np.random.MT19937(4))}
    return {**kinds, **bits, "pair": pair, "several": [torch.Generator(), torch.ones(2)]}


def composed() -> dict[str, Any]:
    """Sparse tensors, a subclass made of tensors, arrays of all kinds."""
    arrays = {
        "plain": np.arange(6, dtype=">i4").reshape(2, 3), "text": np.array(["ab", "c"]), "empty": np.empty((0, 2)),
        "dates": np.array(["2026-01-01"], dtype="datetime64[D]"), "complex": np.array(1 + 2j),
    }  # fmt: skip
    sparse = {"coo": torch.eye(3).to_sparse_coo(), "csr": torch.eye(3).to_sparse_csr()}
    return {"own": Holder(scaled=Scaled(torch.ones(4), torch.tensor(2.0), "m"), **sparse), **arrays}


def values() -> dict[str, Any]:
    """Python's own values: each tag of typed JSON at least once."""
    zone = dt.timezone(dt.timedelta(hours=2), "here")
    named = OrderedDict([(1, "one")])
    vars(named)["_metadata"] = {"version": 1}
    return {
        "own": Holder(
            big=1 << 80, nan=math.nan, inf=[math.inf, -math.inf, -0.0], bad="\ud800", raw=b"\0\xff",
            array=bytearray(b"x"), complex=complex(1, math.nan), tuple=(1, (2,)), named=Pair(1, "r"),
            set={3, 1}, frozen=frozenset("ab"), dict={1: "a", (2, 3): "b"}, dollar={"$": 1}, ordered=named,
            default=defaultdict(list, {"a": [1]}), counter=Counter("aab"), deque=deque([1, 2], maxlen=5),
            slice=slice(1, None, 2), range=range(0, 9, 2), dots=..., space=SimpleNamespace(a=1, b=[torch.ones(1)]),
            paths=[Path("/a/b"), PurePosixPath("c"), PureWindowsPath("d\\e")], day=dt.date(2026, 1, 2),
            time=dt.time(1, 2, 3, 4, zone, fold=1), when=dt.datetime(2026, 1, 2, 3, tzinfo=dt.timezone.utc),
            delta=dt.timedelta(1, 2, 3), zone=zone, decimal=Decimal("1.50"), fraction=Fraction(1 << 70, 3),
            uuid=UUID(int=7), numpy=[np.float16(1.5), np.int64(-1), np.bool_(True), np.str_("a\0"), np.bytes_(b"b"),
            np.datetime64("2026", "Y")], color=Color.RED, rights=Rights.READ | Rights.WRITE, point=Point(1.0, ("a",)),
            torch=[torch.float32, torch.device("cpu"), torch.Size([1, 2]), torch.strided, torch.channels_last],
            shared=[torch.zeros(2)] * 2, none=None, true=True,
        )
    }  # fmt: skip


@pytest.mark.parametrize("limit", [1 << 30, 60])
@pytest.mark.parametrize("make", [of_every_dtype, modules, optimizers, generators, composed, values])
@pytest.mark.filterwarnings(
    "ignore:Sparse CSR tensor support is in beta state"
)  # torch says so of all of them
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")  # as of complex32
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
def test_it_reads_what_our_reader_reads(make, limit, tmp_path):
    """Every tensor bit for bit and every value, from whole files and from tensors cut into many."""
    tracker = Tracker(warn=print)
    for name, obj in make().items():
        tracker.add(name, obj)
    capture = tracker.capture(session={"values": {"note": ("a", 1)}, "positions": {"total": 3}})
    write_checkpoint(open_store(str(tmp_path)), capture, max_file_bytes=limit)

    assert_agree(tmp_path)


def test_it_reads_a_run(tmp_path):
    """A real one, with the position in its data."""
    program = Program()
    with program.session(tmp_path) as run:
        run.values["note"] = {"k": 1}
        for step, batch in run.steps(program.loader, until=5):
            program.train(step, batch)

    found = assert_agree(tmp_path)

    assert found.session["positions"]["total"] == found.manifest["step"] == 5
    assert found.session["values"] == {"note": {"k": 1}}


def test_it_follows_rollbacks(tmp_path):
    """What a rollback set aside is not the newest; what later attempts publish is."""
    from spotsafe.checkpoint.rollback import plan_rollback, roll_back
    from spotsafe.identity import Identity

    def attempt(until):
        program = Program()
        with program.session(tmp_path, save_every=2, keep=10) as run:
            for step, batch in run.steps(program.loader, until=until):
                program.train(step, batch)
                run.wait()

    attempt(6)
    store = open_store(str(tmp_path))
    for back, until in ((2, 4), (6, 8)):
        roll_back(store, plan_rollback(store, back), identity=Identity.of_this_process(), wall=1.0)
        assert assert_agree(tmp_path).manifest["step"] == back
        attempt(until)
        assert assert_agree(tmp_path).manifest["step"] == until


def assert_agree(folder: Path) -> independent_reader.Checkpoint:
    """Compare the independent reader with ours, tensor by tensor and tree by tree."""
    found = independent_reader.read_newest(folder)
    ours = with_checkpoint(str(folder), lambda opened: load_verified(opened.store, opened.candidate))
    assert found.tensors.keys() == ours.saved.tensors.keys()
    for name, tensor in ours.saved.tensors.items():
        assert found.dtypes[name] == str(tensor.dtype).removeprefix("torch.")
        assert found.tensors[name].shape[: tensor.ndim] == tuple(tensor.shape), name
        assert found.tensors[name].tobytes() == raw(tensor), name
    values = Source(ours.saved.tensors, lenient=True)
    assert found.state.keys() == ours.saved.state.keys()
    for name, tree in ours.saved.state.items():
        if "torch.wrapper" not in str(tree):  # which takes a live tensor to rebuild
            assert form(found.state[name]) == form(values.decode(tree)), name
    assert form(found.session) == form(values.decode(ours.session))
    return found


def raw(tensor: torch.Tensor) -> bytes:
    return as_bytes(tensor.contiguous()).numpy().tobytes()


def form(value: Any) -> Any:  # noqa: C901, PLR0911 - one branch for each kind
    """What both readers must agree on: types and values, tensors by their bytes, classes by their names."""
    if isinstance(value, torch.Tensor):
        return form_tensor(value)
    if isinstance(value, Unbound):
        return ("class", value.class_name, form(value.value))
    if type(value) in WORDS:
        return (str, str(value).removeprefix("torch.") if type(value) is not torch.Size else str(list(value)))
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], dict) and value[0] in TAGS:
        return form_tagged(*value)
    if isinstance(value, np.ndarray):
        return ("array", value.tobytes())
    if isinstance(value, float):
        return (float, "nan" if math.isnan(value) else (value, math.copysign(1, value)))
    if isinstance(value, complex):
        return (complex, form(value.real), form(value.imag))
    if isinstance(value, dict):
        return (type(value), [(form(key), form(item)) for key, item in value.items()])
    if isinstance(value, (list, tuple, deque)):
        return (type(value), [form(item) for item in value], getattr(value, "maxlen", None))
    if isinstance(value, slice):
        return (slice, form((value.start, value.stop, value.step)))
    if isinstance(value, SimpleNamespace):
        return (SimpleNamespace, form(vars(value)))
    return (type(value), value)


WORDS = {torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format}
TAGS = {"enum", "dataclass", "torch.dtype", "torch.device", "torch.Size", "torch.layout", "torch.memory_format",
        "torch.sparse_coo", "torch.sparse_csr"}  # fmt: skip


def form_tensor(tensor: torch.Tensor) -> Any:
    if tensor.layout is torch.sparse_coo:
        return [form(tensor._indices()), form(tensor._values())]
    if tensor.layout is torch.sparse_csr:
        return [form(part) for part in (tensor.crow_indices(), tensor.col_indices(), tensor.values())]
    return ("array", raw(tensor))


def form_tagged(tag: str, members: dict[str, Any]) -> Any:
    if tag in {"enum", "dataclass"}:
        (value,) = (members[key] for key in ("name", "value", "fields") if key in members)
        return ("class", members["class"], form(value))
    if tag.startswith("torch.sparse"):
        return [form(value) for value in members.values() if isinstance(value, np.ndarray)]
    return (str, str(members["value"]))


def test_the_page_describes_every_kind_of_state(tmp_path):
    """Whoever reads the page knows what a tree in `state` looks like, member by member."""
    page = (READER.parents[1] / "docs" / "format.md").read_text(encoding="utf-8")
    for make in (modules, optimizers, generators, composed):
        tracker = Tracker(warn=print)
        for name, obj in make().items():
            tracker.add(name, obj)
        for tree in tracker.capture().state.values():
            row = next(line for line in page.splitlines() if line.startswith(f"| `{tree['kind']}` |"))
            assert not [member for member in tree if member != "kind" and f"`{member}`" not in row], row


def test_it_knows_every_tag():
    """Whoever adds a kind of value to the format adds it here; what takes torch or a class comes as it is."""
    tags = [*typed_scalars.DECODERS, *typed_decode._CONTAINERS, *source._BUILDERS]
    known = {"tensor", *independent_reader.CONTAINERS, *independent_reader.KINDS}

    assert not [
        tag for tag in tags if tag not in known and not tag.startswith(("enum", "dataclass", "torch."))
    ]


def test_it_is_small_and_independent():
    """At most 200 lines, and every import of it is of the standard library or numpy."""
    tree = ast.parse(READER.read_text(encoding="utf-8"))
    imports = {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    imports |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}

    assert len(READER.read_text(encoding="utf-8").splitlines()) <= 200
    assert {name.partition(".")[0] for name in imports} <= {*sys.stdlib_module_names, "numpy"}


@pytest.mark.parametrize("file", ["manifest.json", "index-00000.json"])
def test_it_refuses_what_was_changed(file, tmp_path):
    """It is a reader of the format, which means that it compares what the format lets it compare."""
    tracker = Tracker(warn=print)
    tracker.add("t", torch.ones(2))
    write_checkpoint(open_store(str(tmp_path)), tracker.capture())
    (path,) = tmp_path.glob(f"checkpoints/*/{file}")
    data = path.read_bytes()
    path.write_bytes(data[:-10] + bytes([data[-10] ^ 1]) + data[-9:])

    with pytest.raises(ValueError, match=r"seal|differs"):
        independent_reader.read_newest(tmp_path)


def refer(run: Path) -> Path:
    """Move the last data file of the newest checkpoint into the folder of one that is gone, and refer to it there."""
    store = open_store(str(run))
    candidate = resolve(store)
    owner, name, manifest = CheckpointName(1, 0, 1, "0" * 8), candidate.name, candidate.manifest
    assert manifest is not None
    (index,) = (read_index(store, candidate, part) for part in manifest.parts)
    old, new = index.files[-1].name, frozen_file(0, 0)
    (run / owner.folder).mkdir()
    (run / name.file(old)).rename(run / owner.file(new))
    (run / owner.manifest).write_bytes(encode_marker(Marker(state="retired", in_use=(new,))))
    moved = structs.replace(index.files[-1], name=new, checkpoint=str(owner), age_s=5.0)
    tensors = tuple(
        structs.replace(
            one,
            slices=tuple(structs.replace(box, file=new) if box.file == old else box for box in one.slices),
        )
        for one in index.tensors
    )
    data = encode_index(replace(index, files=(*index.files[:-1], moved), tensors=tensors))
    (run / name.file("index-00000.json")).write_bytes(data)
    part = replace(manifest.parts[0], size=len(data), sha256=sha256_hex(data))
    reference = Reference(checkpoint=str(owner), file=new, size=moved.size)
    total = manifest.total_bytes - moved.size
    changed = replace(manifest, parts=(part,), references=(reference,), total_bytes=total)
    (run / name.manifest).write_bytes(encode_manifest(changed))
    return run / owner.file(new)


def test_it_follows_references_to_files_of_retired_checkpoints(tmp_path):
    """A file may lie in the folder of a checkpoint that does not exist any more; `spotsafe.load` finds it too."""
    tracker = Tracker(warn=print)
    tensors = {"head": torch.ones(40), "base": torch.arange(40.0)}
    for name, tensor in tensors.items():
        tracker.add(name, tensor)
    write_checkpoint(open_store(str(tmp_path)), tracker.capture(), max_file_bytes=160)
    path = refer(tmp_path)

    found = assert_agree(tmp_path)

    assert found.manifest["requires"] == ["references"]
    assert found.tensors["base"].tolist() == tensors["base"].tolist()
    held = spotsafe.load(tmp_path)
    assert all(torch.equal(held[name], tensor) for name, tensor in tensors.items())
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert torch.equal(spotsafe.load(tmp_path, "head")["head"], tensors["head"])
    with pytest.raises(DamagedCheckpoint, match=r"a000001-s000000000-0001-00000000/frozen-00000-000"):
        spotsafe.load(tmp_path, "base")
