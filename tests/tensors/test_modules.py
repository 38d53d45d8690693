"""Modules under names that no wrapper changes."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel

from spotsafe.checkpoint.dtypes import DTYPES
from spotsafe.errors import StateMismatch, UnsupportedState
from spotsafe.tensors.modules import ModuleNames, customised, named_parameters
from spotsafe.tensors.tree import SavedState, spec_of
from spotsafe.testing.states import through_checkpoint
from spotsafe.tracking import Tracker
from tests.tensors.look_alikes import Linear4, Packed, Scaled
from tests.tensors.same import differences
from tests.tensors.state_trees import Level


class Net(nn.Module):
    """Has a real submodule called ``module``, a tied weight, buffers, and a list."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.module(self.embed(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


NAMES = [
    "embed.weight",
    "module.0.weight",
    "module.0.bias",
    "module.1.weight",
    "module.1.bias",
    "blocks.0.weight",
    "blocks.0.bias",
    "blocks.1.weight",
    "blocks.1.bias",
    "head.weight",
]


def net(seed: int) -> Net:
    torch.manual_seed(seed)
    made = Net()
    with torch.no_grad():
        for buffer in made.buffers():
            buffer.add_(seed)
    return made


def save(module: nn.Module) -> SavedState:
    tracker = Tracker(warn=print)
    tracker.add("m", module)
    return through_checkpoint(tracker.capture())


def load(module: nn.Module, saved: SavedState, *, strict: bool = True) -> Tracker:
    warnings: list[str] = []
    tracker = Tracker(strict=strict, warn=warnings.append)
    tracker.add("m", module)
    tracker.restore(saved)
    tracker.warnings = warnings  # type: ignore[attr-defined] # for the tests only
    return tracker


def equal(one: nn.Module, other: nn.Module) -> bool:
    first, second = one.state_dict(), other.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """A group of one, which DistributedDataParallel needs."""
    if not torch.distributed.is_available():
        pytest.skip("this torch is built without torch.distributed")
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")  # type: ignore[return-value] # a module in, a module out


def compiled_part(module: nn.Module) -> nn.Module:
    module.module = compiled(module.module)  # type: ignore[assignment, arg-type] # as users do it
    return module


def compiled_blocks(module: nn.Module) -> nn.Module:
    for number, block in enumerate(module.blocks):  # type: ignore[arg-type] # a ModuleList
        module.blocks[number] = compiled(block)  # type: ignore[index, operator] # a ModuleList
    return module


def distributed(module: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(module)


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda module: module,
    "compiled": compiled,
    "compiled part": compiled_part,
    "compiled blocks": compiled_blocks,
    "DataParallel": nn.DataParallel,
    "DDP": distributed,
    "compile(DDP)": lambda module: compiled(distributed(module)),
    "DDP(compile)": lambda module: distributed(compiled(module)),
    "DDP(compiled part)": lambda module: distributed(compiled_part(module)),
}


def test_every_wrapping_loads_every_other() -> None:
    """Saved plain, compiled, parallel or both: all other wrappings load it, over several generations."""
    with process_group():
        saved = {name: save(wrap(net(1))) for name, wrap in WRAPPERS.items()}
        keys = {name: list(one.state["m"]["state"]) for name, one in saved.items()}
        assert all(one == keys["plain"] for one in keys.values())
        for name, one in saved.items():
            for other, wrap in WRAPPERS.items():
                inner = net(2)
                outer = wrap(inner)
                load(outer, one)
                again = net(3)
                load(again, save(outer))
                assert equal(again, net(1)), (name, other)


def test_a_real_submodule_called_module_keeps_its_name() -> None:
    """Only segments that a wrapper put there are left out."""
    names = [name for name, _ in named_parameters(net(1))]
    assert names == NAMES
    assert [name for name, _ in named_parameters(nn.DataParallel(net(1)))] == NAMES
    inside = ModuleNames(nn.DataParallel(net(1)))
    assert inside.canonical("module.module.0.weight") == "module.0.weight"
    assert inside.raw("module.0.weight") == "module.module.0.weight"
    assert inside.raw("embed.weight") == "module.embed.weight"


def test_raw_is_the_inverse_of_canonical() -> None:
    """For every key of every wrapping without a process group."""
    for name in ("plain", "compiled", "compiled part", "compiled blocks", "DataParallel"):
        module = WRAPPERS[name](net(1))
        names = ModuleNames(module)
        for key in module.state_dict():
            assert names.raw(names.canonical(key)) == key, name


