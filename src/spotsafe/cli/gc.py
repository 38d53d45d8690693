"""``spotsafe gc``: what dead attempts left behind, and why everything else is kept."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from functools import partial
from typing import Any

import click

from spotsafe import human
from spotsafe.checkpoint.clearing import delete_garbage, find_garbage
from spotsafe.checkpoint.survey import Item, Survey
from spotsafe.cli.output import print_json, print_table, say
from spotsafe.cli.target import check_run, json_option, open_target, target_argument
from spotsafe.events import DeleteRefused, Event
from spotsafe.ledger.reading import ended_at
from spotsafe.storage.store import Store


@click.command("gc", short_help="Show, or delete, what dead attempts left behind.")
@target_argument
@click.option("--delete", is_flag=True, help="Delete it. Without this nothing is changed.")
@json_option
def command(target: str, *, delete: bool, as_json: bool) -> None:
    """Show what attempts that are over left behind, and what is kept and why; with --delete, delete it.

    Garbage are the files of saves that were never published, what is left of withdrawn checkpoints, and markers
    that guard against nobody any more. Published checkpoints are never touched: which of them to keep is the run's
    own decision. Nor is anything of the newest attempt, so this is safe beside a running job, nor what spotsafe did
    not write. Uploads that older attempts began and never completed are given up with --delete.
    """
    store, selector = open_target(target)
    if selector is not None:
        raise click.UsageError(f"gc cleans a whole run; write {target.rpartition('@')[0]}")
    check_run(store)
    now = time.time()
    found = _survey(store, now=now)
    garbage = [item for item in found.items if item.delete]
    refused = _delete(store, found, now=now) if delete and not found.obstacle else []
    left = {item.path for item in _survey(store, now=now).items} if delete else set[str]()
    records = [_record(item, gone=delete and item.delete and item.path not in left) for item in found.items]
    if as_json:
        total = sum(item.bytes for item in garbage)
        print_json({
            "url": store.url, "attempt": found.attempt, "deleted": delete, "garbage_bytes": total,
            "obstacle": found.obstacle, "refused": refused, "items": records,
        })  # fmt: skip
    else:
        _print(store, found, records, deleted=delete, refused=refused)
    if refused or (delete and any(record["delete"] and not record["gone"] for record in records)):
        sys.exit(1)


def _survey(store: Store, *, now: float) -> Survey:
    return find_garbage(store, ended_at=partial(ended_at, store), now=now)


def _delete(store: Store, found: Survey, *, now: float) -> list[dict[str, str]]:
    """What the store refused."""
    refused: list[dict[str, str]] = []

    def note(event: Event) -> None:
        if isinstance(event, DeleteRefused):
            refused.append({"path": event.path, "error": event.error})

    delete_garbage(store, found, ended_at=partial(ended_at, store), now=now, on_event=note)
    return refused


def _record(item: Item, *, gone: bool) -> dict[str, Any]:
    return {
        "path": item.path,
        "stored_bytes": item.bytes,
        "delete": item.delete,
        "gone": gone,
        "reason": item.reason,
    }


def _print(
    store: Store,
    found: Survey,
    records: Iterable[dict[str, Any]],
    *,
    deleted: bool,
    refused: Iterable[dict[str, str]],
) -> None:
    words = {
        (False, False): "keep",
        (True, False): "not deleted" if deleted else "would delete",
        (True, True): "deleted",
    }
    rows = [
        (
            words[record["delete"], record["gone"]],
            human.size(record["stored_bytes"]),
            record["path"],
            record["reason"],
        )
        for record in records
    ]
    print_table(("", "stored>", "path", "because"), rows)
    for one in refused:
        say(f"the store did not let go of {one['path']}: {one['error']}", err=True)
    if found.obstacle:
        say(f"{store.url}: {found.obstacle}", err=True)
        return
    garbage = [item for item in found.items if item.delete]
    size = human.size(sum(item.bytes for item in garbage))
    if not garbage:
        say(f"{store.url}: no garbage")
    elif deleted:
        say(f"{store.url}: {human.count(len(garbage), 'file')} of garbage, {size}")
    else:
        say(f"{store.url}: {human.count(len(garbage), 'file')} of garbage, {size}; --delete deletes it")
