"""The attack of docs/security.md: a folder or file that runs code in whoever loads it. Ours runs none."""

from __future__ import annotations

import contextlib
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import spotsafe
from spotsafe.checkpoint.catalog import resolve
from spotsafe.checkpoint.digest import sha256_hex
from spotsafe.checkpoint.sealed import seal
from spotsafe.errors import SpotsafeError
from spotsafe.exchange.importing import read_foreign
from spotsafe.integrations.dcp import SpotsafeReader, SpotsafeWriter
from spotsafe.storage.open import open_store
from tests.exchange.hostile import Payload, change_metadata, dcp_folder, pt_files, with_value

PAGE = Path(__file__).parents[2] / "docs" / "security.md"
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """Touched by every payload that runs."""
    return tmp_path / "marker"


def blank() -> dict[str, Any]:
    return {"model": {"w": torch.zeros(2)}, "step": 0}


def in_planner_data(folder: Path, marker: Path) -> Path:
    def change(metadata: Any) -> Any:
        metadata.planner_data["extra"] = Payload(marker)
        return metadata

    change_metadata(dcp_folder(folder), change)
    return folder


def in_a_value(folder: Path, marker: Path) -> Path:
    return with_value(folder, Payload(marker))


@pytest.mark.parametrize("craft", [in_planner_data, in_a_value])
def test_plain_dcp_load_runs_the_code_in_a_folder(craft, marker, tmp_path):
    """In its metadata and in a value that is no tensor; the load ends as if nothing had been."""
    folder = craft(tmp_path / "folder", marker)
    values = blank()

    dcp.load(values, checkpoint_id=folder, no_dist=True)

    assert marker.exists(), "this torch does not run it any more: docs/security.md should say so"
    assert values["model"]["w"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("craft", [in_planner_data, in_a_value])
def test_our_import_of_that_folder_runs_none(craft, marker, tmp_path):
    """It is refused."""
    with pytest.raises(SpotsafeError, match=r"[Nn]othing of it was executed"):
        read_foreign(str(craft(tmp_path / "folder", marker)))
    assert not marker.exists()


def test_torch_load_runs_the_code_in_a_file_unless_it_may_not(marker, tmp_path):
    """Without `weights_only`, as older programs and other libraries load; ours never does."""
    path = next(pt_files(tmp_path, marker))

    with pytest.raises(SpotsafeError):
        read_foreign(str(path))
    assert not marker.exists()
    torch.load(path, weights_only=False)
    assert marker.exists()


# -- the same attacker at a folder of ours ------------------------------------------------------------------------


def forged(run: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """What whoever may write the folder can do: another index under a manifest with all the right digests."""
    name = resolve(open_store(str(run))).name
    index_path, manifest_path = run / name.file("index-00000.json"), run / name.manifest
    index, manifest = json.loads(index_path.read_bytes()), json.loads(manifest_path.read_bytes())
    change(index)
    data = json.dumps(index).encode()
    index_path.write_bytes(data)
    manifest["parts"][0].update(size=len(data), sha256=sha256_hex(data))
    del manifest["sha256"]
    manifest_path.write_bytes(seal(manifest))


def command(marker: Path) -> str:
    return f"touch {marker}"


def nodes(marker: Path) -> dict[str, Any]:
    """What one would write to have code run, in each kind of typed JSON that names something."""
    text = command(marker)
    return {
        "class": {"$": "dataclass", "class": "os:system", "fields": {"command": text}},
        "enum": {"$": "enum", "class": "os:system", "name": text},
        "flag": {"$": "enum", "class": "subprocess:Popen", "value": 1},
        "tuple": {"$": "namedtuple", "class": "os:system", "fields": ["command"], "items": [text]},
        "wrapper": {"$": "torch.wrapper", "inner": [], "context": text, "shape": [], "stride": []},
        "word": {"$": "torch.dtype", "value": "hub.load"},
        "reduce": {"$": "reduce", "callable": "os:system", "arguments": [text]},
        "object": {"$": "py/object", "py/reduce": ["os.system", text]},
        "attributes": {"$": "ordered_dict", "items": [], "attributes": {"__class__": text}},
        "pickle": {"$": "bytes", "base64": "Y29zCnN5c3RlbQooUyd0b3VjaCB4Jwp0Ui4="},
        "array": {"$": "ndarray", "dtype": "|O", "shape": [1], "values": {"$": "tensor", "name": "model.w"}},
    }  # fmt: skip


@pytest.mark.parametrize("kind", list(nodes(Path("x"))))
def test_a_forged_index_runs_no_code(kind, marker, tmp_path):
    """Digests do not stop whoever can make them anew; there is simply nothing in the format that runs."""
    writer = SpotsafeWriter(tmp_path / "run")
    dcp.save(
        {"model": {"w": torch.ones(2)}, "step": 5}, checkpoint_id="1", storage_writer=writer, no_dist=True
    )
    forged(
        tmp_path / "run",
        lambda index: index["state"].update(step={"kind": "value", "value": nodes(marker)[kind]}),
    )

    for load in (
        lambda: spotsafe.load(tmp_path / "run"),
        lambda: dcp.load(blank(), storage_reader=SpotsafeReader(tmp_path / "run"), no_dist=True),
    ):
        with contextlib.suppress(SpotsafeError, CheckpointException):
            load()
        assert not marker.exists()


@pytest.mark.parametrize("file", ["manifest.json", "index-00000.json", "data-00000-000.safetensors"])
def test_a_pickle_in_the_place_of_a_file_is_never_unpickled(file, marker, tmp_path):
    """Nothing that reads a checkpoint knows how."""
    writer = SpotsafeWriter(tmp_path / "run")
    dcp.save(
        {"model": {"w": torch.ones(2)}, "step": 5}, checkpoint_id="1", storage_writer=writer, no_dist=True
    )
    (path,) = (tmp_path / "run").rglob(file)
    path.write_bytes(pickle.dumps(Payload(marker)))

    for load in (
        lambda: spotsafe.load(tmp_path / "run"),
        lambda: dcp.load(blank(), storage_reader=SpotsafeReader(tmp_path / "run"), no_dist=True),
    ):
        with pytest.raises((SpotsafeError, CheckpointException)):
            load()
    assert not marker.exists()


def test_the_page_names_its_test():
    """Whoever reads the claim finds what shows it."""
    assert "tests/security/test_same_attack.py" in PAGE.read_text(encoding="utf-8")
