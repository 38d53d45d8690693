"""`spotsafe import`: what a file of another kind holds, without its code, as a checkpoint like any other."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import spotsafe
from spotsafe.checkpoint.catalog import resolve
from spotsafe.checkpoint.verify import verify
from spotsafe.errors import RunInUse, StateMismatch, UnsupportedState
from spotsafe.events import Warned
from spotsafe.exchange import weights_only
from spotsafe.exchange.importing import import_values, read_foreign
from spotsafe.ledger.reading import read_end
from spotsafe.storage.open import open_store
from spotsafe.testing.memory import MemoryStore
from tests.exchange.hostile import change_metadata, dcp_folder, dcp_folders, pt_files
from tests.session.rig import Net, Program


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(7)
    return dict(Net().state_dict())


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def written(folder: Path, kind: str, values: dict[str, Any]) -> str:
    """A file of each kind with the same state_dict in it."""
    path = folder / f"file.{kind}"
    if kind == "safetensors":
        save_file(values, path)
    elif kind == "dcp":
        dcp_folder(path, values)
    else:
        torch.save(values, path)
    return str(path)


@pytest.mark.parametrize("kind", ["pt", "bin", "safetensors", "dcp"])
def test_a_program_starts_with_imported_weights(kind, tmp_path, call):
    """From the file to the first step of a fresh run, by the command and `init_from`."""
    source, run = written(tmp_path, kind, weights()), tmp_path / "imported"

    result = call("import", source, run, "--step", "40", "--json")

    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert (answer["step"], answer["tensors"], answer["objects"]) == (40, 5, {"model": "module"})
    program = Program()
    with program.session(tmp_path / "run", init_from=f"{run}@40") as session:
        assert session.step == 0
        assert same(program.model.state_dict(), weights())


def test_an_import_is_a_checkpoint_like_any_other(tmp_path):
    """Claimed, published, verified; its attempt is on record as finished."""
    store = open_store(str(tmp_path))
    done = import_values(store, {"model": weights()}, step=3)

    assert resolve(store, 3).name == done.name
    assert verify(store, done.name) == []
    end = read_end(store, 1)
    assert end is not None
    assert (end.outcome, end.published, end.step) == ("finished", 1, 3)
    assert same(spotsafe.load(store), {f"model.{key}": value for key, value in weights().items()})


def test_a_program_that_tracks_what_was_imported_resumes_from_it(tmp_path):
    """It goes on at the step that was given; its loops and random numbers begin afresh."""
    import_values(open_store(str(tmp_path)), {"model": weights()}, step=40)
    program = Program()
    steps = []
    with spotsafe.session(str(tmp_path), model=program.model, watch=None, save_every=1) as run:
        assert same(program.model.state_dict(), weights())
        assert (run.step, run.values, run.attempt) == (40, {}, 2)
        for step in run.range(2):
            steps.append(step)
            program.model.mean.add_(1)

    assert steps == [0, 1]
    assert resolve(open_store(str(tmp_path))).name.step == 42


def test_what_was_not_imported_is_missed(tmp_path):
    """An optimizer that the file did not hold is no surprise to be found out later."""
    import_values(open_store(str(tmp_path)), {"model": weights()})

    with pytest.raises(StateMismatch, match="optimizer: tracked, but not in the checkpoint"):
        Program().session(tmp_path).start()


def test_frozen_parameters_of_an_import_are_no_news(tmp_path):
    """A file does not tell what was trained, so nobody is warned that something is frozen now."""
    import_values(open_store(str(tmp_path)), {"model": weights()})
    program = Program()
    program.model.first.weight.requires_grad_(False)

    with spotsafe.session(str(tmp_path), model=program.model, watch=None, events=program.sink):
        pass

    assert not [event.message for event in program.of(Warned) if "saved" in event.message]


@pytest.mark.parametrize("kind", ["pt", "dcp"])
def test_a_file_with_several_things_in_it(kind, tmp_path):
    """Each entry becomes an object: dicts of tensors modules, other dicts state, the rest values and tensors."""
    values = {
        "model": weights(), "ema": torch.ones(2), "epoch": 7, "best": 0.5,
        "sched": {"last_epoch": 3, "lrs": [0.1, 0.2], "nested": {"a": [{"t": torch.zeros(1)}, "x"]}},
    }  # fmt: skip
    store = MemoryStore()

    done = import_values(store, read_foreign(written(tmp_path, kind, values)))

    assert done.objects == {
        "model": "module", "ema": "tensor", "epoch": "value", "best": "value", "sched": "stateful",
    }  # fmt: skip
    held = spotsafe.load(store)
    assert torch.equal(held["ema"], torch.ones(2))
    assert (held["epoch"], held["best"], held["sched.last_epoch"], held["sched.lrs"]) == (
        7,
        0.5,
        3,
        [0.1, 0.2],
    )
    nested = held["sched.nested['a']"]
    assert (nested[0]["t"].tolist(), nested[1]) == ([0.0], "x")


def test_names_can_be_stripped_and_given(tmp_path, call):
    """What DistributedDataParallel put in front of names is left out on demand; all names must have it."""
    path = written(tmp_path, "pt", {f"module.{key}": value for key, value in weights().items()})

    result = call("import", path, tmp_path / "run", "--strip", "module.", "--name", "net")

    assert result.exit_code == 0, result.output
    assert same(spotsafe.load(tmp_path / "run"), {f"net.{key}": value for key, value in weights().items()})
    refused = call("import", path, tmp_path / "other", "--strip", "model.")
    assert (refused.exit_code, "does not begin with 'model.'" in refused.stderr) == (2, True)
    assert not (tmp_path / "other").exists()


def trained(model: torch.nn.Module) -> torch.optim.Optimizer:
    """An optimizer of a model after a step: every parameter has moments."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, number + 1.0)
    optimizer.step()
    return optimizer


