"""What happens in a run, as typed values. Logs, metrics and progress bars only render them.

An event is emitted where the state changes, by the thread that changes it. `Fanout` hands it to every sink
and swallows what a sink raises: a broken logger must not end a training run.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base of all events."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted(Event):
    """The attempt is claimed and the state restored; training may begin."""

    url: str
    run: str
    attempt: int
    step: int
    resumed_from: str | None
    """Name of the checkpoint that was loaded; None for a fresh start."""
    age_s: float | None
    """Seconds since that checkpoint was published, by the wall clock."""
    watching: tuple[str, ...]
    """Names of the sources that can announce a reclaim."""
    single_writer: bool = False
    """Nothing on the store keeps two writers apart; see `SingleWriter`."""
    initialized_from: str | None = None
    """Of a fresh run, the url and name of the checkpoint that `init_from` took its first values from."""
    initialized: tuple[str, ...] = ()
    """Names of the tracked objects that got them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleWriter(Event):
    """The store does not refuse to create an object that is there, so nothing on it keeps two writers apart."""

    url: str
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreStarted(Event):
    """Reading and verifying a checkpoint begins."""

    checkpoint: str
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreProgress(Event):
    """A checkpoint is being read. See `Progress`."""

    checkpoint: str
    waited_s: float
    """Seconds since reading began."""
    read_bytes: int
    """Read and verified."""
    total_bytes: int
    over: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreVerified(Event):
    """All bytes are read and match their digests; nothing has been loaded into objects yet."""

    checkpoint: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreFinished(Event):
    """The state is loaded into the tracked objects."""

    checkpoint: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPassedOver(Event):
    """A checkpoint was found that will not be resumed from."""

    checkpoint: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstStep(Event):
    """The first step of this attempt was committed."""

    step: int
    seconds_since_start: float
    """Seconds since the session was entered."""
    parts: tuple[tuple[str, float], ...] = ()
    """Name and seconds of each part of the start, from the beginning of the process on; see `spotsafe.startup`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveStarted(Event):
    """A save was decided at a safe point; the copy begins."""

    checkpoint: str
    step: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveStaged(Event):
    """The copy is complete; training goes on while it is written."""

    checkpoint: str
    total_bytes: int
    blocked_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FileWritten(Event):
    """One data file of a save is durable."""

    checkpoint: str
    file: str
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexWritten(Event):
    """A rank's index of a save is durable; only the manifest is missing."""

    checkpoint: str
    file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPublished(Event):
    """The manifest is durable: from now on the checkpoint exists."""

    checkpoint: str
    step: int
    total_bytes: int
    write_s: float
    healthy: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveFailed(Event):
    """A save in the background failed. Earlier checkpoints are untouched."""

    checkpoint: str
    step: int
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveDiscarded(Event):
    """A copy beside training was overtaken by a write. Nothing of it was written; the next safe point saves."""

    checkpoint: str
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SavePostponed(Event):
    """A save was due while the one before was still being written; a later safe point makes it. Said once for each."""

    step: int
    reason: str
    """Why the save was due: ``interval``, ``asked``, ..."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterReplaced(Event):
    """The process that writes saves has ended. Another one goes on, or this process itself if it ended too often."""

    reason: str
    """How it ended."""
    lost: tuple[str, ...]
    """Names of the saves that it was given and had not ended; what they held is saved again, as a new save."""
    by: str
    """``process`` or ``thread``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterAwaited(Event):
    """The writer process of a trainer that has ended is still writing its last save: the start waits for it."""

    waited_s: float
    limit_s: float
    """After so many seconds the start goes on."""
    over: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EndAwaited(Event):
    """Reclaimed, and everything is saved; the process waits for its launcher to end it, since an exit would harm."""

    launchers: tuple[str, ...]
    """Who started it, the innermost first."""
    limit_s: float
    """After so many seconds it exits all the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveAwaited(Event):
    """The training thread waits for a save in flight, in `run.wait` or when leaving; see `Progress`."""

    checkpoint: str
    waited_s: float
    limit_s: float
    """After so many seconds it waits no more. A notice makes it less."""
    written_bytes: int
    """Of data files that are durable."""
    total_bytes: int | None
    """Of all of them; None until they are staged."""
    published: bool
    """The checkpoint exists, and what it makes superfluous is being deleted."""
    over: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRetired(Event):
    """Retention has withdrawn a checkpoint and deleted its files."""

    checkpoint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeleteRefused(Event):
    """The store did not let a file be deleted; it stays as garbage."""

    path: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class IntervalChosen(Event):
    """How often will be saved."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticeReceived(Event):
    """A source says that this machine will go, or may go."""

    source: str
    kind: str
    action: str
    seconds_left: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticeCancelled(Event):
    """A source took its notice back."""

    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WatcherBlind(Event):
    """A source cannot be asked at the moment; it keeps being polled."""

    source: str
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WatcherRecovered(Event):
    """A source that could not be asked answers again."""

    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptSuperseded(Event):
    """A newer attempt of the run exists; this one deletes nothing and ends."""

    attempt: int
    newer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopStopped(Event):
    """`run.stop` ended the loops that were running."""

    loop: str
    step: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Warned(Event):
    """Something a person should know that stops nothing."""

    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded(Event):
    """The session is left; everything in flight has been drained or given up."""

    step: int
    outcome: str
    """One of ``finished``, ``left``, ``reclaimed``, ``superseded``, ``failed``, ``storage_failed``,
    ``interrupted``, ``restart_loop``."""
    code: int | None
    """The exit code that goes with it, if the session sets one."""
    newest: str | None
    """The newest checkpoint that this attempt published or resumed from."""
    in_flight: bool = False
    """Whether something may still be written: a save that outlives the session by a moment, for the time to drain was
    over, or the manifest of one that failed without an answer."""
    reason: str | None = None
    """Of a finished run, what `run.stop` was told, if that is what ended its last loop."""


