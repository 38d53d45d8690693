"""A fork server for these scripts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e import processes
from tests.e2e.processes import Launcher


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    with processes.launcher() as one:
        yield one
