"""Every store of ours passes the suite that we ask of every store."""

from __future__ import annotations

import errno
import os
import uuid
from pathlib import Path

import pytest

from spotsafe.storage import placing, writing
from spotsafe.storage.local import LocalStore
from spotsafe.storage.remote import FsspecStore
from spotsafe.storage.retrying import RetryingStore
from spotsafe.storage.store import Store
from spotsafe.testing.faults import CountingStore
from spotsafe.testing.stores import StoreConformance


def refuse(number: int):
    def call(*args: object, **kwargs: object) -> None:
        raise OSError(number, os.strerror(number))

    return call


class TestLocalStore(StoreConformance):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return LocalStore(str(tmp_path / "deep" / "run"))


class TestLocalStoreWithoutDirect(StoreConformance):
    """A file system that refuses O_DIRECT when a file is opened, after having created it."""

    @pytest.fixture
    def store(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
        real = os.open

        def open_(path: str, flags: int, *args: int, **kwargs: int) -> int:
            if flags & os.O_DIRECT:
                os.close(real(path, flags & ~os.O_DIRECT, *args, **kwargs))
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
            return real(path, flags, *args, **kwargs)

        monkeypatch.setattr(writing.os, "open", open_)
        return LocalStore(tmp_path / "run")


class TestLocalStoreWithoutLink(StoreConformance):
    """A share that has no hard links: `renameat2` does it."""

    @pytest.fixture
    def store(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
        monkeypatch.setattr(placing.os, "link", refuse(errno.EPERM))
        return LocalStore(tmp_path / "run")


class TestLocalStoreWithoutLinkAndRename(StoreConformance):
    """A user-space file system that has neither: rule 12."""

    atomic_create = False

    @pytest.fixture
    def store(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
        monkeypatch.setattr(placing.os, "link", refuse(errno.EPERM))
        monkeypatch.setattr(placing, "rename_noreplace", refuse(errno.EINVAL))
        return LocalStore(tmp_path / "run")


class TestMemory(StoreConformance):
    @pytest.fixture
    def store(self) -> Store:
        return FsspecStore(f"memory://{uuid.uuid4().hex}/run")


class TestFsspecOnFiles(StoreConformance):
    """A backend without conditional writes: fsspec looks and then writes in place."""

    atomic_create = False
    whole_or_nothing = False

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return FsspecStore(f"file://{tmp_path}/run")


class TestRetrying(StoreConformance):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return RetryingStore(LocalStore(tmp_path / "run"), sleep=lambda _seconds: None)


class TestWrapped(StoreConformance):
    """A wrapping store hands everything through."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return CountingStore(LocalStore(tmp_path / "run"))
