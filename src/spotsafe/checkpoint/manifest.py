"""The manifest: the small file that is published last and makes a checkpoint exist.

As bytes it is sealed by its own digest (see `sealed`), which is compared before anything else is looked at.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from spotsafe.checkpoint import sealed, strict_json
from spotsafe.checkpoint.layout import (
    MANIFEST,
    CheckpointName,
    index_file,
    is_file_name,
    is_frozen_file,
)
from spotsafe.checkpoint.strict_json import is_text
from spotsafe.checkpoint.versions import (
    VERSION,
    check_references_required,
    check_version,
    members_of_version,
    unsupported,
)
from spotsafe.errors import DamagedCheckpoint, UnsupportedFormat

MAX_BYTES = 1 << 20
"""What ``manifest.json`` may have at most, in bytes."""
METRICS_BYTES = MAX_BYTES // 2
"""What the metrics in it may have at most; the rest is for the names in `Health` and the parts of all ranks."""
ABANDONED = "abandoned"
"""State of a checkpoint that was never published and never will be."""
RETIRED = "retired"
"""State of a checkpoint that was published and then withdrawn."""
MARKER_STATES = frozenset({ABANDONED, RETIRED})

_NONFINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MAX_INT = (1 << 63) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One rank's index, which in turn describes its data files."""

    rank: int
    file: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A file of another checkpoint that this one needs."""

    checkpoint: str
    """Name of the checkpoint in whose folder it lies."""
    file: str
    size: int
    """Bytes."""

    @property
    def path(self) -> str:
        """Its path inside the run."""
        return self.owner.file(self.file)

    @property
    def owner(self) -> CheckpointName:
        """The checkpoint in whose folder it lies."""
        owner = CheckpointName.parse(self.checkpoint)
        assert owner is not None, "a manifest is checked before anybody uses it"
        return owner


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Whether the values look alive."""

    healthy: bool
    nonfinite: tuple[str, ...] = ()
    """Trainable parameters and moments with a NaN or an infinity (the first 100 names)."""
    nonfinite_buffers: tuple[str, ...] = ()
    """Buffers with one; reported, never counted as unhealthy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a published checkpoint is."""

    run: str
    attempt: int
    step: int
    save: int
    nonce: str
    parent: str | None
    """Name of the checkpoint that the attempt resumed from."""
    created: float
    """Unix time in seconds; for people, never for an order."""
    world_size: int
    reason: str
    """Why it was saved: ``interval``, ``asked``, ``notice``, ``end``, ..."""
    health: Health
    metrics: Mapping[str, float] = field(default_factory=dict)
    parts: tuple[Part, ...] = ()
    total_bytes: int = 0
    """Sum of the sizes of the data files in its own folder."""
    references: tuple[Reference, ...] = ()
    """Every file of another checkpoint that one of its indexes refers to."""

    @property
    def needed_bytes(self) -> int:
        """Sum of the sizes of all data files that a reader needs, also those of other checkpoints."""
        return self.total_bytes + sum(reference.size for reference in self.references)

    @property
    def name(self) -> CheckpointName:
        """The checkpoint's identity, which its folder's name must equal."""
        return CheckpointName(self.attempt, self.step, self.save, self.nonce)


