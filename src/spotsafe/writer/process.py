"""The writer as a process of its own: it shares no interpreter with training, and outlives it by the last save.

The trainer's side. What runs in the process is `serving`; how it is begun, `boot`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from spotsafe.checkpoint.layout import CheckpointName
from spotsafe.checkpoint.markers import EndedAt
from spotsafe.clock import Clock
from spotsafe.errors import WriterDied
from spotsafe.events import Event, SaveFailed, WriterReplaced
from spotsafe.identity import Identity
from spotsafe.storage.open import Reopening, same_place
from spotsafe.storage.store import Store
from spotsafe.writer import boot, channel, presence, wire
from spotsafe.writer.arena import Arena, can_share, open_numbers, shared_arena
from spotsafe.writer.child import Child
from spotsafe.writer.copied import BYTES, Staging, place_of
from spotsafe.writer.flight import MOST_IN_FLIGHT, InFlight
from spotsafe.writer.job import SaveJob, SaveResult
from spotsafe.writer.thread import NAME, WriterThread

DEATHS = 3
"""After so many in a row the saves are written by a thread of the trainer."""
MODULE = "spotsafe.helper"
"""What the process runs."""
_PACKAGE = Path(__file__).parents[1]
_HIDDEN = {"CUDA_VISIBLE_DEVICES": "", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
"""No context on a device, and no threads that nobody uses."""
_LAST_WORDS = 400
LEAVE_S = 5.0
"""A process that has nothing to do any more ends within this time, or is ended."""
_EXIT_S = 30.0
_LOOK_EVERY_MS = 500

_log = logging.getLogger(__name__)


def can_run() -> bool:
    """Whether this system can have a writer process."""
    return (
        sys.platform == "linux"
        and bool(sys.executable)
        and not hasattr(sys, "frozen")  # the executable is the program itself: it would be run once more
        and os.path.isfile(boot.__file__)  # not in an archive
        and can_share()
        and hasattr(socket, "send_fds")
        and hasattr(os, "posix_spawn")
    )


@dataclass(eq=False)
class _Link:
    """One writer process, and the way to it."""

    ours: socket.socket
    theirs: socket.socket
    sender: wire.Sender = field(default_factory=wire.Sender)
    process: Child | None = None
    ready: bool = False
    remains: tuple[str, ...] = ()
    """Files that it removes if it ends well."""

    @property
    def log(self) -> str:
        """Where it writes what nobody expected."""
        return self.remains[-1]

    def close(self) -> None:
        """Say no more to it."""
        channel.close(self.ours)
        channel.close(self.theirs)

    def clean(self, *, keep_log: bool = False) -> None:
        """Remove its files."""
        for path in self.remains[:-1] if keep_log else self.remains:
            with contextlib.suppress(OSError):
                os.unlink(path)


@dataclass(eq=False)
class _Flying:
    """A save that a process was given."""

    link: _Link
    job: SaveJob
    place: int | None = None
    """Of the words that tell how far its copy is."""


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A message that was made ahead, for a save that lies in shared memory."""

    job: SaveJob
    sender: wire.Sender
    """What the process had been sent when it was made: it is right only as long as that is all."""
    message: wire.Job
    data: bytes
    after: wire.Sender


