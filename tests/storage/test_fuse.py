"""The whole suite for stores on real mounts: with all that a file system can have, and with as little as some do."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from spotsafe.storage.local import LocalStore
from spotsafe.storage.mounts import durability_doubt
from spotsafe.storage.retrying import RetryingStore
from spotsafe.storage.store import Store
from spotsafe.testing.stores import StoreConformance
from tests.storage.fuse import passthrough

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with passthrough(tmp_path_factory.mktemp("full")) as point:
        yield point


@pytest.fixture(scope="module")
def poor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    base = tmp_path_factory.mktemp("poor")
    with passthrough(base, "no-link", "no-noreplace", "no-direct", "no-folder-sync") as point:
        yield point


@pytest.fixture(scope="module")
def without_links(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with passthrough(tmp_path_factory.mktemp("links"), "no-link") as point:
        yield point


def on(point: Path) -> Store:
    """A new place on a mount, tried again as `open_store` has it.

    A file that is replaced between the kernel's look and its opening is a stale handle there (ESTALE), not an older
    file as on a disk.
    """
    return RetryingStore(LocalStore(point / uuid.uuid4().hex / "run"), sleep=lambda _seconds: None)


class TestOnAMount(StoreConformance):
    """Hard links, `O_DIRECT` and all."""

    @pytest.fixture
    def store(self, full: Path) -> Store:
        return on(full)


class TestOnAMountWithoutLinks(StoreConformance):
    """`renameat2` does it."""

    @pytest.fixture
    def store(self, without_links: Path) -> Store:
        return on(without_links)


class TestOnAPoorMount(StoreConformance):
    """No hard links, no renaming without going over what is there, no `O_DIRECT`, no sync of folders: rule 12."""

    atomic_create = False

    @pytest.fixture
    def store(self, poor: Path) -> Store:
        return on(poor)


def test_the_mounts_are_what_they_say(full: Path, poor: Path, without_links: Path) -> None:
    """The kernel answers as the suite above is told; else it would prove nothing."""
    for point, is_exclusive, links in (
        (full, True, True),
        (without_links, True, False),
        (poor, False, False),
    ):
        store = LocalStore(point / "said")
        assert store.create("a", b"1")
        assert store.exclusive is is_exclusive
        if links:
            os.link(point / "said" / "a", point / "said" / "b")
        else:
            with pytest.raises(PermissionError):
                os.link(point / "said" / "a", point / "said" / "b")
        doubt = durability_doubt(str(point / "said"))
        assert doubt is not None
        assert "fuse.passthrough" in doubt
    with pytest.raises(OSError, match="Invalid argument"):
        os.open(poor / "direct", os.O_CREAT | os.O_WRONLY | os.O_DIRECT)
    os.close(os.open(full / "direct", os.O_CREAT | os.O_WRONLY | os.O_DIRECT))