@dataclass(frozen=True, slots=True, kw_only=True)
class Marker:
    """A manifest's name that was decided another way: the checkpoint does not exist (any more)."""

    state: str
    """``abandoned`` (never published; decided by gc) or ``retired`` (withdrawn by retention)."""
    in_use: tuple[str, ...] = ()
    """Files of it that later checkpoints still refer to."""


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of ``manifest.json`` for a published checkpoint.

    Raises:
        ValueError: a manifest that `decode` would refuse, or that is larger than a manifest may be.
    """
    members = {
        **members_of_version(references=bool(manifest.references)),
        **msgspec.to_builtins(manifest),
        "metrics": {name: _encode_metric(value) for name, value in manifest.metrics.items()},
    }
    if not manifest.references:
        del members["references"]
    return _seal(members, check=lambda found: _manifest(found, expected=manifest.name))


def metrics_problem(metrics: Mapping[str, float]) -> str | None:
    """Why a manifest cannot hold these metrics, in words that say what to do; None if it can."""
    lost = [name for name in metrics if not name or not is_text(name)]
    if lost:
        return f"cannot have the name {lost[0]!r}: it needs at least one character, and no lone surrogates"
    size = len(strict_json.dump({name: _encode_metric(value) for name, value in metrics.items()}))
    if size > METRICS_BYTES:
        return (
            f"takes {size:,} bytes, more than the {METRICS_BYTES:,} that a manifest has room for: give fewer"
        )
    return None


def encode_marker(marker: Marker) -> bytes:
    """The bytes of ``manifest.json`` for a checkpoint that is not there (any more).

    Raises:
        ValueError: a marker that `decode` would refuse.
    """
    if marker.state not in MARKER_STATES:
        raise ValueError(f"unknown state {marker.state!r}")
    return _seal({**VERSION, **msgspec.to_builtins(marker)}, check=_marker)


def decode(data: bytes, *, expected: CheckpointName) -> Manifest | Marker:
    """What the bytes of ``manifest.json`` in the folder of `expected` say.

    The own digest is compared first, then format and requirements, then every member.

    Raises:
        DamagedCheckpoint: the bytes are not what was published, or belong to another checkpoint.
        UnsupportedFormat: intact, but written by a newer spotsafe.
    """
    try:
        found = sealed.unseal(data, max_bytes=MAX_BYTES)
        members = check_version(found, file=expected.manifest, checkpoint=str(expected))
        if "state" not in members:
            return _manifest(members, expected=expected)
        marker = _marker(members)
    except UnsupportedFormat:
        raise
    except (ValueError, msgspec.ValidationError) as error:  # in old msgspec the one is not the other
        raise DamagedCheckpoint(checkpoint=str(expected), file=MANIFEST, reason=str(error)) from error
    if marker.state not in MARKER_STATES:
        raise unsupported([f"state {marker.state}"], file=expected.manifest, checkpoint=str(expected))
    return marker


def _seal(members: Mapping[str, Any], *, check: Callable[[dict[str, Any]], object]) -> bytes:
    data = sealed.seal(members)
    if len(data) > MAX_BYTES:
        raise ValueError(f"a manifest of {len(data)} bytes, more than {MAX_BYTES}: fewer or shorter metrics")
    check(sealed.unseal(data, max_bytes=MAX_BYTES))
    return data


def _marker(members: Mapping[str, Any]) -> Marker:
    marker = msgspec.convert(members, Marker)
    _ensure(all(map(is_file_name, marker.in_use)), "names in in_use that are no file names")
    return marker


def _manifest(members: Mapping[str, Any], *, expected: CheckpointName) -> Manifest:
    fields = (item.name for item in dataclasses.fields(Manifest) if item.name != "references")
    missing = [name for name in fields if name not in members]
    _ensure(not missing, f"lacks {', '.join(missing)}")
    metrics = members["metrics"]
    _ensure(type(metrics) is dict, "metrics is no object")
    decoded = {name: _decode_metric(name, value) for name, value in metrics.items()}
    manifest = msgspec.convert({**members, "metrics": decoded}, Manifest)
    _ensure(manifest.name == expected, f"belongs to {manifest.name}")
    _check_identity(manifest)
    _check_parts(manifest.parts, world_size=manifest.world_size)
    _check_references(manifest)
    check_references_required(members, references=bool(manifest.references))
    return manifest


def _check_identity(manifest: Manifest) -> None:
    name, parent = manifest.name, manifest.parent
    _ensure(CheckpointName.parse(str(name)) == name, f"{name} is no checkpoint's name")
    _ensure(max(name.attempt, name.step, name.save) <= _MAX_INT, f"{name} has a number out of range")
    _ensure(parent is None or CheckpointName.parse(parent) is not None, "its parent is no checkpoint's name")
    _ensure(bool(manifest.run), "has no run")
    _ensure(math.isfinite(manifest.created), "its time is not finite")
    _ensure(1 <= manifest.world_size <= _MAX_INT, f"a world of {manifest.world_size}")
    _ensure(0 <= manifest.total_bytes <= _MAX_INT, f"{manifest.total_bytes} bytes of data")


def _check_parts(parts: tuple[Part, ...], *, world_size: int) -> None:
    _ensure(len({part.rank for part in parts}) == len(parts), "two parts of one rank")
    for part in parts:
        _ensure(0 <= part.rank < world_size, f"a part of rank {part.rank}, but world_size is {world_size}")
        _ensure(part.file == index_file(part.rank), f"rank {part.rank}'s index is named {part.file!r}")
        _ensure(0 < part.size <= _MAX_INT, f"{part.file} has {part.size} bytes")
        _ensure(_SHA256.fullmatch(part.sha256) is not None, f"{part.file} has no proper SHA-256")


def _check_references(manifest: Manifest) -> None:
    found = {(reference.checkpoint, reference.file) for reference in manifest.references}
    _ensure(len(found) == len(manifest.references), "the same reference twice")
    for one in manifest.references:
        name = CheckpointName.parse(one.checkpoint)
        _ensure(name is not None, f"refers to {one.checkpoint[:80]!r}, which is no checkpoint's name")
        _ensure(name != manifest.name, "refers to a file of its own folder")
        _ensure(is_frozen_file(one.file), f"refers to {one.file[:80]!r}, which is no file that it may")
        _ensure(0 <= one.size <= _MAX_INT, f"refers to {one.file} of {one.size} bytes")


def _encode_metric(value: float) -> Any:
    number = float(value)
    return number if math.isfinite(number) else {"$": "float", "value": str(number)}


def _decode_metric(name: str, node: Any) -> float:
    if type(node) is float:
        return node
    value = node.get("value") if type(node) is dict and node.get("$") == "float" else None
    if type(value) is str and value in _NONFINITE:
        return _NONFINITE[value]
    raise ValueError(f"metric {name!r} is no number")


def _ensure(condition: bool, problem: str) -> None:
    if not condition:
        raise ValueError(problem)
