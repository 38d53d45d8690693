"""Rollback: the next start goes on from the chosen checkpoint, whatever happens in between, and nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import numpy as np
import pytest

from spotsafe.checkpoint import gc, sealed
from spotsafe.checkpoint.attempts import MAX_BYTES, AttemptRecord, read_attempt, read_branch
from spotsafe.checkpoint.branch import Rollback
from spotsafe.checkpoint.candidates import candidates, listing_of, look, read_candidate
from spotsafe.checkpoint.catalog import list_rows, resolve
from spotsafe.checkpoint.claim import claim
from spotsafe.checkpoint.layout import CheckpointName, attempt_record, data_file, parse_pin
from spotsafe.checkpoint.manifest import Marker, encode_manifest, encode_marker
from spotsafe.checkpoint.pins import SLACK_S, pinned_manifest, place_pin
from spotsafe.checkpoint.rollback import KEPT_S, plan_rollback, roll_back
from spotsafe.checkpoint.verify import verify
from spotsafe.errors import (
    CheckpointNotFound,
    DamagedCheckpoint,
    RunInUse,
    StorageNotFound,
    StorageUnavailable,
    UnsupportedFormat,
)
from spotsafe.identity import Identity
from spotsafe.policy.retention import latest
from spotsafe.storage.store import Store
from spotsafe.storage.wrapping import Operation, WrappingStore
from spotsafe.testing.faults import CountingStore, FailingStore, LostResponseStore
from spotsafe.testing.memory import MemoryStore
from spotsafe.testing.saves import Attempt
from tests.killed import Crash, Killed

T = TypeVar("T")

ME = Identity.of_this_process(environ={}, argv=["spotsafe", "rollback"])
ALL = latest(100)


def run_of(*steps: int) -> MemoryStore:
    """A run whose first attempt published these steps."""
    store = MemoryStore()
    train(store, *steps)
    return store


def train(store: Store, *steps: int) -> Attempt:
    """One more attempt that publishes these steps."""
    attempt = Attempt(store, keep=ALL)
    for step in steps:
        assert attempt.save(step).published
    return attempt


def back_to(store: Store, selector: str | int) -> AttemptRecord:
    """Roll back."""
    return roll_back(store, plan_rollback(store, selector), identity=ME, wall=1_700_000_000.0)


def next_start(store: Store) -> CheckpointName:
    """What a start would go on from, health aside."""
    listing = look(store)
    return next(candidates(store, listing, read_branch(store, listing))).name


def counts(store: Store) -> list[int]:
    """The steps that count, newest first."""
    listing = look(store)
    return [one.name.step for one in candidates(store, listing, read_branch(store, listing))]


def steps(names: tuple[CheckpointName, ...]) -> list[int]:
    return [name.step for name in names]


# What it does


def test_next_start_goes_on_from_there() -> None:
    """The chosen checkpoint and older ones count; the newer ones are whole and set aside."""
    store = run_of(1, 2, 3, 4)

    record = back_to(store, 2)

    assert (record.attempt, record.is_rollback) == (2, True)
    assert next_start(store).step == 2
    assert counts(store) == [2, 1]
    rows = {row.candidate.name.step: row for row in list_rows(store)}
    assert {step: row.set_aside for step, row in rows.items()} == {1: False, 2: False, 3: True, 4: True}
    assert all(verify(store, row.candidate.name) == [] for row in rows.values())


def test_only_a_record_and_a_pin_are_written() -> None:
    """And a pin, for whoever may be deleting right now. Nothing else in the run changes."""
    store = run_of(1, 2, 3)
    before = dict(store.objects)

    back_to(store, 1)

    new = sorted(path for path in store.objects if path not in before)
    assert new[0] == attempt_record(2)
    assert [parse_pin(path.partition("/")[2]) for path in new[1:]] == [look(store).names[2]]
    assert all(store.objects[path] == data for path, data in before.items())


def test_a_look_changes_nothing_and_tells_all() -> None:
    """Saves that were never published are among what is set aside: their writer may still live."""
    store = run_of(1, 2, 3)
    begun = CheckpointName(1, 4, 4, "00000000")
    store.put(begun.file(data_file(0, 0)), b"x")
    before = dict(store.objects)

    plan = plan_rollback(store, 2)

    assert store.objects == before
    assert plan.target.name.step == 2
    assert steps(plan.sets_aside) == [4, 3]
    assert plan.brings_back == ()
    assert not plan.is_done


def test_later_records_repeat_it() -> None:
    """Start after start after start, the newest record alone tells what counts."""
    store = run_of(1, 2, 3)
    made = back_to(store, 1)
    for number in (3, 4, 5):
        attempt = train(store, number * 10)
        assert attempt.record.rollbacks == made.rollbacks
        assert not attempt.record.is_rollback
    assert counts(store) == [50, 40, 30, 1]


def test_new_branch_may_pass_the_old_steps() -> None:
    """The new branch has a step 3 of its own, and that one is meant by its step."""
    store = run_of(1, 2, 3, 4)
    back_to(store, 2)
    train(store, 3)

    assert resolve(store, "latest").name.attempt == 3
    assert resolve(store, 3).name.attempt == 3
    assert resolve(store, 4).name.attempt == 1, "not on the branch, but there is no other step 4"


def test_latest_and_best_are_those_that_count() -> None:
    """What is set aside is never the latest or the best."""
    store = MemoryStore()
    attempt = Attempt(store, keep=ALL)
    for step, loss in ((1, 0.5), (2, 0.4), (3, 0.1)):
        attempt.save(step, metrics={"loss": loss})
    back_to(store, 2)

    assert resolve(store, "latest").name.step == 2
    assert resolve(store, "best:loss").name.step == 2
    full = str(look(store).names[0])
    assert str(resolve(store, full).name) == full, "a full name means the same on every branch"


def test_latest_and_best_can_be_gone_back_to() -> None:
    """Going back to the best is what one does after a run has gone wrong."""
    store = MemoryStore()
    attempt = Attempt(store, keep=ALL)
    for step, loss in ((1, 0.5), (2, 0.1), (3, 0.4)):
        attempt.save(step, metrics={"loss": loss})

    assert plan_rollback(store, "latest").is_done
    back_to(store, "best:loss")
    assert counts(store) == [2, 1]


def test_nothing_to_do_is_known() -> None:
    """The newest that counts needs no rollback, before and after one."""
    store = run_of(1, 2)
    assert plan_rollback(store, 2).is_done
    back_to(store, 1)
    assert plan_rollback(store, 1).is_done


# One after another


def test_second_rollback_on_the_new_branch() -> None:
    """What the first one set aside stays so."""
    store = run_of(1, 2, 3)
    back_to(store, 2)
    train(store, 3, 4, 5)
    back_to(store, str(look(store).names[2]))
    assert counts(store) == [3, 2, 1]
    train(store, 9)
    assert counts(store) == [9, 3, 2, 1]
    assert next_start(store).attempt == 5


def test_rollback_to_what_an_earlier_one_set_aside() -> None:
    """It undoes that one: the old line of the run counts again, and the new one is set aside."""
    store = run_of(1, 2, 3)
    back_to(store, 1)
    train(store, 2, 3)
    plan = plan_rollback(store, str(look(store).names[2]))
    assert steps(plan.brings_back) == [3, 2]
    assert [(name.attempt, name.step) for name in plan.sets_aside] == [(3, 3), (3, 2)]

    roll_back(store, plan, identity=ME, wall=1_700_000_000.0)

    assert [(one.attempt, one.step) for one in _counted(store)] == [(1, 3), (1, 2), (1, 1)]


def test_back_and_forth_between_two_lines() -> None:
    """Going to the old line and back to the new one restores what the new one had set aside, from its record."""
    store = run_of(1, 2, 3)
    back_to(store, 2)
    new = train(store, 5).results[0].name
    back_to(store, 3)
    back_to(store, str(new))
    assert [(one.attempt, one.step) for one in _counted(store)] == [(3, 5), (1, 2), (1, 1)]


def test_history_of_a_checkpoint_without_a_record() -> None:
    """If the record of the checkpoint's attempt is gone or damaged, the present history up to it is taken."""
    for damage in (None, b"{}"):
        store = run_of(1, 2, 3)
        back_to(store, 2)
        new = train(store, 5, 6).results[0].name
        train(store, 7)
        if damage is None:
            del store.objects[attempt_record(3)]
        else:
            store.objects[attempt_record(3)] = damage
        back_to(store, str(new))
        assert [(one.attempt, one.step) for one in _counted(store)] == [(3, 5), (1, 2), (1, 1)]


