"""In a container that has memory for little more than the state, saves are streamed and nobody is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from spotsafe.checkpoint.candidates import candidates, look
from spotsafe.checkpoint.verify import verify
from spotsafe.machine import CGROUP, PROC, memory_now
from spotsafe.storage.local import LocalStore
from spotsafe.writer.process import can_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not can_run(), reason="this system cannot have a writer process"),
]

STATE = 768 << 20
LIMIT = STATE * 16 // 10
NEEDED = 4 * STATE
"""What has to be free here, so that it is the group that says no."""

PROGRAM = f"""
import os, sys, torch, spotsafe
from spotsafe import events

class Told:
    def emit(self, event):
        if isinstance(event, events.Warned):
            os.write(1, (event.message + "\\n").encode())

weights = {{f"w{{n}}": torch.zeros({STATE} // 16) for n in range(4)}}
given = int(sys.argv[2]) or "auto"
with spotsafe.session(
    sys.argv[1], state=weights, save_every=1, keep=2, watch=None, writer="process", staging_memory=given, events=Told()
) as run:
    for step in run.range(3):
        for one in weights.values():
            one.fill_(step + 1)
        run.wait()
os.write(1, f"{{len(run.failures)}} failed".encode())
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group of this one, with a limit; of version 1, for version 2 lets nobody in below a group in use."""
    lines = (PROC / "self/cgroup").read_text().splitlines()
    own = [line.split(":", 2)[2] for line in lines if "memory" in line.split(":")[1].split(",")]
    if not own:
        pytest.skip("no control group of version 1 limits memory here")
    if (memory_now().left or 0) < NEEDED:
        pytest.skip("there is not enough memory free for a test of what happens when there is none")
    folder = CGROUP / "memory" / own[0].lstrip("/") / f"spotsafe-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        (folder / "memory.limit_in_bytes").write_text(str(LIMIT))
        yield folder
    finally:
        end = time.monotonic() + 30
        while folder.exists() and time.monotonic() < end:  # until the last process is gone
            with contextlib.suppress(OSError):
                folder.rmdir()
            time.sleep(0.05)


def run_in(group: Path, folder: Path, *, staging_memory: int) -> subprocess.CompletedProcess[str]:
    """The program, in that group."""
    command = [
        "sh",
        "-c",
        f'echo $$ > {group}/cgroup.procs && exec "$@"',
        "sh",
        *(sys.executable, "-c", PROGRAM, str(folder / "run"), str(staging_memory)),
    ]
    path = os.pathsep.join(map(os.path.abspath, sys.path))
    return subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": path, "XDG_RUNTIME_DIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_saves_where_only_the_state_fits(group: Path, tmp_path: Path) -> None:
    """A limit of 1.6 times the state: it is written through a small slot, which is said, and every save is there."""
    done = run_in(group, tmp_path, staging_memory=0)
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
    assert "do not fit in the memory that is left" in done.stdout
    assert done.stdout.endswith("0 failed")
    store = LocalStore(tmp_path / "run")
    found = [one.name for one in candidates(store, look(store)) if one.manifest is not None]
    assert [name.step for name in found] == [3, 2]
    assert all(verify(store, name) == [] for name in found)


ADDRESSES = """
import os, resource, sys, torch, spotsafe

weights = {f"w{n}": torch.zeros(4 << 20) for n in range(4)}
with spotsafe.session(sys.argv[1], state=weights, save_every=1, keep=2, watch=None, writer="process") as run:
    for step in run.range(6):
        for one in weights.values():
            one.fill_(step + 1)
        if step == 1:  # a slot is there
            run.wait()
            with open("/proc/self/statm") as file:
                mapped = int(file.read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (mapped + (32 << 20),) * 2)
os.write(1, f"{len(run.failures)} failed".encode())
"""


@pytest.mark.parametrize("late", [False, True], ids=["from the start", "later"])
def test_saves_where_the_address_space_is_small(tmp_path: Path, late: bool) -> None:
    """``ulimit -v``: there is no second slot, or not even one, and training goes on with what there is."""
    program = (
        ADDRESSES
        if late
        else ADDRESSES.replace("if step == 1:", "if step == 0:").replace("run.wait()", "pass")
    )
    path = os.pathsep.join(map(os.path.abspath, sys.path))
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "run")],
        env={**os.environ, "PYTHONPATH": path, "XDG_RUNTIME_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
    assert done.stdout.endswith("0 failed")
    store = LocalStore(tmp_path / "run")
    [newest, *_] = [one.name for one in candidates(store, look(store)) if one.manifest is not None]
    assert newest.step == 6
    assert verify(store, newest) == []
    assert ("do not fit in the memory" in done.stderr) != late


def test_the_limit_is_one(group: Path, tmp_path: Path) -> None:
    """Who is told to stage all of it there is killed: so this is a test of something."""
    done = run_in(group, tmp_path, staging_memory=2 * STATE)
    killed = done.returncode == -signal.SIGKILL
    assert killed or "writer process has ended" in done.stderr, (done.returncode, done.stdout, done.stderr)
