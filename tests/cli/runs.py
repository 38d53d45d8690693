"""Runs with small checkpoints on a local disk, made of the format's own parts and without torch."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from spotsafe.checkpoint.attempts import AttemptRecord, encode_record
from spotsafe.checkpoint.digest import BLOCK, block_digests, sha256_hex
from spotsafe.checkpoint.dtypes import require
from spotsafe.checkpoint.image import ImageTensor, plan_image
from spotsafe.checkpoint.index import FileEntry, Index, Slice, TensorEntry, encode_index
from spotsafe.checkpoint.layout import CheckpointName, attempt_record, data_file, index_file
from spotsafe.checkpoint.manifest import Health, Manifest, Part
from spotsafe.checkpoint.publish import publish
from spotsafe.storage.open import open_store

NONCE = "0a1b2c3d"
STATE = {"optimizer": {"param_groups": [{"lr": 0.1}]}, "scheduler": {"last_epoch": 7}}
SESSION = {"rng": {"torch": "AAAA"}, "positions": {"steps": {"done": 7}}, "values": {}}


def attempt(folder: Path, number: int = 1) -> None:
    """Claim an attempt."""
    record = AttemptRecord(
        run=NONCE, attempt=number, nonce=NONCE, host="h", pid=1, boot="", job="j", arguments=("train.py",),
        newest_seen=None, started=time.time(),
    )  # fmt: skip
    open_store(str(folder)).put(attempt_record(number), encode_record(record))


def checkpoint(
    folder: Path,
    step: int,
    *,
    number: int = 1,
    age_s: float = 0.0,
    healthy: bool = True,
    metrics: Mapping[str, float] | None = None,
    tensors: Mapping[str, np.ndarray[Any, Any]] | None = None,
    state: Mapping[str, Any] = STATE,
    session: Any = SESSION,
    published: bool = True,
) -> CheckpointName:
    """Write a checkpoint of float32 tensors; its attempt must be there."""
    if tensors is None:
        tensors = {"model.weight": np.full((2, 3), step, "<f4"), "optimizer.exp_avg": np.zeros(3, "<f4")}
    store = open_store(str(folder))
    name = CheckpointName(number, step, step, NONCE)
    float32 = require("float32", path="")
    image = plan_image(ImageTensor.of(key, dtype=float32, shape=one.shape) for key, one in tensors.items())
    data = image.header + b"".join(tensors[key].tobytes() for key in image.starts)
    store.put(name.file(data_file(0, 0)), data)
    index = Index(
        rank=0,
        block_size=BLOCK,
        files=(FileEntry(name=data_file(0, 0), size=image.size, digests=block_digests(data)),),
        tensors=tuple(
            TensorEntry(
                name=key,
                dtype="float32",
                shape=one.shape,
                role="parameter" if key.startswith("model") else "moment",
                slices=(
                    Slice(
                        offsets=(0,) * one.ndim,
                        lengths=one.shape,
                        file=data_file(0, 0),
                        start=image.starts[key],
                        nbytes=one.nbytes,
                    ),
                ),
            )
            for key, one in tensors.items()
        ),
        state=state,
        session=session,
    )
    encoded = encode_index(index)
    store.put(name.file(index_file(0)), encoded)
    if published:
        manifest = Manifest(
            run=NONCE, attempt=number, step=step, save=step, nonce=NONCE, parent=None,
            created=time.time() - age_s, world_size=1, reason="interval",
            health=Health(healthy=healthy, nonfinite=() if healthy else ("model.weight",)),
            metrics=dict(metrics or {}),
            parts=(Part(rank=0, file=index_file(0), size=len(encoded), sha256=sha256_hex(encoded)),),
            total_bytes=image.size,
        )  # fmt: skip
        publish(store, manifest)
    return name


def run(folder: Path, *steps: int, **options: Any) -> list[CheckpointName]:
    """A run of one attempt with a checkpoint at each step."""
    attempt(folder)
    return [checkpoint(folder, step, **options) for step in steps]
