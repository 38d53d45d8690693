"""The first lines of the writer process, run as a script: by its path, in an isolated interpreter.

It imports nothing of the package before it has been told where that lies. So what runs is the very package that the
trainer uses, and neither the trainer's main module nor a module in the folder where it was started is ever imported.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import select
import signal
import socket
import sys

NAME = "spotsafe-writer"
"""As ``ps`` and ``top`` show it: fifteen characters, as many as there is room for."""
CONNECTION = 3
"""As `child.CONNECTION`, which cannot be imported here yet."""
_MOST = 1 << 20


def main() -> None:
    """Read where the package lies, and run what the trainer names."""
    # A launcher may signal every process. As long as the trainer lives it may still save; after that this one ends.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError), open("/proc/self/comm", "w", encoding="ascii") as comm:
        comm.write(NAME)
    close_all_but(CONNECTION)
    end = socket.socket(fileno=CONNECTION)
    select.select([end], [], [])
    told = json.loads(end.recv(_MOST) or b"null")
    if told is None:
        return  # the trainer is gone already
    sys.path.extend(one for one in told["path"] if one not in sys.path)
    load(told["package"], told["folder"])
    importlib.import_module(told["module"]).main(end)


def close_all_but(last: int) -> None:
    """Close what the trainer's libraries have left open for every child: it would be held for as long as this lives."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > last:
            with contextlib.suppress(OSError):
                os.close(int(name))


def load(name: str, folder: str) -> None:
    """Import a package from this very folder, whatever else lies on the path."""
    spec = importlib.util.spec_from_file_location(
        name, f"{folder}/__init__.py", submodule_search_locations=[folder]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"no package in {folder}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


if __name__ == "__main__":
    main()
