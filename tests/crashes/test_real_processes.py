"""A real process is gone before and after each step of a save, publish, retention and gc, on local disk.

What `test_every_step` does with exceptions, this does with `os._exit`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from spotsafe.events import CheckpointPublished
from tests.crashes.lives import CLEANING, SAVING, Life, go_on_after, names_in
from tests.crashes.places import Disk, Level
from tests.crashes.process import start
from tests.e2e.processes import Launcher
from tests.proof import record as write_down

pytestmark = pytest.mark.slow

CRASHED = 9
"""The exit status of `spotsafe.testing.faults.kill_process`."""
Ends = Callable[..., int]
SHARE = 200
"""Of the steps one in so many is tried each time; all of them by `make prove`."""


@pytest.fixture
def ends(launcher: Launcher, tmp_path: Path) -> Ends:
    """Ends processes that live a life; answers how many."""

    def end(life: Life, level: Level, kind: str, *, share: int) -> int:
        disk, before, status, tried = Disk(tmp_path), life.before(), CRASHED, 0
        at = 1 + (kind == "after") * share // 2
        while status == CRASHED:
            store, log = disk.lay(before), tmp_path / f"{at}.log"
            options = {"run": store.url, "life": life.name, "level": level, "at": at, "kind": kind}
            status = start(launcher, log, options).end()
            text = log.read_text()
            assert status == (0 if "ended" in text.split() else CRASHED), text
            told = [
                names_in(line) for line in text.splitlines() if line.startswith(CheckpointPublished.__name__)
            ]
            go_on_after(life, store, set(before.published).union(*told))
            at, tried = at + share, tried + 1
        return tried - 1

    return end


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.prove)], ids=["share", "all"])
@pytest.mark.parametrize("kind", ["before", "after"])
@pytest.mark.parametrize("level", ["operations", "inside"])
@pytest.mark.parametrize("life", [SAVING, CLEANING], ids=lambda life: life.name)
def test_gone_at_a_step(ends: Ends, life: Life, level: Level, kind: str, *, whole: bool) -> None:
    """At one after the other, until there is no such step, because the life has come to its end before."""
    tried = ends(life, level, kind, share=1 if whole else SHARE)
    what = "storage operation" if level == "operations" else Disk.inside
    write_down(f"{life.name}, on {Disk.name}: os._exit {kind} each {what}", tried=tried)
