"""`spotsafe show`."""

from __future__ import annotations

import json

import numpy as np

from tests.cli import runs


def test_shows_tensors_and_keys_of_the_latest(tmp_path, call):
    """Names, dtypes, shapes, sizes, and the keys of what is no tensor; no tensor's values."""
    runs.run(tmp_path, 1, 2)

    result = call("show", tmp_path)

    assert result.exit_code == 0, result.output
    assert "step: 2\n" in result.stdout
    assert "optimizer.param_groups" in result.stdout
    assert "scheduler.last_epoch" in result.stdout
    weight = next(line for line in result.stdout.splitlines() if line.startswith("model.weight"))
    assert weight.split() == ["model.weight", "float32", "2x3", "24", "bytes", "parameter"]
    assert "2 tensors, 9 elements, 36 bytes in data files of 4.1 kB" in result.stdout


def test_a_scalar_has_a_shape_too(tmp_path, call):
    """A tensor without dimensions is shown as a scalar, not as nothing."""
    runs.run(tmp_path, 1, tensors={"optimizer.step": np.array(3.0, "<f4")})

    assert "scalar" in call("show", tmp_path).stdout


def test_json_holds_all_of_it(tmp_path, call):
    """The same for programs."""
    (name,) = runs.run(tmp_path, 5, metrics={"val_loss": 0.5})

    answer = json.loads(call("show", f"{tmp_path}@5", "--json").stdout)

    assert (answer["name"], answer["step"], answer["metrics"]) == (str(name), 5, {"val_loss": 0.5})
    assert answer["tensor_bytes"] == sum(tensor["tensor_bytes"] for tensor in answer["tensors"])
    assert (answer["data_bytes"], answer["referred_bytes"]) == (4096 + answer["tensor_bytes"], 0)
    assert answer["state"] == [
        "optimizer.param_groups",
        "run.positions",
        "run.rng",
        "run.values",
        "scheduler.last_epoch",
    ]
    assert answer["tensors"][0] == {
        "name": "model.weight",
        "dtype": "float32",
        "shape": [2, 3],
        "role": "parameter",
        "tensor_bytes": 24,
        "files": ["data-00000-000.safetensors"],
    }


def test_selectors(tmp_path, call):
    """latest, a step, the best by a metric, and a full name each find their checkpoint."""
    runs.attempt(tmp_path)
    for step, loss in ((1, 0.3), (2, 0.1), (3, 0.2)):
        runs.checkpoint(tmp_path, step, metrics={"val_loss": loss})
    full = f"a000001-s000000001-0001-{runs.NONCE}"

    for selector, step in (("latest", 3), ("1", 1), ("best", 2), ("best:val_loss:max", 1), (full, 1)):
        answer = json.loads(call("show", f"{tmp_path}@{selector}", "--json").stdout)
        assert answer["step"] == step, selector


def test_a_step_that_is_not_there(tmp_path, call):
    """The error lists what is there."""
    runs.run(tmp_path, 1, 2)

    result = call("show", f"{tmp_path}@7")

    assert result.exit_code == 1
    assert result.stderr.startswith("Error: ")
    assert "steps 2, 1" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_an_ambiguous_best(tmp_path, call):
    """With several metrics one has to be named; the message shows how."""
    runs.run(tmp_path, 1, metrics={"acc": 1.0, "val_loss": 1.0})

    result = call("show", f"{tmp_path}@best")

    assert result.exit_code == 2
    assert "@best:acc" in result.stderr


def test_no_run(tmp_path, call):
    """A folder that is no run is an error, not an empty answer."""
    result = call("show", tmp_path)

    assert result.exit_code == 1
    assert "no run at" in result.stderr


def test_a_damaged_index(tmp_path, call):
    """What cannot be read is one clear line."""
    (name,) = runs.run(tmp_path, 1)
    path = tmp_path / name.file("index-00000.json")
    path.write_bytes(path.read_bytes()[:-1])

    result = call("show", tmp_path)

    assert result.exit_code == 1
    assert "index-00000.json" in result.stderr
    assert "Traceback" not in result.output
