"""Starts training scripts as processes of their own without importing torch for each: it forks.

A server has imported torch and the package, has computed nothing and has no thread, so a forked child is as fresh as a
new interpreter that has just done its imports. The child leads a session of its own, as a program under a launcher
does, writes to files and runs the script as ``python script.py`` would.

Run as ``python -m tests.e2e.forkserver [MODULE ...]``, with what else scripts import: a request is a line of JSON on
standard input, the answer one on standard output.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import sys
import threading
import traceback
from typing import Any

import torch
import torch._dynamo  # what the first optimizer of a process imports, a second or two otherwise

import spotsafe

assert spotsafe.session, "and what it needs"


def start(request: dict[str, Any]) -> int:
    """Fork a child that runs ``script``; returns its process id."""
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            become(request)
            code = run(request["script"])
        finally:
            os._exit(code)
    return pid


def become(request: dict[str, Any]) -> None:
    """Let go of the server's session and descriptors."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.closerange(3, max(null, log) + 1)
    os.environ.update(request["environment"])
    sys.argv = [request["script"]]
    sys.path[0] = os.path.dirname(request["script"])


def run(script: str) -> int:
    """The script's exit status, with everything done that the end of an interpreter does."""
    code = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as error:
        if isinstance(error.code, str):
            sys.stderr.write(error.code + "\n")
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def wait(pid: int, timeout_s: float) -> int | None:
    """The exit status of a child (negative: the signal), or None if it lives on after the time."""
    handle = os.pidfd_open(pid)
    try:
        ready, _, _ = select.select([handle], [], [], timeout_s)
    finally:
        os.close(handle)
    if not ready:
        return None
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def tell(answer: int | None) -> None:
    """Write an answer; the first one, unasked, says that the server is there."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Serve until standard input ends."""
    for name in sys.argv[1:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # children do not copy what only the collector would touch
    torch.set_num_threads(1)
    children: set[int] = set()
    tell(os.getpid())
    try:
        serve(children)
    finally:
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def serve(children: set[int]) -> None:
    """Answer requests; the children that are not waited for yet are kept in the set."""
    for line in sys.stdin.buffer:
        request = json.loads(line)
        answer: int | None
        if request["do"] == "start":
            children.add(answer := start(request))
        else:
            answer = wait(request["pid"], request["timeout_s"])
            if answer is not None:
                children.discard(request["pid"])
        tell(answer)


if __name__ == "__main__":
    main()
