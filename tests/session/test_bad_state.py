"""State that cannot be saved, that is no state, or that does not fit the checkpoint: the error says where and what."""

from __future__ import annotations

import enum
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import spotsafe
from spotsafe import events as ev
from spotsafe.testing.memory import MemoryStore
from tests.session.places import attempts, manifests, run_of_two, start_fails, steps_there, train, trained
from tests.session.rig import Program
from tests.session.test_ways_out import Announcer


class Stateful:
    """Hands out what it is told."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


# -- what cannot be encoded -----------------------------------------------------------------------------------------


@pytest.fixture(params=["lambda", "open file", "generator", "module"])
def unsayable(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """Values that no JSON and no tensor can hold."""
    if request.param == "open file":
        with (tmp_path / "log").open("w") as file:
            yield file
    else:
        yield {"lambda": lambda x: x, "generator": (i for i in range(3)), "module": torch.nn.Linear(1, 1)}[
            request.param
        ]


def test_state_that_cannot_be_encoded_names_its_path(unsayable: Any) -> None:
    """It surfaces at the save, in the training thread; the checkpoints before it stay good."""
    store = MemoryStore()
    program, mine = Program(), Stateful({"epoch": 1, "inner": [{"rate": 0.1}]})
    seen = []
    with (
        pytest.raises(spotsafe.UnsupportedState, match=r"mine\.inner\[0\]\['rate'\]") as caught,
        program.session(store, save_every=2, mine=mine) as run,
    ):
        for step, batch in run.steps(program.loader, until=6):
            program.train(step, batch)
            seen.append(step)
            run.wait()
            if step == 2:
                mine.state["inner"][0]["rate"] = unsayable
    assert caught.value.path == "mine.inner[0]['rate']"
    assert isinstance(caught.value, TypeError)
    assert seen == [0, 1, 2, 3]
    assert steps_there(store) == [2]
    assert [path for path in store.objects if "s000000004" in path] == []
    assert program.of(ev.RunEnded)[0].outcome == "failed"

    again, restored = Program(), Stateful()
    with again.session(store, mine=restored) as run:
        assert run.step == 2
        assert restored.state == {"epoch": 1, "inner": [{"rate": 0.1}]}


class Phase(enum.Enum):
    WARM = "warm"


class Level(enum.IntEnum):
    LOW = 1


@dataclass
class Settings:
    rate: float = 0.1


class Point(NamedTuple):
    x: int = 0
    y: int = 1


@pytest.mark.parametrize(
    "value",
    [
        *[Phase.WARM, Level.LOW, Settings(), [{"deep": Phase.WARM}]],
        *[Point(), {"deep": [Point()]}, defaultdict(int), {1: defaultdict(list)}],  # would be a tuple, a dict
    ],
)
def test_values_that_no_resume_could_rebuild_are_refused_at_the_save(value: Any) -> None:
    """`run.values` are restored before the program can show a class: such checkpoints could never be loaded."""
    store, program = MemoryStore(), Program()
    with (
        pytest.raises(
            spotsafe.UnsupportedState, match=r"run\.values\['mine'\].* a resume could not find"
        ) as caught,
        program.session(store) as run,
    ):
        run.values["mine"] = value
        run.save()
    assert caught.value.path.startswith("run.values['mine']")
    assert steps_there(store) == []


def test_a_value_of_the_run_that_cannot_be_encoded_names_its_path(unsayable: Any) -> None:
    """The path begins with what the user wrote: run.values."""
    store = MemoryStore()
    program = Program()
    with (
        pytest.raises(spotsafe.UnsupportedState, match=r"run\.values\['callback'\]\[1\]"),
        program.session(store, save_every=2) as run,
    ):
        for step, batch in run.steps(program.loader, until=6):
            program.train(step, batch)
            run.wait()
            if step == 2:
                run.values["callback"] = [0, unsayable]
    assert steps_there(store) == [2]


def test_a_value_that_cannot_be_encoded_at_the_end_is_raised_too() -> None:
    """Behind the loop there is no safe point but the end of the block."""
    store = MemoryStore()
    program = Program()
    with pytest.raises(spotsafe.UnsupportedState, match="report"), program.session(store) as run:
        train(program, run)
        run.values["report"] = print
    assert steps_there(store)[0] == 6
    assert program.of(ev.RunEnded)[0].outcome == "failed"


def test_a_failed_save_of_a_loop_of_ones_own_is_made_up_for() -> None:
    """A program that catches the error and repairs its state loses nothing: the end is saved."""
    store = MemoryStore()
    program, mine = Program(), Stateful({"a": 1})
    with program.session(store, save_every=1, mine=mine) as run:
        for step in range(3):
            program.train(step, {"id": torch.tensor([0]), "x": torch.ones(1, 2), "y": torch.ones(1, 1)})
            mine.state = {"a": print} if step == 2 else {"a": step}
            if step < 2:
                run.safe_point()
                run.wait()
                continue
            with pytest.raises(spotsafe.UnsupportedState, match=r"mine\.a"):
                run.safe_point()
            mine.state = {"a": 2}
        assert run.step == 3
    assert steps_there(store)[0] == 3
    restored = Stateful()
    with Program().session(store, mine=restored):
        assert restored.state == {"a": 2}


def test_state_that_cannot_be_encoded_at_a_notice_keeps_the_exit_code() -> None:
    """The launcher has to start this again: 143, with the failure told and the checkpoint before it good."""
    store = MemoryStore()
    program, mine = Program(), Stateful({"a": 1})
    with (
        pytest.raises(spotsafe.Reclaimed) as caught,
        program.session(store, save_every=2, mine=mine) as run,
    ):
        for step, batch in run.steps(program.loader, until=6):
            program.train(step, batch)
            run.wait()
            if step == 2:
                mine.state["a"] = print
                Announcer(run).notice()
    assert caught.value.code == 143
    assert any("mine.a" in event.error or "mine['a']" in event.error for event in program.of(ev.SaveFailed))
    assert steps_there(store) == [2]


def test_a_state_dict_that_raises_keeps_its_own_error() -> None:
    """It is the program's own bug, shown as it is; earlier checkpoints stay."""

    class Broken(Stateful):
        def state_dict(self) -> Any:
            raise ZeroDivisionError("in my own code")

    store = MemoryStore()
    trained(store, until=2)
    program = Program()
    with (
        pytest.raises(ZeroDivisionError, match="in my own code"),
        program.session(store, save_every=1, strict=False, broken=Broken()) as run,
    ):
        train(program, run)
    assert steps_there(store) == [2]


