"""What can be state, what cannot, and dicts and lists of it."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from spotsafe.checkpoint.dtypes import DTYPES
from spotsafe.errors import StateMismatch, UnsupportedState
from spotsafe.tensors import kinds
from spotsafe.tensors.tree import SavedState
from spotsafe.testing.states import through_checkpoint
from spotsafe.tracking import Tracker
from tests.tensors.same import differences


class Counter:
    """The smallest stateful object."""

    def __init__(self, value: Any = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state.pop("value")

    def read(self) -> Any:
        return self.value

    def write(self, value: Any) -> None:
        self.value = value


def tracked(obj: Any, **options: Any) -> Tracker:
    tracker = Tracker(warn=print, **options)
    tracker.add("x", obj)
    return tracker


def save(obj: Any) -> SavedState:
    return through_checkpoint(tracked(obj).capture())


KINDS: list[tuple[Any, str]] = [
    (nn.Linear(1, 1), "module"),
    (nn.ModuleDict(), "module"),
    (torch.optim.SGD([torch.ones(1)]), "optimizer"),
    (torch.ones(1), "tensor"),
    (nn.Parameter(torch.ones(1)), "tensor"),
    (np.ones(1), "array"),
    (torch.Generator(), "torch.Generator"),
    (np.random.default_rng(), "numpy.Generator"),
    (np.random.RandomState(), "numpy.RandomState"),
    (Counter(), "stateful"),
    (torch.amp.GradScaler("cpu"), "stateful"),
    ((Counter().read, Counter().write), "pair"),
    ((lambda: 1, functools.partial(print)), "pair"),
    ({"a": Counter()}, "dict"),
    ([Counter(), np.ones(1)], "list"),
    ((nn.Linear(1, 1), nn.Linear(1, 1)), "list"),
]


@pytest.mark.parametrize(
    ("obj", "name"), KINDS, ids=[f"{name}-{number}" for number, (_, name) in enumerate(KINDS)]
)
def test_every_kind_is_recognised(obj: Any, name: str) -> None:
    """Each object is handled as what it is; a module is not taken for a function."""
    assert kinds.kind_of(obj, "x").name == name


@pytest.mark.parametrize(
    ("obj", "words"),
    [
        (3, r"x is a plain value \(int\); keep it in run.values"),
        (None, "x is None, which is no state; leave it out"),
        ("text", r"plain value \(str\)"),
        (np.float32(1), r"plain value \(float32\)"),
        (True, r"plain value \(bool\)"),
        (nn.Linear, "is the class Linear; track an instance"),
        (Counter, "is the class Counter"),
        (lambda: 1, r"is a function; track a \(get, set\) pair"),
        (len, "is a function"),
        (object(), "is a object, which is no state; give it state_dict/load_state_dict"),
        ([], "an empty list; keep plain values in run.values"),
        ({}, "an empty dict"),
        ((), "an empty tuple"),
        ({"lr": 0.1}, r"x\.lr is a plain value"),
        ([Counter(), 1], r"x\[1\] is a plain value"),
        ({("a", 1): Counter()}, "keys of state must be text or whole numbers"),
        ({"a": {"b": [object()]}}, r"x\.a\.b\[0\] is a object"),
        (torch.ones(1).expand(3), "is an expanded tensor"),
        (np.broadcast_to(np.ones(1), 3), "is a read-only array"),
    ],
)
def test_what_is_no_state_says_what_to_do(obj: Any, words: str) -> None:
    """Everything else is a TypeError that names the place and the way out."""
    with pytest.raises(UnsupportedState, match=words):
        kinds.kind_of(obj, "x")
    assert issubclass(UnsupportedState, TypeError)


def test_tensors_are_restored_in_place() -> None:
    """A tracked tensor or Parameter keeps its identity, its memory and its place in autograd."""
    for tensor in (
        torch.zeros(2, 3).t(),
        nn.Parameter(torch.zeros(3, 2)),
        torch.zeros(3, 2, dtype=torch.complex64).conj(),
    ):
        address = tensor.data_ptr()
        value = torch.arange(6.0).reshape(3, 2).to(tensor.dtype)
        tracked(tensor).restore(save(value.clone().requires_grad_(tensor.requires_grad)))
        assert tensor.data_ptr() == address
        assert torch.equal(tensor.detach().resolve_conj(), value)


def test_trainable_and_other_tensors_have_their_roles() -> None:
    """A bare tensor counts for health like a parameter if it is trained, like a buffer if not."""
    assert tracked(nn.Parameter(torch.ones(1))).capture().tensors[0].role == "parameter"
    assert tracked(torch.ones(1)).capture().tensors[0].role == "buffer"


def test_a_tensor_trained_before_and_not_now_is_reported() -> None:
    """requires_grad is compared."""
    said: list[str] = []
    tracker = Tracker(warn=said.append)
    tracker.add("x", torch.ones(2))
    tracker.restore(save(nn.Parameter(torch.zeros(2))))
    assert said == ["x was saved with requires_grad=True, and has requires_grad=False now"]


@pytest.mark.parametrize(
    ("saved", "live", "words"),
    [
        (torch.ones(2), torch.ones(3), r"x: saved float32 \[2\], program has float32 \[3\]"),
        (torch.ones(2), torch.ones(2).int(), r"x: saved float32 \[2\], program has int32 \[2\]"),
        (np.ones(2), np.ones(3), r"x: saved array <f8 \[2\], program has <f8 \[3\]"),
        (np.ones(2), np.ones(2, dtype=np.float32), "x: saved array <f8"),
        (np.ones(2), torch.ones(2), "x: saved as array, program has tensor"),
        (Counter(), {"a": Counter()}, "x: saved as stateful, program has dict"),
        ([Counter()], [Counter(), Counter()], r"x\[1\]: in the program, not in the checkpoint"),
        (
            {"a": Counter(), "b c": Counter()},
            {"a": Counter()},
            r"x\['b c'\]: in the checkpoint, not in the program",
        ),
    ],
)
def test_what_does_not_fit_is_named(saved: Any, live: Any, words: str) -> None:
    """Shapes, dtypes, kinds and keys are compared before anything changes."""
    with pytest.raises(StateMismatch, match=words):
        tracked(live).restore(save(saved))


def test_arrays_are_restored_in_place() -> None:
    """A tracked array keeps its memory, whatever its strides."""
    base = np.zeros((3, 4), dtype=np.float16)
    view = base[::2, 1:].T
    tracked(view).restore(save(np.arange(6, dtype=np.float16).reshape(3, 2)))
    assert base.tolist() == [[0, 0, 2, 4], [0, 0, 0, 0], [0, 1, 3, 5]]


def test_a_pair_of_callables() -> None:
    """What get returns is handed to set, tensors and nested values too."""
    one, other = Counter({"replay": [torch.ones(2), (1, "a")], "n": np.arange(2)}), Counter()
    tracked((other.read, other.write)).restore(save((one.read, one.write)))
    assert other.value["replay"][0].tolist() == [1, 1]
    assert other.value["replay"][1] == (1, "a")
    assert other.value["n"].tolist() == [0, 1]


def test_a_getter_that_fails_before_there_is_anything() -> None:
    """An object that has no state yet can be given one."""
    taken: list[Any] = []

    def get() -> Any:
        raise RuntimeError("nothing yet")

    tracked((get, taken.append)).restore(save((lambda: [1], print)))
    assert taken == [[1]]


def test_objects_may_empty_what_they_are_given() -> None:
    """An object that pops from its state does not empty the checkpoint: it loads twice."""
    saved = save(Counter([1, 2]))
    for _ in range(2):
        other = Counter()
        tracked(other).restore(saved)
        assert other.value == [1, 2]
        other.value.clear()


def test_the_saved_structure_wins_over_the_live_one() -> None:
    """A state that has grown, or is shaped differently from the fresh object's, comes back as it was saved."""
    other = Counter({"e": 0, "log": []})
    tracked(other).restore(save(Counter({"e": 20, "log": [{"a": 1}], "new": torch.ones(1)})))
    assert other.value["e"] == 20
    assert other.value["log"] == [{"a": 1}]
    assert other.value["new"].tolist() == [1]


