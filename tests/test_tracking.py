"""What a session tracks: names, ownership, checks before the claim, restores at enter and at track, the judgement."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from spotsafe.errors import StateMismatch, UnsupportedState, UntrackedParameters
from spotsafe.tensors.tree import Capture, SavedState, spec_of
from spotsafe.testing.states import through_checkpoint
from spotsafe.tracking import Tracker

OPTIONS = ("save_every", "keep", "resume", "grace", "strict", "events")


class Counter:
    """The smallest stateful object."""

    def __init__(self, value: Any = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Lines(list[str]):
    """Collects warnings."""

    def __call__(self, text: str) -> None:
        self.append(text)


def tracked(*, strict: bool = True, warn: Callable[[str], None] = print, **objects: Any) -> Tracker:
    tracker = Tracker(strict=strict, options=OPTIONS, warn=warn)
    for name, obj in objects.items():
        tracker.add(name, obj)
    return tracker


def save(**objects: Any) -> SavedState:
    return through_checkpoint(tracked(**objects).capture())


def model_and_optimizer(seed: int, *, steps: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(1, 3)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    return torch.cat([optimizer.state[one]["exp_avg"].flatten() for one in model.parameters()])


# -- names ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("save_evry", 100, r"save_evry is no state; did you mean save_every=\?"),
        ("kep", 3, r"did you mean keep=\?"),
        ("resumes", "must", r"did you mean resume=\?"),
        ("zebra", 3, r"zebra is a plain value \(int\); keep it in run.values"),
        ("zebra", None, "zebra is None, which is no state; leave it out"),
        ("modle", nn.Linear, "is the class Linear"),
    ],
)
def test_a_keyword_that_is_no_state(name: str, value: Any, words: str) -> None:
    """A TypeError names the nearest option, or what to do with the value."""
    with pytest.raises(UnsupportedState, match=words):
        tracked(**{name: value})
    assert issubclass(UnsupportedState, TypeError)


def test_a_state_that_is_called_nearly_like_an_option() -> None:
    """The hint is for mistakes only; real state may have any name."""
    assert tracked(keeper=Counter(), events_seen=Counter()).names == ("keeper", "events_seen")


def test_names_of_options_are_reserved() -> None:
    """Such a name is refused with the way out, which is allowed."""
    tracker = tracked()
    with pytest.raises(ValueError, match=r"keep is an option of the session; .*state=\{\.\.\.\}"):
        tracker.add("keep", Counter())
    tracker.add("keep", Counter(), from_state=True)
    assert tracker.names == ("keep",)


def test_a_name_or_an_object_twice() -> None:
    """Two objects of one name, or one object under two names, would overwrite each other."""
    counter = Counter()
    tracker = tracked(a=counter)
    with pytest.raises(ValueError, match="a is tracked already; choose another name"):
        tracker.add("a", Counter())
    with pytest.raises(ValueError, match="b is tracked already, as a"):
        tracker.add("b", counter)
    for name in ("", 3):
        with pytest.raises(ValueError, match="needs a name"):
            tracker.add(name, Counter())  # type: ignore[arg-type] # the mistake under test
    assert tracker.names == ("a",)


def test_two_parameters_of_one_name() -> None:
    """Names from `state=` may contain dots; where two parameters would share one, it is refused."""
    tracker = Tracker(warn=print)
    inner = nn.Sequential(nn.Linear(1, 1))
    tracker.add("m", inner)
    tracker.add("m.0", nn.Linear(1, 1))
    with pytest.raises(UnsupportedState, match=r"m\.0\.weight"):
        tracker.capture()


# -- capture -------------------------------------------------------------------------------------------------------


def test_the_order_of_tracking_is_kept_and_owners_name_their_tensors() -> None:
    """A tensor that several objects hold is called after the first that is no optimizer."""
    model, _ = model_and_optimizer(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight]["anchor"] = model.weight.detach()
    capture = tracked(optimizer=optimizer, model=model).capture()
    assert list(capture.state) == ["optimizer", "model"]
    assert [one.name for one in capture.tensors] == ["model.weight", "model.bias"]


def test_the_sessions_values_are_captured_too() -> None:
    """Values of any kind, tensors and arrays among them, come back decoded."""
    session = {"values": {"best": 0.5, "curve": torch.ones(2)}, "positions": {"a": 3}}
    capture = tracked(a=Counter()).capture(session=session)
    assert [one.name for one in capture.tensors] == ["run.values['curve']"]
    with pytest.raises(UnsupportedState, match=r"run\.values\['f'\]"):
        tracked().capture(session={"values": {"f": open}})


def test_an_empty_tracker() -> None:
    """A session without state is legal: it keeps its position only."""
    capture = tracked().capture(session={"positions": {}})
    saved = through_checkpoint(capture)
    tracker = tracked()
    tracker.restore(saved)
    tracker.judge()
    assert (dict(saved.state), capture.tensors) == ({}, ())


def test_a_capture_holds_the_live_tensors() -> None:
    """Nothing is copied at a capture."""
    model = nn.Linear(3, 2)
    capture = tracked(model=model).capture()
    assert isinstance(capture, Capture)
    assert capture.tensors[0].tensor.data_ptr() == model.weight.data_ptr()


# -- owners of parameters ------------------------------------------------------------------------------------------


def test_what_nobody_owns_shows_the_line_to_write() -> None:
    """The error says which optimizer, how many, their shapes, and the call that helps."""

    class PolicyNet(nn.Sequential):
        pass

    model, policy = nn.Linear(2, 2), PolicyNet(nn.Linear(2, 3), nn.Linear(3, 3))
    tracker = tracked(
        model=model, optimizer=torch.optim.SGD([*model.parameters(), *policy.parameters()], lr=0.1)
    )
    lost = tracker.unowned()
    assert [(path, tuple(one.shape)) for path, one in lost] == [
        ("optimizer", (3, 2)),
        ("optimizer", (3,)),
        ("optimizer", (3, 3)),
        ("optimizer", (3,)),
    ]
    with pytest.raises(
        UntrackedParameters, match=r"optimizer: 4 parameters .*run\.track\(policy_net=<the PolicyNet>\)"
    ):
        tracker.judge()
    tracker.add("policy_net", policy)
    tracker.judge()
    assert tracker.unowned() == []


def test_a_bare_parameter_that_nobody_owns() -> None:
    """For a parameter of no module the line tracks the parameter itself, under a free name."""
    alpha = torch.zeros(1, requires_grad=True)
    tracker = tracked(parameter=Counter(), optimizer=torch.optim.SGD([alpha], lr=0.1))
    with pytest.raises(UntrackedParameters, match=r"run\.track\(parameter_2=<the parameter>\)"):
        tracker.judge()
    tracker.add("log_alpha", alpha)
    tracker.judge()


class Agent:
    """Owns a network that only its state dict shows."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.net = nn.Linear(2, 2)
        self.steps = 0

    def state_dict(self) -> dict[str, Any]:
        return {"net": self.net.state_dict(), "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.net.load_state_dict(state["net"])
        self.steps = state["steps"]


def test_parameters_that_only_a_state_dict_shows() -> None:
    """An object whose state shares memory with a parameter owns it."""
    one, other = Agent(1), Agent(2)
    optimizers = [torch.optim.Adam(agent.net.parameters()) for agent in (one, other)]
    one.net(torch.ones(1, 2)).sum().backward()
    optimizers[0].step()
    one.steps = 4
    tracker = tracked(agent=other, optimizer=optimizers[1])
    tracker.restore(save(agent=one, optimizer=optimizers[0]))
    tracker.judge()
    assert other.steps == 4
    assert torch.equal(other.net.weight, one.net.weight)
    assert torch.equal(moments(other.net, optimizers[1]), moments(one.net, optimizers[0]))


def test_optimizers_and_modules_are_found_inside_containers() -> None:
    """Step hooks and barriers need every optimizer, wherever it is."""
    model, optimizer = model_and_optimizer(1)
    tracker = tracked(everything={"a": [model], "b": {"c": optimizer}}, counter=Counter())
    assert tracker.optimizers == (optimizer,)
    assert tracker.modules == (model,)


# -- restore at enter ----------------------------------------------------------------------------------------------


def check(tracker: Tracker, saved: SavedState) -> list[str]:
    return tracker.check(
        tensors={name: spec_of(one) for name, one in saved.tensors.items()}, state=saved.state
    )


def test_a_check_lists_every_mismatch_and_changes_nothing() -> None:
    """Before the claim: shapes, kinds, groups and missing names of all objects at once."""
    model, optimizer = model_and_optimizer(1, steps=2)
    saved = save(model=model, optimizer=optimizer, counter=Counter(3))
    other = nn.Linear(4, 2)
    tracker = tracked(
        model=other,
        optimizer=torch.optim.AdamW([{"params": [other.weight]}, {"params": [other.bias]}]),
        counter=torch.ones(2),
        extra=Counter(),
    )
    before = other.weight.clone()
    problems = check(tracker, saved)
    assert problems[0] == "model.weight: saved float32 [2, 3], program has float32 [2, 4]"
    assert any("parameter group" in line for line in problems)
    assert "counter: saved as stateful, program has tensor" in problems
    assert any(line.startswith("extra: tracked, but not in the checkpoint") for line in problems)
    assert any(line.endswith("model, optimizer, counter; strict=False starts it afresh") for line in problems)
    with pytest.raises(StateMismatch, match="does not fit the program") as caught:
        tracker.restore(saved)
    assert list(caught.value.problems) == problems
    assert torch.equal(other.weight, before)


def test_a_check_that_finds_nothing() -> None:
    """What fits has no problems; objects that may be tracked later are none."""
    model, optimizer = model_and_optimizer(1, steps=2)
    saved = save(model=model, optimizer=optimizer, counter=Counter(3))
    assert check(tracked(model=nn.Linear(3, 2)), saved) == []


def test_everything_is_restored_in_place() -> None:
    """Model, optimizer and objects are what they were; identities stay."""
    model, optimizer = model_and_optimizer(1, steps=3)
    saved = save(model=model, optimizer=optimizer, counter=Counter(3))
    other, second = model_and_optimizer(2)
    counter, weight = Counter(), other.weight
    tracker = tracked(model=other, optimizer=second, counter=counter)
    tracker.restore(saved)
    tracker.judge()
    assert other.weight is weight
    assert torch.equal(other.weight, model.weight)
    assert torch.equal(moments(other, second), moments(model, optimizer))
    assert counter.value == 3


def test_two_trackers_restore_from_one_checkpoint() -> None:
    """No restore changes what the next one finds."""
    saved = save(a=Counter({"list": [1, torch.ones(2)]}))
    for _ in range(2):
        counter = Counter()
        tracked(a=counter).restore(saved)
        assert counter.value["list"][1].tolist() == [1, 1]
        counter.value["list"][1].zero_()
        counter.value.clear()


# -- restore at track ----------------------------------------------------------------------------------------------


def test_an_object_tracked_later_is_restored_at_once() -> None:
    """Before the first body, `track` restores what the checkpoint holds of it."""
    tracker = tracked(a=Counter())
    tracker.restore(save(a=Counter(1), b=Counter(2)))
    later = Counter()
    tracker.add("b", later)
    assert later.value == 2
    tracker.judge()


def test_an_optimizer_waits_for_its_last_parameter() -> None:
    """It is restored when the last of its parameters has a name."""
    torch.manual_seed(1)
    parts = [nn.Linear(2, 2), nn.Linear(2, 1)]
    optimizer = torch.optim.Adam([*parts[0].parameters(), *parts[1].parameters()])
    parts[1](parts[0](torch.ones(1, 2))).sum().backward()
    optimizer.step()
    saved = save(a=parts[0], optimizer=optimizer, b=parts[1])
    others = [nn.Linear(2, 2), nn.Linear(2, 1)]
    second = torch.optim.Adam([*others[0].parameters(), *others[1].parameters()])
    tracker = tracked(a=others[0], optimizer=second)
    assert check(tracker, saved) == []
    tracker.restore(saved)
    assert not second.state
    tracker.add("b", others[1])
    assert torch.equal(moments(others[1], second), moments(parts[1], optimizer))
    tracker.judge()


def test_an_object_tracked_later_that_does_not_fit() -> None:
    """The mismatch is raised at `track`, and a name that was not saved is one."""
    tracker = tracked(a=Counter())
    tracker.restore(save(a=Counter(), w=torch.ones(2)))
    with pytest.raises(StateMismatch, match=r"w: saved float32 \[2\], program has float32 \[3\]"):
        tracker.add("w", torch.ones(3))
    fresh = tracked(a=Counter())
    fresh.restore(save(a=Counter()))
    with pytest.raises(StateMismatch, match="new: tracked, but not in the checkpoint, which holds a"):
        fresh.add("new", Counter())


def test_objects_tracked_after_the_first_body_start_as_they_are() -> None:
    """Once judged, nothing of the checkpoint is left to restore."""
    tracker = tracked(a=Counter())
    tracker.restore(save(a=Counter(1)))
    tracker.judge()
    later = Counter(9)
    tracker.add("b", later)
    assert later.value == 9


def test_a_fresh_start_restores_nothing() -> None:
    """Without a checkpoint, tracking and judging leave everything as it is."""
    tracker = tracked(a=Counter(1))
    tracker.judge()
    tracker.add("b", Counter(2))
    tracker.judge()
    assert tracker.skipped == []


# -- the judgement -------------------------------------------------------------------------------------------------


def test_saved_names_that_nobody_claimed() -> None:
    """At the first body, what was saved and is not tracked is an error that lists it."""
    tracker = tracked(a=Counter())
    tracker.restore(save(a=Counter(), scaler=Counter(), ema=Counter()))
    with pytest.raises(StateMismatch) as caught:
        tracker.judge()
    assert list(caught.value.problems) == [
        "scaler: in the checkpoint, but not tracked; run.track(scaler=...)",
        "ema: in the checkpoint, but not tracked; run.track(ema=...)",
    ]


def test_without_strict_what_was_skipped_is_said() -> None:
    """Names of only one side are left, listed and said once."""
    said = Lines()
    tracker = tracked(strict=False, warn=said, a=Counter(5), new=Counter(6))
    tracker.restore(save(a=Counter(1), old=Counter(2)))
    tracker.judge()
    tracker.judge()
    assert tracker.skipped == ["new: tracked, not in the checkpoint", "old: in the checkpoint, not tracked"]
    assert said == [
        "not restored (strict=False): new: tracked, not in the checkpoint; old: in the checkpoint, not tracked"
    ]


def test_keys_that_all_differ_are_an_error() -> None:
    """A prefix on every key is not taken for a partial load."""
    saved = save(model=nn.Sequential(nn.Linear(1, 1)))
    with pytest.raises(StateMismatch) as caught:
        tracked(model=nn.ModuleDict({"x": nn.Sequential(nn.Linear(1, 1))})).restore(saved)
    assert len(caught.value.problems) == 4


# -- health and marks ----------------------------------------------------------------------------------------------


def test_what_is_not_finite_at_the_start() -> None:
    """Parameters and moments count, buffers do not; optimizers that wait for parameters are left out."""
    model, optimizer = model_and_optimizer(1, steps=1)
    with torch.no_grad():
        model.bias[0] = float("nan")
    optimizer.state[model.weight]["exp_avg"][0] = float("inf")
    other = torch.optim.SGD([torch.ones(1)], lr=0.1)
    buffer = torch.tensor([float("nan")])
    tracker = tracked(model=model, optimizer=optimizer, other=other, buffer=buffer)
    assert tracker.nonfinite() == {"model.bias", "optimizer.model.weight.exp_avg"}


def test_marks_tell_whether_anything_moved() -> None:
    """A mark is equal to the next one until a tracked tensor is written or replaced."""
    model, ema = nn.BatchNorm1d(2), torch.zeros(2)
    tracker = tracked(model=model, ema=ema, counter=Counter())
    mark = tracker.buffers_mark()
    assert not tracker.buffers_moved(mark)
    assert tracker.buffers_mark() == mark
    model(torch.ones(2, 2))
    assert tracker.buffers_moved(mark)
    mark = tracker.buffers_mark()
    ema.mul_(2)
    assert tracker.buffers_mark() != mark


def test_objects_tracked_later_are_marked() -> None:
    """The mark covers what is tracked now."""
    tracker = tracked(a=torch.zeros(1))
    tracker.buffers_mark()
    later = torch.zeros(1)
    tracker.add("b", later)
    mark = tracker.buffers_mark()
    later.add_(1)
    assert tracker.buffers_moved(mark)


# -- first values from another run ---------------------------------------------------------------------------------


def test_weights_of_another_run() -> None:
    """`initialize` takes modules and tensors, or everything that is found."""
    model, optimizer = model_and_optimizer(1, steps=2)
    saved = save(model=model, optimizer=optimizer, counter=Counter(3), other=Counter(4))
    target, second = model_and_optimizer(2)
    counter = Counter()
    tracker = tracked(model=target, optimizer=second, counter=counter, new=Counter(1))
    assert tracker.initialize(saved, weights_only=True) == ["model"]
    assert torch.equal(target.weight, model.weight)
    assert not second.state
    assert counter.value == 0
    assert tracker.initialize(saved, weights_only=False) == ["model", "optimizer", "counter"]
    assert torch.equal(moments(target, second), moments(model, optimizer))
    tracker.judge()
    with pytest.raises(StateMismatch, match="none of the tracked names"):
        tracked(net=nn.Linear(3, 2)).initialize(saved, weights_only=True)


# -- no code runs --------------------------------------------------------------------------------------------------

_LOADER = """
import pickle, sys
def refuse(*_): raise AssertionError("pickle was used")
pickle.loads = pickle.load = pickle.Unpickler = refuse
import torch
torch.load = refuse
from spotsafe.reader import choose, load_verified
from spotsafe.checkpoint.catalog import look
from spotsafe.storage.open import open_store
from spotsafe.tracking import Tracker
class Holder:
    value = None
    def state_dict(self): return {}
    def load_state_dict(self, state): self.value = state["value"]
store, holder, tracker = open_store(sys.argv[1]), Holder(), Tracker(warn=print)
tracker.add("x", holder)
tracker.restore(load_verified(store, choose(store, look(store)).candidate).saved)
print(repr(holder.value))
"""


@pytest.mark.slow
def test_a_load_in_a_new_process_uses_no_pickle(tmp_path: Any) -> None:
    """numpy's and torch's own states come back in a process in which unpickling is an error."""
    import numpy as np

    from spotsafe.storage.open import open_store
    from spotsafe.testing.states import write_checkpoint

    value = {
        "rng": np.random.RandomState(3).get_state(),
        "lr": np.float64(0.5),
        "n": np.int64(3),
        "t": torch.ones(2),
    }
    store = open_store(str(tmp_path / "run"))
    write_checkpoint(store, tracked(x=Counter(value)).capture())
    done = subprocess.run(
        [sys.executable, "-c", _LOADER, str(tmp_path / "run")],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == repr(value)
    assert json.dumps(list(save(x=Counter(value)).state)) == '["x"]'
