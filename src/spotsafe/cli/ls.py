"""``spotsafe ls``: the checkpoints of a run, or the runs of a folder."""

from __future__ import annotations

import time
from typing import Any

import click

from spotsafe import human
from spotsafe.checkpoint.catalog import Row, list_rows
from spotsafe.checkpoint.layout import ATTEMPTS, parse_attempt
from spotsafe.cli.output import print_json, print_table, say
from spotsafe.cli.target import is_run, json_option, meant, open_target, target_argument
from spotsafe.errors import CheckpointNotFound, StorageLinked
from spotsafe.storage.store import Store

_REMARKS = {"set_aside": "set aside by a rollback", "pinned": "pinned by a reader"}


@click.command("ls", short_help="List the checkpoints of a run, or the runs of a folder.")
@target_argument
@click.option("--all", "everything", is_flag=True, help="Also checkpoints that were withdrawn or abandoned.")
@json_option
def command(target: str, *, everything: bool, as_json: bool) -> None:
    """List the checkpoints of a run, newest first, or the runs of a folder.

    Of a run: step, age, what is stored in its folder (not what it refers to in others), health, metrics, and remarks:
    why a checkpoint is not usable, as far as listing the folder and reading the manifests tells (`spotsafe verify`
    reads everything), whether a rollback set it aside, whether a reader pinned it.
    """
    store, selector = open_target(target)
    if selector is not None:
        raise click.UsageError(f"ls lists a whole run; for one checkpoint: spotsafe show {target}")
    if is_run(store):
        _show_checkpoints(store, everything=everything, as_json=as_json)
    else:
        _show_runs(store, as_json=as_json)


def _show_checkpoints(store: Store, *, everything: bool, as_json: bool) -> None:
    now = time.time()
    rows = [row for row in list_rows(store, now=now) if everything or row.candidate.marker is None]
    records = [_record(row, now=now) for row in rows]
    if as_json:
        print_json({"kind": "run", "url": store.url, "checkpoints": records})
        return
    if not records:
        say(f"{store.url}: no checkpoint yet")
        return
    print_table(
        ("step>", "age>", "stored>", "health", "metrics", "checkpoint", "remarks"),
        [_cells(record) for record in records],
    )


def _record(row: Row, *, now: float) -> dict[str, Any]:
    name, manifest = row.candidate.name, row.candidate.manifest
    return {
        "name": str(name),
        "attempt": name.attempt,
        "step": name.step,
        "save": name.save,
        "usable": not row.problem,
        "problem": row.problem,
        "set_aside": row.set_aside,
        "pinned": row.pinned,
        "stored_bytes": row.stored_bytes,
        "created": manifest.created if manifest else None,
        "age_s": max(0.0, now - manifest.created) if manifest else None,
        "reason": manifest.reason if manifest else None,
        "healthy": manifest.health.healthy if manifest else None,
        "nonfinite": list(manifest.health.nonfinite) if manifest else [],
        "metrics": dict(manifest.metrics) if manifest else {},
    }


def _cells(record: dict[str, Any]) -> tuple[str, ...]:
    health = {True: "ok", False: "not finite", None: "-"}[record["healthy"]]
    metrics = " ".join(f"{key}={value:.6g}" for key, value in record["metrics"].items())
    age = "-" if record["age_s"] is None else human.age(record["age_s"])
    size = human.size(record["stored_bytes"])
    remarks = [record["problem"]] if record["problem"] else []
    remarks += [_REMARKS[member] for member in _REMARKS if record[member]]
    return (str(record["step"]), age, size, health, metrics, record["name"], "; ".join(remarks))


def _show_runs(store: Store, *, as_json: bool) -> None:
    records = [record for name in store.names("") if (record := _run_record(store, name)) is not None]
    if not records:
        todo = meant(store.url)
        raise CheckpointNotFound(
            f"{store.url} is neither a run nor a folder with runs{'' if todo is None else f'; {todo}'}"
        )
    if as_json:
        print_json({"kind": "folder", "url": store.url, "runs": records})
        return
    print_table(
        ("run", "step>", "checkpoints>", "attempts>"),
        [
            (
                record["name"],
                "-" if record["newest_step"] is None else str(record["newest_step"]),
                str(record["checkpoints"]),
                str(record["attempts"]),
            )
            for record in records
        ],
        title=f"{human.count(len(records), 'run')} in {store.url}",
    )


def _run_record(folder: Store, name: str) -> dict[str, Any] | None:
    """What two listings tell of a run; None if it is none."""
    try:
        marks = folder.names(f"{name}/{ATTEMPTS}")
    except StorageLinked:
        return None  # whatever it leads to is listed where it is
    attempts = [mark for mark in marks if parse_attempt(mark) is not None]
    if not attempts:
        return None
    store, _ = open_target(f"{folder.url.rstrip('/')}/{name}/")
    rows = [row for row in list_rows(store) if row.candidate.manifest is not None]
    present = [row.candidate.name for row in rows if not row.set_aside]
    return {
        "name": name,
        "attempts": len(attempts),
        "checkpoints": len(rows),
        "newest": str(present[0]) if present else None,
        "newest_step": present[0].step if present else None,
    }
