"""Training resilience for PyTorch on machines that can vanish at any second.

::

    loader = spotsafe.ResumableDataLoader(dataset, batch_size=32, shuffle=True, seed=0, num_workers=4)

    with spotsafe.session("s3://bucket/run-0412", model=model, optimizer=optimizer) as run:
        for step, batch in run.steps(loader, until=10_000):
            loss = train_step(batch)

The first run and every resume are the same command. Importing this package imports no torch: the names that need it
are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from spotsafe.errors import (
    CheckpointError,
    CheckpointNotFound,
    DamagedCheckpoint,
    LoaderNotResumable,
    LookAhead,
    NotEnoughMemory,
    NoUsableCheckpoint,
    Reclaimed,
    RestartLoop,
    RunError,
    RunInUse,
    SaveFailed,
    SpotsafeError,
    StateError,
    StateMismatch,
    StorageError,
    StorageFull,
    StorageNotFound,
    StorageRefused,
    StorageShort,
    StorageUnavailable,
    Superseded,
    UnsupportedFormat,
    UnsupportedState,
    UntrackedParameters,
)
from spotsafe.policy.interval import auto, every_epoch, every_steps, every_time, never
from spotsafe.policy.restarts import Limits
from spotsafe.policy.retention import best, every, latest

if TYPE_CHECKING:
    from spotsafe.data.loader import ResumableDataLoader
    from spotsafe.data.sampler import ResumableSampler
    from spotsafe.loading import load
    from spotsafe.options import InitFrom
    from spotsafe.pinning import pin
    from spotsafe.reclaim.notice import NoticeKind, ReclaimNotice
    from spotsafe.run import Run, session

__version__ = "0.1.0"

_LAZY = {
    "InitFrom": "spotsafe.options",
    "NoticeKind": "spotsafe.reclaim.notice",
    "ReclaimNotice": "spotsafe.reclaim.notice",
    "ResumableDataLoader": "spotsafe.data.loader",
    "ResumableSampler": "spotsafe.data.sampler",
    "Run": "spotsafe.run",
    "load": "spotsafe.loading",
    "pin": "spotsafe.pinning",
    "session": "spotsafe.run",
}

__all__ = [
    "CheckpointError",
    "CheckpointNotFound",
    "DamagedCheckpoint",
    "InitFrom",
    "Limits",
    "LoaderNotResumable",
    "LookAhead",
    "NoUsableCheckpoint",
    "NotEnoughMemory",
    "NoticeKind",
    "ReclaimNotice",
    "Reclaimed",
    "RestartLoop",
    "ResumableDataLoader",
    "ResumableSampler",
    "Run",
    "RunError",
    "RunInUse",
    "SaveFailed",
    "SpotsafeError",
    "StateError",
    "StateMismatch",
    "StorageError",
    "StorageFull",
    "StorageNotFound",
    "StorageRefused",
    "StorageShort",
    "StorageUnavailable",
    "Superseded",
    "UnsupportedFormat",
    "UnsupportedState",
    "UntrackedParameters",
    "auto",
    "best",
    "every",
    "every_epoch",
    "every_steps",
    "every_time",
    "latest",
    "load",
    "never",
    "pin",
    "session",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'spotsafe' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
