"""A child's death does not interrupt what must not be interrupted, and is not lost either."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from spotsafe.reclaim.children import child_deaths_deferred


@pytest.fixture(autouse=True)
def sigchld_as_before() -> Iterator[None]:
    """Each test leaves SIGCHLD as it found it."""
    before = signal.getsignal(signal.SIGCHLD)
    yield
    signal.signal(signal.SIGCHLD, before)


def child_dies() -> None:
    os.kill(os.getpid(), signal.SIGCHLD)


class Handler:
    """A SIGCHLD handler of the user's own."""

    def __init__(self) -> None:
        self.calls = 0
        signal.signal(signal.SIGCHLD, self)

    def __call__(self, number: int, frame: object) -> None:
        self.calls += 1


def dataloaders(message: str = "DataLoader worker (pid 7) is killed by signal: Terminated.") -> object:
    """A handler that raises, and says that it is from the module of DataLoader's."""

    def handler(number: int, frame: object) -> None:
        raise RuntimeError(message)

    handler.__module__ = "torch.utils.data._utils.signal_handling"
    signal.signal(signal.SIGCHLD, handler)
    return handler


def test_dataloaders_handler_raises_without_it():
    """The error that all this is about comes out of any line."""
    dataloaders()
    with pytest.raises(RuntimeError, match="killed by signal"):
        child_dies()


def test_dataloaders_handler_does_not_interrupt_the_block_and_is_back_after_it():
    """Inside nothing is raised, nor at the end; a death afterwards raises as ever."""
    handler = dataloaders()
    with child_deaths_deferred():
        child_dies()
        child_dies()
    assert signal.getsignal(signal.SIGCHLD) is handler
    with pytest.raises(RuntimeError):
        child_dies()


def test_a_users_handler_is_called_once_at_the_end():
    """A reaper that missed deaths gets one call, as after any burst of signals."""
    handler = Handler()
    with child_deaths_deferred():
        child_dies()
        child_dies()
        assert handler.calls == 0
    assert handler.calls == 1
    assert signal.getsignal(signal.SIGCHLD) is handler


def test_a_users_handler_is_not_called_for_nothing():
    """Without a death in the block there is no call."""
    handler = Handler()
    with child_deaths_deferred():
        pass
    assert handler.calls == 0


def test_the_handler_is_back_when_the_block_raises():
    """An error in the block passes through, and the missed call is made."""
    handler = Handler()
    with pytest.raises(KeyError), child_deaths_deferred():
        child_dies()
        raise KeyError("x")
    assert handler.calls == 1
    assert signal.getsignal(signal.SIGCHLD) is handler


@pytest.mark.parametrize("disposition", [signal.SIG_DFL, signal.SIG_IGN])
def test_where_no_python_handler_stands_nothing_is_touched(disposition: signal.Handlers):
    """The default cannot interrupt anything."""
    signal.signal(signal.SIGCHLD, disposition)
    with child_deaths_deferred():
        assert signal.getsignal(signal.SIGCHLD) is disposition
    assert signal.getsignal(signal.SIGCHLD) is disposition


def test_off_the_main_thread_it_does_nothing():
    """Handlers can only be exchanged by the main thread; the block just runs."""
    handler, inside = Handler(), list[object]()

    def work() -> None:
        with child_deaths_deferred():
            inside.append(signal.getsignal(signal.SIGCHLD))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(30)
    assert inside == [handler]


def test_blocks_can_be_nested():
    """A save inside a safe point: the handler is called once, when the outer block ends."""
    handler = Handler()
    with child_deaths_deferred():
        with child_deaths_deferred():
            child_dies()
        assert handler.calls == 0
    assert handler.calls == 1


def test_a_handler_installed_inside_stays():
    """DataLoader installs its own at its first use: it keeps its place, and what it calls below works."""
    mine = Handler()
    with child_deaths_deferred():
        below = signal.getsignal(signal.SIGCHLD)
        assert callable(below)

        def on_top(number: int, frame: object) -> None:
            below(number, frame)

        signal.signal(signal.SIGCHLD, on_top)
    assert signal.getsignal(signal.SIGCHLD) is on_top
    child_dies()
    assert mine.calls == 1


def test_a_death_just_before_the_block_is_raised_after_it(monkeypatch: pytest.MonkeyPatch):
    """Exchanging handlers first runs the old one if its signal waits; its error is held back, not lost."""
    real, done = signal.signal, list[str]()

    def exchanging(number: int, handler: object) -> object:
        if not done:
            done.append("raised")
            raise RuntimeError("killed by signal")
        return real(number, handler)

    handler = dataloaders()
    monkeypatch.setattr(signal, "signal", exchanging)
    with pytest.raises(RuntimeError, match="killed by signal"), child_deaths_deferred():
        done.append("the block ran")
    assert done == ["raised", "the block ran"]
    assert signal.getsignal(signal.SIGCHLD) is handler


def test_an_interrupt_from_the_keyboard_is_not_held_back(monkeypatch: pytest.MonkeyPatch):
    """Only an error of the kind that DataLoader raises waits."""

    def interrupted(number: int, handler: object) -> object:
        raise KeyboardInterrupt

    Handler()
    with monkeypatch.context() as patched:
        patched.setattr(signal, "signal", interrupted)
        with pytest.raises(KeyboardInterrupt), child_deaths_deferred():
            raise AssertionError("the block must not run")


REAL_LOADER = """
import os, signal, sys, time
import torch
from torch.utils.data import DataLoader, Dataset
from spotsafe.reclaim.children import child_deaths_deferred

class Numbers(Dataset):
    def __len__(self):
        return 100
    def __getitem__(self, index):
        return index

batches = iter(DataLoader(Numbers(), batch_size=2, num_workers=1))
next(batches)
handler = signal.getsignal(signal.SIGCHLD)
print(handler.__module__, flush=True)
with child_deaths_deferred():
    os.kill(batches._workers[0].pid, signal.SIGKILL)
    batches._workers[0].join(30)
    print("saved", flush=True)
assert signal.getsignal(signal.SIGCHLD) is handler
try:
    for _ in batches:
        pass
except RuntimeError as error:
    print("found:", "exited unexpectedly" in str(error) or "killed" in str(error), flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_a_real_dataloader_finds_its_dead_worker_by_itself():
    """The worker dies inside the block: the block ends undisturbed, and the loader still reports the death."""
    done = subprocess.run(
        [sys.executable, "-c", REAL_LOADER], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.splitlines() == [
        "torch.utils.data._utils.signal_handling",
        "saved",
        "found: True",
    ], done.stderr
