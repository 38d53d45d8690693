"""Who is reclaimed leaves in the way that its launcher takes for what it is."""

from __future__ import annotations

import pytest

from spotsafe.identity import Launcher
from spotsafe.policy.leaving import AGENT_S, MOST_S, NEAR_END_S, SLACK_S, Leaving, way_out

TORCHRUN, SKYPILOT, SLURM, KUBERNETES = Launcher


@pytest.mark.parametrize("launchers", [(), (KUBERNETES,)])
@pytest.mark.parametrize("signalled", [True, False])
@pytest.mark.parametrize("left", [None, 0.0, 90.0])
def test_at_once(launchers: tuple[Launcher, ...], signalled: bool, left: float | None) -> None:
    """A program that nobody but a shell or a kubelet looks after."""
    assert way_out(launchers, signalled=signalled, seconds_left=left) == Leaving()
    assert Leaving().limit_s == 0


@pytest.mark.parametrize("launcher", [SKYPILOT, SLURM])
@pytest.mark.parametrize("signalled", [True, False])
@pytest.mark.parametrize(
    ("left", "wait"), [(None, MOST_S), (90.0, 90.0 + SLACK_S), (0.0, SLACK_S), (1e6, MOST_S)]
)
def test_alive_until_the_end(launcher: Launcher, signalled: bool, left: float | None, wait: float) -> None:
    """An exit would be a failure there; but nobody waits for ever."""
    assert way_out([launcher], signalled=signalled, seconds_left=left) == Leaving(wait_s=wait)


@pytest.mark.parametrize(
    ("signalled", "ends_in", "waits"),
    [
        (True, NEAR_END_S - 1, False),
        (True, -5.0, False),
        (True, NEAR_END_S, True),
        (True, None, True),
        (False, 10.0, True),
    ],
)
def test_a_job_of_slurm_that_is_told_of_its_own_end(
    signalled: bool, ends_in: float | None, waits: bool
) -> None:
    """What ends it then is its time limit: the batch script behind it needs the rest to queue the job again."""
    found = way_out([SLURM], signalled=signalled, seconds_left=None, job_ends_in_s=ends_in)
    assert (found.wait_s > 0) is waits


def test_the_agent_is_asked_if_it_does_not_know() -> None:
    """A notice from the metadata service reaches the process alone. If the agent has sent a signal, it is leaving."""
    assert way_out([TORCHRUN], signalled=False, seconds_left=90) == Leaving(ask_agent=True)
    assert Leaving(ask_agent=True).limit_s == AGENT_S
    assert way_out([TORCHRUN], signalled=True, seconds_left=90) == Leaving()


def test_an_agent_inside_a_job() -> None:
    """First the machine's end is waited for, which is the better way out; then the agent is asked."""
    found = way_out([TORCHRUN, SKYPILOT], signalled=False, seconds_left=90)
    assert found == Leaving(wait_s=90 + SLACK_S, ask_agent=True)
    assert found.limit_s == 90 + SLACK_S + AGENT_S
