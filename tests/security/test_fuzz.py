"""Random changes to files that are read from elsewhere: an error of the tree, or values; never anything else."""

from __future__ import annotations

import contextlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import spotsafe
from spotsafe.checkpoint.catalog import resolve
from spotsafe.checkpoint.digest import sha256_hex
from spotsafe.checkpoint.sealed import seal
from spotsafe.errors import SpotsafeError
from spotsafe.exchange.exporting import export
from spotsafe.exchange.importing import read_foreign
from spotsafe.integrations.dcp import SpotsafeReader, SpotsafeWriter
from spotsafe.loading import with_checkpoint
from spotsafe.testing.memory import MemoryStore
from tests.exchange.hostile import Payload, dcp_folder
from tests.session.rig import Program
from tests.test_loading import Holder, saved

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
VALUES: list[Any] = [
    None, True, 0, -1, 1 << 62, 1.5, "", "$", "model", "kind", [], {}, [[]], {"$": 1}, {"$": "tensor"}, [1, [2, {}]],
    {"$": "tensor", "name": "model.first.weight"}, {"$": "dict", "items": [[1, 2], [1, 3]]}, {"kind": "module"},
    {"kind": "optimizer", "form": "by name"}, {"kind": "list", "items": [["a", {"kind": "x"}]]}, {"$": "torch.wrapper"},
    {"$": "ndarray", "dtype": "|V8", "shape": [-1], "values": {"$": "tensor", "name": "model.first.weight"}},
]  # fmt: skip


def places(node: Any) -> list[tuple[Any, Any]]:
    """Container and key of everything inside a JSON document."""
    keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else []
    return [place for key in keys for place in [(node, key), *places(node[key])]]


def changed(document: Any, rng: random.Random) -> Any:
    """One value replaced, left out, or doubled under another key."""
    container, key = rng.choice(places(document))
    what = rng.randrange(4)
    if what == 0:
        del container[key]
    elif what == 1 and isinstance(container, dict):
        container[rng.choice(["$", "kind", "state", "name", "x"])] = container[key]
    else:
        container[key] = json.loads(json.dumps(rng.choice(VALUES)))
    return document


def forge(store: MemoryStore, index: Any) -> None:
    """Put an index in the place of the newest one, with digests that fit."""
    name = resolve(store).name
    manifest = json.loads(store.read(name.manifest, max_bytes=1 << 20))
    data = json.dumps(index).encode()
    store.replace(name.file("index-00000.json"), data)
    manifest["parts"][0].update(size=len(data), sha256=sha256_hex(data))
    del manifest["sha256"]
    store.replace(name.manifest, seal(manifest))


@pytest.mark.slow
def test_a_forged_index_is_an_error_or_a_value(tmp_path):
    """For whatever reads checkpoints without their program: `load`, `export` and the reader for DCP."""
    program, rng = Program(), random.Random(5)
    for step, batch in zip(range(2), program.loader, strict=False):
        program.train(step, batch)
    own = Holder(pair=(1, torch.ones(2)), nested={"a": {"b": [torch.zeros(1)]}})
    tracked = {
        "model": program.model,
        "optimizer": program.optimizer,
        "own": own,
        "many": {"x": torch.ones(1)},
    }
    store = saved(**tracked)
    assert isinstance(store, MemoryStore)
    good = store.read(resolve(store).name.file("index-00000.json"), max_bytes=1 << 20)
    outcomes = []
    for _ in range(400):
        forge(store, changed(json.loads(good), rng))
        for read in (spotsafe.load, lambda one: SpotsafeReader(one).read_metadata(), export_all(tmp_path)):
            try:
                read(store)
                outcomes.append("value")
            except SpotsafeError:
                outcomes.append("error")
    assert min(outcomes.count("value"), outcomes.count("error")) > 100


def export_all(folder: Path) -> Any:
    out = str(folder / "out.pt")
    return lambda store: with_checkpoint(
        store, lambda opened: export(opened, out, everything=True, force=True)
    )


@pytest.mark.slow
def test_a_changed_dcp_folder_is_an_error_or_a_value(tmp_path):
    """Single bytes of `.metadata` and of the data: one kind of error, and no code."""
    marker, rng = tmp_path / "marker", random.Random(6)
    folder = dcp_folder(tmp_path / "folder", {"model": {"w": torch.ones(3, 2)}, "n": [1, "x"], "p": 5})
    outcomes = []
    for file in (".metadata", "__0_0.distcp"):
        good = (folder / file).read_bytes()
        for _ in range(300):
            data = bytearray(good)
            data[rng.randrange(len(data))] = rng.randrange(256)
            (folder / file).write_bytes(data)
            try:
                read_foreign(str(folder))
                outcomes.append("value")
            except (SpotsafeError, FileNotFoundError):  # the changed byte may be in the name of a file
                outcomes.append("error")
        (folder / file).write_bytes(good)
    assert min(outcomes.count("value"), outcomes.count("error")) > 50
    assert not marker.exists()


def test_a_payload_among_ours_is_stored_as_no_code(marker_of, tmp_path):
    """Saving an object that would run code is refused: there is no form for it."""
    writer = SpotsafeWriter(tmp_path / "run")
    with contextlib.suppress(dcp.CheckpointException):
        dcp.save({"x": Payload(marker_of)}, checkpoint_id="1", storage_writer=writer, no_dist=True)

    assert not list((tmp_path / "run").rglob("manifest.json"))
    assert not marker_of.exists()


@pytest.fixture
def marker_of(tmp_path: Path) -> Path:
    """A file that the payload would touch."""
    return tmp_path / "marker"
