"""torch.distributed.checkpoint over spotsafe's format, in one process."""

from __future__ import annotations

import datetime as dt
import gc
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import spotsafe
from spotsafe.checkpoint.candidates import candidates, look
from spotsafe.checkpoint.catalog import resolve
from spotsafe.checkpoint.layout import CheckpointName
from spotsafe.checkpoint.verify import verify
from spotsafe.clock import SystemClock
from spotsafe.errors import StateMismatch, StorageUnavailable
from spotsafe.integrations.dcp import SpotsafeReader, SpotsafeWriter
from spotsafe.integrations.dcp_attempt import known_attempt
from spotsafe.integrations.dcp_writer import step_of
from spotsafe.ledger import occupancy
from spotsafe.ledger.reading import read_end, read_heartbeat
from spotsafe.storage.open import open_store
from spotsafe.testing.faults import FailingStore
from spotsafe.testing.memory import MemoryStore
from tests import independent_reader
from tests.session.rig import Net, Program


def state() -> dict[str, Any]:
    """What programs save: nested dicts, tensors of all kinds, plain values, lists with and without tensors."""
    torch.manual_seed(3)
    return {
        "model": dict(Net().state_dict()),
        "odd": {
            "half": torch.ones(3, 2, dtype=torch.bfloat16)[:, :1], "empty": torch.empty(0, 3),
            "scalar": torch.tensor(7), "fp8": torch.ones(4).to(torch.float8_e4m3fn), "z": torch.ones(1) * 1j,
        },
        "epoch": 3, "name": "run", "lrs": [0.1, 0.2], "loss": float("inf"), "when": dt.date(2026, 1, 2),
        "history": [{"t": torch.zeros(2), "pair": (1, "x")}, 5], "many": {"deep": {"er": {"k": None}}},
        "tuple": (torch.ones(2), 3),
    }  # fmt: skip


