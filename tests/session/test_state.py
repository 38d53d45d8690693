"""Every kind of state in a session: what was saved is what is there after the resume, bit for bit."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import spotsafe
from spotsafe import events as ev
from spotsafe.testing.memory import MemoryStore
from tests.session.places import manifests, steps_there, train, trained
from tests.session.rig import Cut, Program


class Counting:
    """The smallest object that is state."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {"n": 0}

    def state_dict(self) -> dict[str, Any]:
        return self.seen

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = dict(state)


class Everything:
    """One object of each kind, and a body that changes all of them by what they draw and hold."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Linear(3, 2)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=2)
        self.tensor = torch.zeros(3)
        self.parameter = torch.nn.Parameter(torch.full((2,), float(seed)))
        self.generator = torch.Generator().manual_seed(seed)
        self.numpy = np.random.default_rng(seed)
        self.legacy = np.random.RandomState(seed)
        self.python = random.Random(seed)
        self.array = np.full((2, 2), seed, dtype=np.int16)
        self.total = float(seed)
        self.counting = Counting()
        self.models = {"student": torch.nn.Linear(1, 1), 3: torch.nn.Linear(1, 1)}
        self.listed = [Counting(), torch.zeros(1), (lambda: {"k": self.listed_value}, self.set_listed)]
        self.listed_value = (seed, "x")

    def set_listed(self, state: dict[str, Any]) -> None:
        self.listed_value = state["k"]

    def set_total(self, value: float) -> None:
        self.total = value

    @property
    def tracked(self) -> dict[str, Any]:
        names = "model optimizer scheduler scaler tensor parameter generator numpy legacy python array counting models"
        return {
            **{name: getattr(self, name) for name in names.split()},
            "total": (lambda: self.total, self.set_total),
            "listed": self.listed,
        }

    def body(self) -> list[Any]:
        """Change everything, and tell what was drawn."""
        drawn = [
            torch.rand(1, generator=self.generator).item(),
            self.numpy.standard_normal(),
            self.legacy.standard_normal(),
            self.python.gauss(0, 1),
            torch.rand(1).item(),
            float(np.random.rand()),
            random.random(),
            random.gauss(0, 1),
        ]
        loss = self.model(torch.full((1, 3), drawn[0])).square().sum()
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        with torch.no_grad():
            self.tensor += drawn[1]
            self.parameter += drawn[2]
            for model in self.models.values():
                model.weight.fill_(drawn[3])
        self.array += 1
        self.total += drawn[4]
        self.counting.seen["n"] += 1
        self.listed[0].seen["n"] += 2
        self.listed[1] += drawn[5]
        self.listed_value = (self.listed_value[0] + 1, "y")
        return drawn

    def look(self) -> list[Any]:
        """Everything, as values that can be compared."""
        return [
            [value.tolist() for value in self.model.state_dict().values()],
            [
                [value.tolist() for value in one.values()]
                for one in self.optimizer.state_dict()["state"].values()
            ],
            self.optimizer.param_groups[0]["lr"],
            self.scheduler.last_epoch,
            self.scaler.state_dict(),
            self.tensor.tolist(),
            self.parameter.tolist(),
            self.array.tolist(),
            self.total,
            self.counting.seen,
            [model.weight.item() for model in self.models.values()],
            (self.listed[0].seen, self.listed[1].tolist(), self.listed_value),
        ]


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def life(
    store: MemoryStore, seed: int, *, until: int, cut: int | None = None
) -> tuple[list[Any], Everything]:
    """One attempt with everything tracked: what its bodies drew, and the objects."""
    things, drawn = Everything(seed), []
    seed_all(seed)
    try:
        with spotsafe.session(store, watch=None, save_every=2, **things.tracked) as run:
            for step in run.range(until):
                drawn.append(things.body())
                run.wait()
                if step == cut:
                    raise Cut
    except Cut:
        pass
    return drawn, things


def test_every_kind_of_state_goes_on_where_it_was() -> None:
    """Cut after step 4 with a checkpoint at 4, resumed over objects that were made with another seed."""
    whole, reference = life(MemoryStore(), 1, until=7)
    store = MemoryStore()
    first, _ = life(store, 1, until=7, cut=4)
    rest, things = life(store, 2, until=7)
    assert first[:4] + rest == whole
    assert things.look() == reference.look()


def test_objects_are_restored_in_place() -> None:
    """Whoever holds a reference - an optimizer, a closure - sees the restored values."""
    store = MemoryStore()
    life(store, 1, until=4)
    things = Everything(2)
    before = {name: id(value) for name, value in things.tracked.items() if not isinstance(value, tuple)}
    pointers = [p.data_ptr() for p in (things.tensor, things.parameter, things.model.weight)]
    with spotsafe.session(store, watch=None, **things.tracked):
        assert {name: id(getattr(things, name)) for name in before} == before
        assert [p.data_ptr() for p in (things.tensor, things.parameter, things.model.weight)] == pointers
        assert things.array.tolist() == [[5, 5], [5, 5]]


def test_the_checkpoint_does_not_hang_on_to_live_objects() -> None:
    """What was restored is a copy of its own: changing it changes no checkpoint, and the next save is of now."""
    store = MemoryStore()
    trained(store)
    before = {path: data for path, data in store.objects.items() if "a000001" in path}
    program = Program()
    with program.session(store, save_every=1, keep=10) as run:
        with torch.no_grad():
            for parameter in program.model.parameters():
                parameter.zero_()
        train(program, run, 5)
    assert {path: data for path, data in store.objects.items() if "a000001" in path} == before
    again = Program()
    with again.session(store):
        assert again.weights() == program.weights()


def test_a_load_that_empties_what_it_is_given_harms_nobody() -> None:
    """LambdaLR once popped from the caller's dict: each object gets a copy of its own."""

    class Greedy(Counting):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            super().load_state_dict(state)
            state.clear()

    store = MemoryStore()
    shared = {"n": 1, "inner": [1, 2]}
    one, two = Greedy(), Greedy()
    one.seen = two.seen = shared
    trained(store, one=one, two=two)
    one, two = Greedy(), Greedy()
    program = Program()
    with program.session(store, one=one, two=two) as run:
        assert (one.seen, two.seen) == (shared, shared)
        train(program, run)
    with Program().session(store, one=(again := Greedy()), two=Greedy()):
        assert again.seen == shared


