"""The private event loop."""

from __future__ import annotations

import asyncio
import gc
import os
import threading

import pytest

from spotsafe.storage.eventloop import private_loop


class Owner:
    pass


def loop_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "spotsafe-storage"}


def test_it_runs_until_its_owner_is_gone() -> None:
    """Coroutines run on a thread of their own; thread and loop end with the owner."""
    before = loop_threads()
    owner = Owner()
    loop = private_loop(owner)
    (thread,) = loop_threads() - before

    async def where() -> int:
        return threading.get_ident()

    assert asyncio.run_coroutine_threadsafe(where(), loop).result(10) == thread.ident
    assert thread.daemon
    del owner
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()
    assert loop.is_closed()


def test_a_forked_child_leaves_its_parents_loop_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call that ends the loop is inherited by a child, and does nothing there."""
    before = loop_threads()
    owner = Owner()
    loop = private_loop(owner)
    (thread,) = loop_threads() - before
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 2**22 + 1)
        del owner
        gc.collect()
    assert thread.is_alive()
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    assert not thread.is_alive()