def test_checkpointed_layers_that_rename_themselves() -> None:
    """A wrapper whose own hooks remove its segment from the state is seen through in parameter names too."""
    wrapper = pytest.importorskip("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    module = nn.Sequential(wrapper.checkpoint_wrapper(nn.Sequential(nn.Linear(2, 2))), nn.Linear(2, 2))
    assert [name for name, _ in named_parameters(module)] == ["0.0.weight", "0.0.bias", "1.weight", "1.bias"]
    plain = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2))
    load(plain, save(module))
    assert torch.equal(plain[0][0].weight, next(module.parameters()))
    other = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    load(other, save(plain))
    assert torch.equal(next(other.parameters()), plain[0][0].weight)


def test_an_averaged_model_is_no_wrapper_to_strip() -> None:
    """AveragedModel's own names, its counter and its buffers are state."""
    model = net(1)
    averaged = AveragedModel(model, use_buffers=True)
    averaged.update_parameters(model)
    averaged.update_parameters(net(4))
    other = AveragedModel(net(2), use_buffers=True)
    load(other, save(averaged))
    assert other.n_averaged.item() == 2
    assert equal(other, averaged)


def test_tied_weights_are_stored_once_and_stay_tied() -> None:
    """Both names refer to one tensor of the checkpoint, and the module's weights are still one."""
    saved = save(net(1))
    assert saved.state["m"]["state"]["head.weight"] == saved.state["m"]["state"]["embed.weight"]
    assert sum(tensor.shape == (5, 4) for tensor in saved.tensors.values()) == 1
    other = net(2)
    load(other, saved)
    assert other.head.weight is other.embed.weight


def test_roles_say_what_is_trained() -> None:
    """Trained parameters, frozen ones and buffers are told apart."""
    module = net(1)
    module.blocks[0].weight.requires_grad_(False)
    tracker = Tracker(warn=print)
    tracker.add("m", module)
    roles = {one.name: one.role for one in tracker.capture().tensors}
    assert roles["m.embed.weight"] == "parameter"
    assert roles["m.blocks.0.weight"] == "other"
    assert roles["m.module.1.running_mean"] == "buffer"
    assert "m.scratch" not in roles


def test_a_weight_frozen_in_one_of_two_states_is_reported() -> None:
    """requires_grad is saved and compared; the values are restored all the same."""
    saved = save(net(1))
    other = net(2)
    other.blocks[1].bias.requires_grad_(False)
    tracker = load(other, saved)
    assert equal(other, net(1))
    assert tracker.warnings == ["m.blocks.1.bias was saved trainable, but has requires_grad=False now"]  # type: ignore[attr-defined]


class Extra(nn.Linear):
    """Keeps something that is no tensor."""

    def __init__(self, extra: Any) -> None:
        super().__init__(2, 2)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize("extra", [{"a": (1, 2)}, b"\x00\xff", torch.arange(3), [None, {"t": torch.ones(1)}]])
def test_extra_state_of_any_kind(extra: Any) -> None:
    """`get_extra_state` may return a dict, bytes, a tensor or more."""
    other = nn.Sequential(Extra(None))
    load(other, save(nn.Sequential(Extra(extra))))
    assert repr(other[0].extra) == repr(extra)


def test_extra_state_is_the_objects_own() -> None:
    """Two loads of one checkpoint share no memory."""
    saved = save(nn.Sequential(Extra(torch.ones(2))))
    first, second = nn.Sequential(Extra(None)), nn.Sequential(Extra(None))
    load(first, saved)
    first[0].extra.zero_()
    load(second, saved)
    assert second[0].extra.tolist() == [1, 1]


def test_versions_of_modules_reach_their_loading() -> None:
    """`_metadata`, by which modules know old formats, is kept under canonical names."""
    seen: list[Any] = []

    class Versioned(nn.Linear):
        _version = 7

        def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
            seen.append(metadata.get("version"))
            super()._load_from_state_dict(state, prefix, metadata, *rest)

    load(compiled(nn.Sequential(Versioned(2, 2))), save(nn.DataParallel(nn.Sequential(Versioned(2, 2)))))
    assert seen == [7]


def test_parametrized_and_normalised_weights() -> None:
    """Parametrizations keep their originals."""
    torch.manual_seed(1)
    module = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(3, 3)), parametrizations.spectral_norm(nn.Linear(3, 3))
    )
    module(torch.ones(1, 3))
    torch.manual_seed(2)
    other = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(3, 3)), parametrizations.spectral_norm(nn.Linear(3, 3))
    )
    load(other, save(module))
    assert equal(other, module)


