"""A real process is gone before and after every single storage operation: what was published is good, and it goes on.

The first scenario is a fresh start. In the second, the attempt that crashes is the second of its run, whose first one
was killed inside a save: its operations are those of a look, a claim, a restore, saves, the sweep of what the first one
left, retention of its own and of foreign checkpoints, and the end. Both wait for each save, so that the operations come
in the same order in each process.

Only the ledger's thread writes when it likes. Its operations are left out of the count, and counted by themselves.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e import harness
from tests.e2e.harness import Bench, Record
from tests.e2e.processes import Launcher
from tests.proof import record as write_down

pytestmark = pytest.mark.slow

CRASHED = 9
"""The exit status of `spotsafe.testing.faults.kill_process`."""
SHORT = {"until": 7, "save_every": 2, "lockstep": True}
NEVER = 10**9
SHARE = 3
"""Of the fresh start's crash points one in so many is tried each time; all by `make prove`."""

Copy = Callable[[], Bench]


@pytest.fixture(scope="module")
def short(launcher: Launcher, tmp_path_factory: pytest.TempPathFactory) -> Record:
    """The uninterrupted run."""
    return harness.uninterrupted(launcher, tmp_path_factory.mktemp("short"), **SHORT)


@pytest.fixture(scope="module")
def half(launcher: Launcher, short: Record, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """A run whose first attempt has published once and was killed inside its second save."""
    bench = Bench(launcher, tmp_path_factory.mktemp("half"), SHORT, reference=short)
    assert bench.start(kill_at="IndexWritten:2").end().in_save
    assert len(bench.published) == 1
    return bench


@pytest.fixture
def fresh(launcher: Launcher, short: Record, tmp_path: Path) -> Copy:
    """Makes runs that have not begun."""
    numbers = iter(range(NEVER))
    return lambda: Bench(launcher, tmp_path / f"run{next(numbers)}", SHORT, reference=short)


@pytest.fixture
def resumed(launcher: Launcher, half: Bench, tmp_path: Path) -> Copy:
    """Makes copies of the run as it is after its first attempt."""
    numbers = iter(range(NEVER))

    def copy() -> Bench:
        folder = tmp_path / f"run{next(numbers)}"
        shutil.copytree(half.run, folder / "run")
        return Bench(launcher, folder, SHORT, reference=half.reference, records=list(half.records))

    return copy


def operations(copy: Copy, **options: bool) -> list[str]:
    """What a whole attempt does, in order."""
    whole = copy().finish(crash_at=NEVER, **options)
    assert whole.result is not None
    made: list[str] = whole.result["operations"]
    return made


def crash(copy: Copy, when: str, at: int, **options: bool) -> bool:
    """Crash there, and go on to the end; false if the attempt had fewer operations."""
    bench = copy()
    crashed = bench.start(crash_at=at, crash_when=when, **options).end()
    assert crashed.status in {0, CRASHED}, crashed.log
    if crashed.status == CRASHED:
        bench.finish()
    return crashed.status == CRASHED


@pytest.mark.parametrize("when", ["before", "after"])
def test_crash_of_a_resumed_attempt(resumed: Copy, when: str) -> None:
    """At each operation, of which there is every kind that an attempt has."""
    made = operations(resumed)
    kinds = Counter(one.split()[0] for one in made)
    assert set(kinds) == harness.OPERATIONS
    for at in range(1, len(made) + 1):
        assert crash(resumed, when, at), made[at - 1]
    write_down(f"os._exit {when} each storage operation of a resumed attempt", points=len(made))


@pytest.mark.parametrize("share", [SHARE, pytest.param(1, marks=pytest.mark.prove)])
@pytest.mark.parametrize("when", ["before", "after"])
def test_crash_of_a_fresh_start(fresh: Copy, when: str, share: int) -> None:
    """Nothing is published at first; then the next attempt starts afresh, and is no worse for it."""
    made = operations(fresh)
    assert made.index("create attempts/000001.json") < made.index("create attempts/000001.published")
    for at in range(1 + (when == "after"), len(made) + 1, share):
        assert crash(fresh, when, at), made[at - 1]
    write_down(f"os._exit {when} each storage operation of a fresh start", points=len(made))


@pytest.mark.parametrize("when", ["before", "after"])
def test_crash_in_the_ledgers_thread(resumed: Copy, when: str) -> None:
    """The first heartbeat and the first piece are always there; how many pieces more, nobody knows."""
    made = operations(resumed, crash_ledger=True)
    assert {one.split("/")[0].split()[1] for one in made} == {"ledger"}
    crashes = [crash(resumed, when, at, crash_ledger=True) for at in range(1, len(made) + 2)]
    assert crashes[:2] == [True, True]
    write_down(f"os._exit {when} an operation of the ledger's thread", points=sum(crashes))
