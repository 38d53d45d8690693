"""A capture that reuses the last one says what a capture in full would."""

from __future__ import annotations

import gc
import json
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from spotsafe.errors import UnsupportedState
from spotsafe.tensors import kept_capture, kept_moments
from spotsafe.tensors.tree import Capture
from spotsafe.tracking import Tracker


class Net(nn.Module):
    """Layers, buffers of both kinds, a list, a tied weight and a module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.many = nn.ParameterList([torch.full((3,), float(number)) for number in range(4)])
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.again = self.body[0]
        self.holder = nn.Module()
        self.holder.module = nn.Linear(2, 2)
        self.act = nn.ReLU()
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


class Renaming(nn.Linear):
    """Has a saving of its own."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {f"own.{key}": value for key, value in super().state_dict(*args, **kwargs).items()}


class Extra(nn.Linear):
    """Has more to save than tensors."""

    def get_extra_state(self) -> Any:
        return {"count": 3}

    def set_extra_state(self, state: Any) -> None:
        pass


class World:
    """A model, wrapped and in part tracked twice or not, with an optimizer and another model beside it."""

    def __init__(self, *, wrapped: bool) -> None:
        self.net = Net()
        self.teacher = nn.Linear(70, 70).requires_grad_(requires_grad=False)
        self.shown = nn.Parameter(torch.ones(2))
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.1)
        model = nn.DataParallel(self.net) if wrapped else self.net
        self.objects = {
            "first": (lambda: {"shown": self.shown}, print),
            "model": model,
            "teachers": {"old one": self.teacher, **({"same": self.net.body} if wrapped else {})},
            "optimizer": self.optimizer,
        }
        _step(self)

    @property
    def held(self) -> dict[Any, Any]:
        """What the optimizer keeps of one of its parameters."""
        found: dict[Any, Any] = self.optimizer.state[self.net.many[1]]
        return found

    def tracker(self) -> Tracker:
        tracker = Tracker(warn=lambda _: None)
        for name, obj in self.objects.items():
            tracker.add(name, obj)
        return tracker


def _set(owner: Any, name: str, value: Any) -> None:
    setattr(owner, name, value)


def _step(world: World) -> None:
    for parameter in world.net.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    world.optimizer.step()


def _replace_trained(world: World) -> None:
    world.net.body[0].weight = nn.Parameter(torch.ones(4, 4))
    world.optimizer.add_param_group({"params": [world.net.body[0].weight]})


def _rename(world: World) -> None:
    moved = world.net.body._modules.pop("1")
    world.net.body._modules["one" if "one" not in world.net.body._modules else "two"] = moved


def _reshape(world: World) -> None:
    weight = world.teacher.weight
    weight.data = weight.data.view(-1) if weight.dim() == 2 else weight.data.view(70, 70)


def _share(world: World) -> None:
    with torch.no_grad():
        world.net.many[1].data = world.net.many[0].data.view(3)


def _part_of(world: World) -> None:
    world.net.seen = world.net.many[2].detach()[:2]


