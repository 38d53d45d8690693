"""What is open at a descriptor, and closing it only if that is still ours."""

from __future__ import annotations

import os
from pathlib import Path

from spotsafe.descriptors import close_if, file_at


def test_a_descriptor_is_closed_if_the_same_file_is_open_there(tmp_path: Path) -> None:
    """Else it is somebody's, or nobody's, and left alone."""
    fd = os.open(tmp_path / "ours", os.O_CREAT | os.O_RDWR)
    ours = file_at(fd)
    assert ours is not None
    close_if(ours, fd)
    assert file_at(fd) is None
    close_if(ours, fd)
    assert os.open(tmp_path / "another", os.O_CREAT | os.O_RDWR) == fd, "the lowest number that is free"
    close_if(ours, fd)
    close_if(None, fd)
    assert file_at(fd) not in (None, ours)
    os.close(fd)


def test_no_descriptor_is_no_file() -> None:
    """Minus one stands for none."""
    assert file_at(-1) is None
    close_if(None, -1)
