"""Values that are not finite: saved, said, passed over at a resume, and never a reason to lose the last good ones."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import spotsafe
from spotsafe import events as ev
from spotsafe.errors import EXIT_RESTART_LOOP
from spotsafe.testing.memory import MemoryStore
from tests.session.places import manifests, published, steps_there, train, trained
from tests.session.rig import Program

NAN, INF = math.nan, math.inf


def poison(tensor: torch.Tensor, value: float = NAN) -> None:
    with torch.no_grad():
        tensor.view(-1)[0] = value


def decayed(store: Any, *, good: int, bad: int, value: float = NAN, **options: Any) -> Program:
    """An attempt of which the first steps are good and the last ones have a weight that is not finite."""
    program = Program()
    with program.session(store, **{"save_every": 1, "keep": 10, **options}) as run:
        done = run.step
        for step, batch in run.steps(program.loader, until=done + good + bad):
            program.train(step, batch)
            if step >= done + good:
                poison(program.model.second.weight, value)
            run.wait()
    return program


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_weight_that_is_not_finite_makes_a_checkpoint_unhealthy(value: float) -> None:
    """It is saved all the same, and its manifest names the tensors: the moments follow with the next step."""
    store = MemoryStore()
    program = decayed(store, good=2, bad=1, value=value)
    found = manifests(store)
    assert [one.health.healthy for one in found.values()] == [True, True, False]
    assert "model.second.weight" in found[3].health.nonfinite
    assert [event.healthy for event in program.of(ev.CheckpointPublished)] == [True, True, False]


def test_a_resume_prefers_the_newest_healthy_and_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    """Back to before the decay, loudly; what was passed over stays for somebody to look at."""
    store = MemoryStore()
    decayed(store, good=2, bad=2)
    sick = [str(name) for name in published(store) if name.step > 2]
    assert len(sick) == 1  # retention counts healthy ones only: of the sick it keeps the newest
    capfd.readouterr()
    program = Program()
    with program.session(store, keep=1, save_every=1) as run:
        assert run.step == 2
        assert all(map(math.isfinite, program.weights()))
        train(program, run, 8)
    assert [event.checkpoint for event in program.of(ev.CheckpointPassedOver)] == sick
    assert all("model.second.weight" in event.reason for event in program.of(ev.CheckpointPassedOver))
    assert f"not resuming from {sick[0]}: unhealthy: NaN or infinity in" in capfd.readouterr().err
    assert set(sick) <= {str(name) for name in published(store)}
    assert program.seen == trained(MemoryStore(), until=8).seen[2:]


def test_retention_keeps_the_newest_healthy() -> None:
    """Three thousand sick checkpoints must not push out the last good ones."""
    store = MemoryStore()
    decayed(store, good=3, bad=5, keep=2)
    assert {2, 3} <= set(steps_there(store))
    assert steps_there(store)[0] == 8
    assert len(steps_there(store)) == 3


def test_with_sick_ones_only_the_newest_is_used() -> None:
    """Better than nothing, and no fresh start."""
    store = MemoryStore()
    decayed(store, good=0, bad=2)
    program = Program()
    with program.session(store) as run:
        assert run.step == 2
        assert math.isnan(program.model.second.weight.view(-1)[0].item())
    assert program.of(ev.CheckpointPassedOver) == []


def test_what_was_not_finite_at_the_start_is_no_decay() -> None:
    """A mask of -inf among the parameters: healthy in the first attempt and after a resume; new ones count."""

    def life(store: MemoryStore, until: int, *, decay: bool = False) -> Program:
        program = Program()
        program.model.register_parameter("mask", torch.nn.Parameter(torch.tensor([0.0, -INF])))
        with program.session(store, save_every=1, keep=10) as run:
            for step, batch in run.steps(program.loader, until=until):
                program.train(step, batch)
                if decay:
                    poison(program.model.first.bias)
                run.wait()
        return program

    store = MemoryStore()
    life(store, 2)
    life(store, 4)
    life(store, 5, decay=True)
    assert [one.health.healthy for one in manifests(store).values()] == [True, True, True, True, False]
    assert [one.health.nonfinite for one in manifests(store).values()][-1][0] == "model.first.bias"


def masked() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor([0.0, -INF]))


def test_what_comes_later_with_infinities_is_no_decay_either() -> None:
    """Tracked in the second attempt and unknown to the checkpoint: it is as the program made it, now and later."""
    store = MemoryStore()
    trained(store, until=2, save_every=1)
    program = Program()
    with program.session(store, save_every=1, keep=10) as run:
        for step, batch in run.steps(program.loader, until=4):
            program.train(step, batch)
            if step == 2:
                run.track(late=masked())
            run.wait()
    again = Program()
    with again.session(store, save_every=1, keep=10, late=masked()) as run:
        for step, batch in run.steps(again.loader, until=6):
            again.train(step, batch)
            if step == 5:
                poison(again.model.first.bias)
            run.wait()
    health = [one.health for one in manifests(store).values()]
    assert [one.healthy for one in health] == [True, True, True, True, True, False]
    assert "late" in health[3].nonfinite


def test_what_the_checkpoint_lacks_is_as_the_program_made_it() -> None:
    """Without strict a parameter may be new at the start of an attempt."""
    store = MemoryStore()
    trained(store, until=2, save_every=1)
    program = Program()
    with program.session(store, save_every=1, keep=10, strict=False, late=masked()) as run:
        train(program, run, 4)
    assert all(one.health.healthy for one in manifests(store).values())


def test_what_comes_later_out_of_the_checkpoint_is_judged_by_the_checkpoint() -> None:
    """It decayed before: that it is not finite when it is tracked excuses nothing."""

    def life(store: MemoryStore, until: int, value: float) -> bool:
        program, late = Program(), torch.nn.Parameter(torch.zeros(2))
        with program.session(store, save_every=1, keep=10) as run:
            run.track(late=late)
            for step, batch in run.steps(program.loader, until=until):
                program.train(step, batch)
                poison(late, value)
                run.wait()
        return manifests(store)[until].health.healthy

    store = MemoryStore()
    assert not life(store, 1, NAN)
    assert not life(store, 2, NAN)
    assert life(store, 3, 0.0)


def test_a_frozen_parameter_and_a_buffer_are_only_reported() -> None:
    """Running statistics overflow and recover; a frozen part is not trained."""
    store = MemoryStore()
    program = Program()
    program.model.register_parameter("fixed", torch.nn.Parameter(torch.zeros(1), requires_grad=False))
    with program.session(store, save_every=1, keep=10) as run:
        for step, batch in run.steps(program.loader, until=2):
            program.train(step, batch)
            if step == 1:
                poison(program.model.mean)
                poison(program.model.fixed)
            run.wait()
    newest = manifests(store)[2].health
    assert newest.healthy
    assert newest.nonfinite == ()
    assert newest.nonfinite_buffers == ("model.mean",)
    with Program().session(store, strict=False) as run:
        assert run.step == 2


def test_an_optimizers_moments_count() -> None:
    """A NaN in exp_avg is in the weights one step later."""
    store = MemoryStore()
    program = Program()
    with program.session(store, save_every=1, keep=10) as run:
        for step, batch in run.steps(program.loader, until=2):
            program.train(step, batch)
            if step == 1:
                poison(program.optimizer.state[program.model.first.weight]["exp_avg"])
            run.wait()
    newest = manifests(store)[2].health
    assert not newest.healthy
    assert newest.nonfinite == ("optimizer.model.first.weight.exp_avg",)


def test_the_third_start_that_goes_back_to_the_same_checkpoint_is_stopped() -> None:
    """The same decay again and again: exit code 93 instead of training it for ever."""
    store = MemoryStore()
    decayed(store, good=2, bad=1, restart_limits=None)
    for _ in range(2):
        program = Program()
        with (
            pytest.raises(ZeroDivisionError),
            program.session(store, save_every=1, keep=10, restart_limits=None) as run,
        ):
            assert run.step == 2
            for step, batch in run.steps(program.loader, until=8):
                program.train(step, batch)
                poison(program.model.second.weight)
                if step:
                    run.save()
                if step == 3:
                    run.wait()
                    raise ZeroDivisionError
    with (
        pytest.raises(
            spotsafe.RestartLoop, match="3 starts in a row went back to a000001-s000000002"
        ) as caught,
        Program().session(store, restart_limits=None),
    ):
        pytest.fail("it started")
    assert caught.value.code == EXIT_RESTART_LOOP


def test_what_has_recovered_and_decays_again_counts() -> None:
    """A parameter that began as -inf and became finite in an attempt is no longer excused in the next."""

    def life(store: MemoryStore, until: int, value: float) -> None:
        program = Program()
        program.model.register_parameter("mask", torch.nn.Parameter(torch.tensor([0.0, -INF])))
        with program.session(store, save_every=1, keep=10) as run:
            for step, batch in run.steps(program.loader, until=until):
                program.train(step, batch)
                poison(program.model.mask[1:], value)
                run.wait()

    store = MemoryStore()
    life(store, 2, 0.5)
    life(store, 4, NAN)
    health = [one.health.healthy for one in manifests(store).values()]
    assert health[:2] == [True, True]
    assert not health[-1]
