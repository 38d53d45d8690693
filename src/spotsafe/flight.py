"""How far the save in flight has come, as its events tell it: the same for every kind of writer."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace

from spotsafe.events import CheckpointPublished, Event, FileWritten, SaveAwaited, SaveStaged, SaveStarted


@dataclass(frozen=True, slots=True, kw_only=True)
class _Save:
    checkpoint: str = ""
    written_bytes: int = 0
    total_bytes: int | None = None
    published: bool = False


class Flight:
    """A sink that follows the newest save. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._save = _Save()

    def emit(self, event: Event) -> None:
        """Take note of it."""
        with self._lock:
            self._save = _after(self._save, event)

    def awaited(self, *, waited_s: float, limit_s: float, over: bool) -> SaveAwaited:
        """The event that says what is waited for."""
        save = self._save
        return SaveAwaited(
            checkpoint=save.checkpoint,
            waited_s=waited_s,
            limit_s=limit_s,
            written_bytes=save.written_bytes,
            total_bytes=save.total_bytes,
            published=save.published,
            over=over,
        )


def _after(save: _Save, event: Event) -> _Save:
    """A file may be written before all of them are staged; an earlier save says nothing of this one."""
    if isinstance(event, SaveStarted):
        return _Save(checkpoint=event.checkpoint)
    if (
        isinstance(event, FileWritten | SaveStaged | CheckpointPublished)
        and event.checkpoint == save.checkpoint
    ):
        if isinstance(event, FileWritten):
            return replace(save, written_bytes=save.written_bytes + event.total_bytes)
        if isinstance(event, SaveStaged):
            return replace(save, total_bytes=event.total_bytes)
        return replace(save, published=True)
    return save
