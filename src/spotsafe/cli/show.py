"""``spotsafe show``: what is in one checkpoint."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import click

from spotsafe import human
from spotsafe.checkpoint.candidates import read_index
from spotsafe.checkpoint.index import Index, TensorEntry
from spotsafe.checkpoint.manifest import Manifest
from spotsafe.checkpoint.naming import contents
from spotsafe.cli.output import print_json, print_table, say
from spotsafe.cli.target import chosen, json_option, open_target, target_argument

_SHOWN = 40  # names of what is no tensor; --json has all of them


@click.command("show", short_help="Show what is in one checkpoint.")
@target_argument
@json_option
def command(target: str, *, as_json: bool) -> None:
    """Show what is in one checkpoint: tensors with dtype, shape and size, and the names of all other state.

    Without @ it is the latest of the run. No tensor is read. Data files hold the tensors and headers; those of frozen
    tensors may lie with another checkpoint. The names are what `spotsafe.load` takes.
    """
    store, selector = open_target(target)
    candidate = chosen(store, selector)
    manifest = candidate.manifest
    assert manifest is not None, "`resolve` answers only published checkpoints"
    indexes = [read_index(store, candidate, part) for part in manifest.parts]
    tensors = _merged(indexes)
    named = contents(indexes, checkpoint=str(manifest.name))
    keys = sorted(named.values.keys() - {tensor["name"] for tensor in tensors})
    if as_json:
        total = sum(tensor["tensor_bytes"] for tensor in tensors)
        head = {"url": store.url, **_header(manifest), "tensor_bytes": total}
        print_json({**head, "tensors": tensors, "state": keys})
    else:
        _print(manifest, tensors=tensors, keys=keys)


def _header(manifest: Manifest) -> dict[str, Any]:
    return {
        "name": str(manifest.name),
        "run": manifest.run,
        "attempt": manifest.attempt,
        "step": manifest.step,
        "save": manifest.save,
        "parent": manifest.parent,
        "created": manifest.created,
        "reason": manifest.reason,
        "world_size": manifest.world_size,
        "healthy": manifest.health.healthy,
        "nonfinite": list(manifest.health.nonfinite),
        "nonfinite_buffers": list(manifest.health.nonfinite_buffers),
        "metrics": dict(manifest.metrics),
        "data_bytes": manifest.needed_bytes,
        "referred_bytes": manifest.needed_bytes - manifest.total_bytes,
        "references": [f"{one.checkpoint}/{one.file}" for one in manifest.references],
    }


def _merged(indexes: Sequence[Index]) -> list[dict[str, Any]]:
    """One record a tensor, whichever ranks wrote its pieces."""
    records: dict[str, dict[str, Any]] = {}
    for entry in (tensor for index in indexes for tensor in index.tensors):
        record = records.setdefault(entry.name, _tensor(entry))
        record["tensor_bytes"] += sum(piece.nbytes for piece in entry.slices)
        record["files"] = sorted({*record["files"], *(piece.file for piece in entry.slices)})
    return [records[name] for name in sorted(records)]


def _tensor(entry: TensorEntry) -> dict[str, Any]:
    facts = {"name": entry.name, "dtype": entry.dtype, "shape": list(entry.shape), "role": entry.role}
    return {**facts, "tensor_bytes": 0, "files": []}


def _lent(manifest: Manifest) -> dict[str, str]:
    if not manifest.references:
        return {}
    owners = ", ".join(sorted({one.checkpoint for one in manifest.references}))
    size = human.size(sum(one.size for one in manifest.references))
    return {
        "refers to": f"{human.count(len(manifest.references), 'file')} of {owners}, {size} of frozen tensors"
    }


def _print(manifest: Manifest, *, tensors: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> None:
    health = "ok" if manifest.health.healthy else "not finite: " + ", ".join(manifest.health.nonfinite)
    facts = {
        "checkpoint": str(manifest.name),
        "step": str(manifest.step),
        "saved": human.age(time.time() - manifest.created),
        "saved because of": manifest.reason,
        "resumed from": manifest.parent or "nothing; a fresh start",
        "health": health,
        **_lent(manifest),
        **{f"metric {name}": f"{value:.6g}" for name, value in manifest.metrics.items()},
    }
    for name, text in facts.items():
        say(f"{name}: {text}")
    elements = sum(math.prod(tensor["shape"]) for tensor in tensors)
    size = human.size(sum(tensor["tensor_bytes"] for tensor in tensors))
    stored = f"in data files of {human.size(manifest.needed_bytes)}"
    more = f", ... ({len(keys) - _SHOWN} more with --json)" if len(keys) > _SHOWN else ""
    say(f"state: {', '.join(keys[:_SHOWN]) or 'none besides tensors'}{more}")
    say("")
    print_table(
        ("tensor", "dtype", "shape", "size>", "role"),
        [
            (
                tensor["name"],
                tensor["dtype"],
                "x".join(map(str, tensor["shape"])) or "scalar",
                human.size(tensor["tensor_bytes"]),
                tensor["role"],
            )
            for tensor in tensors
        ],
        title=f"{human.count(len(tensors), 'tensor')}, {elements:,} elements, {size} {stored}",
    )
