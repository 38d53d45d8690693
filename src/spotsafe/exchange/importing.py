"""Making a checkpoint of a file of another kind, by the protocol of every other checkpoint."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from spotsafe.checkpoint.candidates import look
from spotsafe.checkpoint.catalog import refuse_parent
from spotsafe.checkpoint.claim import claim
from spotsafe.checkpoint.layout import CheckpointName
from spotsafe.clock import Clock, SystemClock
from spotsafe.errors import RunInUse, UnsupportedState
from spotsafe.events import Event, RunEnded
from spotsafe.exchange.choosing import choose_entries
from spotsafe.exchange.dcp_folder import METADATA, is_dcp_folder, read_dcp_folder
from spotsafe.exchange.parameter_order import (
    UnknownOrder,
    is_optimizer_state,
    parameter_names,
    strip_names,
)
from spotsafe.exchange.trees import capture_values, is_state_dict
from spotsafe.exchange.weights_only import load_weights_only
from spotsafe.identity import Identity
from spotsafe.ledger.record import Ledger
from spotsafe.policy.retention import latest
from spotsafe.storage.store import Store
from spotsafe.tensors.plan import PlanCache
from spotsafe.tensors.staging import stage
from spotsafe.tensors.tree import Capture
from spotsafe.writer.arena import Arena
from spotsafe.writer.job import SaveJob, SaveResult
from spotsafe.writer.upload import Uploader

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """What was made of a file."""

    name: CheckpointName
    objects: Mapping[str, str]
    """Name -> kind of each object of the checkpoint."""
    tensors: int
    total_bytes: int
    unordered: Mapping[str, str]
    """Name -> why the state of this optimizer is plain state, which no optimizer is restored from."""


def read_foreign(
    path: str,
    *,
    name: str | None = None,
    strip: str = "",
    rename: Mapping[str, str] | None = None,
    only: Collection[str] = (),
) -> dict[str, Any]:
    """What a file or folder of another kind holds, as objects by name; no code in it runs.

    A file that is itself a state_dict, as every safetensors file is, is one object, `name`.

    Args:
        path: a safetensors file, a file of `torch.save`, or a folder of torch.distributed.checkpoint.
        name: see above; ``model`` if None.
        strip: left out at the beginning of the names of tensors, such as ``module.``; all must have it.
        rename: of a file with several entries, an entry -> its name in the checkpoint; see `choose_entries`.
        only: names in the checkpoint of what is taken; everything if empty.

    Raises:
        UnsupportedState: it holds what cannot be read without running code, or what cannot be stored.
        ValueError: a kind of file that nobody knows, names without `strip`, or options that do not fit the file.
        OSError: it could not be read.
    """
    values = _read(path)
    if is_state_dict(values) or is_optimizer_state(values):
        if rename or only:
            raise ValueError(f"{path} is one state_dict; --name says what to call it")
        objects = {name or "model": values}
    elif name is not None:
        entries = ", ".join(map(repr, values))
        raise ValueError(f"{path} holds several things, which --rename OLD={name} can rename: {entries}")
    else:
        objects = choose_entries(values, rename=rename or {}, only=only, path=path)
    return {key: _stripped(value, strip, path) for key, value in objects.items()}


def _read(path: str) -> Mapping[str, Any]:
    if is_dcp_folder(path):
        values: Any = read_dcp_folder(path)
    elif os.path.isdir(path):
        raise ValueError(f"{path} is a folder without {METADATA}: not one of torch.distributed.checkpoint")
    elif path.endswith(".safetensors"):
        values = _read_safetensors(path)
    elif path.endswith(SUFFIXES):
        values = load_weights_only(path, name=path)
    else:
        raise ValueError(f"{path} is no folder, and its name ends in none of {', '.join(SUFFIXES)}")
    if not isinstance(values, Mapping) or not values or not all(isinstance(key, str) for key in values):
        raise UnsupportedState(f"{path} holds no dict with names, but a {type(values).__name__}", path=path)
    return values


def import_values(
    store: Store,
    values: Mapping[str, Any],
    *,
    step: int = 0,
    optimizer_order: str | None = None,
    clock: Clock | None = None,
) -> Imported:
    """Publish `values` as the first checkpoint of a new run.

    What looks like the state of an optimizer is one if it is known which parameter is which, else plain state.

    Args:
        store: a folder in which no run is yet.
        values: objects by name, from `read_foreign`.
        step: which step it is the state of.
        optimizer_order: the module whose state_dict has the order of the parameters; see `parameter_names`.
        clock: time.

    Raises:
        ValueError: `optimizer_order` does not fit what is there, or the folder holds runs.
        RunInUse: there is a run already; a checkpoint from outside would end the job that may be alive there.
        UnsupportedState: something in it cannot be stored.
        StorageError: it could not be written; nothing was published.
    """
    clock = clock or SystemClock()
    orders, unordered = _orders(values, like=optimizer_order)
    refuse_parent(store)
    listing = look(store)
    if listing.highest:
        raise RunInUse(
            f"{store.url} holds a run already; import into a new folder, and use it with init_from="
        )
    capture = capture_values(values, orders=orders)
    record = claim(
        store, listing=listing, identity=Identity.of_this_process(), newest_seen=None, wall=clock.wall()
    )
    name = CheckpointName(record.attempt, step, 1, record.nonce)
    ledger = Ledger(store, record.attempt, clock=clock, step=lambda: step)
    try:
        result = _write(store, capture, name=name, run=record.run, created=clock.wall(), emit=ledger.emit)
        outcome = "finished" if result.published else "failed"
        newest = str(name) if result.published else None
        ledger.emit(RunEnded(step=step, outcome=outcome, code=None, newest=newest))
    finally:
        ledger.close()
    if result.error is not None:
        raise result.error
    kinds = {key: tree["kind"] for key, tree in capture.state.items()}
    return Imported(
        name=name,
        objects=kinds,
        tensors=len(capture.tensors),
        total_bytes=result.total_bytes,
        unordered=unordered,
    )


def _orders(
    values: Mapping[str, Any], *, like: str | None
) -> tuple[dict[str, list[list[str]]], dict[str, str]]:
    """The names of the parameters of each optimizer, and why they are not known."""
    modules = {name: value for name, value in values.items() if is_state_dict(value)}
    optimizers = {name: value for name, value in values.items() if is_optimizer_state(value)}
    if like is not None and not optimizers:
        raise ValueError("there is no state of an optimizer to be ordered; rename it from where it is")
    known: dict[str, list[list[str]]] = {}
    unknown: dict[str, str] = {}
    for name, value in optimizers.items():
        try:
            known[name] = parameter_names(value, modules, like=like)
        except UnknownOrder as error:
            if like is not None:
                raise ValueError(f"{name}: {error}") from error
            unknown[name] = str(error)
    return known, unknown


def _write(
    store: Store,
    capture: Capture,
    *,
    name: CheckpointName,
    run: str,
    created: float,
    emit: Callable[[Event], object],
) -> SaveResult:
    plan = PlanCache().plan(capture.tensors)
    arena = Arena(plan.arena_size)
    try:
        stage(plan, capture, arena.view)
        job = SaveJob(
            name=name,
            run=run,
            parent=None,
            reason="import",
            created=created,
            world_size=1,
            rank=0,
            metrics={},
            files=plan.files,
            tensors=plan.tensors,
            state=capture.state,
            session=None,
            health=plan.health,
            nonfinite_before=frozenset(),
            keep=latest(2),
            resumed_from=None,
        )
        return Uploader(store, emit=emit, monotonic=time.monotonic).run(job, arena.view)
    finally:
        arena.close()


def _read_safetensors(path: str) -> dict[str, Any]:
    from safetensors import SafetensorError  # noqa: PLC0415 - only this kind of import pays for it
    from safetensors.torch import load_file  # noqa: PLC0415 - only this kind of file needs it

    try:
        return load_file(path)
    except SafetensorError as error:
        raise UnsupportedState(f"{path} is no whole safetensors file: {error}", path=path) from error


def _stripped(value: Any, prefix: str, path: str) -> Any:
    if prefix and is_optimizer_state(value):
        return strip_names(value, prefix)
    if not prefix or not is_state_dict(value):
        return value
    other = next((key for key in value if not key.startswith(prefix)), None)
    if other is not None:
        raise ValueError(f"{path}: {other!r} does not begin with {prefix!r}")
    return {key.removeprefix(prefix): tensor for key, tensor in value.items()}
