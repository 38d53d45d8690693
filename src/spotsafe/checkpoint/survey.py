"""What lies in a run's folder, thing by thing: what is garbage, what is not, and why. Changes nothing."""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass, replace

from spotsafe.checkpoint.attempts import attempt_exists
from spotsafe.checkpoint.candidates import Candidate, by_folder, look
from spotsafe.checkpoint.cleaning import Cleaning, MayDelete
from spotsafe.checkpoint.deleting import files_in, is_strange
from spotsafe.checkpoint.layout import (
    ATTEMPTS,
    CHECKPOINTS,
    LEDGER,
    MANIFEST,
    PINS,
    CheckpointName,
    parse_attempt,
    parse_ledger_folder,
    parse_pin,
    parse_published,
)
from spotsafe.checkpoint.markers import EndedAt, is_over
from spotsafe.checkpoint.pins import read_pins
from spotsafe.events import Warned
from spotsafe.storage.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A file or a folder of the run."""

    path: str
    bytes: int
    delete: bool
    """Whether it is garbage."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """Everything in a run's folder."""

    attempt: int
    """The highest attempt; only what lower ones left is garbage."""
    items: tuple[Item, ...]
    obstacle: str
    """Why nothing may be deleted now; empty if nothing speaks against it."""


def highest_attempt(store: Store) -> int:
    """The highest attempt that left any trace. Asked by key too: a listing may be old.

    Raises:
        StorageError: the store could not say.
    """
    highest = look(store).highest
    while attempt_exists(store, highest + 1):
        highest += 1
    return highest


def survey(store: Store, *, ended_at: EndedAt, now: float, may_delete: MayDelete) -> Survey:
    """Look at everything below the run's folder.

    Args:
        store: the run.
        ended_at: when an attempt ended, by its own record.
        now: Unix seconds.
        may_delete: which checkpoints of older attempts have no other writer.

    Raises:
        StorageError: the store could not say.
    """
    attempt = highest_attempt(store)
    warnings: list[str] = []
    cleaning = Cleaning(
        store=store,
        attempt=attempt,
        on_event=lambda event: warnings.append(event.message) if isinstance(event, Warned) else None,
        known={},
        may_delete=may_delete,
        now=now,
    )
    obstacle = "" if cleaning.look() else warnings[-1]
    entries = store.list("")
    folders = by_folder(entries)
    others = [(entry.path, entry.size) for entry in entries if not _is_in(entry.path, folders)]
    items = [_other(path, size) for path, size in others]
    explainer = _Explainer(cleaning, ended_at=ended_at, now=now)
    for name, sizes in sorted(folders.items()):
        items += explainer.folder(name, sizes)
    if obstacle:
        items = [replace(item, delete=False, reason=obstacle) if item.delete else item for item in items]
    return Survey(attempt=attempt, items=tuple(sorted(items, key=lambda item: item.path)), obstacle=obstacle)


def _is_in(path: str, folders: Container[CheckpointName]) -> bool:
    top, _, rest = path.partition("/")
    folder, inside, _ = rest.partition("/")
    name = CheckpointName.parse(folder)
    return top == CHECKPOINTS and bool(inside) and name is not None and name in folders


def _other(path: str, size: int) -> Item:
    """What lies in no checkpoint's folder; none of it is ever deleted."""
    top, _, rest = path.partition("/")
    inner = rest.partition("/")[0]
    reason = "not ours"
    if top == ATTEMPTS and (parse_attempt(rest) is not None or parse_published(rest) is not None):
        reason = "the record of an attempt, which is never deleted"
    elif top == LEDGER and parse_ledger_folder(inner) is not None:
        reason = "the ledger of an attempt"
    elif top == PINS and parse_pin(rest) is not None:
        reason = "a reader's pin"
    return Item(path=path, bytes=size, delete=False, reason=reason)


class _Explainer:
    """Says of each thing in a checkpoint's folder whether it is garbage."""

    def __init__(self, cleaning: Cleaning, *, ended_at: EndedAt, now: float) -> None:
        self._cleaning, self._ended_at, self._now = cleaning, ended_at, now
        self._needed = cleaning.needed()
        self._pinned = {name for name, pin in read_pins(cleaning.store) if pin is None or pin.lasts(now)}

    def folder(self, name: CheckpointName, sizes: dict[str, int]) -> Iterator[Item]:
        """One item for what is kept or goes as a whole, and one for each exception."""
        mine = files_in(name, sizes)
        strangers = [
            path for path in sizes if path != name.manifest and path[len(name.folder) + 1 :] not in mine
        ]
        for path in strangers:
            yield Item(path=path, bytes=sizes[path], delete=False, reason="not ours")
        whole = self._whole(name, sizes)
        if whole is not None:
            total = sum(sizes[path] for path in sizes if path not in strangers)
            yield Item(path=name.folder, bytes=total, delete=False, reason=whole)
            return
        needed = self._needed.among(name, mine)
        for file in sorted(mine):
            keep = f"other checkpoints refer to it{self._doubt()}" if file in needed else ""
            reason = keep or self._gone(name)
            path = name.file(file)
            yield Item(path=path, bytes=sizes[path], delete=not keep, reason=reason)
        if name.manifest in sizes:
            yield self._marker(name, sizes[name.manifest], empty=not needed and not strangers)

    def _whole(self, name: CheckpointName, sizes: dict[str, int]) -> str | None:
        """Why the whole folder is kept, or None if its files have to be judged one by one."""
        candidate, attempt = self._candidate(name, sizes), self._cleaning.attempt
        reasons = {
            "a published checkpoint; which of them to keep is the run's own decision": candidate.manifest
            is not None,
            f"its manifest cannot be read: {candidate.fault}": candidate.fault is not None,
            "a folder lies where its manifest would: not ours": (
                name.manifest not in sizes and is_strange(name, sizes)
            ),
            "a reader has pinned it": name in self._pinned,
            "of the newest attempt, which may be writing it; the next start cleans it up": name.attempt
            >= attempt,
            "its attempt recorded no end, and this store may not refuse a late writer": (
                not self._cleaning.may_delete(name)
            ),
        }
        return next((reason for reason, applies in reasons.items() if applies), None)

    def _candidate(self, name: CheckpointName, sizes: dict[str, int]) -> Candidate:
        cleaning = self._cleaning
        if name in cleaning.published:
            return Candidate(name=name, manifest=cleaning.published[name])
        if name in cleaning.markers:
            return Candidate(name=name, marker=cleaning.markers[name])
        return cleaning.read(name) if name.manifest in sizes else Candidate(name=name)

    def _gone(self, name: CheckpointName) -> str:
        marker = self._cleaning.markers.get(name)
        if marker is None:
            return f"of a save that was never published; attempt {self._cleaning.attempt} is newer"
        return f"left of a checkpoint that was {marker.state}"

    def _doubt(self) -> str:
        return f", or may: {self._needed.unknown}" if self._needed.unknown else ""

    def _marker(self, name: CheckpointName, size: int, *, empty: bool) -> Item:
        over = empty and is_over(self._cleaning.store, name.attempt, ended_at=self._ended_at, now=self._now)
        if over:
            reason = f"the marker of a checkpoint that is gone; no writer of attempt {name.attempt} can live"
        elif empty:
            reason = f"keeps the name from a writer of attempt {name.attempt}, which may still live"
        else:
            reason = "says which files in its folder are in use"
        return Item(path=f"{name.folder}/{MANIFEST}", bytes=size, delete=over, reason=reason)
