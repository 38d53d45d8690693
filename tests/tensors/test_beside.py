"""The copy that runs beside training, alone."""

from __future__ import annotations

import threading

import pytest
import torch

from spotsafe.tensors import beside
from spotsafe.tensors.beside import BesideCopy, Watched, can_be_beside
from spotsafe.tensors.plan import SavePlan, plan_save, specs_of
from spotsafe.tensors.staging import stage
from spotsafe.tensors.tree import Capture, NamedTensor
from spotsafe.writer.arena import Arena

LARGE = beside.LEAST_BYTES


def planned(*tensors: torch.Tensor, limit: int = 1 << 30) -> tuple[SavePlan, Capture, Arena]:
    named = tuple(NamedTensor(f"t{at}", tensor, "parameter") for at, tensor in enumerate(tensors))
    plan = plan_save(specs_of(named), max_file_bytes=limit)
    return plan, Capture(state={}, tensors=named), Arena(plan.arena_size)


@pytest.mark.parametrize("limit", [1 << 30, 40_000])
def test_the_arena_is_as_of_a_blocking_copy(limit: int) -> None:
    """Byte for byte, also of tensors that are cut over several files, with the rest copied by `stage`."""
    torch.manual_seed(0)
    tensors = [torch.randn(LARGE), torch.randn(300, 301), torch.randn(3), torch.randn(1, 2, LARGE // 8)]
    plan, capture, arena = planned(*tensors, limit=limit)
    stage(plan, capture, arena.view)
    expected = bytes(arena.view)
    arena.view[:] = bytes(len(arena.view))
    chosen = {0, 1, 3}
    copy = BesideCopy(plan, capture, arena.view, chosen)
    copy.start()
    stage(plan, capture, arena.view, skip=chosen)
    copy.wait()
    assert bytes(arena.view) == expected
    assert not copy.moved()
    assert not copy.differing()


@pytest.mark.parametrize(
    ("write", "moved", "differs"),
    [
        (lambda tensor: tensor.add_(1), ["t1"], ["t1"]),
        (lambda tensor: tensor[-1:].mul_(1), ["t1"], []),
        (lambda tensor: tensor.data[-1:].add_(1), [], ["t1"]),
        (lambda tensor: tensor.detach().copy_(tensor), ["t1"], []),
        (lambda tensor: None, [], []),
    ],
)
def test_writes_are_seen(write: object, moved: list[str], differs: list[str]) -> None:
    """Those that torch counts at once, others by comparing; a NaN is equal to itself."""
    tensors = [torch.randn(LARGE), torch.randn(LARGE)]
    tensors[1][0] = float("nan")
    plan, capture, arena = planned(*tensors)
    stage(plan, capture, arena.view)
    watched = Watched(plan, capture, arena.view, {0, 1})
    assert callable(write)
    write(tensors[1])
    assert watched.moved() == moved
    assert watched.differing() == differs


@pytest.mark.parametrize(
    "let_go",
    [lambda tensor: tensor.share_memory_(), lambda tensor: tensor.untyped_storage().resize_(0)],
    ids=["share_memory_", "resize_"],
)
def test_memory_that_its_storage_lets_go_is_not_read(let_go: object) -> None:
    """No alias keeps that: to read it would end the process, or copy what others keep there by now."""
    tensors = [torch.randn(LARGE), torch.randn(LARGE << 8)]  # so much goes back to the system at once
    plan, capture, arena = planned(*tensors)
    stage(plan, capture, arena.view)
    copy = BesideCopy(plan, capture, arena.view, {0, 1})
    assert callable(let_go)
    let_go(tensors[1])
    copy.start()
    copy.wait()
    assert copy.moved() == ["t1"]
    assert copy.differing() == []


def test_a_copy_of_what_was_written_before_is_overtaken() -> None:
    """Whether torch counts the write or not; what is written behind the copy does it no harm."""
    tensors = [torch.randn(LARGE), torch.randn(LARGE + 1), torch.randn(LARGE)]
    plan, capture, arena = planned(*tensors)
    copy = BesideCopy(plan, capture, arena.view, {0, 1, 2})
    tensors[1].data.add_(1)
    copy.start()
    copy.wait()
    assert copy.differing() == ["t1"]
    tensors[0].data.add_(1)
    assert copy.differing() == ["t1"]


def test_memory_is_kept_while_it_is_read() -> None:
    """A tensor that is given other memory, or is gone, does not take what is being copied with it."""
    tensor = torch.ones(LARGE)
    plan, capture, arena = planned(tensor)
    copy = BesideCopy(plan, capture, arena.view, {0})
    tensor.data = torch.zeros(LARGE)
    del capture
    copy.start()
    copy.wait()
    start = plan.placements[0].arena_offset
    assert torch.frombuffer(arena.view, dtype=torch.float32, offset=start, count=LARGE).eq(1).all()


def test_a_copy_is_called_off_at_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its thread is there, before that looks for work, and while it works: nothing is copied behind that."""
    plan, capture, arena = planned(torch.ones(LARGE))
    never = BesideCopy(plan, capture, arena.view, {0})
    never.call_off()
    never.start()
    never.wait()
    assert not any(arena.view)
    assert never.differing() == ["t0"], "nobody takes it for whole"

    begun, go_on, copy = threading.Event(), threading.Event(), beside._copy

    def late(*move: int) -> object:
        begun.set()
        assert go_on.wait(60)
        return copy(*move)

    monkeypatch.setattr(beside, "_copy", late)
    at_work = BesideCopy(plan, capture, arena.view, {0})
    at_work.start()
    assert begun.wait(60)
    threading.Timer(0.01, go_on.set).start()
    at_work.call_off()
    assert go_on.is_set()
    assert at_work.differing() == []


def test_what_is_not_plain_memory_is_not_copied_beside() -> None:
    """Nor what is small, or has no count of writes."""
    large = torch.zeros(2, LARGE)
    with torch.inference_mode():
        uncounted = torch.zeros(LARGE)
    refused = [
        torch.zeros(8),
        large.T,
        torch.zeros(LARGE, dtype=torch.complex64).conj(),
        uncounted,
        large.to_sparse(),
        torch.zeros(LARGE, device="meta"),
    ]
    assert can_be_beside(NamedTensor("a", large))
    assert can_be_beside(NamedTensor("a", torch.nn.Parameter(large)))
    assert not any(can_be_beside(NamedTensor("a", tensor)) for tensor in refused)
