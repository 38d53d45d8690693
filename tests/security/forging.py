"""Runs whose files lie, with seals and digests that fit: integrity checks find accidents, not liars."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from spotsafe.checkpoint.catalog import resolve
from spotsafe.checkpoint.digest import sha256_hex
from spotsafe.checkpoint.sealed import seal
from spotsafe.cli.app import main
from spotsafe.storage.open import open_store
from tests.session.rig import Program

Change = Callable[[dict[str, Any]], object]
COMMANDS = ("ls", "show", "verify", "gc", "rollback", "export")


def trained(folder: Path, *, steps: int = 2) -> Path:
    """A run of the tests' program that has finished `steps`."""
    program = Program()
    with program.session(folder) as run:
        for step, batch in run.steps(program.loader, until=steps):
            program.train(step, batch)
    return folder


def forge_manifest(folder: Path, change: Change) -> None:
    """Change the newest manifest, and seal it again."""
    path = folder / resolve(open_store(str(folder))).name.manifest
    reseal(path, change)


def forge_index(folder: Path, change: Change) -> None:
    """Change the newest index, and put its size and digest into the manifest."""
    path = folder / resolve(open_store(str(folder))).name.file("index-00000.json")
    index = json.loads(path.read_bytes())
    change(index)
    data = json.dumps(index).encode()
    path.write_bytes(data)
    reseal(
        path.with_name("manifest.json"),
        lambda manifest: manifest["parts"][0].update(size=len(data), sha256=sha256_hex(data)),
    )


def reseal(path: Path, change: Change) -> None:
    """Change a sealed file."""
    members = json.loads(path.read_bytes())
    change(members)
    members.pop("sha256", None)
    path.write_bytes(seal(members))


def command(name: str, folder: Path, out: Path) -> tuple[int, str]:
    """Exit code and output of one command; an exception that is no clear line fails the test."""
    target = f"{folder}@2" if name == "rollback" else str(folder)
    extra = {"gc": ["--delete"], "rollback": ["--takeover"], "export": [str(out), "--all", "--force"]}
    result = CliRunner().invoke(main, [name, target, *extra.get(name, [])])
    assert result.exception is None or isinstance(result.exception, SystemExit), (name, result.exception)
    assert "Traceback" not in result.output
    return result.exit_code, result.output
