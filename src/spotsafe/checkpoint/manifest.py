"""The manifest: the small file that is published last and makes a checkpoint exist."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from spotsafe.checkpoint.layout import CheckpointName

FORMAT = 1
MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One rank's index, which in turn describes its data files."""

    rank: int
    file: str
    size: int
    sha256: str


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
    """Sum of the sizes of its data files."""

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
