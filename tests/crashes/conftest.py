"""One fork server for all these tests."""

from __future__ import annotations

import faulthandler
from collections.abc import Iterator

import pytest

from tests.e2e import processes
from tests.e2e.processes import Launcher


@pytest.fixture(autouse=True)
def as_long_as_it_takes() -> None:
    """All steps take minutes, and each wait in them is bounded by itself."""
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    """Its children have imported what their script needs."""
    with processes.launcher("tests.crashes.process") as one:
        yield one