# -- what is no state -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"save_evry": 100}, r"save_every="),
        ({"resumee": "must"}, r"resume="),
        ({"on_reclame": "return"}, r"on_reclaim="),
        ({"excit_code": 3}, r"exit_code="),
        ({"learning_rate": 0.1}, r"learning_rate .*run\.values"),
        ({"model_class": torch.nn.Linear}, r"class Linear.*instance"),
        ({"hook": print}, r"function.*\(get, set\) pair"),
        ({"log": object()}, r"log .*state_dict/load_state_dict"),
        ({"nothing": None}, r"nothing is None.*leave it out"),
        ({"models": {"a": torch.nn.Linear(1, 1), "b": 3}}, r"models\.b .*run\.values"),
        ({"models": []}, r"models .*empty"),
    ],
)
def test_a_keyword_that_is_no_state(options: dict[str, Any], message: str) -> None:
    """The error names it, and the option that was probably meant; it comes before anything is looked at."""
    store = MemoryStore()
    with pytest.raises(TypeError, match=message):
        spotsafe.session(store, model=torch.nn.Linear(1, 1), **options)
    assert store.objects == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"resume": "yes"}, "'auto', 'must', 'never'"),
        ({"on_reclaim": "stop"}, "'exit', 'return'"),
        ({"exit_code": 256}, "0 to 255"),
        ({"exit_code": -1}, "0 to 255"),
        ({"exit_code": True}, "0 to 255"),
        ({"save_every": 0}, "means nothing; write"),
        ({"save_every": True}, "means nothing; write"),
        ({"save_every": "hourly"}, "hourly"),
        ({"keep": 0}, "at least 1"),
        ({"watch": "aws"}, "watch="),
        ({"state": {"model": torch.nn.Linear(1, 1)}}, "both"),
        ({"state": {"": torch.nn.Linear(1, 1)}}, "name"),
        ({"state": {"\udce9": torch.nn.Linear(1, 1)}}, "name"),
    ],
)
def test_an_option_that_means_nothing(options: dict[str, Any], message: str) -> None:
    """A ValueError that lists what can be written."""
    with pytest.raises(ValueError, match=message):
        spotsafe.session(MemoryStore(), model=torch.nn.Linear(1, 1), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"save_every": 1.5}, "save_every="),
        ({"keep": "all"}, "keep="),
        ({"watch": [object()]}, "no Watcher"),
        ({"exit_code": "143"}, "exit_code"),
        ({"grace": 30}, "grace=.*timedelta"),
        ({"drain_timeout": 60.0}, "drain_timeout=.*timedelta"),
        ({"init_from": 3}, "init_from="),
        ({"events": [object()]}, "events="),
    ],
)
def test_an_option_of_a_wrong_type(options: dict[str, Any], message: str) -> None:
    """A TypeError that names the option, at once and not in the middle of the run."""
    with pytest.raises(TypeError, match=message):
        spotsafe.session(MemoryStore(), model=torch.nn.Linear(1, 1), **options)