# -- names ----------------------------------------------------------------------------------------------------------


def test_names_of_options_go_into_state() -> None:
    """state={...} takes any name; the same name as a keyword is the option."""
    store = MemoryStore()
    names = {"keep": torch.ones(1), "clock": torch.ones(2), "url": torch.ones(3), "a b": torch.ones(4)}
    with spotsafe.session(store, watch=None, state=names) as run:
        for _ in run.range(1):
            for tensor in names.values():
                tensor.add_(1)
    empty = {name: torch.zeros_like(tensor) for name, tensor in names.items()}
    with spotsafe.session(store, watch=None, state=empty):
        assert all(torch.equal(empty[name], names[name]) for name in names)


def test_track_refuses_names_and_objects_twice() -> None:
    """A second name for an object would save it twice; a second object under a name would lose one."""
    program = Program()
    with program.session(MemoryStore()) as run:
        with pytest.raises(ValueError, match="tracked already, as model"):
            run.track(copy=program.model)
        with pytest.raises(ValueError, match="model is tracked already"):
            run.track(model=torch.zeros(1))
        with pytest.raises(ValueError, match="keep is an option"):
            run.track(keep=torch.zeros(1))
        train(program, run)


def test_an_object_that_did_not_fit_may_be_corrected() -> None:
    """In a notebook the next cell tracks it again."""
    store = MemoryStore()
    trained(store, ema=torch.full((3,), 2.0))
    program = Program()
    with program.session(store) as run:
        with pytest.raises(
            spotsafe.StateMismatch, match=r"ema: saved float32 \[3\], program has float32 \[4\]"
        ):
            run.track(ema=torch.zeros(4))
        run.track(ema=(ema := torch.zeros(3)))
        assert ema.tolist() == [2.0] * 3
        train(program, run)


