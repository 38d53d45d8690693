"""What holds for every test: no launcher or cloud of the machine shows through, and no example is random."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

# A deadline would make a busy machine fail a correct test; `too_slow` is the same thing in another place.
settings.register_profile("dev", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("dev"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")

_OF_LAUNCHERS = ("AWS_", "SKYPILOT_", "SLURM", "SPOTSAFE_", "TORCHELASTIC_", "MASTER_", "JOB_COMPLETION_")
_OF_RANKS = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"}
_KEPT = {"SPOTSAFE_PROOF"}  # where `tests.proof` writes


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever launched the tests, each begins as a plain process on a machine of no cloud."""
    for name in list(os.environ):
        if (name.startswith(_OF_LAUNCHERS) or name in _OF_RANKS) and name not in _KEPT:
            monkeypatch.delenv(name)
