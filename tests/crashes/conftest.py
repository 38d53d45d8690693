"""One fork server, and one client of a bucket."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.crashes.places import Seaweed
from tests.e2e import processes
from tests.e2e.processes import Launcher
from tests.servers import Server


@pytest.fixture(scope="module")
def bucket(seaweedfs: Server) -> Iterator[Seaweed]:
    """A bucket of a real server, by boto3."""
    seaweed = Seaweed(seaweedfs.endpoint)
    yield seaweed
    seaweed.close()


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    """Its children have imported what their script needs."""
    with processes.launcher("tests.crashes.process", "tests.writer.processes") as one:
        yield one
