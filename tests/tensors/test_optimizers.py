"""Optimizers by parameter names: k steps, save, new objects, restore, n steps equals never having stopped."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler, swa_utils

from spotsafe.errors import StateMismatch, UntrackedParameters
from spotsafe.tensors.tree import SavedState, dtype_name
from spotsafe.testing.states import through_checkpoint
from spotsafe.tracking import Tracker
from tests.tensors.look_alikes import QuantisedAdam
from tests.tensors.same import differences

Make = Callable[[list[nn.Parameter]], Any]


class Program:
    """A small training program: everything that a run has."""

    def __init__(
        self, make: Make, *, seed: int, dtype: torch.dtype = torch.float32, schedule: Any = None
    ) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).to(dtype)
        self.optimizer = make(list(self.model.parameters()))
        self.scheduler = schedule(self.optimizer) if schedule else None
        self.dtype = dtype

    def tracker(self, **options: Any) -> Tracker:
        tracker = Tracker(warn=print, **options)
        tracker.add("model", self.model)
        tracker.add("optimizer", self.optimizer)
        if self.scheduler is not None:
            tracker.add("scheduler", self.scheduler)
        return tracker

    def loss(self, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(step)
        x = torch.rand(5, 4, generator=generator).to(self.dtype)
        return (self.model(x) - x[:, :2].cumsum(0)).square().mean()

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            loss = self.loss(step)
            self.optimizer.zero_grad()
            loss.backward()
            closure = (
                (lambda step=step: self.again(step))
                if isinstance(self.optimizer, torch.optim.LBFGS)
                else None
            )
            self.optimizer.step(closure) if closure else self.optimizer.step()
            if isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau):
                self.scheduler.step(loss.item())
            elif self.scheduler is not None:
                self.scheduler.step()

    def again(self, step: int) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.loss(step)
        loss.backward()
        return loss

    def save(self) -> SavedState:
        return through_checkpoint(self.tracker().capture())

    def load(self, saved: SavedState, **options: Any) -> Tracker:
        tracker = self.tracker(**options)
        tracker.restore(saved)
        tracker.judge()
        return tracker


def flat(value: Any) -> Any:
    """Every value with dtype, device and bits, comparable."""
    if isinstance(value, torch.Tensor):
        raw = value.detach().cpu().contiguous().reshape(-1)
        return (
            dtype_name(value.dtype),
            value.device.type,
            tuple(value.shape),
            bytes(raw.view(torch.uint8).numpy()) if raw.numel() else b"",
        )
    if isinstance(value, dict):
        return {key: flat(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [type(value), *map(flat, value)]
    return type(value), repr(value)


def assert_same(one: Program, other: Program) -> None:
    assert flat(dict(one.model.state_dict())) == flat(dict(other.model.state_dict()))
    assert flat(one.optimizer.state_dict()) == flat(other.optimizer.state_dict())
    if one.scheduler is not None:
        assert flat(plain(one.scheduler.state_dict())) == flat(plain(other.scheduler.state_dict()))


def plain(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if not callable(value)}


OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "AdamW tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
    "AdamW named": lambda p: torch.optim.AdamW([(f"p{i}", one) for i, one in enumerate(p)], lr=0.01),
    "AdamW groups": lambda p: torch.optim.AdamW(
        [{"params": p[::2], "lr": 0.05}, {"params": p[1::2], "weight_decay": 0.0}], lr=0.01
    ),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.01, t0=1),
    "LBFGS": lambda p: torch.optim.LBFGS(
        p, lr=0.1, max_iter=3, history_size=4, line_search_fn="strong_wolfe"
    ),
}
if hasattr(torch.optim, "Adafactor"):
    OPTIMIZERS["Adafactor"] = lambda p: torch.optim.Adafactor(p, lr=0.01)
if hasattr(torch.optim, "Muon"):
    OPTIMIZERS["Muon"] = lambda p: torch.optim.Muon([one for one in p if one.ndim == 2], lr=0.01)


def test_no_optimizer_of_torch_is_left_out() -> None:
    """A new one makes this fail, so that somebody adds it here."""
    tried = {name.split()[0] for name in OPTIMIZERS} | {"SparseAdam"}
    kinds = [kind for kind in vars(torch.optim).values() if isinstance(kind, type)]
    known = {kind.__name__ for kind in kinds if issubclass(kind, torch.optim.Optimizer)} - {"Optimizer"}
    assert known <= tried


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("steps", [0, 1, 5])
def test_a_resume_is_never_having_stopped(name: str, steps: int) -> None:
    """Every optimizer of torch goes on bit for bit, from before its first step too."""
    whole, before, after = (Program(OPTIMIZERS[name], seed=seed) for seed in (1, 1, 2))
    whole.train(0, steps + 4)
    before.train(0, steps)
    after.load(before.save())
    assert_same(before, after)
    after.train(steps, steps + 4)
    assert_same(whole, after)


@pytest.mark.parametrize("name", ["AdamW", "SGD momentum", "Adafactor", "NAdam", "ASGD", "RMSprop"])
def test_bf16_models(name: str) -> None:
    """Moments of bf16 parameters keep their own dtypes."""
    if name not in OPTIMIZERS:
        pytest.skip(f"this torch has no {name}")
    whole, before, after = (Program(OPTIMIZERS[name], seed=seed, dtype=torch.bfloat16) for seed in (1, 1, 2))
    whole.train(0, 7)
    before.train(0, 3)
    after.load(before.save())
    assert_same(before, after)
    after.train(3, 7)
    assert_same(whole, after)


class Decay:
    """A schedule that is an object: its attributes are state."""

    def __init__(self, rate: float) -> None:
        self.rate, self.calls = rate, 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return self.rate ** (step + self.calls)


SCHEDULERS: dict[str, Any] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.95),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, gamma=0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, total_iters=4),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=6),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=8),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 8),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.1, step_size_up=3, cycle_momentum=False),
    "CyclicLR scale_fn": lambda o: lr_scheduler.CyclicLR(
        o, 0.001, 0.1, step_size_up=3, cycle_momentum=False, scale_fn=lambda x: 0.5**x
    ),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5, threshold=0.5),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=3), lr_scheduler.CosineAnnealingLR(o, 8)], milestones=[3]
    ),
    "SWALR": lambda o: swa_utils.SWALR(o, swa_lr=0.05, anneal_epochs=6),
    "LambdaLR callable": lambda o: lr_scheduler.LambdaLR(o, Decay(0.9)),
    "MultiplicativeLR callable": lambda o: lr_scheduler.MultiplicativeLR(o, Decay(0.9)),
    "CyclicLR callable": lambda o: lr_scheduler.CyclicLR(
        o, 0.001, 0.1, step_size_up=3, cycle_momentum=False, scale_fn=Decay(0.9)
    ),
    "CyclicLR momentum": lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.1, step_size_up=3),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, total_iters=4), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


def test_no_scheduler_of_torch_is_left_out() -> None:
    """A new one makes this fail, so that somebody adds it here."""
    kinds = [kind for kind in vars(lr_scheduler).values() if isinstance(kind, type)]
    known = {kind.__name__ for kind in kinds if issubclass(kind, lr_scheduler.LRScheduler)}
    assert known - {"LRScheduler", "_LRScheduler"} <= {name.split()[0] for name in SCHEDULERS}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler(name: str) -> None:
    """Schedulers go on as if nothing had happened, and so does the learning rate."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # schedulers warn about the order of their first step
        whole, before, after = (
            Program(OPTIMIZERS["AdamW"], seed=seed, schedule=SCHEDULERS[name]) for seed in (1, 1, 2)
        )
        whole.train(0, 9)
        before.train(0, 4)
        after.load(before.save())
        assert_same(before, after)
        after.train(4, 9)
        assert_same(whole, after)


