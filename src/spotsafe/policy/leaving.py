"""How a reclaimed process leaves so that its launcher does the right thing: at once, or only when it has to.

What launchers make of an exit (`docs/launchers.md` has the sources):

- A bare program and a pod of Kubernetes are started again after a code that is not 0.
- Slurm requeues a preempted job only if it is still alive when its grace is over; SkyPilot takes a code that is not 0
  for a failure of the program, but starts it anew where the machine went away.
- The agent of torchrun starts all ranks again after a code that is not 0, on the machine that is about to go, and takes
  0 for the end of the job. It ends without a restart if it gets a SIGTERM itself.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from spotsafe.identity import Launcher

MOST_S = 600.0
"""Seconds to wait for an end of which nobody said when it comes: more than any grace that is given."""
SLACK_S = 60.0
"""Seconds that an announced end may come later than it was announced for."""
NEAR_END_S = 900.0
"""With less than this until the end of its time, a job of Slurm was told of that end, not of a preemption."""
AGENT_S = 60.0
"""Seconds that torchrun's agent may take, of which it gives its ranks 30, before it ends this process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """What to do after everything is saved, in this order; then exit."""

    wait_s: float = 0.0
    """Seconds to wait to be killed."""
    ask_agent: bool = False
    """Whether to ask torchrun's agent to end, and wait for that."""

    @property
    def limit_s(self) -> float:
        """Seconds until the exit at the latest."""
        return self.wait_s + (AGENT_S if self.ask_agent else 0.0)


def way_out(
    launchers: Collection[Launcher],
    *,
    signalled: bool,
    seconds_left: float | None,
    job_ends_in_s: float | None = None,
) -> Leaving:
    """How to leave after a reclaim.

    Args:
        launchers: all that started this process, one inside the other.
        signalled: whether the notice, or one beside it, came as a signal: then who sends it knows already.
        seconds_left: until the end of the machine; None if nobody said.
        job_ends_in_s: until the end of the time that Slurm gave the job; None if that is not known.
    """
    at_its_end = job_ends_in_s is not None and job_ends_in_s < NEAR_END_S
    preempted = Launcher.SLURM in launchers and not (signalled and at_its_end)
    waits = preempted or Launcher.SKYPILOT in launchers
    left_s = MOST_S if seconds_left is None else min(seconds_left + SLACK_S, MOST_S)
    return Leaving(
        wait_s=left_s if waits else 0.0, ask_agent=Launcher.TORCHRUN in launchers and not signalled
    )