# -- tracked later --------------------------------------------------------------------------------------------------


def test_what_is_tracked_before_the_loop_is_restored_at_once() -> None:
    """The values are there in the next line, as the program needs them to go on setting itself up."""
    store = MemoryStore()
    with spotsafe.session(store, watch=None) as run:
        ema = torch.zeros(2)
        run.track(ema=ema)
        for _ in run.range(2):
            ema += 1
    with spotsafe.session(store, watch=None) as run:
        ema = torch.full((2,), 9.0)
        run.track(ema=ema)
        assert ema.tolist() == [2.0, 2.0]
        with pytest.raises(spotsafe.StateMismatch, match="other"):
            run.track(other=torch.zeros(1))


def test_an_optimizer_waits_for_its_parameters() -> None:
    """Tracked at enter, its parameters only later: it is restored when the last of them has a name."""

    def things() -> tuple[torch.nn.Module, torch.nn.Module, torch.optim.Optimizer]:
        one, two = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
        return one, two, torch.optim.Adam([*one.parameters(), *two.parameters()], lr=0.1)

    def step(one: torch.nn.Module, two: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        two(one(torch.ones(1, 1))).sum().backward()
        optimizer.step()

    store = MemoryStore()
    one, two, optimizer = things()
    with spotsafe.session(store, watch=None, optimizer=optimizer) as run:
        run.track(one=one)
        run.track(two=two)
        for _ in run.range(3):
            step(one, two, optimizer)
    moments = [value["exp_avg"].tolist() for value in optimizer.state.values()]

    one, two, optimizer = things()
    with spotsafe.session(store, watch=None, optimizer=optimizer) as run:
        run.track(one=one)
        assert not optimizer.state
        run.track(two=two)
        assert [value["exp_avg"].tolist() for value in optimizer.state.values()] == moments


def test_a_scheduler_made_after_the_restore_does_not_reset_the_rate() -> None:
    """Its constructor writes the optimizer's rate; tracking it puts back the saved one."""
    store = MemoryStore()
    trained(store)
    program = Program()
    with spotsafe.session(store, watch=None, model=program.model, optimizer=program.optimizer) as run:
        saved = program.optimizer.param_groups[0]["lr"]
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(program.optimizer, 50)
        run.track(scheduler=scheduler)
        assert program.optimizer.param_groups[0]["lr"] == saved
        assert scheduler.last_epoch == 4
        program.scheduler = scheduler
        train(program, run)
    assert program.weights() == trained(MemoryStore(), until=6).weights()


def test_what_is_tracked_behind_the_first_step_is_saved_from_then_on() -> None:
    """And a resume asks for it, by the line to write."""
    store = MemoryStore()
    late = torch.zeros(1)
    program = Program()
    with program.session(store, save_every=1, keep=10) as run:
        for step, batch in run.steps(program.loader, until=4):
            program.train(step, batch)
            run.wait()
            if step == 1:
                run.track(late=late)
    again = Program()
    with pytest.raises(spotsafe.StateMismatch, match=r"run\.track\(late="), again.session(store) as run:
        train(again, run)
    assert steps_there(store) == [4, 3, 2, 1]


def test_an_optimizer_that_is_tracked_behind_the_first_step_counts_from_then_on() -> None:
    """A break between two updates is no step, also for an optimizer that came later."""
    store = MemoryStore()
    program = Program()
    other = torch.optim.SGD(program.model.second.parameters(), lr=0.1)
    with program.session(store, save_every=1, keep=10) as run:
        for step, batch in run.steps(program.loader, until=6):
            if step == 1:
                run.track(other=other)
            program.train(step, batch)
            if step == 3:
                break
            program.loss(batch).backward()
            other.step()
            run.wait()
    assert run.step == 3
    assert steps_there(store) == [3, 2, 1]


# -- plain values ---------------------------------------------------------------------------------------------------


def test_values_keep_their_types() -> None:
    """Plain values come back as what they were, not as what JSON makes of them."""
    values: dict[str, Any] = {
        "int": 1 << 80,
        "float": 0.1,
        "inf": float("-inf"),
        "zero": -0.0,
        "complex": 1 + 2j,
        "bytes": b"\0\xff",
        "text": "\u6f22 \udce9",
        "none": None,
        "flag": True,
        "tuple": (1, (2, 3)),
        "set": {1, "a"},
        "keys": {1: "one", (2, 3): "pair", None: 0},
        "ordered": OrderedDict(b=1, a=2),
        "deque": deque([1, 2], maxlen=5),
        "counter": Counter("aab"),
        "path": Path("/a/b"),
        "when": datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=timezone.utc),
        "span": timedelta(seconds=1.5),
        "scalar": np.float32(0.1),
        "array": np.arange(3, dtype=np.int8),
        "tensor": torch.arange(3),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
    }
    store = MemoryStore()
    with spotsafe.session(store, watch=None) as run:
        for _ in run.range(1):
            run.values.update(values)
    with spotsafe.session(store, watch=None) as run:
        assert list(run.values) == list(values)
        for name, value in values.items():
            found = run.values[name]
            assert type(found) is type(value), name
            same = (
                torch.equal
                if isinstance(value, torch.Tensor)
                else np.array_equal
                if name == "array"
                else None
            )
            assert same(found, value) if same else found == value, name
        assert run.values["deque"].maxlen == 5
        assert str(run.values["zero"]) == "-0.0"