@pytest.mark.parametrize("value", ["no number", None, [1.0], torch.zeros(2)])
def test_a_metric_that_is_no_number(value: Any) -> None:
    """Named at the call, not found missing when somebody asks for the best."""
    program = Program()
    with program.session(MemoryStore()) as run, pytest.raises(TypeError, match="accuracy"):
        run.save(metrics={"accuracy": value})


def test_metrics_that_no_manifest_can_hold() -> None:
    """A ValueError where they are given: in the background it would be a failed save, long after."""
    program = Program()
    store = MemoryStore()
    with program.session(store) as run:
        for bad in ({"\ud800": 1.0}, {"": 1.0}, {f"{number:01000}": 0.0 for number in range(600)}):
            with pytest.raises(ValueError, match="metrics="):
                run.save(metrics=bad)
        run.save(metrics={"loss": math.nan})
        assert run.failures == ()
    assert [str(one.metrics["loss"]) for one in manifests(store).values()] == ["nan"]


# -- parameters without an owner ------------------------------------------------------------------------------------


def test_an_optimizer_parameter_that_nothing_tracked_owns() -> None:
    """At the first body, before a step is lost; the line to write is in the error."""
    store = MemoryStore()
    program = Program()
    head = torch.nn.Linear(4, 2)
    program.optimizer.add_param_group({"params": head.parameters()})
    with (
        pytest.raises(spotsafe.UntrackedParameters, match=r"run\.track\(linear=<the Linear>\)") as caught,
        program.session(store, save_every=1) as run,
    ):
        train(program, run)
    assert "optimizer: 2 parameters (of shapes [2, 4], [2])" in str(caught.value)
    assert program.seen == []
    assert steps_there(store) == []

    again = Program()
    again.optimizer.add_param_group({"params": head.parameters()})
    with again.session(store, save_every=1) as run:
        run.track(linear=head)
        train(again, run)
    assert steps_there(store)[0] == 6


def test_a_parameter_that_loses_its_owner_in_mid_run() -> None:
    """A group added behind the first step is found at the next save, not at the next resume."""
    store = MemoryStore()
    program = Program()
    with (
        pytest.raises(spotsafe.UntrackedParameters, match=r"run\.track\("),
        program.session(store, save_every=1) as run,
    ):
        for step, batch in run.steps(program.loader, until=6):
            program.train(step, batch)
            run.wait()
            if step == 2:
                program.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})
    assert steps_there(store) == [2, 1]


# -- what does not fit ----------------------------------------------------------------------------------------------


def test_a_model_whose_shapes_do_not_fit_names_every_mismatch() -> None:
    """Before the claim: nothing is changed or claimed, and each mismatch says what was saved and what is there."""
    store, _, _ = run_of_two()
    before = dict(store.objects)
    program = Program(width=6)
    weights = program.weights()
    with pytest.raises(spotsafe.StateMismatch) as caught, program.session(store):
        pytest.fail("it started")
    model = [line for line in caught.value.problems if line.startswith("model")]
    assert model == [
        "model.first.bias: saved float32 [4], program has float32 [6]",
        "model.first.weight: saved float32 [4, 2], program has float32 [6, 2]",
        "model.mean: saved float32 [4], program has float32 [6]",
        "model.second.weight: saved float32 [1, 4], program has float32 [1, 6]",
    ]
    for line in caught.value.problems:
        assert line in str(caught.value)
    assert store.objects == before
    assert program.weights() == weights


@pytest.mark.parametrize("strict", [True, False])
def test_shapes_must_agree_also_without_strict(strict: bool) -> None:
    """A tensor of another shape is never skipped in silence."""
    store, _, _ = run_of_two()
    program = Program(width=6)
    with pytest.raises(spotsafe.StateMismatch), program.session(store, strict=strict):
        pytest.fail("it started")
    assert attempts(store) == (1,)


