"""`spotsafe export`: files that other tools open, whole or not there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader, load

import spotsafe
from spotsafe.errors import DamagedCheckpoint, StateMismatch, StorageError, StorageExists, UnsupportedState
from spotsafe.exchange import exporting
from spotsafe.exchange.exporting import export, form_of
from spotsafe.exchange.importing import import_values, read_foreign
from spotsafe.loading import with_checkpoint
from spotsafe.storage.open import open_store
from spotsafe.storage.store import Store
from spotsafe.testing.memory import MemoryStore
from tests.session.rig import Program
from tests.test_loading import Holder, saved


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Program]:
    """A run of three steps, and the program as it ended."""
    folder = tmp_path_factory.mktemp("run")
    program = Program()
    with program.session(folder) as session:
        for step, batch in session.steps(program.loader, until=3):
            program.train(step, batch)
    return str(folder), program


def exported(store: str | Store, path: Path, **options: Any) -> exporting.Exported:
    return with_checkpoint(store, lambda opened: export(opened, str(path), **options))


def loaded(path: Path) -> dict[str, Any]:
    """The file as its own tool reads it, safely."""
    if path.suffix == ".safetensors":
        return load_file(path)
    if path.suffix == ".pt":
        found: dict[str, Any] = torch.load(path, weights_only=True)
        return found
    return read_foreign(str(path))


@pytest.mark.parametrize("out", ["w.safetensors", "w.pt", "w_dcp"])
def test_the_weights_of_one_module_are_a_state_dict(out, run, tmp_path, call):
    """The keys are those of the module; a plain torch program loads them without knowing of us."""
    url, program = run

    result = call("export", f"{url}@3", tmp_path / out, "--json")

    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert (answer["tensors"], answer["left_out"]) == (5, [])
    fresh = Program(seed=1)
    if out.endswith("dcp"):
        state = fresh.model.state_dict()
        load(state, storage_reader=FileSystemReader(tmp_path / out), no_dist=True)
        fresh.model.load_state_dict(state)
    else:
        fresh.model.load_state_dict(loaded(tmp_path / out))
    assert fresh.weights() == program.weights()


def test_everything_as_torch_keeps_it(run, tmp_path):
    """The optimizer's and the scheduler's own load_state_dict take what is in a .pt file."""
    url, program = run

    done = exported(url, tmp_path / "all.pt", everything=True)

    assert done.left_out == ()
    held, fresh = loaded(tmp_path / "all.pt"), Program(seed=1)
    for name in ("model", "optimizer", "scheduler"):
        getattr(fresh, name).load_state_dict(held[name])
    assert fresh.weights() == program.weights()
    assert str(fresh.optimizer.state_dict()) == str(program.optimizer.state_dict())
    assert fresh.scheduler.state_dict() == program.scheduler.state_dict()
    assert held["run"]["positions"]["total"] == 3


def test_safetensors_hold_tensors_only_and_the_rest_is_listed(run, tmp_path, call):
    """What has no place in the file is named, so that nobody thinks it is there."""
    url, _ = run

    result = call("export", url, tmp_path / "all.safetensors", "--all")

    assert result.exit_code == 0
    assert "scheduler.last_epoch" in result.stderr
    names = loaded(tmp_path / "all.safetensors")
    assert "optimizer.state.first.weight.exp_avg" in names
    assert "model.first.weight" in names


def test_several_modules_keep_their_names(tmp_path):
    """Also those inside a dict."""
    store = saved(g=torch.nn.Linear(1, 1), heads={"a": torch.nn.Linear(1, 1)}, step=Holder(n=1))

    exported(store, tmp_path / "w.safetensors")
    exported(store, tmp_path / "w.pt")

    names = ["g.bias", "g.weight", "heads.a.bias", "heads.a.weight"]
    assert sorted(loaded(tmp_path / "w.safetensors")) == names
    assert {key: sorted(value) for key, value in loaded(tmp_path / "w.pt").items()} == {
        "g": ["bias", "weight"], "heads.a": ["bias", "weight"],
    }  # fmt: skip


def test_a_tied_weight_is_written_under_all_its_names(tmp_path):
    """Safetensors refuse tensors that share memory; whoever reads the file needs both names."""
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    net[1].weight = net[0].weight

    exported(saved(net=net), tmp_path / "w.safetensors")

    held = loaded(tmp_path / "w.safetensors")
    assert torch.equal(held["0.weight"], held["1.weight"])


def test_there_and_back(run, tmp_path):
    """What is exported and imported again is what it was, by every kind of file."""
    url, _ = run
    weights = spotsafe.load(url, "model.*")
    for out in ("w.safetensors", "w.pt", "w_dcp"):
        exported(url, tmp_path / out)
        store = MemoryStore()
        import_values(store, read_foreign(str(tmp_path / out)))
        again = spotsafe.load(store)
        assert again.keys() == weights.keys()
        assert all(torch.equal(again[name], weights[name]) for name in weights)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e5m2fnuz])
def test_a_dtype_that_safetensors_lack(dtype, tmp_path):
    """Named with its tensor; a .pt file holds it."""
    net = torch.nn.Module()
    net.register_buffer("odd", torch.ones(2).to(dtype))

    with pytest.raises(UnsupportedState, match=f"odd \\({str(dtype)[6:]}\\); export to .pt"):
        exported(saved(net=net), tmp_path / "w.safetensors")
    assert os.listdir(tmp_path) == []
    exported(saved(net=net), tmp_path / "w.pt")
    assert loaded(tmp_path / "w.pt")["odd"].dtype is dtype


def test_values_that_need_trust_are_left_out(tmp_path):
    """A file that plain `torch.load` refuses would be no use: arrays and classes are listed instead."""
    store = saved(own=Holder(n=1, array=np.ones(2), deep=[{"t": torch.ones(1)}], odd=[{"a": np.float32(1)}]))

    done = exported(store, tmp_path / "x.pt", everything=True)

    assert sorted(done.left_out) == ["own.array", "own.odd"]
    assert loaded(tmp_path / "x.pt")["own"]["deep"][0]["t"].tolist() == [1.0]


def test_no_module(tmp_path):
    """The error says what there is, and --all."""
    with pytest.raises(StateMismatch, match=r"holds no module, but own; --all"):
        exported(saved(own=Holder(n=1)), tmp_path / "w.pt")


@pytest.mark.parametrize("out", ["w.safetensors", "w.pt", "w_dcp"])
def test_nothing_is_overwritten_without_force(out, run, tmp_path, call):
    """With it, the old is replaced by the whole new."""
    url, _ = run
    path = tmp_path / out
    exported(url, path)
    before = path.read_bytes() if path.is_file() else (path / ".metadata").read_bytes()

    refused = call("export", url, path)

    assert (refused.exit_code, "--force" in refused.stderr) == (1, True)
    assert (path.read_bytes() if path.is_file() else (path / ".metadata").read_bytes()) == before
    assert call("export", url, path, "--force", "--all").exit_code == 0
    assert len(loaded(path)) > 1
    assert os.listdir(tmp_path) == [out]


def test_force_deletes_no_folder_of_other_things(run, tmp_path):
    """A folder is replaced only by one of its kind, and never by a file."""
    url, _ = run
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    (tmp_path / "mine.pt").mkdir()

    for out in ("mine", "mine.pt"):
        with pytest.raises(StorageExists, match="left as it is"):
            exported(url, tmp_path / out, force=True)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "x"
    assert sorted(os.listdir(tmp_path)) == ["mine", "mine.pt"]


@pytest.mark.parametrize("out", ["w.safetensors", "w.pt", "w_dcp"])
def test_an_interrupted_export_leaves_nothing(out, run, tmp_path, monkeypatch):
    """Neither a part of the file under its name nor a temporary one."""
    url, _ = run

    def fail(_: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exporting, "_sync", fail)
    with pytest.raises(StorageError, match="No space left"):
        exported(url, tmp_path / out)
    assert os.listdir(tmp_path) == []


def test_a_damaged_checkpoint_is_not_exported(tmp_path):
    """Every byte is verified before it is written."""
    store = saved(open_store(str(tmp_path / "run")), net=torch.nn.Linear(2, 2))
    (path,) = (tmp_path / "run").glob("checkpoints/*/data-*")
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))

    with pytest.raises(DamagedCheckpoint, match="data-00000-000"):
        exported(store, tmp_path / "w.pt")
    assert not (tmp_path / "w.pt").exists()


def test_the_ending_says_the_kind(call, tmp_path):
    """An ending that means nothing is a mistake of the command line."""
    assert [form_of(one) for one in ("a.pt", "b.safetensors", "c", "d.e/")] == [
        "pt",
        "safetensors",
        "dcp",
        "dcp",
    ]
    for out, words in (("x.onnx", "says no kind of file"), ("s3://bucket/x.pt", "is a url")):
        result = call("export", tmp_path, out)
        assert (result.exit_code, words in result.stderr) == (2, True)


@pytest.mark.parametrize("out", ["w.safetensors", "w.pt", "w"])
def test_a_folder_that_is_not_there(out, run, tmp_path, call):
    """One line that names the folder, whatever kind of file it is."""
    url, _ = run

    refused = call("export", url, tmp_path / "none" / out)

    assert refused.exit_code == 1
    assert f"there is no folder {tmp_path / 'none'}" in refused.stderr