class ProcessWriter:
    """Writes saves in another process, in the order in which they are given; see `WriterThread`, which does the same.

    The process is started at once, in the background. If it dies, another one takes its place, and the saves that it
    was given end with `WriterDied`; if that happens again and again, a thread of this process writes.

    Args:
        store: the run, for the thread.
        where: how the process opens the same run.
        emit: is told of everything that happens, from a thread of this writer.
        clock: waits in `drain`.
        identity: of this process.
        ended: see `Uploader`.
        ended_at: see `Uploader`.

    Raises:
        OSError: this user has no folder for what such a process needs, or too many files are open.
    """

    shares = True
    """Whether saves lie in memory that another process can read."""

    def __init__(
        self,
        store: Store,
        where: Reopening,
        *,
        emit: Callable[[Event], object],
        clock: Clock,
        identity: Identity,
        ended: Callable[[int], bool] | None = None,
        ended_at: EndedAt | None = None,
    ) -> None:
        self._store, self._where, self._emit, self._clock, self._identity = (
            store,
            where,
            emit,
            clock,
            identity,
        )
        self._ended, self._ended_at = ended, ended_at
        self._folder = presence.runtime_folder()
        self._words = Arena(BYTES * MOST_IN_FLIGHT, shared=True)
        self._serial = 0
        self._flying: InFlight[_Flying] = InFlight()
        self._prepared: _Prepared | None = None
        self._unfinished: list[CheckpointName] = []
        self._undecided = False
        self._deaths = 0
        self._closed = False
        self._instead: WriterThread | None = None
        self._link = self._new_link()
        self._before: _Link | None = None
        self._tending = threading.Thread(target=self._tend, name=NAME, daemon=True)
        try:
            self._tending.start()
        except BaseException:  # no thread to be had
            self._link.close()
            self._link.clean()
            self._words.close()
            raise

    # -- as WriterThread ---

    @property
    def idle(self) -> bool:
        """Whether nothing is being written; costs nothing."""
        return not self._flying and (self._instead is None or self._instead.idle)

    def has(self, name: CheckpointName) -> bool:
        """See `WriterThread.has`."""
        return name in self._flying or (self._instead is not None and self._instead.has(name))

    @property
    def undecided(self) -> bool:
        """See `Uploader.undecided`; ask when it is `idle`."""
        return self._undecided if self._instead is None else self._instead.undecided

    def staging(self) -> Staging:
        """The progress of a copy that is about to begin, for `submit`."""
        if self._instead is not None:
            return self._instead.staging()
        self._serial += 1
        taken = {one.place for one in self._flying.kept()}
        place = next(one for one in range(MOST_IN_FLIGHT) if one not in taken)
        staging = Staging(place_of(self._words.view, place), serial=self._serial, place=place)
        staging.begin()
        return staging

    def prepare(self, job: SaveJob, arena: memoryview, frozen: memoryview | None = None) -> None:
        """See `WriterThread.prepare`. The message is made, which is sent if nothing else has been sent by then.

        Raises:
            Exception: as `submit` makes a failed save of; it will find out for itself.
        """
        link = self._link
        main, lent = shared_arena(arena), None if frozen is None else shared_arena(frozen)
        if main is not None and (lent is None) == (frozen is None):
            self._prepared = _Prepared(job, link.sender, *_message(link.sender, job, None, main, lent))

    def submit(
        self,
        job: SaveJob,
        arena: memoryview,
        frozen: memoryview | None = None,
        *,
        staging: Staging | None = None,
    ) -> None:
        """See `WriterThread.submit`. Memory that is not shared is copied, and then nothing may be missing in it."""
        if self._closed:
            raise RuntimeError(f"save {job.name} given to a writer that is closed")
        if self._instead is not None:
            self._instead.submit(job, arena, frozen, staging=staging)
            return
        self._flying.require_room(job.name)
        link = self._link
        try:
            self._flying.add(job.name, _Flying(link, job, None if staging is None else staging.place))
            self._give(link, job, arena, frozen, staging)
        except BaseException:  # Ctrl-C: nobody knows whether the message is on its way
            self._cut(link)
            raise

    def poll(self) -> list[SaveResult]:
        """See `WriterThread.poll`."""
        return self._flying.poll() + ([] if self._instead is None else self._instead.poll())

    def drain(self, timeout_s: float | None = None, *, left: int = 0) -> bool:
        """See `WriterThread.drain`."""
        end = None if timeout_s is None else self._clock.monotonic() + max(timeout_s, 0.0)
        if not self._flying.wait(self._clock, timeout_s=timeout_s, left=left):
            return False
        if self._instead is None:
            return True
        return self._instead.drain(None if end is None else end - self._clock.monotonic(), left=left)

    def close(self) -> None:
        """Take no more saves. One that is being written is not waited for: the process ends when it is done."""
        if self._closed:
            return
        self._closed = True
        if self._instead is not None:
            self._instead.close()
        idle, link = not self._flying, self._link
        if idle and not link.ready:
            self._kill(link)  # it has nothing to do yet, and would first get ready
        channel.say_no_more(link.ours, socket.SHUT_WR)
        if idle or self._instead is not None:
            self._tending.join(LEAVE_S)
            if self._tending.is_alive():  # it stands still, and nothing is lost with it
                self._kill(self._link)
                self._tending.join(LEAVE_S)
        if self._instead is not None:
            self._close_links()

    # -- giving ---

    def _give(
        self, link: _Link, job: SaveJob, arena: memoryview, frozen: memoryview | None, staging: Staging | None
    ) -> None:
        try:
            self._send(link, job, arena, frozen, staging)
        except BlockingIOError:
            self._cut(link)  # it has not read for a long time
        except ConnectionError as error:
            # What it has been given before is lost when it is known to have ended.
            _log.debug("the writer process is gone", exc_info=error)
            self._flying.end(_died_over(job))
            self._cut(link)  # it lives, if the program has closed all its descriptors
        except Exception as error:  # noqa: BLE001 - whatever is wrong with a save is in its result
            self._flying.end(_failed(job, error))
            self._emit(SaveFailed(checkpoint=str(job.name), step=job.name.step, error=str(error)))

    def _new_link(self) -> _Link:
        """A link on which everything is said already that comes before the first save; the process may come later."""
        link = _Link(*channel.pair())
        where = presence.announce(same_place(self._where.url), folder=self._folder, identity=self._identity)
        try:
            link.remains = (where.path, presence.log_of(where.path))
            hello = wire.Hello(
                url=self._where.url,
                settings=dict(self._where.settings),
                trainer=os.getpid(),
                single_writer=self._ended is not None,
                unfinished=tuple(self._unfinished),
                remains=link.remains,
            )
            link.ours.send(json.dumps(_package()).encode())
            channel.send(link.ours, wire.encode(hello), [self._words.descriptor(), where.fd])
        except BaseException:
            link.close()
            link.clean()
            raise
        finally:
            presence.release(where)
        return link

    def _send(
        self, link: _Link, job: SaveJob, arena: memoryview, frozen: memoryview | None, staging: Staging | None
    ) -> None:
        copies: list[Arena] = []
        try:
            main = _shared(arena, copies, may_copy=staging is None)
            lent = None if frozen is None else _shared(frozen, copies, may_copy=True)
            ahead, self._prepared = self._prepared, None
            if ahead is not None and ahead.job is job and ahead.sender is link.sender and staging is None:
                message, data, after = ahead.message, ahead.data, ahead.after
            else:
                message, data, after = _message(link.sender, job, staging, main, lent)
            here = {one.number: one for one in (main, lent) if one is not None}
            new = [here[one.number].descriptor() for one in message.new]
            channel.send(link.ours, data, new)
            link.sender = after
        finally:
            for one in copies:
                one.close()

    # -- a thread of its own: starts the process, hears it, replaces it ---

    def _tend(self) -> None:
        while True:
            link = self._link
            try:
                reason = self._serve(link)
            except Exception as error:  # noqa: BLE001 - whatever it is, no save may wait for ever
                _log.error("the writer process cannot be used", exc_info=True)
                reason = f"{type(error).__name__}: {error}"
                self._give_up(link)
            if self._closed:
                self._lose(link)
                self._close_links()
                return
            if self._replace(link, reason):
                return

    def _serve(self, link: _Link) -> str:
        """Start the process and hear it to its end.

        Returns:
            How it ended.
        """
        if self._closed and not self._flying:
            link.clean()
            return ""
        self._start(link)
        assert link.process is not None, "it was started"
        while True:
            ended, watch = link.process.ended, link.process.watch
            poll = select.poll()
            poll.register(link.ours, select.POLLIN)
            if watch is not None:
                poll.register(watch, select.POLLIN)
            poll.poll(0 if ended else None if watch is not None else _LOOK_EVERY_MS)
            if not self._hear(link) or ended:
                break
        return self._bury(link)

    def _start(self, link: _Link) -> None:
        descriptor = os.open(link.log, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            link.process = Child(
                [sys.executable, "-I", boot.__file__],
                environment={**os.environ, **_HIDDEN},
                log=descriptor,
                connection=link.theirs.fileno(),
            )
        finally:
            os.close(descriptor)
        channel.close(link.theirs)
        if self._closed and not self._flying:
            self._kill(link)

    def _hear(self, link: _Link) -> bool:
        """Take what the process has said; false if it will say no more."""
        while True:
            try:
                received = channel.receive(link.ours)
            except BlockingIOError:
                return True
            if received is None:
                return False
            message = wire.for_trainer(received[0])
            if isinstance(message, wire.Said):
                self._emit(wire.event_of(message))
            elif isinstance(message, wire.Logged):
                logging.getLogger(message.logger).log(message.level, "%s", message.text)
            elif isinstance(message, wire.Finished):
                self._undecided = message.undecided
                if message.published:
                    self._deaths = 0
                if not message.undecided:
                    self._unfinished.clear()
                self._flying.end(wire.result_of(message))
            else:
                link.ready = True

    def _bury(self, link: _Link) -> str:
        assert link.process is not None, "it was started"
        code = link.process.wait(_EXIT_S)
        if code is None:  # it says no more and yet lives
            link.process.kill()
            code = link.process.wait(_EXIT_S) or -signal.SIGKILL
        link.process.close()
        words = _last_words(link.log) if code not in {0, -signal.SIGKILL} else ""
        link.clean(keep_log=bool(words))
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"{how}: {words} (all of it in {link.log})" if words else how

    def _replace(self, link: _Link, reason: str) -> bool:
        """Let another one take its place; true if that is a thread."""
        self._deaths += 1
        lost = [one.job.name for one in self._flying.kept() if one.link is link]
        if lost:
            self._unfinished += lost
            self._undecided = True
        after = self._another() if self._deaths < DEATHS else None
        if after is None:
            self._instead = self._new_thread()
        else:
            # The old one's descriptor is not closed while the training thread may be about to send something to it.
            before, self._before, self._link = self._before, link, after
            if before is not None:
                before.close()
        by = "thread" if after is None else "process"
        self._emit(WriterReplaced(reason=reason, lost=tuple(map(str, lost)), by=by))
        self._lose(link)
        return after is None

    def _another(self) -> _Link | None:
        try:
            return self._new_link()
        except (OSError, MemoryError):
            _log.warning("no writer process can be started any more", exc_info=True)
            return None

    def _new_thread(self) -> WriterThread:
        writer = WriterThread(
            self._store, emit=self._emit, clock=self._clock, ended=self._ended, ended_at=self._ended_at
        )
        for name in self._unfinished:
            writer.note_lost(name)
        return writer

    def _close_links(self) -> None:
        self._link.close()
        if self._before is not None:
            self._before.close()
        self._words.close()

    def _give_up(self, link: _Link) -> None:
        """Leave nobody at the other end, so that nothing more can be given to it."""
        channel.close(link.theirs)
        if link.process is not None:
            link.process.kill()
            link.process.wait(_EXIT_S)
        link.clean()

    # -- how a save ended ---

    def _lose(self, link: _Link) -> None:
        for one in self._flying.kept():
            if one.link is link:
                self._flying.end(_died_over(one.job))

    def _cut(self, link: _Link) -> None:
        """End a process that is of no use any more: whoever tends it sees the end, and replaces it."""
        self._kill(link)
        channel.say_no_more(link.ours, socket.SHUT_RDWR)

    def _kill(self, link: _Link) -> None:
        if link.process is not None:
            link.process.kill()


def _message(
    sender: wire.Sender, job: SaveJob, staging: Staging | None, main: Arena, lent: Arena | None
) -> tuple[wire.Job, bytes, wire.Sender]:
    message, after = sender.job(
        job,
        copy=None if staging is None else wire.Copy(place=staging.place, serial=staging.serial),
        arena=wire.Memory(number=main.number, size=main.size),
        lent=None if lent is None else wire.Memory(number=lent.number, size=lent.size),
        there=open_numbers(),
    )
    return message, wire.encode(message), after


def _died_over(job: SaveJob) -> SaveResult:
    return _failed(job, WriterDied(f"save {job.name}: the writer process ended over it"))


def _failed(job: SaveJob, error: BaseException) -> SaveResult:
    return SaveResult(name=job.name, published=False, healthy=True, total_bytes=0, write_s=0.0, error=error)


def _shared(view: memoryview, copies: list[Arena], *, may_copy: bool) -> Arena:
    """The shared arena behind a view, or a copy of what it shows."""
    arena = shared_arena(view)
    if arena is None:
        if not may_copy:
            raise ValueError("what is still being copied must lie in shared memory")
        arena = Arena(view.nbytes, shared=True)
        copies.append(arena)
        arena.view[: view.nbytes] = view.cast("B")
    return arena


def _package() -> dict[str, object]:
    """What `boot` is told: where this package lies, and where else the trainer finds what it imports.

    Not the folders of the program: a module in them may have the name of one that is needed.
    """
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    own = set()
    with contextlib.suppress(OSError):  # the working folder may have been deleted
        own.add(os.getcwd())
        own.update([] if main is None else [os.path.dirname(os.path.abspath(main))])
    # Programs put what is no text there too; Python's own import passes it over.
    there: list[object] = [*sys.path]
    path = [one for one in there if isinstance(one, str) and os.path.isabs(one) and one not in own]
    return {"package": _PACKAGE.name, "folder": str(_PACKAGE), "module": MODULE, "path": path}


def _last_words(path: str) -> str:
    """The end of a log, in one line."""
    try:
        with open(path, "rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - _LAST_WORDS))
            return " ".join(log.read().decode(errors="replace").split())
    except OSError:
        return ""
