"""Versions: a document of the future is not damage, and a document without a version is no document."""

from __future__ import annotations

from typing import Any

import pytest

from spotsafe.checkpoint.versions import VERSION, check_version, unsupported
from spotsafe.errors import UnsupportedFormat


def test_this_version_is_understood() -> None:
    """Members of other names do not matter."""
    members = {**VERSION, "other": 1}
    assert check_version(members, file="c/f", checkpoint="c") == members


@pytest.mark.parametrize(
    ("members", "found"),
    [
        ({"format": 2, "requires": []}, "format 2"),
        ({"format": 1, "requires": ["tiles"]}, "format 1, tiles"),
        ({"format": 10**30, "requires": ["x" * 1000] * 1000}, "format 1000"),
    ],
)
def test_a_newer_format_or_a_requirement_asks_for_an_upgrade(members: Any, found: str) -> None:
    """The error says what the file needs, in bounded length."""
    with pytest.raises(UnsupportedFormat, match="upgrade spotsafe") as caught:
        check_version(members, file="c/f", checkpoint="c")
    assert caught.value.found.startswith(found)
    assert caught.value.checkpoint == "c"
    assert "c/f" in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    "members",
    [
        [],
        None,
        {},
        {"format": 1},
        {"requires": []},
        {"format": True, "requires": []},
        {"format": 1.0, "requires": []},
        {"format": 0, "requires": []},
        {"format": "1", "requires": []},
        {"format": 1, "requires": {}},
        {"format": 1, "requires": [1]},
    ],
)
def test_a_document_without_a_proper_version_is_none(members: Any) -> None:
    """A missing number is never taken for version 1."""
    with pytest.raises(ValueError, match=r"JSON object|format number|requirements"):
        check_version(members, file="c/f", checkpoint="c")


def test_unknown_words_are_listed() -> None:
    """The same error for a word that only a newer version writes."""
    assert unsupported(["dtype float2"], file="c/f", checkpoint="c").found == "dtype float2"
