"""The benchmark of saves on a device counts what it says, and runs on the CPU too."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from benchmarks import gpu_save_cost
from benchmarks.gpu_save_cost import (
    WATCHED,
    Saving,
    Watch,
    WatchedTraining,
    line,
    main,
    measured,
    slower,
    width_of,
)

STEPS_BETWEEN, SAVES = 3, 2


def test_steps_are_sorted_by_what_goes_on_beside_them() -> None:
    """One that touches a copy is of the copy, also if the write has begun by its end."""
    watch = Watch(steps=[(float(second), second + 1.0) for second in range(8)])
    watch.saves = [Saving(called=1.5, copied=3.5, durable=5.5)]
    assert watch.during_copy() == [1.0] * 3
    assert watch.during_write() == [1.0] * 2
    assert watch.quiet() == [1.0] * 3


def test_a_save_without_a_copy_beside_training_has_no_such_steps() -> None:
    """All of it was between two steps."""
    watch = Watch(steps=[(0.0, 1.0), (2.0, 3.0)], saves=[Saving(called=1.0, copied=2.0, durable=2.0)])
    assert (watch.during_copy(), watch.during_write(), watch.quiet()) == ([], [], [1.0, 1.0])
    assert slower(watch.during_copy(), watch.quiet()) == "-"


def test_slower_is_told_in_percent() -> None:
    """Of medians, so that one slow step says nothing."""
    assert slower([1.1, 1.1, 9.0], [1.0, 1.0, 0.1]) == "+10.0 %"


def test_the_width_makes_a_state_of_the_size() -> None:
    """Weights and two moments, within a percent."""
    training = WatchedTraining(width_of(0.001), 1, "cpu")
    assert math.isclose(training.nbytes, 1e6, rel_tol=0.02)


@pytest.mark.parametrize("name", ["spotsafe", "torch", pytest.param("async", marks=pytest.mark.slow)])
def test_a_method_is_measured(device: torch.device, tmp_path: Path, name: str) -> None:
    """Each save is there with its times, each step once, and the row can be printed."""
    if name == "async":
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1
        )
    method = WATCHED[name](WatchedTraining(16, 2, device.type), str(tmp_path / "run"))
    try:
        row = measured(method, saves=SAVES, steps_between=STEPS_BETWEEN)
    finally:
        method.close()
        if name == "async":
            torch.distributed.destroy_process_group()
    assert len(row["blocked"]) == len(row["durable"]) == SAVES
    assert sum(len(row[kind]) for kind in ("quiet", "copy", "write")) == SAVES * STEPS_BETWEEN
    assert line(name, row).startswith(gpu_save_cost.METHODS[name][0])


def test_without_a_device_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And that is no error."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    main([])
    assert "no CUDA device" in capsys.readouterr().out


@pytest.mark.slow
def test_one_command_prints_one_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each method in a process of its own."""
    sizes = ["--gb", "0.0001", "--step", "0.001", "--saves", "2", "--steps-between", "4"]
    names = ["process"]  # the one with the most parts
    main(["--device", "cpu", "--folder", str(tmp_path), "--only", ",".join(names), *sizes])
    title, heads, *rows = capsys.readouterr().out.splitlines()
    assert "GB of state" not in title
    assert title.startswith("0.00 GB")
    assert "during copy" in heads
    assert [row[:44].strip() for row in rows] == [gpu_save_cost.METHODS[name][0] for name in names]
    assert not list(tmp_path.iterdir())
