"""Bytes into files, directly and through the page cache."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from spotsafe.storage.writing import (
    PAGE,
    flat,
    is_page_aligned,
    open_new,
    sync_folder,
    write_aligned,
    write_all,
)
from spotsafe.testing.stores import aligned_memory, pattern_bytes


def test_flat() -> None:
    """Any contiguous memory becomes a row of bytes; one that is a row already stays itself."""
    row = memoryview(b"abcd")
    assert flat(row) is row
    assert flat(memoryview(b"abcdabcd").cast("I")).tobytes() == b"abcdabcd"
    assert flat(memoryview(bytearray(6)).cast("B", (2, 3))).nbytes == 6
    assert len(flat(memoryview(b"ab").cast("c"))) == 2


def test_alignment() -> None:
    """A mapping begins at a page, also when it is read-only; a byte further is none."""
    memory = aligned_memory(bytes(2 * PAGE))
    assert is_page_aligned(memory)
    assert is_page_aligned(memory.toreadonly())
    assert not is_page_aligned(memory[1:])
    assert is_page_aligned(memory[PAGE:])


@pytest.mark.parametrize("size", [0, 1, PAGE - 1, PAGE, PAGE + 1, 5 * PAGE, 5 * PAGE + 4095])
@pytest.mark.parametrize("direct", [True, False])
def test_write_aligned(tmp_path: Path, size: int, direct: bool) -> None:
    """The file has exactly the bytes, however long the last page is, and the padding is gone."""
    data = pattern_bytes(size)
    fd = open_new(str(tmp_path / "file"), direct=direct)
    try:
        write_aligned(fd, aligned_memory(data))
    finally:
        os.close(fd)
    assert (tmp_path / "file").read_bytes() == data


def refusing(real: Callable[[int, memoryview], int], *, after: int, number: int) -> Callable[..., int]:
    """os.write that fails `number` on a direct descriptor after so many calls."""
    calls = 0

    def write(fd: int, data: memoryview) -> int:
        nonlocal calls
        calls += 1
        import fcntl

        if calls > after and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(number, os.strerror(number))
        return real(fd, data[:PAGE])

    return write


@pytest.mark.parametrize("after", [0, 1, 3])
@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_direct_write_that_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int, number: int
) -> None:
    """Wherever the refusal comes, the rest goes through the page cache, and nothing is lost or doubled."""
    data = pattern_bytes(3 * PAGE + 100)
    fd = open_new(str(tmp_path / "file"), direct=True)
    monkeypatch.setattr(os, "write", refusing(os.write, after=after, number=number))
    try:
        write_aligned(fd, aligned_memory(data))
    finally:
        os.close(fd)
    assert (tmp_path / "file").read_bytes() == data


def test_a_full_disk_is_not_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only "not this way" is tried in another way."""
    fd = open_new(str(tmp_path / "file"), direct=True)
    monkeypatch.setattr(os, "write", refusing(os.write, after=1, number=errno.ENOSPC))
    try:
        with pytest.raises(OSError, match="space"):
            write_aligned(fd, aligned_memory(bytes(4 * PAGE)))
    finally:
        os.close(fd)


def test_open_new_refuses_what_exists(tmp_path: Path) -> None:
    """An existing file, and a link to one, are never opened."""
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("file", "link"):
        for direct in (True, False):
            with pytest.raises(FileExistsError):
                open_new(str(tmp_path / name), direct=direct)
    assert not (tmp_path / "elsewhere").exists()


def test_open_new_does_without_direct(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that refuses O_DIRECT gets a plain file; other errors count."""
    real = os.open

    def refuse(number: int) -> None:
        def open_(path: str, flags: int, mode: int = 0o777) -> int:
            if flags & os.O_DIRECT:
                raise OSError(number, os.strerror(number))
            return real(path, flags, mode)

        monkeypatch.setattr(os, "open", open_)

    refuse(errno.EINVAL)
    os.close(open_new(str(tmp_path / "file"), direct=True))
    assert (tmp_path / "file").exists()
    refuse(errno.EACCES)
    with pytest.raises(PermissionError):
        open_new(str(tmp_path / "other"), direct=True)


def test_files_get_the_users_mode(tmp_path: Path) -> None:
    """Team mates who may read the user's files may read a run, as the umask says."""
    before = os.umask(0o027)
    try:
        os.close(open_new(str(tmp_path / "file")))
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640


def test_write_all_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short writes are continued where they stopped."""
    data = pattern_bytes(5000)
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, piece: real(fd, piece[:7]))
    fd = open_new(str(tmp_path / "file"))
    try:
        write_all(fd, memoryview(data))
    finally:
        os.close(fd)
    assert (tmp_path / "file").read_bytes() == data


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS])
def test_folders_that_cannot_be_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """A file system without such a call needs none; a disk that fails is an error."""

    def fail(error: int) -> None:
        def fsync(fd: int) -> None:
            raise OSError(error, os.strerror(error))

        monkeypatch.setattr(os, "fsync", fsync)

    fail(number)
    sync_folder(str(tmp_path))
    fail(errno.EIO)
    with pytest.raises(OSError, match="rror"):
        sync_folder(str(tmp_path))
