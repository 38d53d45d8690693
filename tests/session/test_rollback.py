"""Rollback under a whole session: the same command goes on from the chosen checkpoint, exactly."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest

import spotsafe
from spotsafe import events as ev
from spotsafe.checkpoint.candidates import look
from spotsafe.checkpoint.layout import CheckpointName, attempt_record
from spotsafe.checkpoint.manifest import Health, Marker, encode_manifest, encode_marker
from spotsafe.checkpoint.rollback import plan_rollback, roll_back
from spotsafe.identity import Identity
from spotsafe.storage.wrapping import Operation, WrappingStore
from spotsafe.testing.memory import MemoryStore
from tests.session.places import attempts, candidate, manifest_of, published, start_fails, train, trained
from tests.session.rig import Program

ME = Identity.of_this_process(environ={}, argv=["spotsafe", "rollback"])


def back_to(store: Any, selector: str | int) -> int:
    return roll_back(store, plan_rollback(store, selector), identity=ME, wall=1.0).attempt


def test_the_same_command_goes_on_from_there() -> None:
    """Step, weights, data and random numbers are those of the chosen checkpoint: the steps come out the same."""
    store = MemoryStore()
    first = trained(store, until=8)
    back_to(store, 4)

    second = Program()
    with second.session(store, save_every=2, keep=10) as run:
        assert (run.attempt, run.step, run.resumed_from) == (3, 4, str(published(store)[2]))
        assert not run.replaying, "a new branch repeats nothing"
        train(second, run, 8)

    assert second.seen == first.seen[4:]
    assert second.weights() == first.weights()


def test_it_goes_on_though_a_job_that_lived_withdrew_it() -> None:
    """The pin has the manifest and has kept the files: the steps come out the same, and then the pin goes."""
    store = MemoryStore()
    first = trained(store, until=8)
    [chosen] = [name for name in published(store) if name.step == 4]
    roll_back(store, plan_rollback(store, 4), identity=ME, wall=time.time())
    store.replace(chosen.manifest, encode_marker(Marker(state="retired")))

    second = Program()
    with second.session(store, save_every=1, keep=10) as run:
        assert run.resumed_from == str(chosen)
        train(second, run, 8)

    assert second.seen == first.seen[4:]
    assert store.names("pins") == []


def test_what_is_set_aside_is_never_gone_back_to() -> None:
    """If the chosen one turns out to be damaged, an older one is taken, not one that was left behind."""
    store = MemoryStore()
    trained(store, until=8)
    names = {name.step: name for name in published(store)}
    back_to(store, 4)
    del store.objects[names[4].file("data-00000-000.safetensors")]

    program = Program()
    with program.session(store) as run:
        assert run.resumed_from == str(names[2])
    assert [event.checkpoint for event in program.of(ev.CheckpointPassedOver)] == [str(names[4])]


def test_no_fresh_start_if_all_that_counts_is_gone() -> None:
    """The chosen checkpoint was deleted by hand: an error that says how to go on, and nothing is claimed."""
    store = MemoryStore()
    trained(store, until=4)
    two, four = sorted(published(store))
    back_to(store, 2)
    for path in [path for path in store.objects if path.startswith(two.folder)]:
        del store.objects[path]

    error = start_fails(store, spotsafe.NoUsableCheckpoint)

    assert str(two) in str(error)
    assert "spotsafe rollback" in str(error)
    back_to(store, str(four))
    with Program().session(store) as run:
        assert run.step == 4


def sicken(store: MemoryStore, name: CheckpointName) -> None:
    """Say in its manifest that a checkpoint holds values that are not finite."""
    sick = Health(healthy=False, nonfinite=("model.first.weight",))
    store.objects[name.manifest] = encode_manifest(dataclasses.replace(manifest_of(store, name), health=sick))


def test_an_unhealthy_checkpoint_can_be_chosen() -> None:
    """A start prefers a healthy one; a person who names a checkpoint has seen it."""
    store = MemoryStore()
    trained(store, until=6)
    names = {name.step: name for name in published(store)}
    sicken(store, names[4])
    back_to(store, 4)
    with Program().session(store) as run:
        assert run.step == 4


def test_a_checkpoint_that_stopped_the_start_can_be_left_behind() -> None:
    """One of a newer version stops every start; a rollback to an older one gets the run going again."""
    store = MemoryStore()
    trained(store, until=4)
    older, newer = sorted(published(store))
    from spotsafe.checkpoint import sealed
    from spotsafe.checkpoint.manifest import MAX_BYTES

    members = sealed.unseal(store.objects[newer.manifest], max_bytes=MAX_BYTES)
    store.objects[newer.manifest] = sealed.seal({**members, "format": 9})
    start_fails(store, spotsafe.UnsupportedFormat)

    back_to(store, 2)

    with Program().session(store) as run:
        assert run.resumed_from == str(older)


@pytest.mark.parametrize("at", range(1, 30))
def test_rollback_at_any_moment_of_a_start(at: int) -> None:
    """Before operation k of the start, for all k: it goes on from the chosen one, or is superseded, then set aside."""
    store = MemoryStore()
    trained(store, until=6)

    class Meeting(WrappingStore):
        count = 0

        def around(self, operation: Operation, call: Any) -> Any:
            if operation.path.startswith(("attempts", "checkpoints")):
                self.count += 1
                if self.count == at:
                    back_to(store, 2)
            return call()

    program = Program()
    meeting = Meeting(store)
    try:
        with program.session(meeting, keep=100) as run:
            resumed, number = run.step, run.attempt
            train(program, run, 8)
    except spotsafe.Superseded:
        assert number < attempts(store)[-1]
        expected = 2
    else:
        assert resumed == 2 or meeting.count < at
        expected = 8
    if meeting.count < at:
        back_to(store, 2)
        expected = 2
    with Program().session(store) as run:
        assert run.step == expected
    assert candidate(store, look(store).names[-1]).manifest is not None


def test_a_restart_loop_is_broken_by_a_rollback() -> None:
    """A person has looked and decided: the starts before it do not count any more."""
    from spotsafe.policy.restarts import Limits

    store = MemoryStore()
    trained(store, until=4)
    limits = Limits(fruitless=2)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), Program().session(store, restart_limits=limits):
            raise ZeroDivisionError
    with pytest.raises(spotsafe.RestartLoop):
        Program().session(store, restart_limits=limits).start()

    back_to(store, 2)

    with Program().session(store, restart_limits=limits) as run:
        assert run.step == 2


def test_damaged_record_of_the_rollback() -> None:
    """Nobody knows what counts: the start ends with the way out, and changes nothing."""
    store = MemoryStore()
    trained(store, until=4)
    number = back_to(store, 2)
    store.objects[attempt_record(number)] = b"{"

    error = start_fails(store, spotsafe.DamagedCheckpoint)

    assert f"spotsafe rollback {store.url}@STEP" in str(error)
