"""Paths of objects: what is one, and what is refused."""

from __future__ import annotations

import pytest

from spotsafe.storage.paths import TEMPORARY, check_folder, check_path, is_temporary, temporary_name


@pytest.mark.parametrize("path", ["a", "a/b", "a/b/c.json", "..a", "a..", "...", "-", " ", "a b", ".hidden"])
def test_good_paths_come_back_as_they_are(path: str) -> None:
    """A legal path is handed through unchanged."""
    assert check_path(path) == path
    assert check_folder(path) == path


@pytest.mark.parametrize(
    "path", ["/", "/a", "a/", "a//b", ".", "..", "a/..", "./a", "a\0b", f"a/{TEMPORARY}1/b"]
)
def test_bad_paths(path: str) -> None:
    """The message shows the path."""
    for check in (check_path, check_folder):
        with pytest.raises(ValueError, match=r"path|reserved") as caught:
            check(path)
        assert repr(path) in str(caught.value)


def test_the_empty_path_is_the_run_and_no_object() -> None:
    """Only a folder may be empty."""
    assert check_folder("") == ""
    with pytest.raises(ValueError, match="empty"):
        check_path("")


def test_temporary_names() -> None:
    """They are known again, and differ."""
    names = {temporary_name() for _ in range(100)}
    assert len(names) == 100
    assert all(is_temporary(name) and "/" not in name for name in names)
    assert not is_temporary("data-00000-000.safetensors")
