"""The private event loop."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from spotsafe.storage.eventloop import PrivateLoop, gather


class Owner:
    pass


def loop_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "spotsafe-storage"}


async def where() -> int:
    return threading.get_ident()


def test_it_runs_until_its_owner_is_gone() -> None:
    """Coroutines run on a thread of their own; thread and loop end with the owner, goodbyes said."""
    before = loop_threads()
    owner = Owner()
    private = PrivateLoop(owner)
    (thread,) = loop_threads() - before
    said: list[str] = []

    async def goodbye() -> None:
        said.append("goodbye")

    async def rude() -> None:
        raise RuntimeError("no manners")

    private.goodbyes += [rude, goodbye]

    assert private.run(where()) == thread.ident
    assert thread.daemon
    del owner
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()
    assert private.loop.is_closed()
    assert said == ["goodbye"]


def test_a_forked_child_leaves_its_parents_loop_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call that ends the loop is inherited by a child, and does nothing there."""
    before = loop_threads()
    owner = Owner()
    private = PrivateLoop(owner)
    (thread,) = loop_threads() - before
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 2**22 + 1)
        del owner
        gc.collect()
    assert thread.is_alive()
    private.loop.call_soon_threadsafe(private.loop.stop)
    thread.join(10)
    assert not thread.is_alive()


def test_a_cancelled_coroutine_is_no_result() -> None:
    """fsspec's own way of waiting returns None here, which looks like success."""
    owner = Owner()
    private = PrivateLoop(owner)

    async def cancelled() -> str:
        raise asyncio.CancelledError

    with pytest.raises(TimeoutError, match="not known"):
        private.run(cancelled())
    private.close()
    private.close()


def test_what_takes_too_long_is_cancelled() -> None:
    """The caller gets a TimeoutError, and the coroutine does not go on behind its back."""
    owner = Owner()
    private = PrivateLoop(owner)
    ended: list[str] = []

    async def slow() -> None:
        try:
            await asyncio.sleep(1000)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    with pytest.raises(TimeoutError):
        private.run(slow(), timeout_s=0.01)
    assert ended == ["cancelled"]
    private.close()


def test_an_interrupt_cancels_what_it_interrupts() -> None:
    """A signal handler that raises leaves no request behind that would still write its object."""
    owner = Owner()
    private = PrivateLoop(owner)
    ended = threading.Event()

    class Interrupt(BaseException):
        pass

    def interrupt(_number: int, _frame: object) -> None:
        raise Interrupt

    async def slow() -> None:
        os.kill(os.getpid(), signal.SIGUSR1)  # which the kernel gives to the main thread
        try:
            await asyncio.sleep(1000)
        finally:
            ended.set()

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(Interrupt):
            private.run(slow())
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert ended.wait(10)
    private.close()


def test_closing_leaves_nobody_waiting() -> None:
    """Another thread's request ends with an error instead of never."""
    owner = Owner()
    private = PrivateLoop(owner)
    begun = threading.Event()
    caught: list[BaseException] = []

    async def slow() -> None:
        begun.set()
        await asyncio.sleep(1000)

    def ask() -> None:
        try:
            private.run(slow())
        except TimeoutError as error:
            caught.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    assert begun.wait(10)
    private.close()
    thread.join(10)
    assert len(caught) == 1


def test_the_end_of_the_process_says_goodbye() -> None:
    """Connections are closed before the interpreter takes the thread away."""
    script = (
        "from spotsafe.storage.eventloop import PrivateLoop\n"
        "class Owner: pass\n"
        "owner = Owner(); private = PrivateLoop(owner)\n"
        "async def goodbye(): print('goodbye')\n"
        "private.goodbyes.append(goodbye)\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert (result.stdout, result.stderr) == ("goodbye\n", "")


def test_gather_keeps_to_its_number() -> None:
    """So many jobs at a time, all done in the end."""
    under_way, most, done = 0, 0, 0

    async def job() -> None:
        nonlocal under_way, most, done
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0)
        under_way -= 1
        done += 1

    asyncio.run(gather([job] * 20, at_once=3))
    assert (most, done) == (3, 20)


def test_gather_ends_the_others_first() -> None:
    """When the first error is raised, no other job is under way any more."""
    ended: list[str] = []

    async def fails() -> None:
        await asyncio.sleep(0)
        raise ValueError("first")

    async def slow() -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            ended.append("ended")

    before = time.monotonic()
    with pytest.raises(ValueError, match="first"):
        asyncio.run(gather([slow, fails, slow, slow], at_once=3))
    assert ended == ["ended", "ended"]
    assert time.monotonic() - before < 100