def blank(value: Any) -> Any:
    """The same structure without the values: what a program has before it loads."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value.contiguous())
    if isinstance(value, dict):
        return {key: blank(one) for key, one in value.items()}
    if isinstance(value, list):
        return [blank(one) for one in value]
    return type(value)() if isinstance(value, (int, float, str)) else None


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        bits = [x.contiguous().reshape(-1).view(torch.uint8) if x.numel() else x for x in (one, other)]
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*bits)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def save(url: Any, values: dict[str, Any], checkpoint_id: str | None = "step-40", **options: Any) -> None:
    dcp.save(values, checkpoint_id=checkpoint_id, storage_writer=SpotsafeWriter(url, **options), no_dist=True)


def load(url: Any, values: dict[str, Any], **options: Any) -> dict[str, Any]:
    dcp.load(values, storage_reader=SpotsafeReader(url), no_dist=True, **options)
    return values


def test_what_is_saved_comes_back(tmp_path):
    """Every value and its type, by the one changed line."""
    save(tmp_path, state())

    assert same(load(tmp_path, blank(state())), state())


def test_a_file_limit_cuts_tensors(tmp_path):
    """Larger tensors lie in several slices and are put together."""
    values = {"w": torch.arange(300.0).reshape(30, 10)}
    save(tmp_path, values, max_file_bytes=100)

    assert same(load(tmp_path, {"w": torch.zeros(30, 10)}), values)


def test_it_is_a_checkpoint_like_any_other(tmp_path):
    """Published with a manifest, verified, listed, loaded in part, read by the independent reader; no pickle."""
    save(tmp_path, state())
    store = open_store(str(tmp_path))
    candidate = resolve(store, 40)

    assert verify(store, candidate.name) == []
    assert candidate.manifest is not None
    assert (candidate.manifest.reason, candidate.manifest.world_size) == ("dcp", 1)
    held = spotsafe.load(tmp_path, ["model.*", "epoch"])
    assert held.pop("epoch") == 3
    assert same({name.removeprefix("model."): value for name, value in held.items()}, state()["model"])
    found = independent_reader.read_newest(tmp_path)
    assert found.state["epoch"] == {"kind": "value", "value": 3}
    found_files = (path for part in ("attempts", "checkpoints") for path in (tmp_path / part).rglob("*"))
    # Not in the ledger, into which the writer's heart beats all the time.
    assert {path.suffix for path in found_files if path.is_file()} == {".json", ".safetensors", ".published"}


def test_a_session_starts_with_its_weights(tmp_path):
    """`init_from` finds the module that a dict of tensors is."""
    save(tmp_path / "dcp", state())
    program = Program()

    with program.session(tmp_path / "run", init_from=f"{tmp_path / 'dcp'}@40"):
        assert same(dict(program.model.state_dict()), state()["model"])


def test_a_session_goes_on_from_it(tmp_path):
    """A program that tracks what was saved resumes in the same run: the step goes on, its loops begin afresh."""
    save(tmp_path, {"model": state()["model"]})
    program = Program()

    with spotsafe.session(str(tmp_path), model=program.model, watch=None, save_every=1) as run:
        assert (run.step, run.attempt, run.resumed_from is not None) == (40, 2, True)
        assert same(dict(program.model.state_dict()), state()["model"])
        for _ in run.range(1):
            program.model.mean.add_(1)

    assert resolve(open_store(str(tmp_path))).name.step == 41


def test_the_writer_claims_once_and_every_save_is_new(tmp_path):
    """The same id again is another checkpoint, and the newest; nothing is overwritten or deleted."""
    writer = SpotsafeWriter(tmp_path)
    for value in (1.0, 2.0):
        dcp.save(
            {"w": torch.full((2,), value)}, checkpoint_id="x/ckpt_40/", storage_writer=writer, no_dist=True
        )
    writer.step = 41
    dcp.save({"w": torch.full((2,), 3.0)}, storage_writer=writer, no_dist=True, checkpoint_id="final")
    writer.step = 42
    dcp.save({"w": torch.full((2,), 4.0)}, storage_writer=writer, no_dist=True)

    names = look(open_store(str(tmp_path))).names
    assert [(name.attempt, name.step, name.save) for name in names] == [
        (1, 42, 4),
        (1, 41, 3),
        (1, 40, 2),
        (1, 40, 1),
    ]
    assert load(f"{tmp_path}@40", {"w": torch.zeros(2)})["w"].tolist() == [2.0, 2.0]
    values, reader = {"w": torch.zeros(2)}, SpotsafeReader(tmp_path)
    dcp.load(values, checkpoint_id="x/ckpt_40", storage_reader=reader, no_dist=True)
    assert values["w"].tolist() == [2.0, 2.0]
    dcp.load(values, storage_reader=reader, no_dist=True)
    assert values["w"].tolist() == [4.0, 4.0]


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("step-4000", 4000),
        ("a/7/", 7),
        ("x_010", 10),
        ("12", 12),
        ("v2/last", None),
        ("", None),
        (Path("r/s9"), 9),
    ],
)
def test_the_step_is_the_number_at_the_end(name, step):
    """And nothing else in the id."""
    assert step_of(name) == step


def test_no_step_is_a_mistake_that_is_told(tmp_path):
    """Nothing is claimed for it."""
    with pytest.raises(CheckpointException, match="End checkpoint_id in a number"):
        save(tmp_path, {"w": torch.ones(1)}, checkpoint_id=None)
    assert not list(tmp_path.iterdir())


def test_retention(tmp_path):
    """Everything stays unless `keep` says otherwise."""
    for keep, left in ((None, 4), (2, 2)):
        url = tmp_path / str(keep)
        writer = SpotsafeWriter(url, keep=keep)
        for step in range(4):
            dcp.save({"w": torch.ones(1)}, checkpoint_id=f"{step}", storage_writer=writer, no_dist=True)
        store = open_store(str(url))
        assert len([one for one in candidates(store, look(store)) if one.manifest is not None]) == left


def test_a_newer_writer_ends_the_older_one(tmp_path):
    """What the older one has completely written is published; then it is told."""
    old, new = SpotsafeWriter(tmp_path), SpotsafeWriter(tmp_path)
    for writer in (old, new):
        dcp.save({"w": torch.ones(1)}, checkpoint_id="1", storage_writer=writer, no_dist=True)

    with pytest.raises(CheckpointException, match="Superseded"):
        dcp.save({"w": torch.ones(1)}, checkpoint_id="2", storage_writer=old, no_dist=True)
    assert resolve(open_store(str(tmp_path))).name.attempt == 2


def write(writer: SpotsafeWriter, step: int, **values: Any) -> None:
    dcp.save({"w": torch.ones(2), **values}, checkpoint_id=f"{step}", storage_writer=writer, no_dist=True)


def test_a_run_of_a_session_is_not_joined(tmp_path):
    """Its program could not resume from what DCP saves; who wants it all the same says so."""
    with Program().session(tmp_path):
        pass

    with Program().session(tmp_path) as run:
        for _ in run.range(1):
            pass
    with pytest.raises(
        CheckpointException, match="is the run of a session, whose newest checkpoint is a000002"
    ):
        write(SpotsafeWriter(tmp_path), 5)
    assert look(open_store(str(tmp_path))).highest == 2
    write(SpotsafeWriter(tmp_path, takeover=True), 5)
    assert resolve(open_store(str(tmp_path))).name.attempt == 3


def test_another_job_that_beats_is_not_superseded(tmp_path, monkeypatch):
    """A writer's heartbeat tells another job that the run is in use, until it is closed."""
    first = SpotsafeWriter(tmp_path)
    write(first, 1)
    store = open_store(str(tmp_path))
    assert known_attempt(first._token).ledger.flush()
    beats = iter(range(100))
    monkeypatch.setattr(occupancy, "read_heartbeat", lambda *_: b"%d" % next(beats))
    monkeypatch.setattr("sys.argv", ["another.py"])

    monkeypatch.setattr(SystemClock, "wait", lambda *_: False)
    with pytest.raises(CheckpointException, match=r"is in use: attempt 1 of another job .* is alive"):
        write(SpotsafeWriter(tmp_path), 2)
    monkeypatch.undo()
    assert read_heartbeat(store, 1) is not None
    first.close()
    monkeypatch.setattr("sys.argv", ["another.py"])
    write(SpotsafeWriter(tmp_path), 2)

    assert resolve(store).name.attempt == 2


