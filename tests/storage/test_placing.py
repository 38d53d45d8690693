"""Giving a finished file its name: link, renameat2, and what remains without both."""

from __future__ import annotations

import ctypes
import errno
import os
import re
from pathlib import Path

import pytest

from spotsafe.storage import placing
from spotsafe.storage.placing import place_new, rename_noreplace

REFUSALS = [errno.EPERM, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EXDEV]


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    """A finished temporary file, and the name that it shall get."""
    temporary = tmp_path / ".tmp-1"
    temporary.write_bytes(b"mine")
    return str(temporary), str(tmp_path / "final")


def refuse(monkeypatch: pytest.MonkeyPatch, *, link: int | None = None, rename: int | None = None) -> None:
    def call(number: int):
        def refused(source: str, target: str) -> None:
            raise OSError(number, os.strerror(number))

        return refused

    if link is not None:
        monkeypatch.setattr(os, "link", call(link))
    if rename is not None:
        monkeypatch.setattr(placing, "rename_noreplace", call(rename))


def content(path: str) -> bytes:
    return Path(path).read_bytes()


def test_link(files: tuple[str, str]) -> None:
    """The usual way is atomic."""
    assert place_new(*files) is True
    assert content(files[1]) == b"mine"


@pytest.mark.parametrize("number", REFUSALS)
def test_rename_where_link_is_refused(
    files: tuple[str, str], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """renameat2 is atomic too, and takes the temporary name away."""
    refuse(monkeypatch, link=number)
    assert place_new(*files) is True
    assert content(files[1]) == b"mine"
    assert not os.path.exists(files[0])


@pytest.mark.parametrize("number", REFUSALS)
def test_plain_rename_where_both_are_refused(
    files: tuple[str, str], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The last way works, and says that it is not atomic."""
    refuse(monkeypatch, link=errno.EPERM, rename=number)
    assert place_new(*files) is False
    assert content(files[1]) == b"mine"


@pytest.mark.parametrize(
    "refused", [{}, {"link": errno.EPERM}, {"link": errno.EPERM, "rename": errno.EINVAL}]
)
def test_a_taken_name(
    files: tuple[str, str], monkeypatch: pytest.MonkeyPatch, refused: dict[str, int]
) -> None:
    """None of the three ways overwrites, be the name a file's, a folder's or a broken link's."""
    refuse(monkeypatch, **refused)
    final = Path(files[1])
    for make, remove in (
        (lambda: final.write_bytes(b"theirs"), final.unlink),
        (final.mkdir, final.rmdir),
        (lambda: final.symlink_to("nowhere"), final.unlink),
    ):
        make()
        with pytest.raises(FileExistsError):
            place_new(*files)
        assert content(files[0]) == b"mine"
        remove()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.ENOENT, errno.EROFS])
def test_other_errors_are_not_refusals(
    files: tuple[str, str], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A disk that fails is not asked in another way."""
    refuse(monkeypatch, link=number)
    with pytest.raises(OSError, match=re.escape(os.strerror(number))) as caught:
        place_new(*files)
    assert caught.value.errno == number
    assert not os.path.exists(files[1])


def test_a_link_whose_reply_was_lost(files: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS repeats the request and is told that the name is taken: by our own file."""
    real = os.link

    def link(source: str, target: str) -> None:
        real(source, target)
        real(source, target)

    monkeypatch.setattr(os, "link", link)
    assert place_new(*files) is True
    assert content(files[1]) == b"mine"


def test_a_taken_name_that_vanishes(files: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The name was taken and is free again: still "exists"; the caller looks again."""
    refuse(monkeypatch, link=errno.EEXIST)
    with pytest.raises(FileExistsError):
        place_new(*files)


def test_renameat2_reports_errno(tmp_path: Path) -> None:
    """The system's error comes with its number and the names."""
    with pytest.raises(FileNotFoundError, match="missing") as caught:
        rename_noreplace(str(tmp_path / "missing"), str(tmp_path / "final"))
    assert caught.value.errno == errno.ENOENT
    assert caught.value.filename2 == str(tmp_path / "final")


def test_a_c_library_without_renameat2(files: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """An old C library is a refusal."""
    monkeypatch.setattr(ctypes, "CDLL", lambda *_args, **_options: object())
    with pytest.raises(OSError, match="implemented") as caught:
        rename_noreplace(*files)
    assert caught.value.errno == errno.ENOSYS