class Wider(torch.nn.Module):
    """A model with one layer more, and one less, than the rig's."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.first = model.first
        self.register_buffer("mean", model.mean)
        self.third = torch.nn.Linear(4, 1)


def test_a_key_missing_or_extra_inside_a_model_is_an_error() -> None:
    """Both directions, all of them, before the claim."""
    store, _, _ = run_of_two()
    wider = Wider(Program().model)
    with pytest.raises(spotsafe.StateMismatch) as caught, spotsafe.session(store, watch=None, model=wider):
        pytest.fail("it started")
    assert list(caught.value.problems) == [
        "model.second.bias: float32 [1] in the checkpoint, not in the program",
        "model.second.weight: float32 [1, 4] in the checkpoint, not in the program",
        "model.third.bias: float32 [1] in the program, not in the checkpoint",
        "model.third.weight: float32 [1, 4] in the program, not in the checkpoint",
    ]
    assert attempts(store) == (1,)


def test_without_strict_what_was_skipped_is_listed() -> None:
    """The rest is restored; every skipped name is in one warning, so that a total mismatch cannot hide."""
    store = MemoryStore()
    saved = trained(store)
    program = Program(seed=9)
    wider = Wider(program.model)
    third = wider.third.weight.tolist()
    extra = torch.full((2,), 5.0)
    with spotsafe.session(
        store, watch=None, model=wider, extra=extra, strict=False, events=program.sink
    ) as run:
        for _ in run.steps(program.loader, until=5):
            break
    assert wider.first.weight.tolist() == saved.model.first.weight.tolist()
    assert wider.third.weight.tolist() == third
    assert extra.tolist() == [5.0, 5.0]
    [warning] = [event.message for event in program.of(ev.Warned) if "not restored" in event.message]
    for name in (
        "model.second.bias",
        "model.second.weight",
        "model.third.bias",
        "model.third.weight",
        "extra: tracked, not in the checkpoint",
        "optimizer: in the checkpoint, not tracked",
        "scheduler: in the checkpoint, not tracked",
    ):
        assert warning.count(name) == 1, name


def test_an_object_that_the_checkpoint_does_not_hold() -> None:
    """Known before the claim; the names that it does hold are listed."""
    store, _, _ = run_of_two()
    error = start_fails(store, spotsafe.StateMismatch, ema=torch.zeros(3))
    assert "ema: tracked, but not in the checkpoint, which holds model, optimizer, scheduler" in str(error)


def test_a_name_in_the_checkpoint_that_nobody_claims() -> None:
    """It may be tracked later, so it is judged at the first body; the line to write is in the error."""
    store = MemoryStore()
    trained(store, ema=torch.zeros(3))
    program = Program()
    with (
        pytest.raises(
            spotsafe.StateMismatch, match=r"ema: in the checkpoint, but not tracked; run\.track\(ema=\.\.\.\)"
        ),
        program.session(store) as run,
    ):
        train(program, run)
    assert program.seen == []
    assert steps_there(store) == [4, 2]

    again, ema = Program(), torch.ones(3)
    with again.session(store) as run:
        run.track(ema=ema)
        assert ema.tolist() == [0.0, 0.0, 0.0]
        train(again, run)


def test_an_object_of_another_kind() -> None:
    """A model where an optimizer was is a mismatch, not an error deep inside torch."""
    store, _, _ = run_of_two()
    program = Program()
    with (
        pytest.raises(spotsafe.StateMismatch, match="scheduler: saved as stateful, program has module"),
        program.session(store, scheduler=torch.nn.Linear(1, 1)),
    ):
        pytest.fail("it started")


def test_an_object_that_refuses_its_state() -> None:
    """Its own error is chained, and the object is named."""

    class Picky(Stateful):
        def load_state_dict(self, state: Any) -> None:
            raise ValueError("no, thank you")

    store = MemoryStore()
    trained(store, picky=Stateful({"a": 1}))
    with (
        pytest.raises(
            spotsafe.StateMismatch, match="picky refused its saved state: ValueError: no, thank you"
        ),
        Program().session(store, picky=Picky()),
    ):
        pytest.fail("it started")
    with Program().session(store, picky=Stateful()) as run:
        assert run.step == 4


def test_loops_that_changed() -> None:
    """A program whose loops are others than the checkpoint's is stopped before it trains the wrong thing."""
    store, _, _ = run_of_two()
    program = Program()
    with (
        pytest.raises(spotsafe.StateMismatch, match=r"taken in loop 'steps0'.*now starts loop 'warmup'"),
        program.session(store) as run,
    ):
        for _ in run.range(3, name="warmup"):
            pytest.fail("it ran")


def test_a_session_state_of_another_shape() -> None:
    """What the session itself keeps is read as strictly as the rest."""
    from spotsafe.testing.states import write_checkpoint
    from spotsafe.tracking import Tracker

    store = MemoryStore()
    tracker = Tracker(warn=lambda _: None)
    tracker.add("x", torch.zeros(1))
    write_checkpoint(store, tracker.capture(session={"positions": 3}))
    with (
        pytest.raises(spotsafe.StateMismatch, match="session state cannot be read"),
        spotsafe.session(store, watch=None, x=torch.zeros(1), takeover=True),
    ):
        pytest.fail("it started")
