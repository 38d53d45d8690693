"""One fork server for all these tests, and one reference."""

from __future__ import annotations

import faulthandler
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import harness, processes
from tests.e2e.harness import Bench, Record
from tests.e2e.processes import Launcher


@pytest.fixture(autouse=True)
def as_long_as_it_takes() -> None:
    """A campaign takes minutes on a busy machine, and each wait in it is bounded by itself."""
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    with processes.launcher() as one:
        yield one


@pytest.fixture(scope="session")
def reference(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Record:
    """The uninterrupted run of the script as it is."""
    return harness.uninterrupted(launcher, tmp_path_factory.mktemp("reference"))


@pytest.fixture
def make_bench(launcher: Launcher, reference: Record, tmp_path: Path) -> Callable[..., Bench]:
    """Makes run folders that are compared with the reference."""

    def make(name: str = "bench", **options: Any) -> Bench:
        return Bench(launcher, tmp_path / name, options, reference=reference)

    return make