def _counted(store: Store) -> list[CheckpointName]:
    listing = look(store)
    return [one.name for one in candidates(store, listing, read_branch(store, listing))]


# What cannot be gone back to


def test_no_such_step() -> None:
    """The message lists what is there."""
    with pytest.raises(CheckpointNotFound, match="no checkpoint of step 4; there are steps 3, 2, 1"):
        plan_rollback(run_of(1, 2, 3), 4)


def test_never_published_or_withdrawn() -> None:
    """A folder is no checkpoint; the message says what became of it."""
    store = run_of(1, 2, 3)
    names = {name.step: name for name in look(store).names}
    del store.objects[names[3].manifest]
    store.objects[names[2].manifest] = encode_marker(Marker(state="retired"))
    with pytest.raises(CheckpointNotFound, match=f"{names[3]}: never published"):
        plan_rollback(store, 3)
    with pytest.raises(CheckpointNotFound, match=f"{names[2]}: retired"):
        plan_rollback(store, 2)


def test_withdrawn_but_pinned_is_for_readers_only() -> None:
    """A pin lets its reader read; a start could not go on from it."""
    store = run_of(1, 2, 3)
    name = look(store).names[2]
    place_pin(store, name, until=2e9, identity=ME)
    store.objects[name.manifest] = encode_marker(Marker(state="retired"))
    assert resolve(store, 1).manifest is not None
    with pytest.raises(CheckpointNotFound, match="withdrawn"):
        plan_rollback(store, 1)


