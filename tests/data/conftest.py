"""Fixtures for the tests of data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.data.traced import Traced


@pytest.fixture
def traced(tmp_path: Path) -> Callable[[int], Traced]:
    """Makes traced datasets, each with a trace of its own."""
    made = iter(range(1000))
    return lambda length: Traced(length, tmp_path / f"trace{next(made)}")
