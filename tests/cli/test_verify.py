"""`spotsafe verify`."""

from __future__ import annotations

import json

import pytest

from tests.cli import runs

DATA = "data-00000-000.safetensors"


def test_good_checkpoints(tmp_path, call):
    """Every checkpoint of the run is read and named; exit code 0."""
    names = runs.run(tmp_path, 1, 2)

    result = call("verify", tmp_path)

    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [f"{name}: good" for name in reversed(names)]


def _flip_a_bit(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize(
    ("file", "change"),
    [
        (DATA, _flip_a_bit),
        (DATA, lambda data: data[:-1]),
        (DATA, lambda data: data + b"\0"),
        ("index-00000.json", _flip_a_bit),
        ("manifest.json", lambda data: data[:-1]),
        ("manifest.json", lambda _: b""),
    ],
)
def test_damage_is_found_and_named(tmp_path, call, file, change):
    """One changed byte in any file is exit code 1 and a line that names the file."""
    good, bad = runs.run(tmp_path, 1, 2)
    path = tmp_path / bad.folder / file
    path.write_bytes(change(path.read_bytes()))

    result = call("verify", tmp_path)

    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[0] == f"{bad}: 1 fault"
    assert lines[1].startswith(f"  {file}: ")
    assert lines[-1] == f"{good}: good"
    assert result.stderr == "1 of 2 checkpoints damaged\n"


def test_a_missing_file(tmp_path, call):
    """What is gone is a fault too."""
    (name,) = runs.run(tmp_path, 1)
    (tmp_path / name.file(DATA)).unlink()

    assert f"  {DATA}: is missing" in call("verify", tmp_path).stdout.splitlines()


def test_latest_does_not_step_past_damage(tmp_path, call):
    """Whoever verifies the latest wants to know about the latest, not about the one before it."""
    _, bad = runs.run(tmp_path, 1, 2)
    (tmp_path / bad.manifest).write_bytes(b"{}")

    result = call("verify", f"{tmp_path}@latest")

    assert result.exit_code == 1
    assert str(bad) in result.stdout


def test_one_checkpoint(tmp_path, call):
    """A selector limits it to one."""
    runs.run(tmp_path, 1, 2)

    lines = call("verify", f"{tmp_path}@1").stdout.splitlines()

    assert len(lines) == 1
    assert "s000000001" in lines[0]


def test_json(tmp_path, call):
    """For programs: the verdict and every fault."""
    _, bad = runs.run(tmp_path, 1, 2)
    (tmp_path / bad.file(DATA)).unlink()

    result = call("verify", tmp_path, "--json")
    answer = json.loads(result.stdout)

    assert result.exit_code == 1
    assert answer["good"] is False
    assert [len(one["faults"]) for one in answer["checkpoints"]] == [1, 0]
    assert answer["checkpoints"][0]["faults"][0]["file"] == DATA


def test_best(tmp_path, call):
    """The best by its metric can be verified as well."""
    runs.attempt(tmp_path)
    runs.checkpoint(tmp_path, 1, metrics={"val_loss": 0.1})
    runs.checkpoint(tmp_path, 2, metrics={"val_loss": 0.2})

    assert "s000000001" in call("verify", f"{tmp_path}@best").stdout


def test_unpublished_folders_are_no_checkpoints(tmp_path, call):
    """What was never published does not count as damage."""
    runs.run(tmp_path, 1)
    runs.checkpoint(tmp_path, 2, published=False)

    assert call("verify", tmp_path).exit_code == 0


def test_nothing_to_verify(tmp_path, call):
    """Nothing verified is not "all good"."""
    runs.attempt(tmp_path)

    result = call("verify", tmp_path)

    assert result.exit_code == 1
    assert "has no checkpoint" in result.stderr
