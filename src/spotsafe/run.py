"""`session()` and `Run`: wiring and life cycle. What is decided, copied or written is decided elsewhere."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from types import TracebackType
from typing import Any, Literal, TypeVar

from spotsafe.assembling import Setting, begin_attempt
from spotsafe.attempt import Attempt
from spotsafe.checkpoint.catalog import run_url
from spotsafe.clock import Clock
from spotsafe.console import Console, LogSink, configure_logging
from spotsafe.data.feed import Feed, feed_for
from spotsafe.errors import EXIT_RECLAIMED, RunError, RunInUse
from spotsafe.events import EventSink, Fanout, Warned, installed
from spotsafe.identity import Identity
from spotsafe.metrics import numbers_of
from spotsafe.options import OPTION_NAMES, InitFrom, Options, asked_writer, make_options, merge_state
from spotsafe.policy.interval import SavePolicy
from spotsafe.policy.restarts import Limits
from spotsafe.policy.retention import DEFAULT_KEEP, Keep
from spotsafe.reclaim.leaving import leave_at_exit
from spotsafe.reclaim.notice import ReclaimNotice
from spotsafe.reclaim.watcher import Watcher
from spotsafe.storage.open import Reopening, open_store, reopening, same_place
from spotsafe.storage.store import Store
from spotsafe.tracking import Tracker

T = TypeVar("T")

_open_places: set[str] = set()
_open_places_lock = threading.Lock()


def session(
    url: str | Store,
    *,
    resume: Literal["auto", "must", "never"] = "auto",
    init_from: str | InitFrom | None = None,
    save_every: Literal["auto", "epoch"] | int | timedelta | SavePolicy | None = "auto",
    keep: int | Keep = DEFAULT_KEEP,
    grace: timedelta | None = None,
    watch: Literal["auto"] | Watcher | Sequence[Watcher] | None = "auto",
    on_reclaim: Literal["exit", "return"] = "exit",
    exit_code: int = EXIT_RECLAIMED,
    strict: bool = True,
    drain_timeout: timedelta = timedelta(minutes=10),
    events: EventSink | Sequence[EventSink] = (),
    clock: Clock | None = None,
    overlap: bool = True,
    takeover: bool = False,
    writer: Literal["auto", "process", "thread"] = "auto",
    staging_memory: Literal["auto"] | int = "auto",
    restart_limits: Limits | None = None,
    state: Mapping[str, Any] | None = None,
    **tracked: Any,
) -> Run:
    """A training run that goes on where it was when the machine went away.

    Use it as a context manager, or call `Run.start` and `Run.close` (in a notebook).

    Args:
        url: where the checkpoints lie: a path or any fsspec URL; or a `Store`.
        resume: ``"auto"`` goes on from the newest good checkpoint and starts afresh when there is none;
            ``"must"`` fails when there is none; ``"never"`` fails when there is one.
        init_from: a run whose values the very first attempt starts with; ignored once this run has a checkpoint.
        save_every: ``"auto"`` (by what a save costs), a number of steps, a timedelta, ``"epoch"``, a policy, or
            None for only when asked, at a notice and at the end.
        keep: what retention keeps: a number, or `latest`, `best`, `every`, joined with ``|``.
        grace: the time that is really left after a notice, if less than the source promises.
        watch: ``"auto"``, None for signals only, or watchers.
        on_reclaim: ``"exit"`` raises `Reclaimed`; ``"return"`` ends the loops and leaves `Run.notice` set.
        exit_code: the code of `Reclaimed`.
        strict: whether a missing or extra name in the checkpoint is an error; if not, it is skipped and listed.
        drain_timeout: how long leaving waits for saves in flight.
        events: sinks that receive every event.
        clock: another clock, for tests.
        overlap: let the copy of a save run beside the next forward and backward pass, where that is found to be
            safe; if not, training waits for it.
        takeover: start even if another job seems to be alive on this folder.
        writer: what writes saves: ``"process"``, which shares no interpreter with training and finishes what is
            staged even if this process is killed, or ``"thread"``. ``"auto"`` is a process where that is possible:
            on Linux, for a path or a url that another process can open, and with nothing of your own (a `Store`, a
            retention policy, a clock) that cannot be sent to it; the environment variable ``SPOTSAFE_WRITER`` may
            name one instead.
        staging_memory: bytes that saves may be staged in. A save is copied into a slot as large as the state, and
            written from there; with two slots the next one can be copied meanwhile. ``"auto"`` takes one, or two if
            both fit in half of what the machine, its control groups and the other ranks leave. A state that fits in
            none goes through a small one piece by piece, while training waits, and that is said.
        restart_limits: when restarting without progress ends with exit code 93.
        state: what to track, by name; for names that are options.
        **tracked: what to track, by name: anything with ``state_dict`` and ``load_state_dict``, tensors,
            random generators, arrays, ``(get, set)`` pairs, or dicts and lists of such.

    Raises:
        TypeError: a keyword is neither an option nor state; the message names the nearest option.
        ValueError: an option has a value that it cannot have.
    """
    options = make_options(
        resume=resume,
        init_from=init_from,
        save_every=save_every,
        keep=keep,
        grace=grace,
        watch=watch,
        on_reclaim=on_reclaim,
        exit_code=exit_code,
        strict=strict,
        drain_timeout=drain_timeout,
        events=events,
        clock=clock,
        overlap=overlap,
        takeover=takeover,
        writer=asked_writer(writer),
        staging_memory=staging_memory,
        restart_limits=restart_limits,
    )
    target = run_url(url)
    return Run(
        open_store(target), where=reopening(target), options=options, tracked=merge_state(tracked, state)
    )


class Run:
    """One attempt of a run. Made by `session`; its attributes need a started run."""

    def __init__(
        self, store: Store, *, where: Reopening | None, options: Options, tracked: Mapping[str, Any]
    ) -> None:
        identity = Identity.of_this_process()
        shown = (LogSink(rank=identity.rank), Console(rank=identity.rank))
        self._fanout = Fanout([*installed(), *options.events, *shown])
        self._tracker = Tracker(strict=options.strict, options=OPTION_NAMES, warn=self._warn)
        for name, obj in tracked.items():
            self._tracker.add(name, obj, from_state=True)
        self._setting = Setting(
            store=store,
            where=where,
            options=options,
            identity=identity,
            tracker=self._tracker,
            values={},
            fanout=self._fanout,
        )
        self._place = same_place(store.url)
        self._attempt: Attempt | None = None
        self._closed = False
        self._process = os.getpid()
        self._feeds: dict[int, tuple[Any, Feed]] = {}

    # -- life cycle ---

    def start(self) -> Run:
        """Claim an attempt, restore the state and start watching.

        Raises:
            ValueError: the url is a folder that holds runs.
            RunInUse: this process already has a session on the run, or another job runs on it.
            SpotsafeError: see `spotsafe.opening`.
        """
        if self._attempt is not None or self._closed:
            raise RunError("a session can be entered once; make another one with spotsafe.session(...)")
        self._process = os.getpid()
        configure_logging()
        _occupy(self._place)
        try:
            self._attempt = begin_attempt(self._setting)
        except BaseException:
            self._closed = True
            _vacate(self._place)
            raise
        return self

    def close(self) -> None:
        """Leave the run as the end of a ``with`` block does. A second call does nothing."""
        self._leave(None)

    def __enter__(self) -> Run:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave(error)

    def _leave(self, error: BaseException | None) -> None:
        if self._attempt is None or self._closed:
            return
        self._closed = True
        if os.getpid() != self._process:
            return  # a forked child goes out through our block: the run, and the threads behind it, are its parent's
        with ExitStack() as stack:  # all of it, whatever fails or interrupts
            stack.callback(_vacate, self._place)
            stack.callback(self._tracker.release)
            stack.callback(self._attempt.close)
            stack.callback(self._prepare_exit, self._attempt)
            self._attempt.leave(error)

    def _prepare_exit(self, attempt: Attempt) -> None:
        if attempt.exits_reclaimed:
            leave_at_exit(attempt.leaving(os.environ), clock=self._setting.options.clock)

    # -- loops ---

    def steps(
        self,
        loader: Iterable[T],
        *,
        until: int | None = None,
        epochs: int | None = None,
        accumulate: int = 1,
        name: str | None = None,
        resume_data: Literal["skip", "epoch", "fresh"] | None = None,
    ) -> Iterator[tuple[int, T]]:
        """Yield ``(step, batch)``; the end of each body is a safe point and one step.

        Args:
            loader: a `ResumableDataLoader`, or another one with ``state_dict``; for others see `resume_data`.
            until: the total of steps of this loop, over all attempts; passes over the loader follow each other.
            epochs: the total of passes over the loader instead. With neither there is one pass.
            accumulate: micro-batches in a step. `sync_gradients` is true on the last.
            name: the loop's name in the checkpoint, where the default (its place in the program) may change.
            resume_data: how to go on with a loader that has no position of its own: ``"skip"`` what was used,
                repeat the ``"epoch"``, or start ``"fresh"``.

        Raises:
            LoaderNotResumable: the loader has no position and `resume_data` is not given.
            ValueError: a number that means nothing.
        """
        if until is not None and epochs is not None:
            raise ValueError("run.steps() takes until= or epochs=, not both")
        for option, value in (("until", until), ("epochs", epochs)):
            if value is not None and value < 0:
                raise ValueError(f"{option}= cannot be negative, got {value}")
        if accumulate < 1:
            raise ValueError(f"accumulate= is a number of micro-batches of at least 1, got {accumulate}")
        loops = self._going.loops
        feed = self._feed(loader, resume_data)
        return loops.steps(feed, until=until, epochs=epochs, accumulate=accumulate, name=name)

    def epochs(self, count: int, *, name: str | None = None) -> Iterator[int]:
        """Yield the number of each epoch up to `count`; the end of the body is a safe point of its own."""
        if count < 0:
            raise ValueError(f"a number of epochs cannot be negative, got {count}")
        return self._going.loops.epochs(count, name=name)

    def range(self, count: int, *, name: str | None = None) -> Iterator[int]:
        """Yield the number of each step up to `count`, for loops that draw their own batches."""
        if count < 0:
            raise ValueError(f"a number of steps cannot be negative, got {count}")
        return self._going.loops.range(count, name=name)

    def safe_point(self) -> None:
        """Commit one step of a loop of your own; may save, or end the program on a reclaim."""
        self._going.loops.safe_point()

    def interruptible(self, iterable: Iterable[T]) -> Iterator[T]:
        """Iterate over a long phase, such as an evaluation, that a reclaim may end at once.

        What was done in it does not count: it is repeated after the resume.
        """
        return self._going.loops.interruptible(iterable)

    def stop(self, reason: str) -> None:
        """End the running loops at the end of their bodies, as if they had reached their limits.

        The same command later yields nothing more; a larger limit continues.
        """
        self._going.loops.stop(reason)

    # -- saving ---

    def track(self, **tracked: Any) -> None:
        """Track more state; what the checkpoint holds of it is restored at once."""
        attempt, added = self._going, []
        try:
            for name, obj in tracked.items():
                self._tracker.add(name, obj)
                added.append(name)
        finally:  # what was tracked before the one that is refused stays
            attempt.tracked_more(added)

    def save(self, *, metrics: Mapping[str, float] | None = None) -> None:
        """Save at the end of this body; outside a loop, now.

        Args:
            metrics: numbers for the manifest, which `best` and ``URL@best`` go by. Asked for more than once in a
                body it is one save with the metrics of all. NaN and the infinities are saved, and never best.

        Raises:
            TypeError: a metric is no number, or its name no text.
            ValueError: a name that is empty or holds lone surrogates, a number that no float can hold, or more
                metrics than a manifest has room for (512 KiB).
        """
        self._going.save(numbers_of({} if metrics is None else metrics))

    def wait_staged(self) -> None:
        """Wait until the last save is copied: from here on the program may write to what is tracked as it likes.

        Only for writes that no optimizer makes, and that torch does not count (``.data``), between the end of one
        body and the optimizer's step in the next.
        """
        self._going.points.settle()

    def wait(self) -> None:
        """Wait until every save so far is published, for `drain_timeout` at most.

        One that its writer process died over is made again: between loops at once, in a body at the next safe point.

        Raises:
            SaveFailed: one was not.
            Superseded: a newer attempt of the run exists.
        """
        self._going.wait()

    # -- what can be read ---

    @property
    def values(self) -> dict[str, Any]:
        """Plain values of your own that are saved and restored: numbers, strings, lists, tuples, dicts, sets, arrays.

        They are restored when the run is entered, before the program can show its classes, and nothing is imported by
        name. So Enums, dataclasses, namedtuples and defaultdicts are refused by the first save: keep their plain form,
        or track an object that owns them.
        """
        return self._setting.values

    @property
    def step(self) -> int:
        """Committed steps of all loops, over all attempts; names the checkpoints."""
        return self._running.loops.positions.total

    @property
    def epoch(self) -> int:
        """The epoch of the innermost epochs-loop, or else of the loader."""
        return self._running.loops.current_epoch

    @property
    def id(self) -> str:
        """The run's id: the same in all attempts, fit for a tracker's run id."""
        return self._running.claimed.record.run

    @property
    def attempt(self) -> int:
        """Which start of the run this is, from 1."""
        return self._running.claimed.record.attempt

    @property
    def resumed_from(self) -> str | None:
        """Name of the checkpoint that was loaded; None after a fresh start."""
        return self._running.saver.lineage.resumed_from

    @property
    def replaying(self) -> bool:
        """Whether an earlier attempt has made this step already."""
        return self._running.loops.positions.total < self._running.claimed.furthest_step

    @property
    def notice(self) -> ReclaimNotice | None:
        """The reclaim that was announced, or None. Reading it costs nothing."""
        return None if self._attempt is None else self._attempt.watch.notice

    @property
    def sync_gradients(self) -> bool:
        """Whether this micro-batch is the last of its step, after which the optimizer steps."""
        return self._running.loops.sync_gradients

    @property
    def failures(self) -> tuple[str, ...]:
        """One line for each save of this attempt that failed."""
        return tuple(self._running.saver.failures)

    # -- inside ---

    @property
    def _running(self) -> Attempt:
        if self._attempt is None:
            raise RunError(
                "the run is not entered yet: with spotsafe.session(...) as run: ... (or run.start())"
            )
        return self._attempt

    @property
    def _going(self) -> Attempt:
        attempt = self._running
        if self._closed:
            raise RunError(
                "the run is closed: what it held can still be read, but to go on make another session"
            )
        return attempt

    def _feed(self, loader: Any, resume_data: str | None) -> Feed:
        known = self._feeds.get(id(loader))
        if known is not None:
            return known[1]
        feed = feed_for(loader, resume_data=resume_data, warn=self._warn)
        self._feeds[id(loader)] = (loader, feed)
        return feed

    def _warn(self, message: str) -> None:
        self._fanout.emit(Warned(message=message))


def _occupy(place: str) -> None:
    with _open_places_lock:
        if place in _open_places:
            raise RunInUse(
                f"this process already has a session on {place}. Two sessions would supersede each other: "
                "run.close() the first one, or use another folder"
            )
        _open_places.add(place)


def _vacate(place: str) -> None:
    with _open_places_lock:
        _open_places.discard(place)