Progress = RestoreProgress | SaveAwaited | WriterAwaited
"""Events that tell of something that takes long: none in its first seconds (`WriterAwaited` comes at once), then one
every few, and one at its end (`over`), whatever that is, if it was told of at all."""


class EventSink(Protocol):
    """Receives every event. Called by any thread; must return at once."""

    def emit(self, event: Event) -> None:
        """Take one event. What it raises is logged once and dropped."""
        ...


class CallableSink:
    """Makes a sink of a function."""

    def __init__(self, function: Callable[[Event], object]) -> None:
        self._function = function

    def emit(self, event: Event) -> None:
        """Call the function."""
        self._function(event)


class Fanout:
    """Hands each event to all sinks; a failing sink is reported once and never reaches training.

    That holds for whatever a sink raises, `SystemExit` too: a sink that wants a run to end has `run.stop`. The one
    exception is Ctrl-C. Python raises its KeyboardInterrupt wherever the main thread happens to be, so in there it is
    a person's word and no fault of the sink: the other sinks get the event, then it goes on.
    """

    def __init__(self, sinks: Iterable[EventSink] = ()) -> None:
        self._sinks = list(sinks)
        self._reported: set[int] = set()

    def add(self, sink: EventSink) -> None:
        """Add a sink at the end."""
        self._sinks.append(sink)

    def emit(self, event: Event) -> None:
        """Hand the event to every sink.

        Raises:
            KeyboardInterrupt: a person pressed Ctrl-C meanwhile; all sinks have had the event.
        """
        interrupted: KeyboardInterrupt | None = None
        for sink in self._sinks:
            try:
                sink.emit(event)
            except BaseException as error:  # noqa: BLE001 - whatever a foreign sink raises must not reach training
                if isinstance(error, KeyboardInterrupt) and _in_main_thread():
                    interrupted = error
                else:
                    self._report(sink)
        if interrupted is not None:
            raise interrupted

    def _report(self, sink: EventSink) -> None:
        if id(sink) in self._reported:
            return
        self._reported.add(id(sink))
        # The log may be what is broken: its handlers are foreign too.
        with contextlib.suppress(Exception, SystemExit):
            _log.exception("event sink %r failed; its errors are ignored from now on", sink)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


_lock = threading.Lock()
_installed: list[EventSink] = []


def install(sink: EventSink) -> Callable[[], None]:
    """Hand `sink` the events of every session that this process enters from now on.

    For what is set up outside the training script: a launcher, a test, a notebook. A session takes the sinks
    that are installed when it is entered, before its own.

    Returns:
        a function that takes the sink out again; calling it twice is no error.
    """
    with _lock:
        _installed.append(sink)

    def uninstall() -> None:
        with _lock:
            _installed[:] = [one for one in _installed if one is not sink]

    return uninstall


def installed() -> tuple[EventSink, ...]:
    """The sinks for every session of this process, in the order of their installation."""
    with _lock:
        return tuple(_installed)
