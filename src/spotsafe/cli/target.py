"""What a TARGET on the command line means: a run, and perhaps one checkpoint of it."""

from __future__ import annotations

import click

from spotsafe.checkpoint.attempts import read_branch
from spotsafe.checkpoint.candidates import Candidate, Listing, candidates, look
from spotsafe.checkpoint.catalog import resolve, split_target
from spotsafe.checkpoint.layout import ATTEMPTS, CHECKPOINTS, CheckpointName
from spotsafe.errors import CheckpointNotFound
from spotsafe.storage.open import open_store
from spotsafe.storage.store import Store

target_argument = click.argument("target", metavar="TARGET")
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")


def open_target(target: str) -> tuple[Store, str | int | None]:
    """The store, and which checkpoint of it.

    Raises:
        click.UsageError: the URL means nothing.
    """
    url, selector = split_target(target)
    try:
        return open_store(url), selector
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def is_run(store: Store) -> bool:
    """Whether the folder is a run's. An empty or missing one is not."""
    return bool({ATTEMPTS, CHECKPOINTS}.intersection(store.names("")))


def check_run(store: Store) -> None:
    """Make sure that the folder is a run's.

    Raises:
        CheckpointNotFound: it is not.
    """
    if not is_run(store):
        todo = meant(store.url) or "try `spotsafe ls` with the folder above it"
        raise CheckpointNotFound(f"no run at {store.url}; {todo}")


def meant(url: str) -> str | None:
    """What to write instead of a target that points into a run or has a wrong word behind its @."""
    above, _, last = url.rstrip("/").rpartition("/")
    if CheckpointName.parse(last) is not None:
        return f"for that checkpoint: spotsafe show {above.removesuffix(f'/{CHECKPOINTS}')}@{last}"
    if last in {CHECKPOINTS, ATTEMPTS}:
        return f"the run is the folder above: {above}"
    if "@" in last:
        return "behind @ goes latest, best, a step, or a checkpoint's full name"
    return None


def chosen(store: Store, selector: str | int | None) -> Candidate:
    """The one published checkpoint that is meant; the latest if nothing is said.

    Raises:
        CheckpointNotFound: there is none like that.
        click.UsageError: the selector means nothing for this run.
    """
    check_run(store)
    try:
        return resolve(store, selector)
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def existing(store: Store, selector: str | int | None) -> list[CheckpointName]:
    """Names of the checkpoints to be examined, newest first, damaged ones among them.

    Unlike `chosen` this never steps past one that cannot be read: finding that out is why one examines.
    Without a selector it is every checkpoint of the run.

    Raises:
        CheckpointNotFound: there is none like that.
    """
    check_run(store)
    if isinstance(selector, str) and selector.startswith("best"):
        return [chosen(store, selector).name]
    named = CheckpointName.parse(selector) if isinstance(selector, str) else None
    listing = look(store)
    if selector is None or named is not None:
        there = [candidate.name for candidate in candidates(store, listing)]
        found = [name for name in there if named in {None, name}]
    else:  # what a rollback set aside is not the latest, and its step is meant only if there is no other
        present = listing.on(read_branch(store, listing))
        found = _first(store, present, selector) or _first(store, listing, selector)
    if not found:
        raise CheckpointNotFound(
            f"{store.url} has no checkpoint{'' if selector is None else f' {selector}'}; "
            "`spotsafe ls` shows what is there"
        )
    return found


def _first(store: Store, listing: Listing, selector: str | int) -> list[CheckpointName]:
    for candidate in candidates(store, listing):
        if selector in {"latest", candidate.name.step}:
            return [candidate.name]
    return []