def test_the_end_of_a_writer_is_on_record(tmp_path):
    """By `close`, or when nobody holds the writer any more; a closed one saves nothing."""
    store = open_store(str(tmp_path))
    first, second = SpotsafeWriter(tmp_path), SpotsafeWriter(tmp_path)
    write(first, 3)
    first.close()
    write(second, 4)
    ledger = known_attempt(second._token).ledger
    del second
    gc.collect()

    assert ledger.close()
    for attempt, step in ((1, 3), (2, 4)):
        end = read_end(store, attempt)
        assert end is not None
        assert (end.outcome, end.step, end.published) == ("left", step, 1)
    with pytest.raises(CheckpointException, match="this writer is closed"):
        write(first, 5)


def test_leftovers_of_older_attempts_are_swept(tmp_path):
    """Behind its first publish, and not what is published."""
    write(SpotsafeWriter(tmp_path), 1)
    (name,) = look(open_store(str(tmp_path))).names
    torn = CheckpointName(1, 2, 2, name.nonce)
    store = open_store(str(tmp_path))
    store.put(torn.file("data-00000-000.safetensors"), b"half")

    write(SpotsafeWriter(tmp_path), 2)

    assert [entry.path for entry in store.list(torn.folder)] == [torn.manifest]
    assert verify(store, name) == []


def test_what_stops_being_finite_is_unhealthy(tmp_path, capsys):
    """Said when it is saved, and in the manifest; a mask of infinities that was always there is none."""
    writer, mask = SpotsafeWriter(tmp_path), torch.full((2, 2), -torch.inf)
    write(writer, 1, mask=mask)
    write(writer, 2, mask=mask, w=torch.tensor([1.0, torch.nan]))
    later = SpotsafeWriter(tmp_path)
    write(later, 3, mask=mask, w=torch.tensor([torch.inf, 1.0], dtype=torch.bfloat16))
    write(later, 4, mask=mask)

    store = open_store(str(tmp_path))
    found = {step: resolve(store, step).manifest for step in (1, 2, 3, 4)}
    assert {step: one.health.healthy for step, one in found.items() if one} == {
        1: True, 2: False, 3: False, 4: True,
    }  # fmt: skip
    assert found[2] is not None
    assert found[2].health.nonfinite == ("mask", "w")
    assert capsys.readouterr().err.count("is unhealthy: NaN or infinity in w\n") == 2


def test_a_cleanup_that_fails_is_no_failed_save(tmp_path, capsys):
    """The checkpoint is there; what could not be deleted is told once."""
    inner = MemoryStore()
    first = SpotsafeWriter(inner, keep=2)
    write(first, 1)
    refusing = FailingStore(
        inner, fail=lambda verb, *_: StorageUnavailable("down") if verb == "delete" else None
    )
    writer = SpotsafeWriter(refusing, keep=2)
    for step in range(2, 7):
        write(writer, step)

    assert [name.step for name in look(inner).names] == [6, 5, 4, 3, 2, 1]
    assert capsys.readouterr().err.count("cleaning up after it failed") == 1


