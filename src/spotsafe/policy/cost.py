"""What a save costs, and how far apart saves should be for the least loss of time.

Sources:
    J. W. Young, "A first order approximation to the optimum checkpoint interval", Communications of the ACM
    17(9), 1974: ``sqrt(2 C / lambda)`` for saves that block for C seconds and failures at the rate lambda.

    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future
    Generation Computer Systems 22(3), 2006: what the first order leaves out. While C is below a thirtieth of
    the mean time between failures that is less than 0.1 % of the time (the tests compute it).

    For saves that are written in the background, and for reclaims of which a share `q` ends in a published
    final save, the same derivation over `waste` gives `best_interval_s`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveCost:
    """What one save was measured to cost, in seconds."""

    blocking_s: float
    """How long training stood still."""
    write_s: float
    """How long the background was busy, from the end of the copy to the publish."""

    @property
    def busy_s(self) -> float:
        """How long nothing else could be written: a save may block while it writes, or write afterwards."""
        return max(self.blocking_s, self.write_s)


def young_interval_s(blocking_s: float, *, interruptions_per_hour: float) -> float:
    """Young's interval in seconds; infinite if nothing ever interrupts.

    Args:
        blocking_s: seconds that training stands still for a save.
        interruptions_per_hour: how often this job (not one of its machines) is interrupted.
    """
    return best_interval_s(
        SaveCost(blocking_s=blocking_s, write_s=0.0), interruptions_per_hour=interruptions_per_hour
    )


def best_interval_s(
    cost: SaveCost, *, interruptions_per_hour: float, saved_by_notice: float = 0.0, slowdown: float = 0.0
) -> float:
    """The interval with the least `waste`: ``max(W, sqrt(2 (C + alpha W) / (lambda (1 - q))))`` seconds.

    Args:
        cost: C and W.
        interruptions_per_hour: lambda, of the whole job.
        saved_by_notice: q, the share of interruptions that end in a published final save.
        slowdown: alpha, the share by which training is slower while a save is written.
    """
    unsaved_per_s = interruptions_per_hour / 3600 * (1 - saved_by_notice)
    if unsaved_per_s <= 0:
        return math.inf
    return max(cost.write_s, math.sqrt(2 * (cost.blocking_s + slowdown * cost.write_s) / unsaved_per_s))


def waste(
    interval_s: float,
    cost: SaveCost,
    *,
    interruptions_per_hour: float,
    saved_by_notice: float = 0.0,
    slowdown: float = 0.0,
    final_save_s: float = 0.0,
    restart_s: float = 0.0,
) -> float:
    """Expected share of the time that is lost (first order; can exceed 1 where nothing useful gets done).

    Three sums: the saves themselves; the work since the last published save, which without a notice is half
    an interval plus what was still being written; and what each interruption costs anyway.

    Args:
        interval_s: seconds of work between two saves.
        cost: what a save costs.
        interruptions_per_hour: of the whole job.
        saved_by_notice: share of interruptions that end in a published final save.
        slowdown: share by which training is slower while a save is written.
        final_save_s: seconds that a final save takes.
        restart_s: seconds from an interruption to the first useful step.
    """
    per_s = interruptions_per_hour / 3600
    saving = (cost.blocking_s + slowdown * cost.write_s) / interval_s
    redone = per_s * (1 - saved_by_notice) * (interval_s / 2 + cost.write_s)
    return saving + redone + per_s * (saved_by_notice * final_save_s + restart_s)
