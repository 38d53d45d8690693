"""How far a copy that runs beside training is trusted. Values only.

Whoever writes to a tensor between the safe point and the next step of an optimizer tears a copy that runs in that time.
torch counts writes (``_version``), so such a copy is thrown away and made again. Writes through ``.data`` and those of
fused optimizers are counted by nobody. Against them the trust is earned first: in the first saves, and in every
fiftieth after them, training waits for the copy; and where a copy beside training would have to be over, the tensors
are compared with it byte by byte. Every other copy is compared, in three places of each tensor, with what was there at
the safe point. One difference ends the trust for good.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

PROBES_FIRST = 3
"""So many copies at the start of a run are made while training waits, and compared afterwards."""
PROBE_EVERY = 50
"""And after them each that has this number."""
MOST_THROWN_AWAY = 3
"""After so many copies that were thrown away it is cheaper to wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapTrust:
    """What is known of the writes between a safe point and the next step of an optimizer."""

    copies: int = 0
    """How many were judged."""
    thrown_away: int = 0
    """How many of them were torn, and seen to be."""
    waits_for: frozenset[str] = frozenset()
    """Names of tensors that were written in that time once: training waits for these."""
    off: str | None = None
    """Why nothing is copied beside training any more; None while it is."""

    @property
    def probes(self) -> bool:
        """Whether training waits for the next copy, so that it can be compared with what is there later."""
        return self.copies < PROBES_FIRST or (self.copies + 1) % PROBE_EVERY == 0

    def after_whole(self) -> OverlapTrust:
        """Nobody wrote."""
        return replace(self, copies=self.copies + 1)

    def after_moved(self, names: Collection[str]) -> OverlapTrust:
        """These tensors were written, as torch counts. A copy beside training is thrown away for it, a probe is not."""
        away = self.thrown_away + (not self.probes)
        waits_for = self.waits_for.union(names)
        off = f"{away} copies were overtaken by writes" if away >= MOST_THROWN_AWAY else self.off
        return replace(self, copies=self.copies + 1, thrown_away=away, waits_for=waits_for, off=off)

    def after_difference(self, names: Collection[str]) -> OverlapTrust:
        """These tensors are not what they were, and nobody counted a write: the next might not be seen."""
        off = f"{min(names)} was written through .data or by a fused kernel before the optimizer's step"
        away = self.thrown_away + (not self.probes)
        return replace(self, copies=self.copies + 1, thrown_away=away, off=off)
