"""`spotsafe pin` and `spotsafe unpin`."""

from __future__ import annotations

import json
import time

import pytest

from spotsafe.checkpoint.layout import PINS
from spotsafe.storage.open import open_store
from tests.cli import runs


def pins(folder):
    return open_store(str(folder)).names(PINS)


def test_pin_is_shown_and_let_go(tmp_path, call):
    """It says how long and how to end it; `ls` shows it; unpin ends it."""
    _, two = runs.run(tmp_path, 1, 2)

    result = call("pin", f"{tmp_path}@2", "--hours", "2")

    assert result.exit_code == 0, result.output
    assert result.stdout == f"{tmp_path}@{two} stays for 2 h, or until: spotsafe unpin {tmp_path}@{two}\n"
    listed = {line.split()[0]: line for line in call("ls", tmp_path).stdout.splitlines()}
    assert "pinned by a reader" in listed["2"]
    assert "pinned" not in listed["1"]
    assert call("unpin", f"{tmp_path}@2").stdout == "1 pin removed\n"
    assert pins(tmp_path) == []


def test_json(tmp_path, call):
    """Without a selector it is the latest, for a day."""
    _, two = runs.run(tmp_path, 1, 2)

    answer = json.loads(call("pin", tmp_path, "--json").stdout)

    assert (answer["checkpoint"], answer["step"]) == (str(two), 2)
    assert answer["until"] == pytest.approx(time.time() + 86_400, abs=60)
    assert json.loads(call("unpin", tmp_path, "--json").stdout) == {"url": str(tmp_path), "removed": 1}


def test_unpin_of_a_run_removes_all(tmp_path, call):
    """Whoever placed them, on whichever checkpoint."""
    runs.run(tmp_path, 1, 2)
    for target in ("@1", "@1", "@2"):
        assert call("pin", f"{tmp_path}{target}").exit_code == 0
    assert call("unpin", tmp_path).stdout == "3 pins removed\n"
    assert call("unpin", tmp_path).stdout == "0 pins removed\n"


def test_a_pin_of_a_checkpoint_that_is_gone_can_be_removed_by_name(tmp_path, call):
    """The full name needs no checkpoint."""
    one, _ = runs.run(tmp_path, 1, 2)
    call("pin", f"{tmp_path}@1")
    (tmp_path / one.manifest).unlink()
    assert call("unpin", f"{tmp_path}@{one}").stdout == "1 pin removed\n"


@pytest.mark.parametrize("command", ["pin", "unpin"])
def test_what_is_not_there(tmp_path, call, command):
    """No run, no such step: one line and exit code 1."""
    assert "no run at" in call(command, tmp_path).stderr
    runs.run(tmp_path, 1)
    result = call(command, f"{tmp_path}@7")
    assert (result.exit_code, pins(tmp_path)) == (1, [])
    assert "no checkpoint of step 7" in result.stderr


@pytest.mark.parametrize("hours", ["0", "-1", "soon", "nan", "inf"])
def test_hours_that_make_no_sense(tmp_path, call, hours):
    """The command line is wrong; nothing is written."""
    runs.run(tmp_path, 1)
    result = call("pin", tmp_path, "--hours", hours)
    assert result.exit_code == 2
    assert pins(tmp_path) == []