def test_damaged_manifest() -> None:
    """It is not gone back to, and said to be damaged."""
    store = run_of(1, 2, 3)
    name = look(store).names[1]
    store.objects[name.manifest] = b"{"
    with pytest.raises(CheckpointNotFound, match=r"manifest\.json"):
        plan_rollback(store, 2)


def test_newer_versions_stop() -> None:
    """A manifest or a record of a newer spotsafe is not worked around."""
    store = run_of(1, 2)
    record = sealed.unseal(store.objects[attempt_record(1)], max_bytes=MAX_BYTES)
    store.objects[attempt_record(1)] = sealed.seal({**record, "format": 9})
    before = dict(store.objects)
    with pytest.raises(UnsupportedFormat):
        back_to(store, 1)
    assert store.objects == before


def test_no_answer_is_no_rollback() -> None:
    """A store that cannot say what is there is an error."""
    failing = FailingStore(run_of(1, 2), fail=lambda *_: StorageUnavailable("down"))
    with pytest.raises(StorageUnavailable):
        plan_rollback(failing, 1)


# Damage to what says so


def test_damaged_record_of_a_rollback_stops_and_another_rollback_is_the_way_out() -> None:
    """Nobody knows what counts, so nothing is guessed; a person who names a checkpoint decides it again."""
    store = run_of(1, 2, 3)
    back_to(store, 2)
    store.objects[attempt_record(2)] = b"{}"

    with pytest.raises(DamagedCheckpoint, match="spotsafe rollback"):
        read_branch(store, look(store))
    with pytest.raises(DamagedCheckpoint):
        Attempt(store)
    with pytest.raises(DamagedCheckpoint):
        resolve(store, "latest")
    with pytest.raises(DamagedCheckpoint):
        plan_rollback(store, "latest")
    assert len(list_rows(store)) == 3, "a list of what is there is needed now"

    assert back_to(store, 2).attempt == 3
    assert counts(store) == [2, 1]


def test_damaged_record_of_an_attempt_that_trained_stops_nothing() -> None:
    """It left a checkpoint, so it was no rollback, and the record before it says the same."""
    store = run_of(1, 2, 3)
    made = back_to(store, 2)
    train(store, 5)
    store.objects[attempt_record(3)] = b"{}"
    assert read_branch(store, look(store)) == made.rollbacks
    assert train(store, 6).record.rollbacks == made.rollbacks


