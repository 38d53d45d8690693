"""What an index says, as values. `index` reads and writes them.

There may be a hundred thousand of those that are structs: one takes a tenth of the time of a frozen dataclass to make,
and the collector never looks at them, since they hold nothing that could hold them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from spotsafe.checkpoint.layout import CheckpointName

ROLES = ("parameter", "moment", "buffer", "other")
"""`parameter`: trainable; `moment`: a floating tensor of an optimizer's state; both decide about health."""


class FileEntry(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """One data file."""

    name: str
    size: int
    digests: tuple[str, ...]
    """xxh3_128 of each block of `Index.block_size` bytes, in hexadecimal; the last block may be shorter."""
    checkpoint: str | None = None
    """The checkpoint in whose folder it lies, if that is another one."""
    age_s: float = 0.0
    """Of such a file: seconds of run time since it was written."""

    def path(self, name: CheckpointName) -> str:
        """Its path in the run, for the checkpoint `name` whose index this is."""
        owner = name if self.checkpoint is None else CheckpointName.parse(self.checkpoint)
        assert owner is not None, "an index is checked before anybody uses it"
        return owner.file(self.name)

    def shown(self) -> str:
        """How messages name it."""
        return self.name if self.checkpoint is None else f"{self.checkpoint}/{self.name}"


class Slice(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An axis-aligned box of a tensor, and where its bytes lie (row-major, contiguous)."""

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    file: str
    start: int
    """Byte offset in the file."""
    nbytes: int


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One tensor of the global view."""

    name: str
    dtype: str
    """As torch names it, without ``torch.``: ``float32``, ``bfloat16``, ..."""
    shape: tuple[int, ...]
    slices: tuple[Slice, ...]
    role: str = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """Everything one rank saved in one checkpoint."""

    rank: int
    block_size: int
    """Bytes of a digest block."""
    files: tuple[FileEntry, ...]
    tensors: tuple[TensorEntry, ...]
    state: Mapping[str, Any] = field(default_factory=dict)
    """Tracked name -> its state in typed JSON; tensors in it are references to names of `tensors`."""
    session: Any = None
    """The session's own state in typed JSON: positions of the loops, RNG, values, names of the nonfinite."""


def entries_by_name(indexes: Iterable[Index]) -> dict[str, list[TensorEntry]]:
    """What all ranks wrote of each tensor."""
    found: dict[str, list[TensorEntry]] = {}
    for index in indexes:
        for entry in index.tensors:
            found.setdefault(entry.name, []).append(entry)
    return found