@pytest.mark.parametrize("name", ["LambdaLR", "LinearLR", "OneCycleLR"])
def test_a_scheduler_made_after_the_restore(name: str) -> None:
    """Its constructor sets the optimizer's lr; tracking it brings the saved one back."""
    schedule = SCHEDULERS[name]
    whole, before = (Program(OPTIMIZERS["AdamW"], seed=1, schedule=schedule) for _ in range(2))
    whole.train(0, 6)
    before.train(0, 3)
    saved = before.save()
    after = Program(OPTIMIZERS["AdamW"], seed=2)
    tracker = after.tracker()
    tracker.restore(saved)
    after.scheduler = schedule(after.optimizer)
    assert after.optimizer.param_groups[0]["lr"] != before.optimizer.param_groups[0]["lr"]
    tracker.add("scheduler", after.scheduler)
    tracker.judge()
    assert_same(before, after)
    after.train(3, 6)
    assert_same(whole, after)


class Swapped(nn.Module):
    """Two layers of equal shape, declared in either order."""

    def __init__(self, *, swapped: bool) -> None:
        super().__init__()
        for name in ("b", "a") if swapped else ("a", "b"):
            setattr(self, name, nn.Linear(2, 2, bias=False))

    def train_once(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        optimizer.zero_grad()
        (
            self.a(torch.full((1, 2), step + 1.0)).sum() - 3 * self.b(torch.ones(1, 2)).square().sum()
        ).backward()
        optimizer.step()


def tracked(**objects: Any) -> Tracker:
    tracker = Tracker(warn=print)
    for name, obj in objects.items():
        tracker.add(name, obj)
    return tracker


@pytest.mark.parametrize("groups", [False, True])
def test_another_order_of_declaration_maps_by_name(groups: bool) -> None:
    """Layers of equal shape never swap their moments, nor groups their options."""

    def make(model: Swapped, *, swapped: bool) -> torch.optim.Optimizer:
        if not groups:
            return torch.optim.AdamW(model.parameters(), lr=0.1)
        both = [{"params": [model.a.weight], "lr": 0.2}, {"params": [model.b.weight], "lr": 0.3}]
        return torch.optim.AdamW(both[::-1] if swapped else both, lr=0.1)

    one, other = Swapped(swapped=False), Swapped(swapped=True)
    first, second = make(one, swapped=False), make(other, swapped=True)
    for step in range(3):
        one.train_once(first, step)
    for group in first.param_groups:
        group["lr"] *= 0.5
    tracked(model=other, optimizer=second).restore(
        through_checkpoint(tracked(model=one, optimizer=first).capture())
    )
    for name in ("a", "b"):
        mine, theirs = getattr(one, name).weight, getattr(other, name).weight
        assert torch.equal(first.state[mine]["exp_avg"], second.state[theirs]["exp_avg"])
        assert lr_of(first, mine) == lr_of(second, theirs)
    for step in range(3, 5):
        one.train_once(first, step)
        other.train_once(second, step)
    assert torch.equal(one.a.weight, other.a.weight)
    assert torch.equal(one.b.weight, other.b.weight)


def lr_of(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> float:
    return next(
        float(group["lr"]) for group in optimizer.param_groups if any(p is parameter for p in group["params"])
    )


def test_named_parameters_of_a_group_keep_the_live_order() -> None:
    """`param_names` of a group follow the parameters of today."""
    one, other = Swapped(swapped=False), Swapped(swapped=True)
    first = torch.optim.SGD(one.named_parameters(), lr=0.1)
    second = torch.optim.SGD(other.named_parameters(), lr=0.2)
    tracked(model=other, optimizer=second).restore(
        through_checkpoint(tracked(model=one, optimizer=first).capture())
    )
    assert second.param_groups[0]["param_names"] == ["b.weight", "a.weight"]
    assert second.param_groups[0]["lr"] == 0.1


def test_lbfgs_refuses_another_order() -> None:
    """Its state is flat over all parameters in their order, so another order is an error, not a mix-up."""
    one, other = Swapped(swapped=False), Swapped(swapped=True)
    first, second = torch.optim.LBFGS(one.parameters()), torch.optim.LBFGS(other.parameters())
    saved = through_checkpoint(tracked(model=one, optimizer=first).capture())
    with pytest.raises(StateMismatch, match="depends on the order"):
        tracked(model=other, optimizer=second).restore(saved)


class Mixed(torch.optim.Optimizer):
    """Keeps state in every dtype, and values of every kind, for bf16 parameters."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "note": "text", "window": (1, 2)})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["moment"] = torch.full_like(parameter, 1 / 3, dtype=torch.float32)
                    state["double"] = torch.full_like(parameter, 1 / 3, dtype=torch.float64)
                    state["packed"] = torch.arange(256, dtype=torch.uint8)
                    state["counts"] = torch.tensor([1 << 40])
                    state["nested"] = {
                        "list": [torch.full((2,), 1 / 3), None, 3],
                        "deep": {"t": torch.tensor(1 / 3)},
                    }
                    state["text"], state["blob"], state["set"] = "abc", b"\x00", {1, 2}
                    state["step"] = 0
                state["step"] += 1


def test_state_keeps_its_own_dtypes() -> None:
    """fp32 and fp64 moments of bf16 parameters, packed bytes, nested tensors and text come back as they were."""
    one, other = Program(Mixed, seed=1, dtype=torch.bfloat16), Program(Mixed, seed=2, dtype=torch.bfloat16)
    one.train(0, 2)
    other.load(one.save())
    assert_same(one, other)
    state = next(iter(other.optimizer.state.values()))
    assert (state["moment"].dtype, state["packed"].dtype) == (torch.float32, torch.uint8)
    assert (state["text"], state["blob"], state["set"], state["step"]) == ("abc", b"\x00", {1, 2}, 2)


def test_bf16_moments_of_fp32_parameters() -> None:
    """Moments that are smaller than their parameters are not promoted."""

    def make(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1, momentum=0.9)

    one, other = Program(make, seed=1), Program(make, seed=2)
    one.train(0, 2)
    for state in one.optimizer.state.values():
        state["momentum_buffer"] = state["momentum_buffer"].bfloat16()
    other.load(one.save())
    assert_same(one, other)


def test_moments_are_the_optimizers_own() -> None:
    """Restored moments do not keep the checkpoint's memory, and two restores share nothing."""
    one = Program(OPTIMIZERS["AdamW"], seed=1)
    one.train(0, 2)
    saved = one.save()
    first, second = Program(OPTIMIZERS["AdamW"], seed=2), Program(OPTIMIZERS["AdamW"], seed=3)
    first.load(saved)
    memory = {tensor.untyped_storage().data_ptr() for tensor in saved.tensors.values()}
    for state in first.optimizer.state.values():
        assert state["exp_avg"].untyped_storage().data_ptr() not in memory
        state["exp_avg"].zero_()
    second.load(saved)
    assert_same(one, second)


class Wrapping(torch.optim.AdamW):
    """Adds something of its own to the state dict, as many optimizers of the field do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.01)
        self.rounds = 0
        self.basis = torch.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        state["rounds"] = self.rounds
        state["extra"] = {"basis": self.basis}
        for position in state["state"]:
            state["state"][position] = {**state["state"][position], "added": torch.tensor(float(position))}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rounds = state.pop("rounds")
        self.basis = state.pop("extra")["basis"]
        super().load_state_dict(state)


def test_an_optimizer_with_a_state_dict_of_its_own() -> None:
    """What an override adds, on top or for each parameter, is saved and handed back."""
    one, other = Program(Wrapping, seed=1), Program(Wrapping, seed=2)
    one.train(0, 3)
    one.optimizer.rounds, one.optimizer.basis = 7, torch.ones(2)
    other.load(one.save())
    assert other.optimizer.rounds == 7
    assert other.optimizer.basis.tolist() == [1, 1]
    assert all("added" in state for state in other.optimizer.state.values())
    assert flat(dict(other.model.state_dict())) == flat(dict(one.model.state_dict()))


class Foreign:
    """An optimizer that is none of torch's class, with a state of its own form."""

    def __init__(self, params: Any) -> None:
        self.param_groups = [{"params": list(params), "lr": 0.1}]
        self.moments = [torch.zeros_like(one) for one in self.param_groups[0]["params"]]

    def zero_grad(self) -> None:
        for one in self.param_groups[0]["params"]:
            one.grad = None

    def step(self) -> None:
        with torch.no_grad():
            for one, moment in zip(self.param_groups[0]["params"], self.moments, strict=True):
                moment.mul_(0.9).add_(one.grad)
                one.sub_(moment, alpha=0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"moments": self.moments}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.moments = state.pop("moments")


def test_a_foreign_optimizer() -> None:
    """A state in a form that we do not know is kept whole, and only loaded into the same order of parameters."""
    whole, before, after = (Program(Foreign, seed=seed) for seed in (1, 1, 2))
    whole.train(0, 6)
    before.train(0, 3)
    saved = before.save()
    after.load(saved)
    after.train(3, 6)
    assert flat(dict(whole.model.state_dict())) == flat(dict(after.model.state_dict()))
    other = Program(lambda params: Foreign(params[::-1]), seed=2)
    with pytest.raises(StateMismatch, match="order"):
        other.load(saved)


def test_hooks_of_state_dicts_run() -> None:
    """Hooks that a user registered on the optimizer see every save and every restore."""
    one, other = Program(OPTIMIZERS["AdamW"], seed=1), Program(OPTIMIZERS["AdamW"], seed=2)
    calls = []
    one.optimizer.register_state_dict_post_hook(lambda _, state: {**state, "mark": 5})
    other.optimizer.register_load_state_dict_pre_hook(lambda _, state: calls.append(state["mark"]))
    one.train(0, 1)
    other.load(one.save())
    assert calls == [5]


def test_state_for_some_parameters_only() -> None:
    """Parameters that never had a gradient have no state, and still have none."""
    one, other = Program(OPTIMIZERS["AdamW"], seed=1), Program(OPTIMIZERS["AdamW"], seed=2)
    one.model[0].requires_grad_(False)
    other.model[0].requires_grad_(False)
    one.train(0, 2)
    assert len(one.optimizer.state) == 2
    other.load(one.save())
    assert_same(one, other)
    one.model[0].requires_grad_(True)
    other.model[0].requires_grad_(True)
    one.train(2, 4)
    other.train(2, 4)
    assert_same(one, other)


def test_a_layer_frozen_later_keeps_its_moments() -> None:
    """State of a parameter that is frozen now is saved, and there when it is unfrozen."""
    whole, before, after = (Program(OPTIMIZERS["AdamW"], seed=seed) for seed in (1, 1, 2))
    for program in (whole, before):
        program.train(0, 3)
        program.model[0].requires_grad_(False)
        program.train(3, 5)
    after.model[0].requires_grad_(False)
    after.load(before.save())
    assert_same(before, after)
    for program in (whole, after):
        program.model[0].requires_grad_(True)
        program.train(5, 7)
    assert_same(whole, after)


def test_groups_added_later_are_named() -> None:
    """More or fewer groups than were saved is an error that says which and what to do."""

    def one_group(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params[:2], lr=0.01)

    def two_groups(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([{"params": params[:2]}, {"params": params[2:]}], lr=0.01)

    small, large = Program(one_group, seed=1), Program(two_groups, seed=1)
    small.train(0, 1), large.train(0, 1)
    with pytest.raises(
        StateMismatch, match=r"optimizer: parameter group 1 \(model\.2\.weight, model\.2\.bias\) is not in"
    ):
        Program(two_groups, seed=2).load(small.save())
    with pytest.raises(StateMismatch, match=r"saved parameter group 1 .* add it with add_param_group before"):
        Program(one_group, seed=2).load(large.save())
    later = Program(one_group, seed=2)
    later.optimizer.add_param_group({"params": list(later.model[2].parameters())})
    later.load(large.save())
    assert_same(large, later)


def test_not_strict_keeps_what_fits() -> None:
    """Without strict, a new parameter starts afresh and the others get their state."""

    def small(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params[:3], lr=0.01)

    one, other = Program(small, seed=1), Program(OPTIMIZERS["AdamW"], seed=2)
    one.train(0, 2)
    one.optimizer.param_groups[0]["lr"] = 0.5
    tracker = other.load(one.save(), strict=False)
    assert len(other.optimizer.state) == 3
    assert other.optimizer.param_groups[0]["lr"] == 0.5
    assert tracker.skipped == ["optimizer: model.2.bias (group 0) is in the program, not in the checkpoint"]
    other.train(2, 3)
    back = Program(small, seed=3)
    tracker = back.load(other.save(), strict=False)
    assert len(back.optimizer.state) == 3
    assert len(tracker.skipped) == 2


def test_another_optimizer_is_refused() -> None:
    """Adam's moments are not loaded into SGD."""
    one = Program(OPTIMIZERS["AdamW"], seed=1)
    one.train(0, 1)
    with pytest.raises(StateMismatch, match="optimizer: saved from AdamW, program has SGD"):
        Program(OPTIMIZERS["SGD"], seed=2).load(one.save())
    other = Program(OPTIMIZERS["SGD"], seed=2)
    tracker = other.load(one.save(), strict=False)
    assert tracker.skipped == ["optimizer: saved from AdamW, program has SGD"]
    assert other.optimizer.param_groups[0]["lr"] == 0.1
    other.train(1, 2)


def test_replaced_parameters_leave_a_warning() -> None:
    """State of tensors that are in no group any more is left out, said once, and stays in the optimizer."""
    one, other = Program(OPTIMIZERS["AdamW"], seed=1), Program(OPTIMIZERS["AdamW"], seed=2)
    one.train(0, 2)
    one.model[0].weight = nn.Parameter(torch.ones(3, 4))
    one.optimizer.param_groups[0]["params"][0] = one.model[0].weight
    said: list[str] = []
    tracker = Tracker(warn=said.append)
    tracker.add("model", one.model), tracker.add("optimizer", one.optimizer)
    before = list(one.optimizer.state)
    tracker.capture()
    saved = through_checkpoint(tracker.capture())
    assert len(said) == 1
    assert "1 tensors that are in none of its parameter groups" in said[0]
    assert [id(key) for key in one.optimizer.state] == [id(key) for key in before]
    other.load(saved)
    assert len(other.optimizer.state) == 3
    assert torch.equal(
        other.optimizer.state[other.model[2].bias]["exp_avg"],
        one.optimizer.state[one.model[2].bias]["exp_avg"],
    )


def test_implementation_flags_are_the_programs() -> None:
    """foreach and fused say how a step is computed; the program of today decides, the moments stay exact."""
    one, other = Program(OPTIMIZERS["AdamW fused"], seed=1), Program(OPTIMIZERS["AdamW foreach"], seed=2)
    one.train(0, 2)
    other.load(one.save())
    group = other.optimizer.param_groups[0]
    assert (group["fused"], group["foreach"]) == (None, True)
    fresh = Program(OPTIMIZERS["AdamW foreach"], seed=3)
    fresh.train(0, 1)
    want, got = (next(iter(one.optimizer.state.values()))["step"] for one in (fresh, other))
    assert (got.dtype, got.device) == (want.dtype, want.device)
    other.train(2, 3)


def test_tensor_options_are_restored() -> None:
    """A tensor learning rate comes back as a tensor with its value."""
    one, other = (
        Program(OPTIMIZERS["AdamW tensor lr"], seed=1),
        Program(OPTIMIZERS["AdamW tensor lr"], seed=2),
    )
    one.optimizer.param_groups[0]["lr"].fill_(0.25)
    other.load(one.save())
    assert isinstance(other.optimizer.param_groups[0]["lr"], torch.Tensor)
    assert other.optimizer.param_groups[0]["lr"].item() == 0.25


def test_bare_parameters_have_their_keyword_as_name() -> None:
    """An optimizer over a tracked Parameter stores its state under the keyword."""
    one, other = nn.Parameter(torch.tensor([1.0, 2.0])), nn.Parameter(torch.zeros(2))
    first, second = torch.optim.Adam([one]), torch.optim.Adam([other])
    one.square().sum().backward()
    first.step()
    saved = through_checkpoint(tracked(log_alpha=one, optimizer=first).capture())
    assert saved.state["optimizer"]["order"] == [["log_alpha"]]
    assert "optimizer.log_alpha.exp_avg" in saved.tensors
    tracked(log_alpha=other, optimizer=second).restore(saved)
    assert torch.equal(one, other)
    assert torch.equal(first.state[one]["exp_avg"], second.state[other]["exp_avg"])


def test_tied_weights_declared_the_other_way_round() -> None:
    """State of a tied weight is found under whichever of its names comes first now."""

    class Tied(nn.Module):
        def __init__(self, first: str, second: str) -> None:
            super().__init__()
            setattr(self, first, nn.Linear(2, 2, bias=False))
            setattr(self, second, nn.Linear(2, 2, bias=False))
            getattr(self, second).weight = getattr(self, first).weight

    one, other = Tied("a", "b"), Tied("b", "a")
    first, second = torch.optim.Adam(one.parameters()), torch.optim.Adam(other.parameters())
    one.a.weight.sum().backward()
    first.step()
    tracked(model=other, optimizer=second).restore(
        through_checkpoint(tracked(model=one, optimizer=first).capture())
    )
    assert torch.equal(first.state[one.a.weight]["exp_avg"], second.state[other.a.weight]["exp_avg"])


def test_an_optimizer_that_refuses_its_state() -> None:
    """What `load_state_dict` raises becomes an error that names the optimizer."""

    class Picky(torch.optim.SGD):
        def load_state_dict(self, state: Any) -> None:
            raise KeyError("not today")

    one, other = Program(lambda p: Picky(p, lr=0.1), seed=1), Program(lambda p: Picky(p, lr=0.1), seed=2)
    with pytest.raises(StateMismatch, match=r"optimizer refused its saved state.*not today"):
        other.load(one.save())


def test_parameters_without_an_owner_are_refused_at_the_save() -> None:
    """A capture with an optimizer whose parameters nobody tracks would lose them."""
    model, other = nn.Linear(2, 2), nn.Linear(3, 1)
    tracker = tracked(
        model=model, optimizer=torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    )
    with pytest.raises(
        UntrackedParameters,
        match=r"optimizer: 2 parameters .*\[1, 3\], \[1\].*run\.track\(linear=<the Linear>\)",
    ):
        tracker.capture()


def test_saving_changes_nothing() -> None:
    """Training with a save after every step is training without."""
    quiet, saving = Program(OPTIMIZERS["AdamW"], seed=1), Program(OPTIMIZERS["AdamW"], seed=1)
    for step in range(4):
        quiet.train(step, step + 1)
        saving.train(step, step + 1)
        saving.tracker().capture()
        saving.save()
    assert_same(quiet, saving)
    untouched = copy.deepcopy(saving.optimizer.state_dict())
    saving.save()
    assert flat(untouched) == flat(saving.optimizer.state_dict())


def test_int_keys_of_a_schedule_stay_int() -> None:
    """MultiStepLR counts its milestones in a Counter of ints; as text they would never be reached."""
    program = Program(OPTIMIZERS["SGD"], seed=1, schedule=SCHEDULERS["MultiStepLR"])
    after = Program(OPTIMIZERS["SGD"], seed=2, schedule=lambda o: lr_scheduler.MultiStepLR(o, [7]))
    after.load(program.save())
    assert list(after.scheduler.milestones.items()) == [(2, 1), (4, 1)]
    assert {type(key) for key in after.scheduler.milestones} == {int}


def test_sparse_adam() -> None:
    """Moments of a sparse embedding go on bit for bit."""

    def make(seed: int) -> tuple[nn.Embedding, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        embedding = nn.Embedding(6, 3, sparse=True)
        return embedding, torch.optim.SparseAdam(embedding.parameters(), lr=0.1)

    def train(embedding: nn.Embedding, optimizer: torch.optim.Optimizer, step: int) -> None:
        optimizer.zero_grad()
        embedding(torch.tensor([step % 6, 2])).square().sum().backward()
        optimizer.step()

    one, other = make(1), make(2)
    for step in range(3):
        train(*one, step)
    saved = through_checkpoint(tracked(model=one[0], optimizer=one[1]).capture())
    tracked(model=other[0], optimizer=other[1]).restore(saved)
    for step in range(3, 6):
        train(*one, step)
        train(*other, step)
    assert flat(one[1].state_dict()) == flat(other[1].state_dict())
    assert torch.equal(one[0].weight, other[0].weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fresh", [True, False])
def test_quantised_moments(dtype: torch.dtype, fresh: bool) -> None:
    """Wrapper subclasses and 4-bit codes as state of an optimizer, which torch would try to cast, come back."""

    def make(seed: int, steps: int) -> tuple[nn.Linear, QuantisedAdam]:
        torch.manual_seed(seed)
        model = nn.Linear(3, 2).to(dtype)
        optimizer = QuantisedAdam(model.parameters())
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(1, 3, dtype=dtype)).square().sum().backward()
            optimizer.step()
        return model, optimizer

    one, other = make(1, 3), make(2, 0 if fresh else 1)
    saved = through_checkpoint(tracked(model=one[0], optimizer=one[1]).capture())
    tracked(model=other[0], optimizer=other[1]).restore(saved)
    for mine, theirs in zip(one[0].parameters(), other[0].parameters(), strict=True):
        assert list(differences(one[1].state[mine], other[1].state[theirs])) == []


def test_a_layer_that_is_unfrozen_gets_a_group_and_goes_on() -> None:
    """A group that was added in the middle of training is there again if the program adds it again."""

    def make(seed: int) -> tuple[nn.Sequential, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
        model[0].requires_grad_(False)
        return model, torch.optim.AdamW(model[1].parameters(), lr=0.1)

    def unfreeze(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
        model[0].requires_grad_(True)
        optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.01})

    def train(model: nn.Sequential, optimizer: torch.optim.Optimizer, steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).square().sum().backward()
            optimizer.step()

    one, other = make(1), make(2)
    train(*one, 2)
    unfreeze(*one)
    train(*one, 2)
    unfreeze(*other)
    saved = through_checkpoint(tracked(model=one[0], optimizer=one[1]).capture())
    tracked(model=other[0], optimizer=other[1]).restore(saved)
    train(*one, 2)
    train(*other, 2)
    assert flat(one[1].state_dict()) == flat(other[1].state_dict())
    assert flat(dict(one[0].state_dict())) == flat(dict(other[0].state_dict()))