@pytest.mark.parametrize(
    "rollbacks",
    [
        "x",
        [{"to": "4000", "attempt": 2}],
        [{"to": "../../x", "attempt": 2}],
        [{"to": "a000001-s000000002-0002-00000000"}],
        [{"to": "a000001-s000000002-0002-00000000", "attempt": 3}],
        [{"to": "a000002-s000000002-0002-00000000", "attempt": 2}],
        [{"to": "a000001-s000000002-0002-00000000", "attempt": 2}] * 2,
        [{"to": "a000001-s000000002-0002-00000000", "attempt": 0}],
    ],
)
def test_records_that_make_no_sense_are_damaged(rollbacks: object) -> None:
    """A record from outside is believed whole or not at all."""
    store = run_of(1, 2, 3)
    back_to(store, 2)
    members = sealed.unseal(store.objects[attempt_record(2)], max_bytes=MAX_BYTES)
    store.objects[attempt_record(2)] = sealed.seal({**members, "rollbacks": rollbacks})
    with pytest.raises(DamagedCheckpoint, match=r"000002\.json"):
        read_attempt(store, 2)


# Races


def start(store: Store, *, listing_of: Store | None = None) -> AttemptRecord:
    """A start that looked at one moment and claims at another."""
    return claim(
        store,
        listing=look(listing_of or store),
        identity=ME,
        newest_seen=None,
        wall=1.0,
    )


def test_rollback_between_the_look_and_the_claim_of_a_start() -> None:
    """The start's record repeats it, and its second look chooses by that."""
    store = run_of(1, 2, 3)
    old = store.copy()
    made = back_to(store, 1)
    record = start(store, listing_of=old)
    assert (record.attempt, record.rollbacks) == (3, made.rollbacks)
    assert counts(store) == [1]


def test_rollback_and_its_start_within_one_look() -> None:
    """Both came after the attempts were listed and before the checkpoints: the record is found by its number."""
    store = run_of(1, 2, 3)
    marks = store.names("attempts")
    made = back_to(store, 1)
    train(store, 2)
    torn = listing_of(marks, store.names("checkpoints"))
    assert (torn.attempts, torn.highest) == ((1,), 3)

    assert read_branch(store, torn) == made.rollbacks
    record = claim(store, listing=torn, identity=ME, newest_seen=None, wall=1.0)
    assert (record.attempt, record.rollbacks) == (4, made.rollbacks)


def test_a_record_that_is_listed_and_cannot_be_read_is_an_error() -> None:
    """Not knowing what it says is not an empty answer; a number without a record at all is one."""
    store = run_of(1, 2)
    listing = look(store)
    back_to(store, 1)
    newer = look(store)
    del store.objects[attempt_record(2)]
    with pytest.raises(StorageNotFound):
        read_branch(store, newer)
    copied = listing_of(store.names("attempts"), [str(CheckpointName(9, 1, 1, "00000000"))])
    assert read_branch(store, copied) == read_branch(store, listing) == ()


def test_two_rollbacks_at_once() -> None:
    """Each gets a number; the later one counts."""
    store = run_of(1, 2, 3)
    first, second = plan_rollback(store, 1), plan_rollback(store, 2)
    roll_back(store, first, identity=ME, wall=1_700_000_000.0)
    made = roll_back(store, second, identity=ME, wall=1_700_000_000.0)
    assert made.attempt == 3
    assert made.rollbacks == (Rollback(to=str(second.target.name), attempt=3),)
    assert counts(store) == [2, 1]


def test_start_between_the_look_and_the_claim_of_a_rollback() -> None:
    """It is met, and may be a reason to give up; else it is superseded, and what it publishes is set aside."""
    store = run_of(1, 2, 3)
    plan = plan_rollback(store, 1)
    started = train(store)

    def refuse(record: AttemptRecord) -> None:
        assert record == started.record
        raise RunInUse("somebody has just started")

    with pytest.raises(RunInUse):
        roll_back(store, plan, identity=ME, wall=1_700_000_000.0, met=refuse)
    assert look(store).attempts == (1, 2)

    roll_back(store, plan, identity=ME, wall=1_700_000_000.0)
    late = started.save(4)
    assert (late.published, late.superseded_by) == (True, 3)
    assert counts(store) == [1]