def test_values_are_saved_as_they_are_at_the_safe_point() -> None:
    """A list that grows later is not the one of the checkpoint."""
    store = MemoryStore()
    program = Program()
    with pytest.raises(Cut), program.session(store, save_every=2) as run:
        for step, batch in run.steps(program.loader, until=6):
            program.train(step, batch)
            run.values.setdefault("losses", []).append(step)
            run.wait()
            if step == 2:
                raise Cut
    with Program().session(store) as run:
        assert run.values == {"losses": [0, 1]}


def test_values_set_behind_the_last_step_are_saved() -> None:
    """With every form of loop, and in place as well as anew: the end of the block is saved if it says more."""

    def by_range(run: spotsafe.Run) -> None:
        for _ in run.range(2):
            run.values["log"] = run.values.get("log", [])

    def by_epochs(run: spotsafe.Run) -> None:
        for _ in run.epochs(2):
            run.values["log"] = run.values.get("log", [])

    def by_hand(run: spotsafe.Run) -> None:
        while run.step < 2:
            run.values["log"] = run.values.get("log", [])
            run.safe_point()

    for body in (by_range, by_epochs, by_hand):
        store = MemoryStore()
        with spotsafe.session(store, watch=None, save_every=1, keep=10) as run:
            body(run)
            run.wait()
            run.values["log"].append({"accuracy": 0.5})
        with spotsafe.session(store, watch=None) as run:
            assert run.values["log"] == [{"accuracy": 0.5}], body


@pytest.mark.parametrize(
    "value", [torch.zeros(2), np.zeros(2), {"deep": [torch.zeros(2)]}], ids=["tensor", "array", "deep"]
)
def test_an_array_that_is_changed_in_place_behind_the_last_step_is_saved(value: Any) -> None:
    """Its name and shape stay the same; its numbers count."""

    def numbers(found: Any) -> Any:
        return found["deep"][0] if isinstance(found, dict) else found

    store = MemoryStore()
    with spotsafe.session(store, watch=None, save_every=1, keep=10) as run:
        run.values["confusion"] = value
        for _ in run.range(2):
            run.wait()
        run.wait()
        numbers(value)[0] = 5.0
    assert steps_there(store) == [2, 2, 1]
    with spotsafe.session(store, watch=None) as run:
        assert numbers(run.values["confusion"]).tolist() == [5.0, 0.0]


def test_nothing_new_behind_the_last_step_saves_nothing_twice() -> None:
    """The end is saved once, whatever values there are."""
    store = MemoryStore()
    program = Program()
    with program.session(store, save_every=2, keep=10) as run:
        run.values.update(nan=float("nan"), array=np.zeros(2), nested={"a": [1]})
        for step, batch in run.steps(program.loader, until=4):
            program.train(step, batch)
            run.wait()
    assert len(steps_there(store)) == len(set(steps_there(store)))


