"""Run as a process of its own: does one thing with a run under a limit of memory, and says how it went."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

MIB = 1 << 20


def in_child(what: str, run: Path, *, megabytes: int) -> dict[str, Any]:
    """How `load`, `resume` or a command went in a process that may take so many megabytes more than it has.

    Returns:
        ``error``: the class's name, empty if there was none; ``ours``: whether it is of our tree; ``text``: its
        message, or what the command printed; ``code``: the command's; ``peak``: megabytes more than before.
    """
    done = subprocess.run(
        [sys.executable, "-m", "tests.security.limited", what, str(run), str(megabytes)],
        capture_output=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _status(word: str) -> int:
    return int(Path("/proc/self/status").read_text().split(f"{word}:")[1].split()[0]) // 1024


def _do(what: str, run: str) -> dict[str, Any]:
    import spotsafe
    from tests.security.forging import command
    from tests.session.rig import Program

    try:
        if what == "load":
            spotsafe.load(run)
        elif what == "resume":
            with Program().session(run):
                pass
        else:
            code, text = command(what, Path(run), Path(run).with_suffix(".out"))
            return {"error": "", "ours": True, "text": text, "code": code}
    except Exception as error:
        return {
            "error": type(error).__name__,
            "ours": isinstance(error, spotsafe.SpotsafeError),
            "text": str(error),
        }
    return {"error": "", "ours": True, "text": ""}


def main(what: str, run: str, megabytes: str) -> None:
    """Everything is imported before the limit counts: libraries are none of a checkpoint's doing."""
    import torch

    from tests.security.forging import command

    torch.set_num_threads(1)
    command("ls", Path(run).parent / "nothing", Path(os.devnull))
    before, peak = _status("VmSize"), _status("VmHWM")
    limit = (before + int(megabytes)) * MIB
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    found = _do(what, run)
    print(json.dumps({**found, "peak": _status("VmHWM") - peak}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