def test_retention_of_a_superseded_attempt_deletes_nothing() -> None:
    """A rollback comes while an attempt lives: its next save deletes neither the chosen checkpoint nor others."""
    store = MemoryStore()
    alive = Attempt(store, keep=latest(2))
    for step in (1, 2):
        alive.save(step)
    back_to(store, 1)
    assert alive.save(3).superseded_by == 2
    assert counts(store) == [1]
    assert len(look(store).names) == 3


# Retention


def test_retention_keeps_the_way_back_and_what_is_set_aside() -> None:
    """The chosen checkpoint stays until two newer ones are there; what is set aside is not counted, not touched."""
    store = run_of(1, 2, 3, 4, 5)
    back_to(store, 2)
    attempt = Attempt(store, keep=latest(2))
    assert attempt.resumed_from is not None
    assert attempt.resumed_from.name.step == 2

    attempt.save(3)
    assert counts(store) == [3, 2]
    attempt.save(4)
    assert counts(store) == [4, 3]
    attempt.save(5)

    assert counts(store) == [5, 4]
    old = [name.step for name in look(store).names if name.attempt == 1 and store.list(name.folder)[1:]]
    assert old == [5, 4, 3]
    assert all(verify(store, name) == [] for name in look(store).names if name.attempt == 1 and name.step > 2)


def test_retention_counts_what_was_brought_back() -> None:
    """After a rollback to the old line its checkpoints are retained like any others, but for what is still pinned."""
    store = run_of(1, 2, 3)
    back_to(store, 1)
    train(store, 8)
    back_to(store, 3)
    attempt = Attempt(store, keep=latest(2))
    attempt.save(4)
    attempt.save(5)
    assert counts(store) == [5, 4, 1]
    later = int(KEPT_S + SLACK_S) + 10
    attempt.save(later)
    assert counts(store) == [later, 5]
    assert resolve(store, 8).name.attempt == 3, "the other line is set aside and stays"


# Every crash


def operations_of(action: Callable[[Store], object], store: MemoryStore) -> int:
    counting = CountingStore(store.copy())
    action(counting)
    return len(counting.operations)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_crash_at_every_operation_of_a_rollback(after: bool) -> None:
    """The run goes on from the old newest or from the chosen one; again, and it is the chosen one."""
    base = run_of(1, 2, 3)
    seen = set()
    for at in range(1, operations_of(lambda store: back_to(store, 1), base) + 1):
        store = base.copy()
        with suppress(Crash):
            back_to(Killed(store, at=at, after=after), 1)
        seen.add(next_start(store).step)
        if not plan_rollback(store, 1).is_done:
            back_to(store, 1)
        assert next_start(store).step == 1
        assert train(store, 2).record.rollbacks
    assert seen == ({3, 1} if after else {3})


def test_every_lost_answer_of_a_rollback() -> None:
    """It is told as an error, and doing it again does no harm."""
    base = run_of(1, 2, 3)
    names = {operation.name for operation in _operations(base)}
    assert "create" in names
    for name in names:
        store = base.copy()
        with suppress(StorageUnavailable):
            back_to(LostResponseStore(store, operations={name}), 1)
        if not plan_rollback(store, 1).is_done:
            back_to(store, 1)
        assert next_start(store).step == 1


def _operations(base: MemoryStore) -> list[Operation]:
    counting = CountingStore(base.copy())
    back_to(counting, 1)
    return counting.operations


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_crash_at_every_operation_of_the_attempt_after_it(after: bool) -> None:
    """Claim, saves, sweep and retention on the new branch: it never leaves the branch, and loses nothing of either."""
    base = run_of(1, 2, 3, 4)
    back_to(base, 2)

    def go_on(store: Store) -> None:
        attempt = Attempt(store, keep=latest(2))
        for step in (3, 4, 5):
            error = attempt.save(step, files=1).error
            if isinstance(error, Crash):
                raise error

    chosen = set()
    for at in range(1, operations_of(go_on, base) + 1):
        store = base.copy()
        with suppress(Crash):
            go_on(Killed(store, at=at, after=after))
        newest = next_start(store)
        assert newest.step == 2 or newest.attempt == 3
        assert verify(store, newest) == []
        aside = [name for name in look(store).names if name.attempt == 1 and name.step > 2]
        assert [verify(store, name) for name in aside] == [[], []]
        chosen.add(newest.step)
        again = Attempt(store, keep=latest(2))
        assert again.resumed_from is not None
        assert again.resumed_from.name == newest
        assert again.save(9).error is None
    assert chosen == {2, 3, 4, 5}


