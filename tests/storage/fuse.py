"""Real mounts of user-space file systems, where this machine's kernel lets us make one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes.util import find_library
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests import servers

_PATIENCE_S = 30.0
_NOT_ALLOWED = ("not permitted", "permission denied")


def unmounter() -> str:
    """The program that unmounts; the test is skipped where the kernel or the system has no such mounts."""
    found = shutil.which("fusermount3") or shutil.which("fusermount")
    if found is None or not os.access("/dev/fuse", os.W_OK):
        pytest.skip("this machine cannot mount user-space file systems (fusermount3 or /dev/fuse is missing)")
    return found


@contextmanager
def mounted_by(command: list[str], *, base: Path, point: Path) -> Iterator[Path]:
    """The mount that a program in the foreground makes; unmounted, and the program gone, at the end."""
    unmount = unmounter()
    process = servers.launch(command, folder=base)
    try:
        end = time.monotonic() + _PATIENCE_S
        while not os.path.ismount(point):
            if process.poll() is not None or time.monotonic() > end:
                said = (base / "output.txt").read_text()[-300:]
                if any(word in said.lower() for word in _NOT_ALLOWED):
                    pytest.skip(f"this machine does not let us mount: {said}")
                pytest.fail(f"no mount came of it: {said}")
            time.sleep(0.05)
        yield point
    finally:
        subprocess.run([unmount, "-u", "-z", str(point)], check=False, capture_output=True)
        process.kill()
        process.wait()


@contextmanager
def passthrough(base: Path, *without: str) -> Iterator[Path]:
    """A folder behind a file system of our own that lacks what is named; see `tests.storage.passthrough`."""
    unmounter()
    if find_spec("mfusepy") is None:
        servers.missing("mfusepy")
    if find_library("fuse3") is None:
        pytest.skip("this machine has no libfuse3")
    behind, point = base / "behind", base / "mount"
    behind.mkdir()
    point.mkdir()
    script = Path(__file__).with_name("passthrough.py")
    with mounted_by([sys.executable, str(script), str(behind), str(point), *without], base=base, point=point):
        yield point