CHANGES: dict[str, Callable[[World], object]] = {
    "nothing": lambda w: None,
    "a step": _step,
    "a parameter is replaced": lambda w: _set(w.net.many, "2", nn.Parameter(torch.ones(3))),
    "a trained one is replaced": _replace_trained,
    "frozen": lambda w: w.net.body[0].weight.requires_grad_(requires_grad=False),
    "trained": lambda w: w.teacher.requires_grad_(),
    "a buffer comes": lambda w: w.net.register_buffer("late", torch.ones(2)),
    "a passing buffer comes": lambda w: w.net.register_buffer("late", torch.ones(2), persistent=False),
    "a buffer is replaced": lambda w: _set(w.net, "seen", torch.ones(4)),
    "a buffer is None": lambda w: _set(w.net, "seen", None),
    "tied": lambda w: _set(w.net.head, "weight", w.net.embed.weight),
    "untied": lambda w: _set(w.net.head, "weight", nn.Parameter(torch.ones(5, 4))),
    "a group": lambda w: w.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
    "what only a state shows is trained": lambda w: w.optimizer.add_param_group({"params": [w.shown]}),
    "other memory": lambda w: _set(w.net.many[3], "data", torch.ones(3)),
    "other shape": _reshape,
    "other dtype": lambda w: w.teacher.to(torch.float64),
    "one memory": _share,
    "a part of another": _part_of,
    "empty": lambda w: _set(w.net, "seen", torch.ones(0)),
    "another name": _rename,
    "another name of a tensor": lambda w: w.net._buffers.update(other=w.net._buffers.pop("seen")),
    "another name of an empty part": lambda w: w.net._modules.update(other=w.net._modules.pop("act")),
    "a parameter of the same memory": lambda w: _set(w.net.many, "2", nn.Parameter(w.net.many[2].detach())),
    "a wrapper": lambda w: _set(w.net.holder, "__class__", nn.DataParallel),
    "a child goes": lambda w: w.net._modules.pop("again", None),
    "a child comes": lambda w: w.net.add_module("again", nn.Linear(2, 2)),
    "another order": lambda w: _set(w.net, "again", w.net._modules.pop("again", None)),
    "a hook": lambda w: w.net._register_state_dict_hook(lambda one, state, *_: state.pop("seen", None)),
    "an override": lambda w: _set(w.net.head, "state_dict", lambda **_: {}),
    "another class": lambda w: _set(w.net.body[0], "__class__", Renaming),
    "extra state": lambda w: _set(w.net.body[0], "__class__", Extra),
    "another version": lambda w: _set(w.net.head, "_version", 7),
    "no number as version": lambda w: _set(w.net.head, "_version", "7"),
    "a name that is no text": lambda w: w.net.register_buffer("\ud800", torch.ones(1)),
    "a name with accents": lambda w: w.net.register_buffer("été", torch.ones(1)),
    "a taken name": lambda w: w.net.register_buffer("$", torch.ones(1)),
    "inference": lambda w: _set(w.net, "seen", _in_inference()),
    "a view that is negated": lambda w: _set(w.net, "seen", torch.ones(3, dtype=torch.complex64).conj().imag),
    "sparse": lambda w: _set(w.net, "seen", torch.eye(3).to_sparse()),
    "nested": lambda w: _set(w.net, "seen", _nested()),
    "on no device": lambda w: _set(w.net, "seen", torch.ones(3, device="meta")),
    "a moment is replaced": lambda w: w.held.update(exp_avg=torch.ones(3)),
    "a moment comes": lambda w: w.held.update(exp_max=torch.ones(2)),
    "a moment goes": lambda w: w.held.pop("exp_avg", None),
    "moments in another order": lambda w: w.held.update(step=w.held.pop("step")),
    "a number as moment": lambda w: w.held.update(step=3),
    "a parameter as moment": lambda w: w.held.update(exp_avg=nn.Parameter(torch.ones(3))),
    "a moment with a gradient": lambda w: w.held["exp_avg"].requires_grad_(),
    "a weight as moment": lambda w: w.held.update(exp_avg=w.net.many[1].detach()),
    "a buffer as moment": lambda w: w.held.update(exp_avg=w.net.seen),
    "two moments of one memory": lambda w: w.held.update(exp_avg=w.held["exp_avg_sq"]),
    "other memory of a moment": lambda w: _set(w.held["exp_avg"], "data", torch.ones(3)),
    "other shape of a moment": lambda w: _set(w.held["exp_avg"], "data", torch.ones(3, 1)),
    "an empty moment": lambda w: w.held.update(exp_avg=torch.ones(0)),
    "a sparse moment": lambda w: w.held.update(exp_avg=torch.eye(3).to_sparse()),
    "a moment on no device": lambda w: w.held.update(exp_avg=torch.ones(3, device="meta")),
    "a moment whose name is no word": lambda w: w.held.update({"exp.avg": torch.ones(3)}),
    "a moment whose name is no text": lambda w: w.held.update({"\ud800": torch.ones(3)}),
    "a moment that has a number": lambda w: w.held.update({7: torch.ones(3)}),
    "moments in a dict of another class": lambda w: w.optimizer.state.update(
        {w.net.many[1]: OrderedDict(w.held)}
    ),
    "nothing is kept": lambda w: w.optimizer.state.pop(w.net.many[1], None),
    "less is kept": lambda w: w.held.clear(),
    "state in another order": lambda w: w.optimizer.state.update(
        {w.net.many[1]: w.optimizer.state.pop(w.net.many[1])}
    ),
    "state of nobody": lambda w: w.optimizer.state.update({"shared": {"count": torch.ones(1)}}),
    "an option that is a tensor": lambda w: w.optimizer.param_groups[0].update(lr=torch.tensor(0.1)),
}


def _in_inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(3)


def _nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that they are a prototype
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def said(capture: Callable[[], Capture]) -> Any:
    """All that a capture says, or its error."""
    try:
        found = capture()
    except Exception as error:  # whichever it is, both must raise it
        return type(error), str(error)
    tensors = [
        (
            one.name,
            one.role,
            one.tensor.data_ptr() or "empty",
            one.tensor.shape,
            one.tensor.stride(),
            one.tensor.dtype,
        )
        for one in found.tensors
    ]
    return json.dumps([found.state, found.session]), tensors, sorted(found.frozen)


