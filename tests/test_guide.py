"""docs/guide.md tells the truth: its code runs as it stands there, and does what is said around it."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from spotsafe.events import RunStarted, install
from spotsafe.testing.sinks import RecordingSink

GUIDE = (Path(__file__).parent.parent / "docs" / "guide.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", GUIDE, flags=re.DOTALL | re.MULTILINE)


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the page says that the program has, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def train_step() -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    return {
        "__name__": "page",
        "model": model,
        "optimizer": optimizer,
        "dataset": list(range(8)),
        "train_step": train_step,
    }


def run_blocks(page: dict[str, Any], *words: str) -> None:
    """Run the blocks that hold these words, in the order of the page."""
    found = [block for block in BLOCKS if any(word in block for word in words)]
    assert len(found) == len(words)
    for block in found:
        exec(compile(block, "docs/guide.md", "exec"), page)


@pytest.fixture
def started() -> Iterator[RecordingSink]:
    """The events of every session."""
    sink = RecordingSink()
    uninstall = install(sink)
    yield sink
    uninstall()


def test_which_checkpoint_and_from_where(page, started):
    """Each selector finds the one that the page says; a run begins with all values of another."""
    run_blocks(page, "best:val_loss", "InitFrom")

    weights = [page[name]["model.weight"].tolist() for name in ("newest", "third", "second")]
    assert weights[0] == weights[1] != weights[2]
    fresh = started.of(RunStarted)[-1]
    assert fresh.initialized == ("model", "optimizer")
    assert fresh.initialized_from is not None
    assert fresh.initialized_from.split("@")[0].endswith("runs/a")


def test_loaders_and_times(page, started):
    """The options are taken as they stand there."""
    run_blocks(page, "best:val_loss", "DataLoader", "timedelta")

    assert [event.url.rpartition("/")[2] for event in started.of(RunStarted)] == ["a", "b", "d"]


def test_a_notebook(page, capsys):
    """Without a block it is the same run, and says what it is."""
    page["spotsafe"] = __import__("spotsafe")
    run_blocks(page, ".start()")

    run = page["run"]
    assert capsys.readouterr().out.split() == [run.id, "3", "1", "None"]


def test_the_watcher(page, tmp_path, capsys):
    """A command's answer ends the loop, and the notice is there afterwards."""
    (tmp_path / "node-state").write_text("ready\n")
    page["spotsafe"] = __import__("spotsafe")
    timer = threading.Timer(0.5, lambda: (tmp_path / "node-state").write_text("draining\n"))
    timer.start()
    run_blocks(page, "class DrainWatcher:")
    page["DrainWatcher"].interval_s = 0.05
    run_blocks(page, "1_000_000")
    timer.join()

    assert page["run"].notice.source == "drain"
    assert 0 < page["run"].step < 1_000_000
    assert "action='drain'" in capsys.readouterr().out


def _tests_of(page: dict[str, Any], name: str) -> None:
    """Run the tests of a conformance class of the page, as pytest does."""
    tests = [one for one in dir(page[name]) if one.startswith("test_")]
    assert tests
    for test in tests:
        getattr(page[name](), test)()


def test_the_watcher_passes_the_suite_as_the_page_says(page):
    """The three functions are enough."""
    run_blocks(page, "class DrainWatcher:", "class TestDrainWatcher")
    page["TestDrainWatcher"]().quiet()

    _tests_of(page, "TestDrainWatcher")


def test_the_sink(page):
    """It gets what it asks for, and passes its suite."""
    page["spotsafe"] = __import__("spotsafe")
    run_blocks(page, "class Tracker:", "class TestTracker")

    told = [page["tracker"].waiting.get_nowait() for _ in range(2)]
    assert [one["step"] for one in told] == [1, 2]
    _tests_of(page, "TestTracker")


def test_every_block_runs_in_some_test():
    """A new one must not be forgotten."""
    assert len(BLOCKS) == 10