def layers() -> torch.nn.Module:
    """Without buffers."""
    return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))


@pytest.mark.parametrize("kind", ["pt", "dcp"])
@pytest.mark.parametrize("way", ["resume", "init_from"])
def test_a_program_goes_on_with_an_imported_optimizer(kind, way, tmp_path, call):
    """A file as many programs write it: with names given to its entries, and the order of parameters by a word."""
    before, run = layers(), tmp_path / "imported"
    state = trained(before).state_dict()
    file = {"model_state_dict": before.state_dict(), "optimizer_state_dict": state, "epoch": 3}
    names = ["--rename", "model_state_dict=model", "--rename", "optimizer_state_dict=optimizer"]
    wanted = ["--only", "model", "--only", "optimizer", "--optimizer-order", "model"]

    result = call("import", written(tmp_path, kind, file), run, *names, *wanted, "--json")

    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert (answer["objects"], answer["unordered"]) == ({"model": "module", "optimizer": "optimizer"}, {})
    model = layers()
    # Given its parameters in another order, which numbers would get wrong.
    optimizer = torch.optim.AdamW(reversed(list(model.parameters())), lr=0.1)
    options = {"init_from": spotsafe.InitFrom(str(run), what="all")} if way == "init_from" else {}
    url = str(tmp_path / "run" if way == "init_from" else run)
    with spotsafe.session(url, model=model, optimizer=optimizer, watch=None, **options):
        assert same(model.state_dict(), before.state_dict())
        assert optimizer.param_groups[0]["lr"] == 0.5
        for number, parameter in enumerate(model.parameters()):
            assert same(optimizer.state[parameter], state["state"][number])


def test_the_command_of_the_readme(tmp_path, call, monkeypatch):
    """What stands there for such a file works."""
    monkeypatch.chdir(tmp_path)
    before = layers()
    state = trained(before).state_dict()
    torch.save({"model_state_dict": before.state_dict(), "optimizer_state_dict": state, "epoch": 3}, "old.pt")
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^```bash\n(.*?)^```$", readme, flags=re.DOTALL | re.MULTILINE)

    result = call(*shlex.split(command.replace("\\\n", ""))[1:])

    assert result.exit_code == 0, result.output
    assert result.stdout.rstrip().endswith(": model (module), optimizer (optimizer)")


def test_an_optimizer_whose_order_nobody_knows(tmp_path, call):
    """It is said; and who wants to restore an optimizer from it is told what is missing."""
    before, run = Net(), tmp_path / "imported"
    file = {"model": before.state_dict(), "optimizer": trained(before).state_dict()}

    result = call("import", written(tmp_path, "pt", file), run)
    word = call("import", written(tmp_path, "pt", file), tmp_path / "other", "--optimizer-order", "model")

    assert result.exit_code == 0
    assert "optimizer is plain state, which no optimizer is restored from" in result.stderr
    assert "the file does not say which parameter is which (see --optimizer-order)" in result.stderr
    with pytest.raises(StateMismatch, match="imported without the names of its parameters"):
        Program().session(run).start()
    assert word.exit_code == 2
    assert "optimizer: it has 4 parameters, and model 5 tensors" in word.stderr
    assert not (tmp_path / "other").exists()


