"""Listings end, whatever a bucket holds and a server says."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from spotsafe.errors import StorageError
from spotsafe.storage import listing
from spotsafe.storage.listing import Pages, bounded
from spotsafe.storage.local import LocalStore

MARKERS = {"NextKey": "Key", "NextUpload": "Upload"}


def pages() -> Pages:
    return Pages(MARKERS, where="s3://bucket/run/a/", path="a/")


def page(**members: object) -> dict[str, object]:
    return {"IsTruncated": True, **members}


def test_as_many_names_as_there_may_be_are_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit itself is no error; one more is, and nothing is asked for behind it."""
    monkeypatch.setattr(listing, "MAX_NAMES", 3)
    assert list(bounded(range(3), where="x", path="")) == [0, 1, 2]
    with pytest.raises(StorageError, match="more than 3 names"):
        list(bounded(range(3), where="x", path="", before=1))
    endless = itertools.count()
    with pytest.raises(StorageError, match="runs/a holds more than 3 names") as caught:
        list(bounded(endless, where="runs/a", path="a"))
    assert caught.value.path == "a"
    assert next(endless) == 4


def test_pages_lead_on() -> None:
    """Each marker becomes the parameter that it is for; one that is missing is left out; the last page ends it."""
    one = pages()
    assert one.after(page(NextKey="a", NextUpload="1")) == {"Key": "a", "Upload": "1"}
    assert one.after(page(NextKey="a", NextUpload="2")) == {"Key": "a", "Upload": "2"}
    assert one.after(page(NextKey="b", NextUpload="")) == {"Key": "b"}
    assert one.after({"IsTruncated": False, "NextKey": "c"}) is None
    assert one.after({}) is None


@pytest.mark.parametrize("last", [{}, {"NextKey": ""}, {"Other": "x"}])
def test_a_page_that_leads_nowhere(last: dict[str, str]) -> None:
    """ "There is more", without a word where: an error that names the place."""
    with pytest.raises(StorageError, match=r"s3://bucket/run/a/: .* not where"):
        pages().after(page(**last))


@pytest.mark.parametrize("round_trip", [["a"], ["a", "b"], ["a", "b", "c", "d", "e"]])
def test_pages_that_lead_back(round_trip: list[str]) -> None:
    """At once, or by way of others: no page is asked for twice."""
    one = pages()
    for key in round_trip:
        one.after(page(NextKey=key))
    with pytest.raises(StorageError, match="leads back"):
        one.after(page(NextKey=round_trip[0]))


def test_pages_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ever new ones, with nothing in them."""
    monkeypatch.setattr(listing, "_MAX_PAGES", 50)
    one = pages()
    for number in range(50):
        one.after(page(NextKey=str(number)))
    with pytest.raises(StorageError, match="more than 50 pages"):
        one.after(page(NextKey="50"))


def filled(folder: Path, names: int) -> LocalStore:
    (folder / "checkpoints" / "deeper").mkdir(parents=True)
    for number in range(names):
        (folder / "checkpoints" / "deeper" / str(number)).touch()
    return LocalStore(folder)


@pytest.mark.parametrize("call", ["list", "begun", "abort_uploads"])
def test_a_folder_that_somebody_filled(tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders count too, however they lie in each other; the error says what to do."""
    monkeypatch.setattr(listing, "MAX_NAMES", 10)
    store = filled(tmp_path / "run", 9)
    getattr(store, call)("checkpoints")
    (tmp_path / "run" / "checkpoints" / "deeper" / "9").mkdir()
    with pytest.raises(StorageError, match="remove what is not of this run"):
        getattr(store, call)("checkpoints")


def test_names_of_a_folder_that_somebody_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first look of a start."""
    monkeypatch.setattr(listing, "MAX_NAMES", 10)
    store = filled(tmp_path / "run", 10)
    assert len(store.names("checkpoints/deeper")) == 10
    (tmp_path / "run" / "checkpoints" / "deeper" / "more").touch()
    with pytest.raises(StorageError, match="more than 10 names"):
        store.names("checkpoints/deeper")
