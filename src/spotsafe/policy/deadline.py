"""What to do when the machine is about to go: only what can still finish."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

MARGIN = 1.25
"""How much longer than measured a save may take: a reclaim hits many machines, and their uploads, at once."""


class Plan(Enum):
    """What to do with the time that is left."""

    SAVE = "save"
    """Let finish what is in flight, then make a new save of now."""
    FINISH = "finish"
    """Finish and publish what is in flight or staged; begin nothing new."""
    NOTHING = "nothing"
    """There is nothing to do, or nothing that would finish."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What is known at a safe point after a notice."""

    seconds_left: float | None
    """Seconds until the machine goes; None if the source does not say."""
    save_s: float | None
    """Seconds that a whole save was measured to take, copy and write; None before there was one."""
    in_flight: bool = False
    """Whether a save is being written."""
    finish_in_flight_s: float | None = None
    """Seconds that the save in flight still needs; None if unknown."""
    staged_unpublished: bool = False
    """Whether a complete copy waits in memory to be written."""
    unsaved_steps: int = 1
    """Steps that neither a checkpoint nor anything in flight or staged holds."""


def plan(situation: Situation, *, margin: float = MARGIN) -> Plan:
    """The best that fits.

    To finish what is already under way costs nothing and is never given up. An unknown deadline is met with a
    save: publishing is all or nothing, so that one cut short does no harm. A save that was never measured
    waits for the one in flight; ask again after that.
    """
    begun = situation.in_flight or situation.staged_unpublished
    rest = Plan.FINISH if begun else Plan.NOTHING
    if situation.unsaved_steps <= 0:
        return rest
    if situation.seconds_left is None:
        return Plan.SAVE
    if begun and (situation.save_s is None or situation.finish_in_flight_s is None):
        return rest
    needed_s = (situation.save_s or 0.0) * margin + ((situation.finish_in_flight_s or 0.0) if begun else 0.0)
    return Plan.SAVE if needed_s < situation.seconds_left else rest
