"""States of several files, which are written while the rest of them is still being copied."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spotsafe import events as ev
from spotsafe.tensors import plan, staging
from spotsafe.testing.memory import MemoryStore
from tests.session.places import steps_there, train
from tests.session.rig import Program


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this were a state of gigabytes."""
    monkeypatch.setattr(plan, "FIRST_FILE_BYTES", 64)


def test_resumes_bit_for_bit(tmp_path: Path) -> None:
    """The same end as of a run that was never interrupted, and events in their order."""
    whole = Program()
    with whole.session(MemoryStore()) as run:
        train(whole, run, 8)
    for until in (3, 8):
        program = Program()
        with program.session(tmp_path / "run") as run:
            train(program, run, until)
        files = [event.file for event in program.of(ev.FileWritten)]
        assert len(set(files)) > 2
        last = max(
            number for number, event in enumerate(program.sink.events) if isinstance(event, ev.SaveStaged)
        )
        published = max(
            number
            for number, event in enumerate(program.sink.events)
            if isinstance(event, ev.CheckpointPublished)
        )
        assert last < published
    assert program.weights() == whole.weights()
    assert program.seen == whole.seen[3:]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_copy_that_fails_half_way_is_no_checkpoint(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is the program's, as of any copy; nothing of that save counts, and the next attempt goes on."""
    store, program, copy, left = MemoryStore(), Program(), staging.copy_bytes, [0]

    def fail(*arguments: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise error("the device is gone")
        return copy(*arguments)

    monkeypatch.setattr(staging, "copy_bytes", fail)
    with (
        pytest.raises(error, match="the device is gone"),
        program.session(store, save_every=2, keep=10) as run,
    ):
        for step, batch in run.steps(program.loader, until=8):
            program.train(step, batch)
            run.wait()
            left[0] = 3 if step == 5 else 0
    assert steps_there(store) == [4, 2]
    assert not program.of(ev.SaveFailed)
    again = Program()
    with again.session(store, save_every=2, keep=10) as run:
        assert run.step == 4
        train(again, run, 8)
    assert steps_there(store) == [8, 6, 4, 2]
