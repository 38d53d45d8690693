"""Listings end: a run has a bounded number of names, and a server's pages must lead on.

What lies in a bucket or a folder, and what a server says of it, is nobody's promise. Without these limits a server
that gives one page again and again, or a folder that somebody fills with names, would hold a start for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from spotsafe.errors import StorageError

T = TypeVar("T")

MAX_NAMES = 1_000_000
"""Names that one listing may have. A checkpoint of a thousand ranks has some thousands; a run keeps a few of them."""
_MAX_PAGES = 100_000
"""Pages of a listing: they hold a thousand names each, but for some that a server has gone over in vain."""


def bounded(found: Iterable[T], *, where: str, path: str, before: int = 0) -> Iterator[T]:
    """The same, one by one, as long as there are not more than a run can have.

    Args:
        found: what a listing shows.
        where: what is listed, for people.
        path: the same inside the run.
        before: how many were found elsewhere in the same listing.

    Raises:
        StorageError: there are more.
    """
    for number, one in enumerate(found, before):
        if number >= MAX_NAMES:
            raise StorageError(
                f"{where} holds more than {MAX_NAMES} names, and a run has only some thousands; "
                "remove what is not of this run",
                path=path,
            )
        yield one


class Pages:
    """Where the next page of a listing is, and whether there can be one.

    Args:
        markers: which member of a page is which parameter of the request for the next.
        where: what is listed, for people.
        path: the same inside the run.
    """

    def __init__(self, markers: Mapping[str, str], *, where: str, path: str) -> None:
        self._markers = dict(markers)
        self._where = where
        self._path = path
        self._seen: set[tuple[tuple[str, str], ...]] = set()

    def after(self, page: Mapping[str, Any]) -> dict[str, Any] | None:
        """The parameters for the page behind this one; None if it is the last.

        Raises:
            StorageError: the page leads nowhere, or back to one that was there before, or there are too many.
        """
        if not page.get("IsTruncated"):
            return None
        more = {name: page[member] for member, name in self._markers.items() if page.get(member)}
        place = tuple(more.items())
        if not more:
            raise self._wrong("says that its list goes on, but not where")
        if place in self._seen:
            raise self._wrong("leads back to a page of its list that it gave before")
        if len(self._seen) >= _MAX_PAGES:
            raise self._wrong(f"gives more than {_MAX_PAGES} pages")
        self._seen.add(place)
        return more

    def _wrong(self, what: str) -> StorageError:
        return StorageError(
            f"cannot list {self._where}: the server {what}. Is it one that speaks S3?", path=self._path
        )