def test_what_an_object_raises_is_named() -> None:
    """An object that refuses its state is an error with its name."""

    class Picky(Counter):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise IndexError("not today")

    with pytest.raises(StateMismatch, match="x refused its saved state: IndexError: not today"):
        tracked(Picky()).restore(save(Counter()))


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ({"fns": [lambda: 1]}, r"x\.value\['fns'\]\[0\]"),
        (open, r"x\.value"),
        ({"a": (object(),)}, r"x\.value\['a'\]\[0\]"),
    ],
)
def test_what_cannot_be_saved_is_named_by_its_path(value: Any, path: str) -> None:
    """A lambda, a function or an object inside the state is an error at the save, with the way to it."""
    with pytest.raises(UnsupportedState, match=path):
        tracked(Counter(value)).capture()


def test_an_open_file_in_the_state(tmp_path: Any) -> None:
    """An open file cannot be saved; the error says where it is."""
    with (
        open(tmp_path / "f", "w", encoding="ascii") as file,
        pytest.raises(UnsupportedState, match=r"x\.value"),
    ):
        tracked(Counter(file)).capture()


def test_dicts_and_lists_of_state() -> None:
    """Nested containers restore each object inside, modules and optimizers too."""

    def make(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        generator, critic = nn.Linear(2, 2), nn.Linear(2, 1)
        return {
            "nets": [generator, critic],
            "optimizers": {
                0: torch.optim.Adam(generator.parameters()),
                "critic one": torch.optim.SGD(critic.parameters(), lr=0.1, momentum=0.9),
            },
            "counter": Counter(seed),
        }

    one, other = make(1), make(2)
    for number in range(2):
        one["nets"][number](torch.ones(1, 2)).sum().backward()
    for optimizer in one["optimizers"].values():
        optimizer.step()
    saved = save(one)
    assert saved.state["x"]["items"][1][1]["items"][0][1]["order"] == [["x.nets[0].weight", "x.nets[0].bias"]]
    tracker = tracked(other)
    assert len(tracker.optimizers) == 2
    assert len(tracker.modules) == 2
    tracker.restore(saved)
    assert torch.equal(one["nets"][1].weight, other["nets"][1].weight)
    assert other["counter"].value == 1
    moment = other["optimizers"]["critic one"].state[other["nets"][1].weight]["momentum_buffer"]
    assert torch.equal(
        moment, one["optimizers"]["critic one"].state[one["nets"][1].weight]["momentum_buffer"]
    )


def test_containers_that_differ_without_strict() -> None:
    """Without strict, objects of only one side are listed and left as they are."""
    other = {"a": Counter(5), "c": Counter(6)}
    tracker = tracked(other, strict=False)
    tracker.restore(save({"a": Counter(1), "b": Counter(2)}))
    assert (other["a"].value, other["c"].value) == (1, 6)
    assert sorted(tracker.skipped) == [
        "x.b: in the checkpoint, not in the program",
        "x.c: in the program, not in the checkpoint",
    ]


def test_a_list_that_grows_is_saved_as_it_is() -> None:
    """Which objects are inside is looked up at every save."""
    objects = [Counter(1)]
    tracker = tracked(objects)
    tracker.capture()
    objects.append(Counter(2))
    assert len(tracker.capture().state["x"]["items"]) == 2


def test_grad_scalers() -> None:
    """A scaler's scale and growth are restored; a disabled one's empty state is refused by an enabled one."""
    one, other = torch.amp.GradScaler("cpu", init_scale=8.0), torch.amp.GradScaler("cpu")
    tracked(other).restore(save(one))
    assert other.state_dict() == one.state_dict()
    assert other.get_scale() == 8.0
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    tracked(disabled).restore(save(disabled))
    with pytest.raises(StateMismatch, match="x refused its saved state"):
        tracked(other).restore(save(disabled))


@pytest.mark.parametrize("name", [name for name in DTYPES if hasattr(torch, name)])
@pytest.mark.filterwarnings("ignore:.*ComplexHalf")
def test_tensors_of_every_dtype_are_restored_in_place(name: str) -> None:
    """Also those that torch itself cannot copy, and whatever their strides are."""
    raw = torch.arange(256, dtype=torch.uint8)
    raw = raw % 2 if name == "bool" else raw
    one, other = (data.view(getattr(torch, name)).reshape(4, -1).t() for data in (raw, torch.zeros_like(raw)))
    tracked(other).restore(save(one))
    assert list(differences(one, other)) == []
    assert other.stride() == one.stride()


@pytest.mark.filterwarnings("ignore:.*beta state")
@pytest.mark.parametrize("values", [0, 2, 9])
def test_sparse_tensors_are_restored_in_place(values: int) -> None:
    """The live tensor need not have as many values as the saved one."""
    dense, present = torch.zeros(3, 3), torch.eye(3)
    dense.view(-1)[:values] = 2.5
    for kind in ("sparse", "sparse_csr", "sparse_csc"):
        one, other = (getattr(matrix, f"to_{kind}")() for matrix in (dense, present))
        tracked(other).restore(save(one))
        assert list(differences(one, other)) == []


def test_structured_arrays_are_restored_in_place() -> None:
    """A tracked record array keeps its memory; one of another structure does not fit."""
    dtype = np.dtype([("id", "<u2"), ("at", ">f8", (2,)), ("tag", "S3")], align=True)
    one, other = np.zeros(3, dtype), np.zeros(3, dtype)
    one["at"], one["tag"] = [1, np.nan], b"ab"
    memory = other.ctypes.data
    tracked(other).restore(save(one))
    assert other.tobytes() == one.tobytes()
    assert other.ctypes.data == memory
    with pytest.raises(StateMismatch, match="program has"):
        tracked(np.zeros(3, [("id", "<u2")])).restore(save(one))


def test_state_that_holds_itself_is_refused() -> None:
    """Containers of state are neither cyclic nor endlessly deep: told at once, with the place."""
    cyclic: dict[str, Any] = {"counter": Counter()}
    cyclic["again"] = cyclic
    deep: Any = Counter()
    for _ in range(40):
        deep = [deep]
    for value in (cyclic, deep):
        with pytest.raises(UnsupportedState, match="more than 32"):
            tracked(value)
    shallow: Any = Counter([1])
    other: Any = Counter()
    for _ in range(32):
        shallow, other = [shallow], [other]
    tracked(other).restore(save(shallow))


@pytest.mark.parametrize("key", ["\ud800", 1 << 63, (1, 2), None, True])
def test_keys_of_state_that_no_index_can_hold(key: Any) -> None:
    """Told when the object is tracked, not when the save is written."""
    with pytest.raises(UnsupportedState, match="has a key"):
        tracked({key: Counter()})
