"""Which files a checkpoint lends to others: what any published manifest refers to stays.

Frozen tensors lie in files of their own, and later checkpoints refer to them instead of writing them again. So a
folder may have to keep some files after its checkpoint was withdrawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from spotsafe.checkpoint.layout import CheckpointName, is_frozen_file
from spotsafe.checkpoint.manifest import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Needed:
    """Files that checkpoints need of other folders than their own."""

    files: Mapping[CheckpointName, frozenset[str]] = field(default_factory=dict)
    """Owner -> names of its files."""
    unknown: str = ""
    """Why there may be references that nobody can read; then every file that can be referred to is needed."""

    def among(self, owner: CheckpointName, present: Iterable[str]) -> frozenset[str]:
        """Those of the files `present` in the folder of `owner` that have to stay."""
        named = self.files.get(owner, frozenset())
        return frozenset(file for file in present if file in named or (self.unknown and is_frozen_file(file)))


def needed_by(manifests: Iterable[Manifest], *, unknown: str = "") -> Needed:
    """What these checkpoints need of other folders.

    Args:
        manifests: of checkpoints that exist, whole or not.
        unknown: see `Needed`.
    """
    files: dict[CheckpointName, frozenset[str]] = {}
    for manifest in manifests:
        for one in manifest.references:
            files[one.owner] = files.get(one.owner, frozenset()) | {one.file}
    return Needed(files=files, unknown=unknown)
