"""Code between and behind loops: a resume runs it again, and must find everything as it was then."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import spotsafe
from spotsafe import events as ev
from spotsafe.testing.memory import MemoryStore
from tests.session.rig import Cut, Program

Spot = Callable[[str], None]
"""Called by a program at each place where it may be cut."""


def killed_at(place: str) -> Spot:
    def spot(name: str) -> None:
        if name == place:
            raise Cut

    return spot


def nowhere(name: str) -> None:
    """Lets the program run to its end."""


def attempt(
    body: Callable[[Program, spotsafe.Run, Spot], None], store: MemoryStore, spot: Spot = nowhere
) -> Program:
    """One process of a program; saves are published before anything goes on."""
    program = Program()
    try:
        with program.session(store, keep=20) as run:
            body(program, run, spot)
    except (Cut, spotsafe.Reclaimed):
        pass
    return program


# -- two stages -------------------------------------------------------------------------------------------------


def train(program: Program, run: spotsafe.Run, spot: Spot, stage: str, until: int) -> None:
    for step, batch in run.steps(program.loader, until=until):
        run.wait()
        spot(f"{stage}{step}")
        program.train(step, batch)
    run.wait()


def two_stages(program: Program, run: spotsafe.Run, spot: Spot, *, save: bool = False) -> None:
    train(program, run, spot, "one", 3)
    spot("between")
    head = torch.nn.Linear(2, 1)  # draws its weights
    other = torch.optim.SGD(head.parameters(), lr=0.1)
    run.track(head=head, other=other)
    if save:
        run.save()
        run.wait()
    spot("behind")
    for step in run.range(4):
        run.wait()
        spot(f"two{step}")
        loss = head(torch.rand(3, 2)).square().mean()
        other.zero_grad()
        loss.backward()
        other.step()
        program.seen.append((100 + step, [], loss.item().hex()))


def two_stages_saved_between(program: Program, run: spotsafe.Run, spot: Spot) -> None:
    two_stages(program, run, spot, save=True)


@pytest.mark.parametrize("body", [two_stages, two_stages_saved_between])
@pytest.mark.parametrize("place", ["one1", "one2", "between", "behind", "two0", "two1", "two3"])
def test_state_of_a_second_stage_is_made_when_it_begins(
    body: Callable[[Program, spotsafe.Run, Spot], None], place: str
) -> None:
    """Wherever it is cut: what is tracked late is new, or restored; its first weights are drawn as they were."""
    whole = attempt(body, MemoryStore())
    store = MemoryStore()
    first = attempt(body, store, killed_at(place))
    second = attempt(body, store)
    start = len(whole.seen) - len(second.seen)
    assert start <= len(first.seen)
    assert first.seen == whole.seen[: len(first.seen)]
    assert second.seen == whole.seen[start:]
    assert second.weights() == whole.weights()


def test_what_is_tracked_in_a_stage_that_was_reached_is_asked_for() -> None:
    """A program that leaves it out is refused, before anything is saved."""
    store = MemoryStore()
    first = Program()
    with pytest.raises(Cut), first.session(store) as run:
        run.track(ema=torch.ones(2))
        train(first, run, nowhere, "one", 3)
        raise Cut
    second = Program()
    with pytest.raises(spotsafe.StateMismatch, match=r"run\.track\(ema="), second.session(store) as run:
        train(second, run, nowhere, "one", 3)
    assert second.checkpoint_steps() == []


def own_loops(program: Program, run: spotsafe.Run, spot: Spot) -> None:
    def stage(name: str, until: int, optimizer: torch.optim.Optimizer) -> None:
        while run.step < until:
            spot(f"{name}{run.step}")
            loss = program.model(torch.rand(3, 2)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            program.seen.append((run.step, [], loss.item().hex()))
            run.safe_point()
            run.wait()

    stage("one", 3, program.optimizer)
    spot("between")
    second = torch.optim.Adagrad(program.model.parameters())
    run.track(second=second)
    stage("two", 6, second)


@pytest.mark.parametrize(("place", "new"), [("one1", 0), ("between", 1), ("two3", 1), ("two4", 0)])
def test_a_second_stage_of_loops_of_ones_own(place: str, new: int) -> None:
    """Its optimizer may be in no checkpoint yet; that is said, since a program that was changed looks the same."""
    whole = attempt(own_loops, MemoryStore())
    store = MemoryStore()
    attempt(own_loops, store, killed_at(place))
    second = attempt(own_loops, store)
    assert 0 < len(second.seen) < len(whole.seen)
    assert second.seen == whole.seen[-len(second.seen) :]
    assert second.weights() == whole.weights()
    assert len([event for event in second.of(ev.Warned) if "starts as it was made" in event.message]) == new


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("guarded", [False, True])
def test_first_values_set_after_the_restore_are_told(stage: int, guarded: bool) -> None:
    """Code before a loop runs at each start: one that writes weights would undo the training, in silence."""

    def body(program: Program, run: spotsafe.Run, spot: Spot) -> None:
        if stage == 2:
            train(program, run, spot, "one", 3)
        if not guarded or run.resumed_from is None:
            torch.nn.init.zeros_(program.model.second.weight)
        for _ in run.range(3):
            spot(f"two{run.step - 3 * (stage - 1)}")
            program.model(torch.rand(4, 2)).square().mean().backward()
            program.optimizer.step()
            program.optimizer.zero_grad()
            run.wait()

    store = MemoryStore()
    first = attempt(body, store, killed_at("two2"))
    second = attempt(body, store)
    told = [event.message for event in (first.of(ev.Warned) + second.of(ev.Warned))]
    assert [message.split(":")[0] for message in told] == ([] if guarded else ["model"])


def test_objects_that_share_tensors_are_not_told_of() -> None:
    """Restoring one of them writes the other, which is no mistake of the program's."""
    store = MemoryStore()
    for until in (2, 4):
        program = Program()
        with program.session(store, bias=program.model.second.bias) as run:
            run.track(late=program.model.mean)
            train(program, run, nowhere, "one", until)
    assert program.of(ev.Warned) == []


# -- behind the last loop -----------------------------------------------------------------------------------------


def test_code_behind_the_last_loop_draws_the_same_again() -> None:
    """A finished run is started again, or goes on to a larger limit: its generators are those of the loop's end."""

    def program(store: MemoryStore, until: int, *, draw: bool = True) -> list[float]:
        torch.manual_seed(1)
        drawn = []
        with spotsafe.session(store, watch=None, save_every=2) as run:
            for _ in run.range(until):
                drawn.append(torch.rand(()).item())
            if draw:
                run.values["behind"] = torch.rand(()).item()
                drawn.append(run.values["behind"])
        return drawn

    store = MemoryStore()
    first = program(store, 3)
    assert program(store, 3) == first[3:]
    assert program(store, 5) == program(MemoryStore(), 5)[3:]
