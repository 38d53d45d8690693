"""What checkpoints a run has, for those who choose one: history, selectors, and the list for people."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from spotsafe.checkpoint.attempts import read_attempt, read_branch
from spotsafe.checkpoint.branch import Branch, is_set_aside
from spotsafe.checkpoint.candidates import (
    Candidate,
    Listing,
    by_folder,
    candidates,
    listing_of,
    look,
    missing_from,
    read_candidate,
    read_index,
    read_many,
    with_its_pin,
)
from spotsafe.checkpoint.layout import ATTEMPTS, CHECKPOINTS, CheckpointName, parse_attempt
from spotsafe.checkpoint.manifest import Manifest
from spotsafe.checkpoint.pins import READER, pinned_manifest, read_pins
from spotsafe.errors import (
    CheckpointNotFound,
    DamagedCheckpoint,
    NoUsableCheckpoint,
    StorageLinked,
    StorageNotFolder,
    StorageRefused,
    UnsupportedFormat,
)
from spotsafe.storage.store import Store

__all__ = [
    "Candidate",
    "Listing",
    "Row",
    "candidates",
    "check_history",
    "list_rows",
    "look",
    "read_candidate",
    "read_index",
    "refuse_parent",
    "resolve",
    "run_url",
    "split_target",
]

Place = TypeVar("Place", bound="str | os.PathLike[str] | Store")

_log = logging.getLogger(__name__)

_BEST = re.compile(r"best(?::(?P<metric>.+?))?(?::(?P<mode>min|max))?")
_SHOWN = 20
_LOOKED_INTO = 20
"""Folders in which a new run looks for others, so that a start beside thousands of files takes no longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of ``spotsafe ls``."""

    candidate: Candidate
    stored_bytes: int
    """What lies in the folder now."""
    problem: str
    """Why it cannot be used, as far as is known without its data; empty if nothing speaks against it."""
    set_aside: bool = False
    """Whether a rollback left it behind: it is whole, and only a rollback to it brings it back."""
    pinned: bool = False
    """Whether a reader keeps it from being deleted."""


def split_target(url: str) -> tuple[str, str | int | None]:
    """Split ``URL@latest``, ``URL@best``, ``URL@4000`` or ``URL@<checkpoint's name>`` into url and selector.

    An ``@`` that no selector follows belongs to the url. To name a folder that is itself called
    ``something@4000``, end it with a slash.

    Returns:
        The url, and the selector for `resolve`: ``"latest"``, ``"best"`` (also ``"best:val_loss"`` and
        ``"best:acc:max"``), a checkpoint's name, the step as an int, or None.
    """
    base, at, tail = url.rpartition("@")
    if not at or not base:
        return url, None
    if tail.isascii() and tail.isdigit():
        return base, int(tail)
    if tail == "latest" or _BEST.fullmatch(tail) or CheckpointName.parse(tail) is not None:
        return base, tail
    return url, None


def run_url(url: Place) -> Place:
    """The url of a run that something is written to, as it is.

    Raises:
        ValueError: it selects a checkpoint. Nobody can write to one, and a run of that name could not be named.
    """
    if isinstance(url, (str, os.PathLike)) and split_target(str(url))[1] is not None:
        raise ValueError(
            f"{url}: a run has no @ with a checkpoint behind it. To go on from an older checkpoint use "
            "`spotsafe rollback`, to begin a new run with one init_from="
        )
    return url


def refuse_parent(store: Store) -> None:
    """Make sure that no run is begun in a folder which holds runs: its checkpoints would lie among them.

    Raises:
        ValueError: it holds runs and is none.
        StorageError: the store could not say.
    """
    names = store.names("")
    if {ATTEMPTS, CHECKPOINTS}.intersection(names):
        return
    run = next((name for name in sorted(names)[:_LOOKED_INTO] if _has_attempts(store, name)), None)
    if run is not None:
        url = store.url.rstrip("/")
        raise ValueError(
            f"{url} is no run but a folder with runs, such as {url}/{run}; name one, or a new one in it"
        )


def _has_attempts(folder: Store, name: str) -> bool:
    try:
        return any(parse_attempt(mark) is not None for mark in folder.names(f"{name}/{ATTEMPTS}"))
    except (StorageLinked, StorageNotFolder, StorageRefused, ValueError):
        return False  # nobody's run: a link, a file, somebody else's folder, a name that we never give


def resolve(
    store: Store, selector: str | int | None = "latest", *, branch: Branch | None = None
) -> Candidate:
    """The published checkpoint that a person asked for; its manifest is there and readable.

    What a rollback set aside is never the latest or the best. Asked for by its step it is found where the present
    branch has no such step, and by its full name always.

    Args:
        store: the run.
        selector: from `split_target`; None is the latest. ``best`` counts healthy checkpoints only, takes the
            lowest value unless it ends in ``:max``, and needs no name of a metric where there is only one.
        branch: the rollbacks that count, if they are known; by default those of the newest record.

    Raises:
        CheckpointNotFound: there is none like that; the message lists what is there.
        UnsupportedFormat: a newer spotsafe wrote one that may be the right one.
        DamagedCheckpoint: nobody knows whether the run was rolled back.
        StorageError: the store could not say.
        ValueError: a selector that means nothing.
    """
    listing = look(store)
    if branch is None:
        named = isinstance(selector, str) and CheckpointName.parse(selector) is not None
        branch = () if named else read_branch(store, listing)  # a full name means the same on every branch
    present = listing.on(branch)
    if isinstance(selector, str) and _BEST.fullmatch(selector):
        return _best(store, present, selector)
    reasons = []
    for name in _wanted(listing, present, selector):
        candidate = with_its_pin(store, read_candidate(store, name), branch)
        if candidate.manifest is not None:
            return candidate
        _pass_over(candidate)
        if selector not in {None, "latest"}:
            pinned = pinned_manifest(store, name) if candidate.absent else None
            if pinned is not None:
                return Candidate(name=name, manifest=pinned)
            reasons.append(f"{name}: {candidate.reason}")
    found = f" ({'; '.join(reasons)})" if reasons else ""
    raise CheckpointNotFound(
        f"{store.url} has no checkpoint {_words(selector)}{found}; {_inventory(store, present)}"
    )


def check_history(store: Store, *, listing: Listing, reasons: Mapping[str, str] | None = None) -> None:
    """Decide whether a run in which no usable checkpoint was found may start afresh.

    It may only if no manifest has ever been seen in it: none is there now in whatever state, no attempt has
    published, and none saw one.

    Args:
        store: the run.
        listing: a look that was taken after the claim, or the one before it.
        reasons: for each checkpoint that is there and cannot be used, or was retired, why.

    Raises:
        NoUsableCheckpoint: there is, or was, a checkpoint.
        StorageError: a record could not be read.
        DamagedCheckpoint: a record is damaged, so that nobody knows.
    """
    if reasons:
        details = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise NoUsableCheckpoint(
            f"{store.url} has checkpoints, but none can be used: {details}. Nothing was started afresh. "
            "Repair the folder, or use another one",
            url=store.url,
            reasons=reasons,
        )
    witness = _witness(store, listing)
    if witness:
        raise NoUsableCheckpoint(
            f"{store.url} shows no checkpoint, but {witness}. Nothing was started afresh. "
            "Bring the checkpoints back, or use another folder",
            url=store.url,
        )


def list_rows(store: Store, *, now: float = 0.0) -> list[Row]:
    """Every checkpoint folder of the run, newest first, with what a listing and the manifests tell.

    Args:
        store: the run.
        now: Unix seconds, for pins; by default none of them is over.

    Raises:
        StorageError: the store could not say.
    """
    marks = store.names(ATTEMPTS)
    folders = by_folder(store.list(CHECKPOINTS))
    branch = _branch_for_people(store, listing_of(marks, map(str, folders)))
    pins = [(name, pin) for name, pin in read_pins(store) if pin is None or pin.purpose == READER]
    held = {name for name, pin in pins if pin is None or pin.lasts(now)}
    rows = []
    for found in read_many(store, sorted(folders, reverse=True)):
        candidate = with_its_pin(store, found, branch)
        sizes = folders[candidate.name]
        problem = candidate.reason
        if candidate.manifest is not None:
            problem = missing_from(candidate.manifest, folders)
        row = Row(
            candidate=candidate,
            stored_bytes=sum(sizes.values()),
            problem=problem,
            set_aside=is_set_aside(candidate.name, branch),
            pinned=candidate.name in held,
        )
        rows.append(row)
    return rows


def _branch_for_people(store: Store, listing: Listing) -> Branch:
    """As far as it is known: a list of what is there is what one needs when a record is damaged."""
    try:
        return read_branch(store, listing)
    except (DamagedCheckpoint, UnsupportedFormat) as error:
        _log.warning("%s; whatever is there is listed as if there had been no rollback", error)
        return ()


def _wanted(listing: Listing, present: Listing, selector: str | int | None) -> list[CheckpointName]:
    """What the selector may mean, the first guess first. A full name is asked for by its key: a listing may be old."""
    named = CheckpointName.parse(selector) if isinstance(selector, str) else None
    if named is not None:
        return [named]
    if isinstance(selector, str) and selector != "latest":
        raise ValueError(
            f"not a checkpoint selector: {selector!r}; write latest, best, a step or a full name"
        )
    names = list(present.names)
    if selector not in {None, "latest"}:
        names += [name for name in listing.names if name not in set(present.names)]
    return [name for name in names if _matches(name, selector)]


def _matches(name: CheckpointName, selector: str | int | None) -> bool:
    if selector is None or selector == "latest":
        return True
    return name.step == selector


def _pass_over(candidate: Candidate) -> None:
    if isinstance(candidate.fault, UnsupportedFormat):
        raise candidate.fault
    if candidate.fault is not None:
        _log.warning("checkpoint passed over: %s", candidate.fault)


def _words(selector: str | int | None) -> str:
    if selector is None or selector == "latest":
        return "yet"
    return f"of step {selector}" if isinstance(selector, int) else f"{selector!r}"


def _best(store: Store, listing: Listing, selector: str) -> Candidate:
    match = _BEST.fullmatch(selector)
    assert match is not None
    found = read_many(store, listing.names)
    for candidate in found:
        _pass_over(candidate)
    saved = [(one, one.manifest) for one in found if one.manifest is not None and one.manifest.health.healthy]
    metric = match["metric"] or _only_metric(store, [manifest for _, manifest in saved])
    sign = -1.0 if match["mode"] == "max" else 1.0
    measured = [
        (sign * value, one)
        for one, manifest in saved
        if math.isfinite(value := manifest.metrics.get(metric, math.nan))
    ]
    if not measured:
        raise CheckpointNotFound(
            f"no healthy checkpoint of {store.url} has a finite {metric!r}; {_inventory(store, listing)}"
        )
    return min(measured, key=lambda pair: pair[0])[1]  # of equal ones the first, which is the newest


def _only_metric(store: Store, manifests: Iterable[Manifest]) -> str:
    metrics = sorted({metric for manifest in manifests for metric in manifest.metrics})
    if len(metrics) == 1:
        return metrics[0]
    if not metrics:
        raise CheckpointNotFound(
            f"no healthy checkpoint of {store.url} has a metric; save one with run.save(metrics={{...}})"
        )
    raise ValueError(
        f"{store.url} has several metrics ({', '.join(metrics)}); write @best:{metrics[0]} or the like"
    )


def _inventory(store: Store, listing: Listing) -> str:
    there = [one.name for one in read_many(store, listing.names[:_SHOWN]) if one.manifest is not None]
    if not there and not listing.attempts and not listing.names:
        return "there is no run of that name; `spotsafe ls` shows the runs of a folder"
    if not there:
        return "there is none at all" if not listing.names else "none of those begun was ever published"
    more = ", ..." if len(listing.names) > _SHOWN else ""
    return "there are steps " + ", ".join(str(name.step) for name in there) + more


def _witness(store: Store, listing: Listing) -> str:
    if listing.published:
        return f"attempt {max(listing.published)} has published one"
    for attempt in reversed(listing.attempts):
        seen = read_attempt(store, attempt).newest_seen
        if seen is not None:
            return f"attempt {attempt} saw {seen}"
    return ""
