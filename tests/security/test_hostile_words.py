"""Names and words of a checkpoint reach a terminal as text: it shows them and does not obey them."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest

from spotsafe.console import Console
from spotsafe.errors import DamagedCheckpoint, SpotsafeError
from spotsafe.events import CheckpointPassedOver, Warned
from spotsafe.human import printable
from tests.security.forging import COMMANDS, command, forge_index, forge_manifest, reseal, trained

EVIL = "\x1b]0;title\x07\x1b[2J\r\u202e\x9b31m"
STEERING = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]")


def in_manifest(manifest: dict[str, Any]) -> None:
    manifest.update(reason=EVIL, run=EVIL, metrics={EVIL: 1.0})
    manifest["health"].update(healthy=False, nonfinite=[EVIL], nonfinite_buffers=[EVIL])


def in_index(index: dict[str, Any]) -> None:
    index["tensors"].append({"name": EVIL, "dtype": "float32", "shape": [0], "slices": []})
    index["state"][EVIL] = {"kind": "value", "value": {"$": EVIL}}


def in_requires(manifest: dict[str, Any]) -> None:
    manifest["requires"] = [EVIL]


def in_nonce(manifest: dict[str, Any]) -> None:
    manifest["nonce"] = EVIL


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_prints_what_steers_a_terminal(name, tmp_path):
    """Whether it shows the words or quotes them in an error."""
    run = trained(tmp_path / "run")
    (run / "checkpoints" / EVIL).mkdir()
    (run / "checkpoints" / EVIL / EVIL).write_bytes(b"")
    texts = [command(name, run, tmp_path / "out.pt")[1]]
    forge_index(run, in_index)
    forge_manifest(run, in_manifest)
    texts.append(command(name, run, tmp_path / "out.pt")[1])
    record = next((run / "attempts").glob("*.json"))
    reseal(record, lambda members: members.update(host=EVIL, job=EVIL, requires=[EVIL]))
    texts.append(command(name, run, tmp_path / "out.pt")[1])
    manifest = next((run / "checkpoints").glob("a*/manifest.json"))
    for change in (in_requires, in_nonce):
        reseal(manifest, change)
        texts.append(command(name, run, tmp_path / "out.pt")[1])
    assert any(texts)
    assert [found[0] for text in texts for found in STEERING.finditer(text)] == []


def test_the_names_are_still_shown(tmp_path):
    """Spelled out, so that one can see what somebody tried."""
    run = trained(tmp_path / "run")
    forge_index(run, in_index)
    _, text = command("show", run, tmp_path / "out.pt")
    assert r"\x1b[2J" in text


def test_file_names_that_are_no_text_are_printed(tmp_path):
    """A folder's name may be any bytes."""
    trained(tmp_path / "runs" / "good")
    trained(tmp_path / "runs" / "bad\udcff\x1b[2J")
    code, text = command("ls", tmp_path / "runs", tmp_path / "out.pt")
    assert code == 0
    assert r"bad\udcff\x1b[2J" in text


def test_errors_and_lines_of_a_session_are_clean():
    """What a start raises, logs or prints quotes the same words."""
    error = DamagedCheckpoint(checkpoint=EVIL, file=EVIL, reason=EVIL)
    assert STEERING.search(str(error)) is None
    assert str(SpotsafeError("two\nlines")) == "two\nlines"
    out = io.StringIO()
    console = Console(out)
    console.emit(Warned(message=EVIL))
    console.emit(CheckpointPassedOver(checkpoint=EVIL, reason=f"{EVIL}\nspotsafe: all is well"))
    assert STEERING.search(out.getvalue()) is None
    assert out.getvalue().count("\n") == 2


def test_printable_leaves_text_alone():
    """Letters of every script, emoji and line feeds are text."""
    assert printable("naïve Ωμέγα 数 🎉\nx") == "naïve Ωμέγα 数 🎉\nx"