def test_async_save(tmp_path):
    """Training may go on changing the tensors; several saves follow each other."""
    writer, values = SpotsafeWriter(tmp_path), {"w": torch.zeros(1000), "n": 0}
    for step in range(3):
        future = dcp.async_save(values, checkpoint_id=f"s{step}", storage_writer=writer, no_dist=True)
        values["w"] += 1
        values["n"] = step + 1
        future.result()

    for step in range(3):
        held = load(f"{tmp_path}@{step}", {"w": torch.ones(1000), "n": 9})
        assert (held["w"].unique().tolist(), held["n"]) == ([float(step)], step)


def test_a_writer_travels_to_another_process(tmp_path):
    """As `async_save` in a process sends it, at every save anew: the claim there is still one."""
    writer = SpotsafeWriter(tmp_path)
    for step in (1, 2):
        again = pickle.loads(pickle.dumps(writer))
        dcp.save({"w": torch.ones(1)}, checkpoint_id=f"{step}", storage_writer=again, no_dist=True)

    assert [(name.attempt, name.save) for name in look(open_store(str(tmp_path))).names] == [(1, 2), (1, 1)]


def test_objects_with_a_state_dict(tmp_path):
    """Modules, optimizers and schedulers as torch's own recipes hand them over."""
    program = Program()
    for step, batch in zip(range(3), program.loader, strict=False):
        program.train(step, batch)
    optimizer = get_optimizer_state_dict(program.model, program.optimizer)
    save(tmp_path, {"model": program.model, "optim": optimizer, "sched": program.scheduler})

    fresh = Program(seed=1)
    blank_optimizer = get_optimizer_state_dict(fresh.model, fresh.optimizer)
    values = {"model": fresh.model, "optim": blank_optimizer, "sched": fresh.scheduler}
    load(tmp_path, values)
    set_optimizer_state_dict(fresh.model, fresh.optimizer, values["optim"])

    assert fresh.weights() == program.weights()
    assert fresh.scheduler.state_dict() == program.scheduler.state_dict()
    assert str(fresh.optimizer.state_dict()) == str(program.optimizer.state_dict())


def test_a_checkpoint_of_a_session_is_loaded(tmp_path):
    """Weights by the tracked name, the optimizer by the names of `get_optimizer_state_dict`, schedulers by key."""
    program = Program()
    with program.session(tmp_path) as run:
        for step, batch in run.steps(program.loader, until=3):
            program.train(step, batch)
    fresh = Program(seed=1)
    blank_optimizer = get_optimizer_state_dict(fresh.model, fresh.optimizer)
    values = {"model": fresh.model, "optimizer": blank_optimizer, "scheduler": fresh.scheduler}

    load(f"{tmp_path}@3", values)
    set_optimizer_state_dict(fresh.model, fresh.optimizer, values["optimizer"])

    assert fresh.weights() == program.weights()
    assert str(fresh.optimizer.state_dict()) == str(program.optimizer.state_dict())
    assert fresh.scheduler.last_epoch == 3


def test_tied_weights_are_stored_once_and_loaded_under_both_names(tmp_path):
    """What is one tensor in memory is one in the checkpoint."""
    shared = torch.ones(500)
    save(tmp_path, {"a": shared, "b": shared, "c": torch.zeros(500)})

    (file,) = tmp_path.rglob("*.safetensors")
    assert file.stat().st_size == 4096 + 2 * 2000
    held = load(tmp_path, {"a": torch.zeros(500), "b": torch.zeros(500)})
    assert torch.equal(held["a"], held["b"])


def test_a_value_that_cannot_be_stored_is_named(tmp_path):
    """By its fqn, and nothing is published."""
    with pytest.raises(CheckpointException, match=r"extra\.thing"):
        save(tmp_path, {"extra": {"thing": object()}, "w": torch.ones(1)})
    with pytest.raises(CheckpointException, match=r"s is a Tensor of layout torch\.sparse_coo"):
        save(tmp_path, {"s": torch.eye(2).to_sparse_coo()})
    assert all(
        candidate.absent for candidate in map(read_of(tmp_path), look(open_store(str(tmp_path))).names)
    )


