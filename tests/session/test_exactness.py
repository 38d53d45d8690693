"""A run that is cut and resumed delivers the samples, draws the masks and ends with the weights of one that is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import spotsafe
from spotsafe.events import Warned
from spotsafe.testing.memory import MemoryStore
from tests.session.rig import Cut, Program, Samples

Body = Callable[[Program, spotsafe.Run], Iterator[None]]


def flat(program: Program, run: spotsafe.Run) -> Iterator[None]:
    for step, batch in run.steps(program.loader, until=9):
        program.train(step, batch)
        yield


def by_passes(program: Program, run: spotsafe.Run) -> Iterator[None]:
    for step, batch in run.steps(program.loader, epochs=3):
        program.train(step, batch)
        yield


def nested(program: Program, run: spotsafe.Run) -> Iterator[None]:
    for epoch in run.epochs(3):
        for step, batch in run.steps(program.loader):
            program.train(step, batch)
            yield
        with torch.no_grad():  # the tail draws random numbers and changes state
            noise = torch.rand(1).item()
            program.model.second.bias.add_(noise * 0.01)
        run.values["tails"] = [*run.values.get("tails", []), noise]
        program.seen.append((-1, [epoch], noise.hex()))
        yield


def accumulated(program: Program, run: spotsafe.Run) -> Iterator[None]:
    for step, batch in run.steps(program.loader, epochs=3, accumulate=4):
        loss = program.loss(batch) / 4
        loss.backward()
        program.seen.append((step, batch["id"].tolist(), loss.item().hex()))
        if run.sync_gradients:
            program.optimizer.step()
            program.optimizer.zero_grad()
            program.scheduler.step()
        yield


def ranged(program: Program, run: spotsafe.Run) -> Iterator[None]:
    dataset = Samples(program.length)
    for step in run.range(8):
        chosen = torch.randint(program.length, (program.batch_size + 1,)).tolist()
        batch = torch.utils.data.default_collate([dataset[index] for index in chosen])
        program.train(step, batch)
        yield


def by_hand(program: Program, run: spotsafe.Run) -> Iterator[None]:
    dataset = Samples(program.length)
    while run.step < 8:
        step = run.step
        chosen = torch.randint(program.length, (program.batch_size + 1,)).tolist()
        program.train(step, torch.utils.data.default_collate([dataset[index] for index in chosen]))
        yield
        run.safe_point()


def attempt(program: Program, body: Body, url: Path, *, cut: int | None = None, **options: Any) -> bool:
    """One process's life: to the cut, or to the end. Each body waits for the save before it."""
    try:
        with program.session(url, **options) as run:
            for count, _ in enumerate(body(program, run), start=1):
                run.wait()
                if count == cut:
                    raise Cut
    except Cut:
        return False
    return True


def committed(seen: list[Any], again: list[Any]) -> list[Any]:
    """What counts of an attempt: all before the place from which the next one went on."""
    if not again:
        return seen
    return seen[: next((at for at, entry in enumerate(seen) if entry == again[0]), len(seen))]


@pytest.mark.parametrize("body", [flat, by_passes, nested, accumulated, ranged, by_hand])
@pytest.mark.parametrize(
    "length",
    [
        pytest.param(10, id="ragged", marks=pytest.mark.slow),
        pytest.param(12, id="even", marks=pytest.mark.slow),
        pytest.param(2, id="short"),
    ],
)
def test_cut_anywhere_and_resumed_it_is_as_if_uninterrupted(tmp_path: Path, body: Body, length: int) -> None:
    """Every body of the program is the place of a cut once: samples, losses and weights are those of one piece."""
    whole = Program(length)
    assert attempt(whole, body, tmp_path / "whole")
    for cut in range(1, len(whole.seen) + 1):
        first = Program(length)
        attempt(first, body, tmp_path / f"cut{cut}", cut=cut)
        second = Program(length)
        assert attempt(second, body, tmp_path / f"cut{cut}")

        assert committed(first.seen, second.seen) + second.seen == whole.seen, cut
        assert second.weights() == whole.weights(), cut


@pytest.mark.parametrize(("body", "cut"), [(flat, 2), (nested, 3), (accumulated, 6)])
def test_five_cuts_in_one_epoch(tmp_path: Path, body: Body, cut: int) -> None:
    """Each resume goes on where the last one stopped, however often."""
    whole = Program(60)
    attempt(whole, body, tmp_path / "whole")
    delivered: list[Any] = []
    for _ in range(5):
        program = Program(60)
        attempt(program, body, tmp_path / "run", cut=cut)
        delivered = committed(delivered, program.seen) + program.seen
    last = Program(60)
    assert attempt(last, body, tmp_path / "run")

    assert committed(delivered, last.seen) + last.seen == whole.seen
    assert last.weights() == whole.weights()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("body", [flat, nested])
