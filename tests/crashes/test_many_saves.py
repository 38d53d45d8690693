"""Thousands of saves, two of them in flight at a time and every tenth of them failing, leave nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from spotsafe.checkpoint.candidates import by_folder, candidates, look
from spotsafe.checkpoint.layout import CHECKPOINTS
from spotsafe.checkpoint.verify import verify
from spotsafe.storage.local import LocalStore
from spotsafe.writer.process import can_run
from tests import proof
from tests.e2e.processes import ONE_THREAD
from tests.writer.processes import runtime_files

SCRIPT = Path(__file__).with_name("scripts") / "many_saves.py"
needs_process = pytest.mark.skipif(not can_run(), reason="this system cannot have a writer process")

pytestmark = pytest.mark.slow


def measured(folder: Path, *, writer: str, saves: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the program says after its first saves, and at the end."""
    path = os.pathsep.join(map(os.path.abspath, sys.path))
    environment = {"RUN": str(folder / "run"), "WRITER": writer, "SAVES": str(saves)}
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env={**os.environ, **ONE_THREAD, **environment, "PYTHONPATH": path, "XDG_RUNTIME_DIR": str(folder)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    first, last = map(json.loads, done.stdout.splitlines())
    return first, last


@pytest.mark.parametrize("writer", [pytest.param("process", marks=needs_process), "thread"])
@pytest.mark.parametrize("saves", [200, pytest.param(2000, marks=pytest.mark.prove)])
def test_many_saves_leave_nothing(tmp_path: Path, writer: str, saves: int) -> None:
    """Memory of all processes stays within 2 %, descriptors stay as they are, and no file is left."""
    first, last = measured(tmp_path, writer=writer, saves=saves)
    count = last["count"]
    assert abs(last["memory"] / first["memory"] - 1) <= 0.02, (first, last)
    assert last["shared"] == first["shared"]
    assert last["descriptors"] == first["descriptors"]
    assert count["SaveStarted"] >= saves
    assert count["SaveFailed"] == (count["SaveStarted"] + 4) // 10
    assert count["CheckpointPublished"] + count["SaveFailed"] == count["SaveStarted"]
    assert count["beside another"] > saves // 2
    assert "WriterReplaced" not in count
    store = LocalStore(tmp_path / "run")
    published = [one.name for one in candidates(store, look(store)) if one.manifest is not None]
    assert len(published) == 2
    assert all(verify(store, name) == [] for name in published)
    for name, sizes in by_folder(store.list(CHECKPOINTS)).items():
        assert name in published or set(sizes) == {name.manifest}, f"no garbage is left in {name}"
    assert not list((tmp_path / "run").rglob(".tmp*"))
    assert runtime_files(tmp_path) == []
    growth = round((last["memory"] / first["memory"] - 1) * 100, 2)
    proof.record(
        f"saves of 64 MiB in a row, two in flight, by a {writer}",
        saves=count["SaveStarted"],
        failed=count["SaveFailed"],
        beside_another=count["beside another"],
        percent_more_memory=growth,
    )