def test_a_file_that_is_one_optimizer(tmp_path, call):
    """As trainers write that keep it in a file of its own."""
    path = written(tmp_path, "pt", trained(layers()).state_dict())

    result = call("import", path, tmp_path / "run", "--name", "optimizer", "--json")

    assert json.loads(result.stdout)["objects"] == {"optimizer": "stateful"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--name", "net"], "holds several things, which --rename OLD=net can rename: 'weights', 'epoch'"),
        (["--rename", "model=net"], "has no 'model'; there is 'weights', 'epoch'"),
        (["--rename", "model"], "--rename is OLD=NEW, not 'model'"),
        (["--rename", "weights=a", "--rename", "weights=b"], "--rename weights is given twice"),
        (["--optimizer-order", "weights"], "no state of an optimizer to be ordered"),
    ],
)
def test_options_that_do_not_fit_the_file(arguments, message, tmp_path, call):
    """Nothing that is asked for is passed over, and no run is begun."""
    path = written(tmp_path, "pt", {"weights": weights(), "epoch": 1})

    result = call("import", path, tmp_path / "run", *arguments)

    assert (result.exit_code, message in result.stderr) == (2, True), result.stderr
    assert not (tmp_path / "run").exists()


def test_one_state_dict_has_no_entries_to_rename(tmp_path, call):
    """Its keys are tensors."""
    result = call("import", written(tmp_path, "pt", weights()), tmp_path / "run", "--rename", "first.bias=x")

    assert (result.exit_code, "is one state_dict; --name says" in result.stderr) == (2, True)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.uint16, torch.bool]
)
def test_dtypes_come_as_they_are(dtype, tmp_path):
    """Bit for bit."""
    values = {"w": torch.arange(6).reshape(2, 3).to(dtype), "scalar": torch.tensor(1).to(dtype)}
    store = MemoryStore()

    import_values(store, read_foreign(written(tmp_path, "pt", values)))

    held = spotsafe.load(store)
    assert (held["model.w"].dtype, held["model.w"].shape) == (dtype, (2, 3))
    assert torch.equal(held["model.w"].view(torch.uint8), values["w"].view(torch.uint8))


def test_a_run_is_never_written_into(tmp_path, call):
    """A checkpoint from outside would become the newest, and end the job that may be alive."""
    import_values(open_store(str(tmp_path / "run")), {"model": weights()})

    with pytest.raises(RunInUse, match="import into a new folder"):
        import_values(open_store(str(tmp_path / "run")), {"model": weights()})
    assert call("import", written(tmp_path, "pt", weights()), f"{tmp_path / 'run'}@3").exit_code == 2


def test_a_folder_with_runs_gets_no_run(tmp_path, call):
    """As for a session."""
    path = written(tmp_path, "pt", weights())
    assert call("import", path, tmp_path / "runs" / "one").exit_code == 0

    result = call("import", path, tmp_path / "runs")

    assert (result.exit_code, "is no run but a folder with runs" in result.stderr) == (2, True)


# -- hostile files -----------------------------------------------------------------------------------------------


def test_no_code_of_a_hostile_pt_runs(tmp_path):
    """In each form of the file and at each place: refused, and the marker is not touched."""
    marker = tmp_path / "marker"
    for path in pt_files(tmp_path, marker):
        with pytest.raises(UnsupportedState, match="Nothing of it was executed"):
            read_foreign(str(path))
        assert not marker.exists(), path


def test_no_code_of_a_hostile_dcp_folder_runs(tmp_path):
    """In the metadata and in a value."""
    marker = tmp_path / "marker"
    for folder in dcp_folders(tmp_path, marker):
        with pytest.raises(UnsupportedState, match=r"[Nn]othing of it was executed"):
            read_foreign(str(folder))
        assert not marker.exists(), folder


def test_the_command_says_it_in_one_line(tmp_path, call):
    """And leaves no run behind."""
    path = next(pt_files(tmp_path, tmp_path / "marker"))

    result = call("import", path, tmp_path / "run")

    assert result.exit_code == 1
    assert len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("version", ["2.4.1", "2.5.0+cu121"])