def in_full(world: World) -> Any:
    """What a capture says that knows no other, and takes no short cut."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept_capture, "_look_at", lambda _: None)
        patch.setattr(kept_moments, "_look_at", lambda _: None)
        return said(world.tracker().capture)


@pytest.mark.slow
@settings(max_examples=100)
@given(st.booleans(), st.lists(st.sampled_from(sorted(CHANGES)), max_size=6))
def test_whatever_changes_in_between(wrapped: bool, changes: list[str]) -> None:
    """After any changes to a model and its optimizer, the next capture is the one of a fresh tracker."""
    world = World(wrapped=wrapped)
    tracker = world.tracker()
    assert said(tracker.capture) == in_full(world)
    for change in changes:
        try:
            CHANGES[change](world)
        except (KeyError, RuntimeError, ValueError, TypeError, AttributeError):
            continue  # it does not go with an earlier one
        assert said(tracker.capture) == in_full(world)
        assert said(tracker.capture) == in_full(world)


@pytest.mark.parametrize("change", sorted(CHANGES))
def test_each_change(change: str) -> None:
    """The same of each change alone, and back."""
    world = World(wrapped=False)
    tracker = world.tracker()
    said(tracker.capture)
    CHANGES[change](world)
    assert said(tracker.capture) == in_full(world)


def test_what_did_not_change_is_the_same_object() -> None:
    """Of a model that was only trained, tree and tensors are those of the last capture: nobody need compare them."""
    world = World(wrapped=False)
    tracker = Tracker(warn=print)
    tracker.add("model", world.net)
    before = tracker.capture()
    with torch.no_grad():
        world.net.seen += 1
    after = tracker.capture()
    assert after.state["model"] is before.state["model"]
    assert after.tensors is before.tensors


def test_what_an_optimizer_keeps_is_the_same_object_too() -> None:
    """Between two steps of one optimizer only its options are captured anew."""
    world = World(wrapped=False)
    tracker = Tracker(warn=print)
    tracker.add("model", world.net)
    tracker.add("optimizer", world.optimizer)
    before = tracker.capture()
    _step(world)
    world.optimizer.param_groups[0]["lr"] = 0.01
    after = tracker.capture()
    assert after.tensors is before.tensors
    assert after.state["optimizer"]["state"] is before.state["optimizer"]["state"]
    assert after.state["optimizer"]["groups"] != before.state["optimizer"]["groups"]


CHANGED = {
    "shape": lambda data: data.view(2, 2),
    "dtype": lambda data: data.view(torch.int32),
    "place": torch.clone,
}


@pytest.mark.parametrize("what", sorted(CHANGED))
def test_another_shape_dtype_or_place(what: str) -> None:
    """What a plan or a copy depends on makes another capture, though the tensor is the same object."""
    held = nn.Module()
    held.register_buffer("kept", torch.zeros(4))
    tracker = Tracker(warn=print)
    tracker.add("model", held)
    before = tracker.capture()
    held.kept.data = CHANGED[what](held.kept.data)
    assert tracker.capture().tensors is not before.tensors


def test_other_captures_do_not_use_what_was_seen_before() -> None:
    """The search for values that are not finite, between two saves, sees what there is then."""
    world = World(wrapped=False)
    tracker = Tracker(warn=print)
    tracker.add("model", world.net)
    tracker.capture()
    world.net.head.weight = nn.Parameter(torch.full((5, 4), torch.inf))
    assert tracker.nonfinite() == {"model.head.weight"}


def test_memory_that_was_given_back_is_not_held() -> None:
    """A model that moved elsewhere leaves nothing behind: the tensors themselves are held, not their old memory."""
    world = World(wrapped=False)
    tracker = Tracker(warn=print)
    tracker.add("model", world.net)
    tracker.capture()
    storage = weakref.ref(world.net.many[0].untyped_storage())
    world.net.many[0].data = torch.ones(3)
    gc.collect()
    assert storage() is None


def test_an_error_leaves_nothing_wrong_behind() -> None:
    """After a capture that failed the next one is whole."""
    world = World(wrapped=False)
    tracker = world.tracker()
    first = said(tracker.capture)
    world.net.register_buffer("$", torch.ones(1))
    with pytest.raises(UnsupportedState):
        tracker.capture()
    del world.net._buffers["$"]
    assert said(tracker.capture) == first
