"""Scripts as users write them are killed at random, and end bit for bit as if nothing had happened."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.e2e.processes import Launcher
from tests.proof import record as write_down
from tests.scripts.trial import PROGRAMS, Campaign, uninterrupted


@pytest.mark.slow
@pytest.mark.parametrize("kills", [4, pytest.param(30, marks=pytest.mark.prove)])
@pytest.mark.parametrize("script", PROGRAMS, ids=lambda path: path.stem)
def test_killed_at_random_it_ends_identical(
    launcher: Launcher, script: Path, kills: int, tmp_path: Path
) -> None:
    """Weights, moments, schedulers, generators, values; every loss and sample, also of what was made twice."""
    whole = uninterrupted(launcher, script, tmp_path / "whole")
    campaign = Campaign(launcher, script, tmp_path, whole, random.Random(f"{script.stem} {kills}"))
    campaign.kill(kills)
    write_down(f"script {script.stem}", **campaign.hits, identical_runs=campaign.runs)