def test_a_torch_that_cannot_be_trusted_reads_no_pickle(version, monkeypatch, tmp_path):
    """Before 2.6 `weights_only` was no protection; safetensors needs none."""
    monkeypatch.setattr(torch, "__version__", version)

    with pytest.raises(UnsupportedState, match=r"use torch 2\.6 or newer"):
        weights_only.load_weights_only(written(tmp_path, "pt", weights()), name="x.pt")
    assert same(read_foreign(written(tmp_path, "safetensors", weights()))["model"], weights())


def escaping(metadata: Any, path: str) -> Any:
    for info in metadata.storage_data.values():
        info.relative_path = path
    return metadata


@pytest.mark.parametrize("path", ["../secret.distcp", "/etc/passwd", "a/b", "..", "", 7])
def test_files_outside_the_folder_are_not_read(path, tmp_path):
    """A name with a way in it is refused before anything is opened."""
    folder = dcp_folder(tmp_path / "folder")
    change_metadata(folder, lambda metadata: escaping(metadata, path))

    with pytest.raises(UnsupportedState, match="no file of this folder"):
        read_foreign(str(folder))


def reshaped(metadata: Any) -> Any:
    metadata.state_dict_metadata["model.w"].size = torch.Size([1 << 50])
    return metadata


def far(metadata: Any) -> Any:
    for info in metadata.storage_data.values():
        info.length = 1 << 50
    return metadata


def unplaced(metadata: Any) -> Any:
    metadata.storage_data = {}
    return metadata


@pytest.mark.parametrize("change", [reshaped, far, unplaced, lambda _: {"a": 1}, lambda _: None])
def test_nonsense_in_the_metadata_is_an_error_of_one_kind(change, tmp_path):
    """Huge shapes and lengths, missing places, another object: no memory is taken, nothing crashes."""
    folder = dcp_folder(tmp_path / "folder")
    change_metadata(folder, change)

    with pytest.raises(UnsupportedState, match="is not read"):
        read_foreign(str(folder))


@pytest.mark.parametrize(
    "content", [b"", b"\x80\x04", b"garbage", b"PK\x03\x04", b"hello, this is text\n" * 9]
)
def test_damaged_files(content, tmp_path):
    """Files that are nothing are refused by name in one sentence, whatever they are called."""
    for name in ("x.pt", "x.safetensors"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UnsupportedState, match=name):
            read_foreign(str(tmp_path / name))
    with pytest.raises(UnsupportedState) as caught:
        read_foreign(str(tmp_path / "x.pt"))
    assert str(caught.value).endswith(
        ("x.pt is not read: it is damaged, or no file of torch.save. Nothing of it was executed",
         "or holds more than tensors and plain values. Nothing of it was executed")
    )  # fmt: skip


def test_what_a_file_uses_is_named(tmp_path):
    """Not torch's advice to switch the protection off, of which only the beginning would be seen."""
    torch.save({"model": weights(), "args": argparse.Namespace(lr=1)}, tmp_path / "x.pt")

    with pytest.raises(UnsupportedState) as caught:
        read_foreign(str(tmp_path / "x.pt"))

    assert "x.pt is not read: it uses argparse.Namespace, and only tensors and plain values are read" in str(
        caught.value
    )
    assert "weights_only" not in str(caught.value)


def test_what_is_no_dict_of_names(tmp_path, call):
    """A single tensor, a list, numbers as keys, nothing at all: there is nothing to call an object."""
    for value in (torch.ones(1), [torch.ones(1)], {1: torch.ones(1)}, {}):
        torch.save(value, tmp_path / "x.pt")
        with pytest.raises(UnsupportedState, match="holds no dict with names"):
            read_foreign(str(tmp_path / "x.pt"))
    (tmp_path / "x.txt").write_text("")
    (tmp_path / "folder").mkdir()
    assert call("import", tmp_path / "x.txt", tmp_path / "run").exit_code == 2
    assert "without .metadata" in call("import", tmp_path / "folder", tmp_path / "run").stderr


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_what_cannot_be_stored_is_named(tmp_path):
    """Quantized tensors have no place in the format."""
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    with pytest.raises(UnsupportedState, match="w"):
        import_values(MemoryStore(), {"model": {"w": quantized}})
