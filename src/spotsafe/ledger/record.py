"""The ledger: what happened in each attempt, written beside the checkpoints by a thread of its own.

A piece, ``events-000001.json``, holds events in their order and, besides, how the attempt stands: how much
it has published and, once it is known, how it ended. So the last piece is enough to know an attempt's end.
Pieces are new objects, never appended to; one whose write failed is written again under the next number, and
a reader drops what it has seen before. The ledger is for people and for policies: nothing in it decides what
a checkpoint is, and nothing that goes wrong here reaches training.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from spotsafe.checkpoint import layout
from spotsafe.checkpoint.claim import HEARTBEAT_S
from spotsafe.clock import Clock
from spotsafe.events import CheckpointPublished, Event, RunEnded, RunStarted, Warned
from spotsafe.storage.store import Store

FORMAT = 1
FLUSH_S = 60.0
MAX_BYTES = 32 << 20
"""More than a piece can have: `_PIECE` events, each with a few texts of `_TEXT` characters."""

_BUFFER = 10_000
_PIECE = 500
_TEXT = 1_000

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRecord:
    """How an attempt ended."""

    outcome: str
    """As in `RunEnded`."""
    code: int | None
    step: int
    published: int
    """Checkpoints that it published."""
    newest: str | None
    wall: float
    """Unix time in seconds."""
    in_flight: bool = False
    """As in `RunEnded`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """An event in a piece of the ledger."""

    n: int
    """Its number within the attempt, from 1; a gap means that events were dropped."""
    wall: float
    offset_s: float
    type: str
    data: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One object of a ledger."""

    format: int
    attempt: int
    published: int
    end: EndRecord | None
    events: tuple[Entry, ...]
    step: int = 0
    """The step that the attempt had reached."""


class Ledger:
    """A sink that writes events to ``ledger/<attempt>/``.

    Args:
        store: the run.
        attempt: whose ledger it is.
        clock: time.
        heartbeat_s: seconds between two heartbeats.
        flush_s: seconds after which new events are written; the start and the end are written at once.
        emit: where to warn, once, when the ledger cannot be written.
        step: tells the step that the attempt has reached.
    """

    def __init__(
        self,
        store: Store,
        attempt: int,
        *,
        clock: Clock,
        heartbeat_s: float = HEARTBEAT_S,
        flush_s: float = FLUSH_S,
        emit: Callable[[Event], object] | None = None,
        step: Callable[[], int] | None = None,
    ) -> None:
        self._store = store
        self._attempt = attempt
        self._clock = clock
        self._heartbeat_s = heartbeat_s
        self._flush_s = flush_s
        self._emit_warning = emit
        self._step = step or (lambda: 0)
        self._began = clock.monotonic()
        self._lock = threading.RLock()
        self._buffer: deque[Entry] = deque(maxlen=_BUFFER)
        self._numbered = 0
        self._published = 0
        self._end: EndRecord | None = None
        self._pieces = 0
        self._beats = 0
        self._errors = 0
        self._wake = threading.Event()
        self._urgent = False
        self._closing = False
        self._requests: list[threading.Event] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._work, name="spotsafe-ledger", daemon=True)
        self._thread.start()

    @property
    def errors(self) -> int:
        """How many writes failed."""
        return self._errors

    def emit(self, event: Event) -> None:
        """Take an event; returns at once. What comes after `close` is dropped."""
        wall, offset_s = self._clock.wall(), self._clock.monotonic() - self._began
        data = {field.name: _plain(getattr(event, field.name)) for field in dataclasses.fields(event)}
        with self._lock:
            if self._closing:
                return
            self._numbered += 1
            self._buffer.append(
                Entry(n=self._numbered, wall=wall, offset_s=offset_s, type=type(event).__name__, data=data)
            )
            self._take_stock(event, wall=wall)
        if isinstance(event, RunStarted | RunEnded):
            self._urgent = True
            self._wake.set()

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Write now what there is; true if all of it is on storage within `timeout_s` seconds."""
        done = threading.Event()
        with self._lock:
            if self._stopped.is_set():
                return not self._buffer
            self._requests.append(done)
        self._wake.set()
        self._clock.wait(done, timeout_s)
        with self._lock:
            return not self._buffer

    def close(self, timeout_s: float = 10.0) -> bool:
        """Write what there is and stop; true if all of it is on storage. Calling it twice is no error."""
        with self._lock:
            self._closing = True
        self._wake.set()
        if self._clock.wait(self._stopped, timeout_s):
            self._thread.join()
        with self._lock:
            return not self._buffer

    # -- the thread

    def _work(self) -> None:
        beat_at = flush_at = self._clock.monotonic()
        closing = False
        while not closing:
            self._wake.clear()
            with self._lock:
                closing, urgent, requests = self._closing, self._urgent, self._requests
                self._urgent, self._requests = False, []
            now = self._clock.monotonic()
            if now >= beat_at and not closing:
                self._guarded(self._beat)
                beat_at = now + self._heartbeat_s
            if now >= flush_at or requests or urgent or closing:
                self._guarded(self._write_pieces)
                flush_at = now + self._flush_s
            for done in requests:
                done.set()
            if not closing:
                self._clock.wait(self._wake, max(0.0, min(beat_at, flush_at) - self._clock.monotonic()))
        self._stop()

    def _stop(self) -> None:
        with self._lock:
            self._stopped.set()
            requests = self._requests
        for done in requests:
            done.set()

    def _guarded(self, write: Callable[[], None]) -> None:
        """A ledger that cannot be written is worth a word, never an end of training."""
        try:
            write()
        except Exception as error:  # noqa: BLE001 - whatever it is, it must not end the heartbeat
            self._errors += 1
            _log.debug("the ledger of attempt %d could not be written", self._attempt, exc_info=True)
            if self._errors == 1 and self._emit_warning is not None:
                self._emit_warning(
                    Warned(message=f"the ledger cannot be written ({error}); training and saving go on")
                )

    def _beat(self) -> None:
        self._beats += 1
        body = {
            "format": FORMAT,
            "attempt": self._attempt,
            "beat": self._beats,
            "wall": self._clock.wall(),
            "step": self._step(),
        }
        self._store.replace(layout.ledger_heartbeat(self._attempt), msgspec.json.encode(body))

    def _write_pieces(self) -> None:
        while True:
            with self._lock:
                entries = tuple(self._buffer)[:_PIECE]
                piece = Piece(
                    format=FORMAT,
                    attempt=self._attempt,
                    published=self._published,
                    end=self._end,
                    events=entries,
                    step=self._step(),
                )
            if not entries:
                return
            self._pieces += 1
            path = layout.ledger_events(self._attempt, self._pieces)
            self._store.put(path, msgspec.json.encode(piece))
            with self._lock:
                while self._buffer and self._buffer[0].n <= entries[-1].n:
                    self._buffer.popleft()

    def _take_stock(self, event: Event, *, wall: float) -> None:
        if isinstance(event, CheckpointPublished):
            self._published += 1
        elif isinstance(event, RunEnded):
            self._end = EndRecord(
                outcome=event.outcome,
                code=event.code,
                step=event.step,
                published=self._published,
                newest=event.newest,
                wall=wall,
                in_flight=event.in_flight,
            )


def _plain(value: object) -> Any:
    """What JSON can hold and a piece has room for. Bytes that are no UTF-8 become their escapes."""
    if isinstance(value, str):
        return value[:_TEXT].encode("utf-8", "backslashreplace").decode()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    return value if value is None or isinstance(value, bool | int) else _plain(repr(value))
