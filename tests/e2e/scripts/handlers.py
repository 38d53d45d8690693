"""Programs that have handlers of their own for SIGTERM, before, inside and after a session.

`HANDLERS` names the program and `RUN` the folder. A program that ends by itself with status 0 is content.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import torch

import spotsafe


def session() -> spotsafe.Run:
    return spotsafe.session(
        os.environ["RUN"], model=torch.nn.Linear(2, 2), watch=None, on_reclaim="return", save_every=None
    )


def terminate() -> None:
    """As somebody else would: to the process."""
    os.kill(os.getpid(), signal.SIGTERM)


def heard_by(handler: Callable[[Callable[..., None]], object]) -> Callable[[], bool]:
    """Install a handler of a user's own; returns a function that terminates and tells whether it was called."""
    calls: list[Any] = []
    handler(lambda *arguments: calls.append(arguments))

    def heard() -> bool:
        calls.clear()
        terminate()
        return len(calls) == 1

    return heard


def user_before() -> None:
    """A handler of signal.signal that was there first is called besides, and alone afterwards."""
    heard = heard_by(lambda handler: signal.signal(signal.SIGTERM, handler))
    installed = signal.getsignal(signal.SIGTERM)
    with session() as run:
        assert run.notice is None
        assert heard()
        assert run.notice is not None
    assert signal.getsignal(signal.SIGTERM) is installed
    assert heard()


def user_inside() -> None:
    """A handler that is installed in the session replaces ours, and stays."""
    with session() as run:
        heard = heard_by(lambda handler: signal.signal(signal.SIGTERM, handler))
        assert heard()
        assert run.notice is None
    assert heard()


def user_inside_passing_on() -> None:
    """One that calls what was there before makes the notice too."""
    with session() as run:
        before = signal.getsignal(signal.SIGTERM)
        assert callable(before)
        calls = []

        def handler(number: int, frame: Any) -> None:
            calls.append(number)
            before(number, frame)

        signal.signal(signal.SIGTERM, handler)
        terminate()
        assert calls == [signal.SIGTERM]
        assert run.notice is not None
    terminate()
    assert calls == [signal.SIGTERM] * 2


def nobody() -> None:
    """Without any handler SIGTERM is a notice inside, and the end outside."""
    with session() as run:
        terminate()
        assert run.notice is not None
    terminate()


class Asynchronous:
    """A handler of asyncio's."""

    def __init__(self) -> None:
        self.calls = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.calls.set)

    async def heard(self) -> bool:
        self.calls.clear()
        terminate()
        await asyncio.wait_for(self.calls.wait(), 60)
        return True


async def asyncio_before() -> None:
    """A loop's handler that was there first hears it, the session too; afterwards it hears it alone."""
    handler = Asynchronous()
    with session() as run:
        assert await handler.heard()
        assert run.notice is not None
    assert await handler.heard()


async def asyncio_inside() -> None:
    """A loop's handler that is installed in the session hears it there and afterwards."""
    with session():
        handler = Asynchronous()
        assert await handler.heard()
    assert await handler.heard()


def asyncio_around() -> None:
    """A loop that runs inside a session and is over leaves it listening."""
    with session() as run:
        asyncio.run(asyncio.sleep(0))
        assert run.notice is None
        terminate()
        assert run.notice is not None
    terminate()


def off_the_main_thread() -> None:
    """A session in another thread leaves the handlers alone."""
    heard = heard_by(lambda handler: signal.signal(signal.SIGTERM, handler))
    inside, leave = threading.Event(), threading.Event()

    def work() -> None:
        with session():
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=work)
    thread.start()
    assert inside.wait(60)
    assert heard()
    leave.set()
    thread.join()
    assert heard()


def main() -> None:
    program = globals()[os.environ["HANDLERS"]]
    if asyncio.iscoroutinefunction(program):
        asyncio.run(program())
    else:
        program()


if __name__ == "__main__":
    main()