@pytest.mark.filterwarnings(
    "ignore:This DataLoader will create:UserWarning"
)  # three workers on a small machine
def test_workers_make_no_difference(tmp_path: Path, body: Body, workers: int) -> None:
    """What was fetched ahead and not trained is fetched again; nothing is lost or doubled."""
    whole = Program(10)
    attempt(whole, body, tmp_path / "whole")
    for cut in (1, 4, len(whole.seen)):
        first = Program(10, workers=workers)
        attempt(first, body, tmp_path / f"cut{cut}", cut=cut)
        second = Program(10, workers=workers)
        assert attempt(second, body, tmp_path / f"cut{cut}")

        assert committed(first.seen, second.seen) + second.seen == whole.seen, cut
        assert second.weights() == whole.weights(), cut


@pytest.mark.parametrize("every", [2, 3])
def test_redone_steps_are_the_same_steps(tmp_path: Path, every: int) -> None:
    """With a checkpoint only now and then, the steps after it are made again, with the same losses."""
    whole = Program(10)
    attempt(whole, flat, tmp_path / "whole")
    first = Program(10)
    attempt(first, flat, tmp_path / "run", cut=6, save_every=every)
    second = Program(10)
    attempt(second, flat, tmp_path / "run", save_every=every)

    assert first.seen == whole.seen[:6]
    start = second.seen[0][0]
    assert start <= 5
    assert start % every == 0
    assert second.seen == whole.seen[start:]


def foreign(program: Program, run: spotsafe.Run) -> Iterator[None]:
    """A plain DataLoader: its iterator draws from the global generators."""
    loader = torch.utils.data.DataLoader(Samples(program.length), batch_size=program.batch_size, shuffle=True)
    for _ in run.epochs(3):
        for step, batch in run.steps(loader, resume_data="skip"):
            program.train(step, batch)
            yield
        program.seen.append((-1, [], torch.rand(1).item().hex()))
        yield


@pytest.mark.slow
def test_a_plain_loader_that_draws_from_the_global_generators_is_exact_by_skipping(tmp_path: Path) -> None:
    """The order is made again as it was, and the masks are those of the uninterrupted run."""
    whole = Program(7, 2)
    attempt(whole, foreign, tmp_path / "whole")
    for cut in range(1, len(whole.seen) + 1):
        first = Program(7, 2)
        attempt(first, foreign, tmp_path / f"cut{cut}", cut=cut)
        second = Program(7, 2)
        attempt(second, foreign, tmp_path / f"cut{cut}")

        assert committed(first.seen, second.seen) + second.seen == whole.seen, cut
        assert second.weights() == whole.weights(), cut


def test_another_number_of_threads_is_told() -> None:
    """Sums on the CPU are cut by it, so the last bits may differ: said once, at the resume, and what to do."""
    store, before = MemoryStore(), torch.get_num_threads()

    def warnings(threads: int) -> list[str]:
        program = Program()
        torch.set_num_threads(threads)
        with program.session(store) as run:
            for step, batch in run.steps(program.loader, until=run.step + 1):
                program.train(step, batch)
        return [event.message for event in program.of(Warned) if "thread" in event.message]

    try:
        assert warnings(before) == []
        assert warnings(before) == []
        (message,) = warnings(before + 1)
        assert f"this process has {before + 1}: results on the CPU may differ in their last bits" in message
        assert f"torch.set_num_threads({before}) repeats them" in message
        assert warnings(before + 1) == [], "the newest checkpoint is the measure"
    finally:
        torch.set_num_threads(before)


def test_a_restored_optimizer_shares_no_memory(tmp_path: Path) -> None:
    """Its state is memory of its own, as large as it needs, also where it was handed over without a copy."""
    for until in (3, 6):
        program = Program(width=5000)
        with program.session(tmp_path / "run") as run:
            state = program.optimizer.state
            tensors = [one for entries in state.values() for one in entries.values()]
            storages = {one.untyped_storage().data_ptr() for one in tensors}
            assert len(storages) == len(tensors)
            assert all(one.untyped_storage().nbytes() == one.nbytes for one in tensors)
            assert all(one.is_leaf and one._base is None for one in tensors)
            for step, batch in run.steps(program.loader, until=until):
                program.train(step, batch)
    assert run.resumed_from is not None
    assert tensors
