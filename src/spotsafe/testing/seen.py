"""What lies in a store, seen at once and by nobody else's code path: for rules that look after every single step.

Everything that is decoded or digested is remembered by its bytes.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

from spotsafe.checkpoint import manifest as manifest_format
from spotsafe.checkpoint.attempts import AttemptRecord, decode_record
from spotsafe.checkpoint.branch import Branch, gone_back_to, is_set_aside
from spotsafe.checkpoint.digest import block_digests, sha256_hex
from spotsafe.checkpoint.index import Index, decode_index
from spotsafe.checkpoint.layout import CHECKPOINTS, MANIFEST, PINS, CheckpointName
from spotsafe.checkpoint.manifest import Manifest
from spotsafe.checkpoint.pins import ROLLBACK
from spotsafe.errors import DamagedCheckpoint, UnsupportedFormat
from spotsafe.testing.cloud import Objects


@dataclass(frozen=True, slots=True)
class Choosable:
    """A published checkpoint, as far as a start would care."""

    name: CheckpointName
    healthy: bool


def newest(
    objects: Objects,
    rotten: frozenset[str],
    *,
    branch: Branch = (),
    up_to: CheckpointName | None = None,
) -> Choosable | None:
    """What a resume should choose.

    Args:
        objects: what is stored.
        rotten: names of checkpoints that do not count.
        branch: the rollbacks that count.
        up_to: leave out what is newer than this one.
    """
    chosen = gone_back_to(branch)
    there = published(objects)
    if chosen is not None and all(str(one.name) != chosen for one in there):
        there = [*there, *held(objects, chosen)]
    found = [
        Choosable(one.name, one.health.healthy or str(one.name) == chosen)
        for one in there
        if str(one.name) not in rotten
        and (up_to is None or one.name <= up_to)
        and not is_set_aside(one.name, branch)
    ]
    healthy = [one for one in found if one.healthy]
    return max(healthy or found, key=lambda one: one.name, default=None)


def names(objects: Objects) -> frozenset[CheckpointName]:
    """Names of the published checkpoints."""
    return frozenset(manifest.name for manifest in published(objects))


def published(objects: Objects) -> list[Manifest]:
    """The manifests of the checkpoints that exist."""
    known = _last.get("objects"), _last.get("published")
    if known[0] is objects:
        return cast("list[Manifest]", known[1])
    found = (manifest_at(path, data) for path, data in objects.items() if path.endswith(MANIFEST))
    there = [manifest for manifest in found if manifest is not None]
    _last.update(objects=objects, published=there)
    return there


def held(objects: Objects, checkpoint: str) -> list[Manifest]:
    """The manifest that a pin holds of a checkpoint, if one does."""
    for path, data in objects.items():
        if path.startswith(f"{PINS}/{checkpoint}."):
            found = pinned_by(data)
            if found is not None:
                return [found]
    return []


def kept_by_a_rollback(objects: Objects, checkpoint: str) -> bool:
    """Whether somebody who went back to this checkpoint, lately or before, has pinned it."""
    return any(
        json.loads(data)["purpose"] == ROLLBACK
        for path, data in objects.items()
        if path.startswith(f"{PINS}/{checkpoint}.")
    )


@lru_cache(maxsize=1 << 12)
def pinned_by(data: bytes) -> Manifest | None:
    """The manifest that these bytes of a pin hold."""
    document = json.loads(data)
    return manifest_at(f"{CHECKPOINTS}/{document['checkpoint']}", base64.b64decode(document["manifest"]))


_last: dict[str, Any] = {}
"""What was looked at last; the rules look at it again and again."""


@lru_cache(maxsize=1 << 16)
def manifest_at(path: str, data: bytes) -> Manifest | None:
    """The manifest that these bytes under this path are, if they are one."""
    name = CheckpointName.parse(path.split("/")[1])
    if name is None:
        return None
    try:
        decoded = manifest_format.decode(data, expected=name)
    except (DamagedCheckpoint, UnsupportedFormat):
        return None
    return decoded if isinstance(decoded, Manifest) else None


@lru_cache(maxsize=1 << 16)
def record_at(data: bytes, number: int) -> AttemptRecord:
    """The record of an attempt that these bytes are."""
    return decode_record(data, attempt=number)


@lru_cache(maxsize=1 << 16)
def _index(data: bytes) -> Index:
    return decode_index(data, checkpoint="", file="")


@lru_cache(maxsize=1 << 16)
def _sha256(data: bytes) -> str:
    return sha256_hex(data)


@lru_cache(maxsize=1 << 16)
def _digests(data: bytes) -> Sequence[str]:
    return block_digests(memoryview(data))


def problem(manifest: Manifest, objects: Objects) -> str:
    """What keeps a checkpoint from being whole; empty if nothing does."""
    for part in manifest.parts:
        data = objects.get(manifest.name.file(part.file))
        if data is None or _sha256(data) != part.sha256:
            return f"its {part.file} is {'gone' if data is None else 'another'}"
        for file in _index(data).files:
            owner = str(manifest.name) if file.checkpoint is None else file.checkpoint
            content = objects.get(f"{CHECKPOINTS}/{owner}/{file.name}")
            if content is None or _digests(content) != file.digests:
                where = f"{file.name} of {file.checkpoint}" if file.checkpoint else file.name
                return f"its {where} is {'gone' if content is None else 'another'}"
    return ""