class Growing(nn.Module):
    """Resizes its buffer to what it is given, as vector quantisers and replay buffers do."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("codes", torch.zeros(size))

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        if prefix + "codes" in state:
            self.codes = torch.zeros_like(state[prefix + "codes"])
        super()._load_from_state_dict(state, prefix, *rest)


def test_a_module_that_resizes_what_it_loads() -> None:
    """A loading of its own decides what fits; shapes are not judged before it."""
    grown = Growing(7)
    grown.codes.add_(1)
    other = nn.Sequential(Growing(2))
    load(other, save(nn.Sequential(grown)))
    assert other[0].codes.tolist() == [1] * 7
    assert customised(grown)
    assert not customised(nn.BatchNorm1d(2))


def test_a_lazy_module_is_made_by_its_state() -> None:
    """An uninitialised layer takes its shapes from the checkpoint; saving it first is refused."""
    made = nn.Sequential(nn.Linear(3, 2))
    other = nn.Sequential(nn.LazyLinear(2))
    load(other, save(made))
    assert torch.equal(other[0].weight, made[0].weight)
    with pytest.raises(UnsupportedState, match=r"m\.0\.weight is not initialised"):
        save(nn.Sequential(nn.LazyLinear(2)))


def test_expanded_buffers_are_restored() -> None:
    """A buffer whose elements share memory is given memory of its own and loaded."""

    class Expanded(nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.register_buffer("mask", torch.full((1,), value).expand(3))

    other = nn.Sequential(Expanded(0.0))
    load(other, save(nn.Sequential(Expanded(2.0))))
    assert other[0].mask.tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    "make",
    [
        lambda value: nn.Parameter(torch.full((3,), value, dtype=torch.uint8), requires_grad=False),
        lambda value: nn.Parameter(
            torch.full((3,), float(value)).to(torch.float8_e4m3fn), requires_grad=False
        ),
        lambda value: nn.Parameter(torch.full((3,), value + 1j, dtype=torch.complex128)),
        lambda value: nn.Parameter(torch.tensor(float(value))),
        lambda value: nn.Parameter(torch.zeros(0, 2)),
    ],
)
def test_parameters_of_odd_dtypes(make: Callable[[int], nn.Parameter]) -> None:
    """Integer, fp8, complex, scalar and empty parameters are restored exactly."""
    one, other = nn.Module(), nn.Module()
    one.p, other.p = make(3), make(1)
    load(other, save(one))
    assert spec_of(other.p) == spec_of(one.p)
    assert torch.equal(
        other.p.detach().reshape(-1).view(torch.uint8) if other.p.numel() else other.p,
        one.p.detach().reshape(-1).view(torch.uint8) if one.p.numel() else one.p,
    )
    assert other.p.requires_grad is one.p.requires_grad


def problems_of(module: nn.Module, saved: SavedState) -> list[str]:
    with pytest.raises(StateMismatch) as caught:
        load(module, saved)
    return list(caught.value.problems)


def test_every_mismatch_is_listed_and_nothing_changes() -> None:
    """All names, shapes and dtypes that differ are in one error, and the module is as it was."""
    small = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 3), nn.BatchNorm1d(3))
    large = nn.Sequential(
        nn.Linear(2, 4), nn.Linear(4, 4, bias=False), nn.BatchNorm1d(3, affine=False), nn.Linear(1, 1)
    )
    large[3].half()
    before = copy.deepcopy(large.state_dict())
    assert problems_of(large, save(small)) == [
        "m.0.bias: saved float32 [3], program has float32 [4]",
        "m.0.weight: saved float32 [3, 2], program has float32 [4, 2]",
        "m.1.bias: float32 [3] in the checkpoint, not in the program",
        "m.1.weight: saved float32 [3, 3], program has float32 [4, 4]",
        "m.2.bias: float32 [3] in the checkpoint, not in the program",
        "m.2.weight: float32 [3] in the checkpoint, not in the program",
        "m.3.bias: float16 [1] in the program, not in the checkpoint",
        "m.3.weight: float16 [1, 1] in the program, not in the checkpoint",
    ]
    assert all(torch.equal(value, before[key]) for key, value in large.state_dict().items())


def test_another_dtype_is_a_mismatch() -> None:
    """A model in bf16 does not silently take fp32 weights."""
    assert problems_of(nn.Linear(1, 1, bias=False).bfloat16(), save(nn.Linear(1, 1, bias=False))) == [
        "m.weight: saved float32 [1, 1], program has bfloat16 [1, 1]"
    ]


def test_not_strict_restores_what_fits() -> None:
    """Without strict, what only one side has is skipped and listed; other dtypes are cast."""
    one, other = (
        nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)),
        nn.Sequential(nn.Linear(1, 1).bfloat16(), nn.ReLU(), nn.Linear(1, 2)),
    )
    kept = other[2].weight.clone()
    tracker = load(other, save(one), strict=False)
    assert torch.equal(other[0].weight, one[0].weight.bfloat16())
    assert torch.equal(other[2].weight, kept)
    assert sorted(tracker.skipped) == [
        "m.1.bias: in the checkpoint, not in the program",
        "m.1.weight: in the checkpoint, not in the program",
        "m.2.bias: in the program, not in the checkpoint",
        "m.2.weight: in the program, not in the checkpoint",
    ]


def test_shapes_must_agree_even_when_not_strict() -> None:
    """Another shape is an error with and without strict."""
    with pytest.raises(
        StateMismatch, match=r"m\.weight: saved float32 \[1, 1\], program has float32 \[2, 1\]"
    ):
        load(nn.Linear(1, 2, bias=False), save(nn.Linear(1, 1, bias=False)), strict=False)


class OwnState(nn.Module):
    """Overrides both methods with a nested state."""

    def __init__(self, value: int) -> None:
        super().__init__()
        self.inner = nn.Linear(1, 1)
        self.value = value

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {"net": self.inner.state_dict(), "value": self.value}

    def load_state_dict(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        self.inner.load_state_dict(state["net"])
        self.value = state.pop("value")


def test_a_module_with_a_state_dict_of_its_own() -> None:
    """Overridden methods are used as they are, and may empty what they get."""
    one, other = OwnState(5), OwnState(6)
    saved = save(one)
    for _ in range(2):
        load(other, saved)
        assert other.value == 5
        assert torch.equal(other.inner.weight, one.inner.weight)


def test_a_module_that_refuses_its_state() -> None:
    """What a module raises while loading becomes an error that names it."""

    class Picky(nn.Linear):
        def _load_from_state_dict(self, *args: Any) -> None:
            raise RuntimeError("not today")

    with pytest.raises(StateMismatch, match=r"m refused its saved state.*not today"):
        load(Picky(1, 1), save(nn.Linear(1, 1)))


def test_keys_that_become_one_are_refused() -> None:
    """Two entries of a state dict must not end under one name."""

    class Twice(nn.Module):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return {"$": 1}

    with pytest.raises(UnsupportedState, match=r"'\$'"):
        save(Twice())

    class Listed(nn.Module):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return [1]

    with pytest.raises(UnsupportedState, match="no dict"):
        save(Listed())


def test_sparse_buffers() -> None:
    """A module may hold a sparse adjacency as a buffer."""

    class Graph(nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            edges = torch.tensor([[0, 1], [1, 0]])
            self.register_buffer(
                "edges",
                torch.sparse_coo_tensor(edges, torch.full((2,), value), (2, 2), check_invariants=True),
            )

    other = Graph(1.0)
    load(other, save(Graph(3.0)))
    assert other.edges.to_dense().tolist() == [[0, 3], [3, 0]]


@pytest.mark.filterwarnings("ignore:.*beta state")
@pytest.mark.parametrize("layout", ["csr", "csc", "bsr", "bsc"])
@pytest.mark.parametrize("saved", [0, 5])
def test_compressed_sparse_buffers_of_any_number_of_values(layout: str, saved: int) -> None:
    """torch copies such a tensor only onto one with as many values; here it need not have as many."""

    def holder(dense: torch.Tensor) -> nn.Module:
        made = nn.Module()
        block = {"csr": (), "csc": ()}.get(layout, ((2, 2),))
        made.register_buffer("edges", getattr(dense, f"to_sparse_{layout}")(*block))
        return made

    dense = torch.zeros(4, 4)
    dense.view(-1)[:saved] = torch.arange(1.0, saved + 1)
    for present in (torch.zeros(4, 4), torch.ones(4, 4)):
        other = holder(present)
        buffer = other.edges
        load(other, save(holder(dense)))
        assert other.edges is buffer
        assert list(differences(holder(dense).edges, other.edges)) == []


@pytest.mark.parametrize("buffer", [True, False])
@pytest.mark.filterwarnings("ignore:.*ComplexHalf")
def test_every_dtype_is_restored_in_place(buffer: bool) -> None:
    """Parameters and buffers of all dtypes, contiguous or not, also of those that torch itself cannot copy."""

    def holder(seed: int) -> nn.Module:
        made = nn.Module()
        raw = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, 256, dtype=np.uint8))
        for name in DTYPES:
            dtype = getattr(torch, name, None)
            if dtype is None:
                continue
            flat = (raw % 2 if name == "bool" else raw).clone().view(dtype)
            for key, value in {f"flat_{name}": flat, f"t_{name}": flat.reshape(-1, 4).t()}.items():
                if buffer:
                    made.register_buffer(key, value)
                else:
                    made.register_parameter(key, nn.Parameter(value, requires_grad=False))
        return made

    one, other = holder(1), holder(2)
    places = {key: value.data_ptr() for key, value in other.state_dict().items()}
    load(other, save(one))
    for key, value in other.state_dict().items():
        assert list(differences(one.state_dict()[key], value)) == [], key
        assert value.data_ptr() == places[key], key
        assert value.stride() == one.state_dict()[key].stride(), key


def test_a_wrapper_subclass_as_a_parameter() -> None:
    """Its inner tensors are restored into those of the live one; tied ones are stored once."""

    def holder(value: int) -> nn.Module:
        made = nn.Module()
        inner = Scaled(torch.tensor([value, -1], dtype=torch.int8), torch.tensor(value / 2), "m")
        made.one = made.two = nn.Parameter(inner, requires_grad=False)
        return made

    other = holder(3)
    saved = save(holder(5))
    assert sorted(saved.tensors) == ["m.one.scale", "m.one.values"]
    load(other, saved)
    assert other.one.values.tolist() == [5, -1]
    assert other.one.scale.item() == 2.5
    assert other.one is other.two


def test_weights_packed_with_their_quantisation_state() -> None:
    """A module that writes more than its parameters into its state gets all of it back, byte for byte."""
    one, other = nn.Sequential(Linear4(1), Linear4(2)), nn.Sequential(Linear4(3), Linear4(4))
    load(other, save(one))
    for mine, theirs in zip(one, other, strict=True):
        assert type(theirs.weight) is Packed
        assert torch.equal(mine.weight.data, theirs.weight.data)
        assert torch.equal(mine.weight.state.absmax, theirs.weight.state.absmax)
        assert (mine.weight.state.kind, mine.weight.state.shape) == ("nf4", theirs.weight.state.shape)


def test_an_enum_in_the_extra_state() -> None:
    """The live extra state lends its classes."""
    one, other = Extra(Level.HIGH), Extra(Level.LOW)
    load(other, save(one))
    assert other.extra is Level.HIGH


def test_scripted_modules() -> None:
    """A scripted module is a module, alone and inside another."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates scripting
        one, other = (nn.Sequential(torch.jit.script(nn.Linear(2, 2)), nn.Linear(1, 1)) for _ in range(2))
    load(other, save(one))
    assert equal(one, other)