# -- without state --------------------------------------------------------------------------------------------------


def test_a_session_without_state_keeps_the_position(tmp_path: Path) -> None:
    """Batch inference: nothing to restore but where it was."""
    program = Program()

    def infer(cut: int | None) -> list[list[int]]:
        done: list[list[int]] = []
        try:
            with spotsafe.session(str(tmp_path / "run"), watch=None, save_every=1) as run:
                for step, batch in run.steps(Program().loader, until=8):
                    run.wait()
                    done.append(batch["id"].tolist())
                    if step == cut:
                        raise Cut
        except Cut:
            pass
        return done

    first = infer(3)
    rest = infer(None)
    loader = program.loader
    whole = []
    with spotsafe.session(MemoryStore(), watch=None) as run:
        for _, batch in run.steps(loader, until=8):
            whole.append(batch["id"].tolist())
    assert first[:3] + rest == whole


# -- random numbers -------------------------------------------------------------------------------------------------


def draw() -> tuple[float, float, float]:
    return torch.rand(1).item(), float(np.random.rand()), random.random()


@pytest.mark.parametrize(
    "setting_up", [lambda: None, lambda: seed_all(99), lambda: [draw() for _ in range(5)]]
)
def test_the_global_generators_go_on_whatever_the_set_up_drew(setting_up: Callable[[], object]) -> None:
    """They are restored when the loop begins, after everything that draws while the program sets itself up."""

    def attempt(store: MemoryStore, cut: int | None) -> list[Any]:
        seed_all(5)
        drawn: list[Any] = []
        try:
            with spotsafe.session(store, watch=None, save_every=1) as run:
                setting_up() if run.resumed_from else None
                for step in run.range(6):
                    run.wait()
                    drawn.append(draw())
                    if step == cut:
                        raise Cut
        except Cut:
            pass
        return drawn

    whole = attempt(MemoryStore(), None)
    store = MemoryStore()
    first = attempt(store, 3)
    assert first[:3] + attempt(store, None) == whole


def test_a_save_before_the_loop_keeps_the_loops_generators() -> None:
    """Asked for between the resume and the loop, it is of the safe point that the loop will go on from."""

    def attempt(store: MemoryStore, *, until: int, ask: bool = False, cut: bool = False) -> list[Any]:
        seed_all(5)
        drawn: list[Any] = []
        try:
            with spotsafe.session(store, watch=None, save_every=1) as run:
                if ask:
                    [draw() for _ in range(3)]
                    run.save()
                    run.wait()
                if cut:
                    raise Cut
                for _ in run.range(until):
                    drawn.append(draw())
        except Cut:
            pass
        return drawn

    whole = attempt(MemoryStore(), until=6)
    store = MemoryStore()
    first = attempt(store, until=3)
    attempt(store, until=6, ask=True, cut=True)
    assert first + attempt(store, until=6) == whole


def test_a_save_before_the_loop_lacks_nothing_that_is_tracked_later() -> None:
    """A checkpoint without the state that nobody has tracked yet would be the newest, and unusable."""
    store = MemoryStore()
    trained(store, ema=torch.ones(2))
    program = Program()
    with pytest.raises(spotsafe.StateMismatch, match=r"run\.track\(ema="), program.session(store) as run:
        run.save()
    assert steps_there(store) == [4, 2]
    with Program().session(store) as run:
        run.track(ema=(ema := torch.zeros(2)))
        run.save(metrics={"loss": 1.0})
        assert ema.tolist() == [1.0, 1.0]
    assert manifests(store)[4].metrics == {"loss": 1.0}


def test_a_late_object_that_begins_with_infinities_is_healthy() -> None:
    """A mask of -inf that was there at the start is no sign of decay, whenever it is tracked."""
    store = MemoryStore()
    program = Program()
    with program.session(store) as run:
        mask = torch.nn.Parameter(torch.tensor([0.0, float("-inf")]))
        run.track(mask=mask)
        train(program, run)
    assert all(event.healthy for event in program.of(ev.CheckpointPublished))