@pytest.mark.slow
def test_branches_of_many_random_histories_agree_with_a_model() -> None:
    """Trainings and rollbacks in any order: what counts is the line of ancestors, as a plain model has it."""
    for seed in range(30):
        random = np.random.default_rng(seed)
        store = MemoryStore()
        line: list[str] = []
        lines: dict[str, list[str]] = {}
        for turn in range(12):
            if lines and random.random() < 0.4:
                name = str(random.choice(sorted(lines)))
                if not plan_rollback(store, name).is_done:
                    back_to(store, name)
                line = lines[name]
            else:
                attempt = Attempt(store, keep=ALL)
                for step in range(int(random.integers(1, 4))):
                    made = str(attempt.save(turn * 10 + step, files=1).name)
                    line = [*line, made]
                    lines[made] = line
            counted = [str(name) for name in reversed(_counted(store))]
            assert counted == line, (seed, turn)


def test_what_was_withdrawn_since_the_look_is_told() -> None:
    """A job that still runs withdrew it: nothing is claimed, and no pin is left."""
    store = run_of(1, 2, 3)
    plan = plan_rollback(store, 1)
    store.replace(plan.target.name.manifest, encode_marker(Marker(state="retired")))
    before = dict(store.objects)
    with pytest.raises(CheckpointNotFound, match="any more"):
        roll_back(store, plan, identity=ME, wall=1_700_000_000.0)
    assert store.objects == before


@pytest.mark.parametrize("at", range(1, 14))
def test_a_job_that_is_just_deleting_it_cannot_take_it_away(at: int) -> None:
    """The newest attempt has looked, then a rollback claims, then the job deletes: before operation k, for all k."""
    store = run_of(1, 2, 3)
    told: list[str] = []

    class Between(WrappingStore):
        """A rollback comes before operation `at` of a retention that takes the chosen one away."""

        count = 0

        def around(self, operation: Operation, call: Callable[[], T]) -> T:
            self.count += 1
            if self.count == at:
                try:
                    back_to(store, 1)
                except CheckpointNotFound as error:
                    told.append(str(error))
            return call()

    between = Between(store)
    retention = gc.Retention(keep=latest(2), resumed_from=None)
    gc.apply_retention(between, attempt=1, retention=retention, on_event=lambda _: None, now=1_700_000_000.0)
    if told or between.count < at:
        assert counts(store) == [3, 2], "nothing was changed"
        return
    assert next_start(store).step == 1
    for step in (5, 6):
        attempt = Attempt(store, keep=latest(2))
        assert attempt.resumed_from is not None
        assert verify_held(store, attempt.resumed_from.name)
        assert attempt.save(step).error is None
    Attempt(store, keep=latest(2)).save(7)
    assert counts(store) == [7, 6]
    assert store.names("pins") == [], "let go once two newer ones were there"


def test_withdrawn_by_a_job_that_lived_it_is_still_what_counts() -> None:
    """Start, list and selectors agree: the pin has its manifest, its files are whole."""
    store = run_of(1, 2, 3)
    back_to(store, 1)
    name = look(store).names[2]
    store.replace(name.manifest, encode_marker(Marker(state="retired")))

    assert next_start(store) == name
    assert resolve(store, "latest").name == name
    assert resolve(store, 1).name == name
    rows = {row.candidate.name: row for row in list_rows(store)}
    assert (rows[name].problem, rows[name].set_aside, rows[name].pinned) == ("", False, False)
    attempt = Attempt(store, keep=latest(2))
    assert attempt.resumed_from is not None
    assert attempt.resumed_from.name == name


def verify_held(store: MemoryStore, name: CheckpointName) -> bool:
    """Whether every byte of a checkpoint is there, be it published or held by a pin."""
    held = pinned_manifest(store, name)
    copy = store.copy()
    if read_candidate(store, name).manifest is None and held is not None:
        copy.objects[name.manifest] = encode_manifest(held)
    return verify(copy, name) == []