def test_lists_and_dicts_of_parameters() -> None:
    """ParameterList and ParameterDict, with keys that only differ by case or look like something else."""

    def holder(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        made = nn.Module()
        made.listed = nn.ParameterList([torch.rand(2), torch.rand(3)])
        keys = ("a", "A", "a b", "%2F", "/", "\0", "__metadata__", "\u00e9", "x" * 300, "$")
        made.named = nn.ParameterDict({key: torch.rand(1) for key in keys})
        return made

    one, other = holder(1), holder(2)
    load(other, save(one))
    assert equal(one, other)


@pytest.mark.parametrize(
    "make", [nn.utils.weight_norm, nn.utils.spectral_norm, nn.utils.parametrizations.orthogonal]
)
def test_weights_that_are_computed(make: Any) -> None:
    """Old and new ways to compute a weight from parameters keep those, and compute the same."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates the first of them
        one, other = (make(nn.Linear(3, 3)) for _ in range(2))
    x = torch.rand(2, 3)
    one(x)
    load(other, save(one))
    assert equal(one, other)
    assert torch.equal(one.eval()(x), other.eval()(x))


def test_a_name_that_is_no_text_is_told_at_once() -> None:
    """Half of a surrogate pair can be in no JSON, so it is refused while the program can see it."""
    with pytest.raises(UnsupportedState, match="no text"):
        save(nn.ParameterDict({"\ud800": torch.ones(1)}))