def read_of(path: Path) -> Any:
    from spotsafe.checkpoint.candidates import read_candidate

    return lambda name: read_candidate(open_store(str(path)), name)


def test_planners_that_keep_their_plans_are_refused(tmp_path):
    """Their plan of an earlier save would lead into an earlier checkpoint."""
    writer = SpotsafeWriter(tmp_path)
    from torch.distributed.checkpoint import DefaultSavePlanner

    for step in (1, 2):
        planner = DefaultSavePlanner(enable_plan_caching=True)
        planner._cached_plans_key = "spotsafe's test"
        if step == 1:
            dcp.save(
                {"w": torch.ones(1)}, checkpoint_id="1", storage_writer=writer, planner=planner, no_dist=True
            )
            continue
        with pytest.raises(CheckpointException, match="enable_plan_caching"):
            dcp.save(
                {"w": torch.ones(1)}, checkpoint_id="2", storage_writer=writer, planner=planner, no_dist=True
            )
    with pytest.raises(ValueError, match="use_collectives"):
        dcp.save({"w": torch.ones(1)}, storage_writer=writer, use_collectives=False, no_dist=True)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_damage_is_found_before_the_first_tensor_changes(tmp_path):
    """torch's own reader loads a flipped bit without a word."""
    save(tmp_path, {"a": torch.ones(4), "b": torch.ones(4)}, max_file_bytes=16)
    path = max(tmp_path.rglob("*.safetensors"))
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    values = {"a": torch.zeros(4), "b": torch.zeros(4)}

    with pytest.raises(CheckpointException, match="are not what was published"):
        load(tmp_path, values)
    assert same(values, {"a": torch.zeros(4), "b": torch.zeros(4)})


def test_mistakes_of_a_load(tmp_path):
    """A missing key, another shape, a step that is not there: torch's errors and ours, each naming what."""
    save(tmp_path, {"w": torch.ones(2)})

    for values, words in (({"x": torch.ones(2)}, "Missing key"), ({"w": torch.ones(3)}, "Size mismatch")):
        with pytest.raises(CheckpointException, match=words):
            load(tmp_path, values)
    with pytest.raises(CheckpointException, match="no checkpoint of step 7; there are steps 40"):
        load(f"{tmp_path}@7", {"w": torch.ones(2)})


def test_a_store_may_stand_for_the_url():
    """As everywhere."""
    store = MemoryStore()
    save(store, {"w": torch.ones(2)})

    assert load(store, {"w": torch.zeros(2)})["w"].tolist() == [1.0, 1.0]


def test_ranks_that_found_different_checkpoints_load_none(tmp_path):
    """Between two ranks' looks one may be published; half of each would be no checkpoint at all."""
    save(tmp_path, {"w": torch.ones(2)}, checkpoint_id="1")
    readers = [SpotsafeReader(tmp_path), SpotsafeReader(tmp_path)]
    readers[0].read_metadata()
    save(tmp_path, {"w": torch.ones(2)}, checkpoint_id="2")
    readers[1].read_metadata()
    plans = [reader.prepare_local_plan(LoadPlan([])) for reader in readers]

    with pytest.raises(StateMismatch, match="found different checkpoints"):
        readers[0].prepare_global_plan(plans)
    assert readers[0].prepare_global_plan(plans[:1]) == plans[:1]


def test_a_checkpoint_that_is_deleted_while_it_is_read(tmp_path):
    """The error says so; nothing was loaded."""
    save(tmp_path, {"w": torch.ones(2), "n": 1})
    reader = SpotsafeReader(tmp_path)
    real = reader.prepare_local_plan

    def delete_and_go_on(plan: LoadPlan) -> LoadPlan:
        for path in tmp_path.rglob("data-*"):
            path.unlink()
        return real(plan)

    reader.prepare_local_plan = delete_and_go_on
    values = {"w": torch.zeros(2), "n": 0}
    with pytest.raises(CheckpointException, match="was deleted while it was read"):
        dcp.load(values, storage_reader=reader, no_dist=True)
    assert same(values, {"w": torch.zeros(2), "n": 0})


def test_a_url_that_names_a_checkpoint_is_not_written_to(tmp_path):
    """A save goes to a run, not into a folder that looks like one of its checkpoints."""
    with pytest.raises(ValueError, match="a run has no @"):
        SpotsafeWriter(f"{tmp_path}/run@4")
