"""`spotsafe ls`."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from spotsafe.checkpoint.layout import CheckpointName
from spotsafe.checkpoint.manifest import Marker, encode_marker
from spotsafe.storage.open import open_store
from tests.cli import runs


def test_lists_newest_first_with_all_that_people_look_for(tmp_path, call):
    """Step, age, size, health and metrics of each checkpoint, the newest first."""
    runs.attempt(tmp_path)
    runs.checkpoint(tmp_path, 100, age_s=7200.0, metrics={"val_loss": 1.25})
    runs.checkpoint(tmp_path, 200, age_s=60.0)

    result = call("ls", tmp_path)

    assert result.exit_code == 0, result.output
    header, newest, older = result.stdout.splitlines()
    assert header.split()[:4] == ["step", "age", "stored", "health"]
    assert newest.split()[0] == "200"
    assert "1 min ago" in newest
    assert "ok" in newest
    assert older.split()[0] == "100"
    assert "2 h ago" in older
    assert "val_loss=1.25" in older


def test_says_why_a_checkpoint_is_not_usable(tmp_path, call):
    """Never published, damaged, unhealthy and incomplete checkpoints are shown with the reason."""
    names = runs.run(tmp_path, 1, 2, 3)
    runs.checkpoint(tmp_path, 4, healthy=False)
    runs.checkpoint(tmp_path, 5, published=False)
    (tmp_path / names[0].manifest).write_bytes(b"{")
    (tmp_path / names[1].file("data-00000-000.safetensors")).unlink()

    lines = {line.split()[0]: line for line in call("ls", tmp_path).stdout.splitlines()}

    assert "never published" in lines["5"]
    assert "not finite" in lines["4"]
    assert lines["3"].rstrip().endswith(str(names[2]))
    assert "data" in lines["2"].split(str(names[1]))[1]
    assert "manifest.json" in lines["1"]


def test_json_has_a_stable_schema(tmp_path, call):
    """Programs find the same members whatever state a checkpoint is in; a NaN metric is null."""
    runs.run(tmp_path, 1, metrics={"loss": float("nan")})
    runs.checkpoint(tmp_path, 2, published=False)

    answer = json.loads(call("ls", tmp_path, "--json").stdout)

    assert answer["kind"] == "run"
    assert answer["url"] == str(tmp_path)
    unpublished, published = answer["checkpoints"]
    assert unpublished.keys() == published.keys()
    assert (unpublished["usable"], unpublished["healthy"], unpublished["age_s"]) == (False, None, None)
    assert (published["usable"], published["healthy"], published["problem"]) == (True, True, "")
    assert published["metrics"] == {"loss": None}
    assert published["reason"] == "interval"
    assert published["stored_bytes"] == sum(
        path.stat().st_size for path in (tmp_path / "checkpoints" / published["name"]).iterdir()
    )


def test_lists_the_runs_of_a_folder(tmp_path, call):
    """On a folder above runs it lists those, and nothing that is no run."""
    runs.run(tmp_path / "one", 10, 20)
    runs.attempt(tmp_path / "two")
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "empty").mkdir()

    answer = json.loads(call("ls", tmp_path, "--json").stdout)
    lines = call("ls", tmp_path).stdout.splitlines()

    assert answer["kind"] == "folder"
    assert [(run["name"], run["newest_step"], run["checkpoints"]) for run in answer["runs"]] == [
        ("one", 20, 2),
        ("two", None, 0),
    ]
    assert lines[0] == f"2 runs in {tmp_path}"
    assert [line.split()[:2] for line in lines[2:]] == [["one", "20"], ["two", "-"]]


def test_a_run_without_a_checkpoint_is_no_error(tmp_path, call):
    """A run that has only begun is a run."""
    runs.attempt(tmp_path)

    result = call("ls", tmp_path)

    assert (result.exit_code, result.stdout) == (0, f"{tmp_path}: no checkpoint yet\n")


def test_neither_run_nor_folder_with_runs(tmp_path, call):
    """A wrong path is one line on stderr and exit code 1."""
    result = call("ls", tmp_path / "nothing")

    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr == f"Error: {tmp_path}/nothing is neither a run nor a folder with runs\n"


def test_a_selector_is_refused_with_the_right_command(tmp_path, call):
    """`ls` is about a whole run; whoever names one checkpoint meant `show`."""
    result = call("ls", f"{tmp_path}@latest")

    assert result.exit_code == 2
    assert f"spotsafe show {tmp_path}@latest" in result.stderr


@pytest.mark.slow
def test_answers_within_half_a_second_for_200_checkpoints(tmp_path):
    """Interpreter start, imports, 200 manifests and the table: under 0.5 s in the best of three."""
    runs.run(tmp_path, *range(200))

    spans = []
    for _ in range(3):
        began = time.monotonic()
        result = subprocess.run(
            [sys.executable, "-m", "spotsafe", "ls", str(tmp_path)],
            capture_output=True,
            check=True,
            text=True,
        )
        spans.append(time.monotonic() - began)

    assert len(result.stdout.splitlines()) == 201
    assert min(spans) < 0.5, spans


def test_markers_are_shown_only_when_asked_for(call, tmp_path):
    """What was withdrawn or abandoned is history: not in the way of who looks for a checkpoint."""
    runs.attempt(tmp_path)
    name = runs.checkpoint(tmp_path, 100)
    marker = CheckpointName(1, 50, 1, "00000000")
    open_store(str(tmp_path)).put(marker.manifest, encode_marker(Marker(state="retired")))
    shown = json.loads(call("ls", tmp_path, "--json").stdout)["checkpoints"]
    assert [record["name"] for record in shown] == [str(name)]
    every = json.loads(call("ls", tmp_path, "--all", "--json").stdout)["checkpoints"]
    assert [record["name"] for record in every] == [str(name), str(marker)]
    assert every[1]["problem"] == "retired"
