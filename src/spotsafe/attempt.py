"""One attempt of a run, from the first look at the store to the last byte of the ledger.

Starts everything in an order in which a failure leaves nothing behind, and ends it so that the way out of the block
is always the one that matters most: the body's own exception, else the reclaim, else what failed in the background.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from spotsafe import events as ev
from spotsafe.activity import Activity
from spotsafe.errors import (
    EXIT_RESTART_LOOP,
    Reclaimed,
    RestartLoop,
    SaveFailed,
    SpotsafeError,
    StateMismatch,
    StorageError,
    Superseded,
)
from spotsafe.events import Event, Fanout
from spotsafe.identity import Identity
from spotsafe.ledger.record import Ledger
from spotsafe.loops import Loops
from spotsafe.opening import Claimed, Opened, claim_attempt, load_init_from, load_newest, once
from spotsafe.options import Options
from spotsafe.policy.restarts import STOPPED
from spotsafe.positions import Positions
from spotsafe.reclaim.children import child_deaths_deferred
from spotsafe.reclaim.detect import detect
from spotsafe.reclaim.signals import SignalWatch
from spotsafe.reclaim.watcher import Watch
from spotsafe.safepoint import SafePoints
from spotsafe.saver import Lineage, Saver
from spotsafe.storage.store import Store
from spotsafe.tensors.rng import RngSnapshot
from spotsafe.tracking import Tracker
from spotsafe.writer.thread import WriterThread

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionState:
    """What the session itself keeps in a checkpoint."""

    positions: Positions
    rng: RngSnapshot | None
    values: Mapping[str, Any]
    nonfinite: frozenset[str]

    @staticmethod
    def read(state: Any) -> SessionState:
        """Decode the plain values of a checkpoint's session member.

        Raises:
            StateMismatch: they are not what a session writes.
        """
        try:
            return SessionState(
                positions=Positions.from_state(state["positions"]),
                rng=RngSnapshot.from_state(state["rng"]),
                values=dict(state["values"]),
                nonfinite=frozenset(state["nonfinite"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise StateMismatch(f"the checkpoint's session state cannot be read: {error!r}") from error


@dataclass(slots=True)
class _Progress:
    """The furthest step that any attempt is known to have reached; what the ledger writes down."""

    reached_before: int
    positions: Positions | None = None

    def __call__(self) -> int:
        now = 0 if self.positions is None else self.positions.total
        return max(self.reached_before, now)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Setting:
    """What an attempt is given from outside."""

    store: Store
    options: Options
    identity: Identity
    tracker: Tracker
    values: dict[str, Any]
    fanout: Fanout


@dataclass(slots=True, eq=False)
class Attempt:
    """The running parts of one attempt. Made by `begin`."""

    claimed: Claimed
    loops: Loops
    points: SafePoints
    saver: Saver
    watch: Watch
    fanout: Fanout
    options: Options
    outcome: str = "left"
    code: int | None = None
    cleanup: ExitStack = field(default_factory=ExitStack)

    # -- begin ---

    @staticmethod
    def begin(
        store: Store,
        *,
        options: Options,
        identity: Identity,
        tracker: Tracker,
        values: dict[str, Any],
        fanout: Fanout,
    ) -> Attempt:
        """Watch, claim, restore; `values` is filled in place.

        Raises:
            SpotsafeError: see `claim_attempt` and `load_newest`; nothing keeps running then.
        """
        setting = _Setting(
            store=store, options=options, identity=identity, tracker=tracker, values=values, fanout=fanout
        )
        entered_at = options.clock.monotonic()
        emit = once(fanout.emit)
        with ExitStack() as stack:
            watch = _start_watch(options, fanout, stack)
            claimed = claim_attempt(store, options=options, identity=identity, tracker=tracker, emit=emit)
            progress = _Progress(claimed.furthest_step)
            _start_ledger(setting, claimed, progress, stack)
            opened = load_newest(store, claimed, emit=emit)
            state = _restore(setting, opened, emit=emit)
            progress.positions = state.positions
            values.update(state.values)
            attempt = _assemble(setting, opened, state, watch=watch, entered_at=entered_at, stack=stack)
            fanout.emit(_started(setting, opened, state, watch))
            attempt.cleanup = stack.pop_all()
            return attempt

    # -- in between ---

    def tracked_more(self, names: Collection[str]) -> None:
        """`run.track` was called."""
        self.points.activity.track(self.points.tracker.optimizers)
        self.saver.tracked_more(names)

    def save(self, metrics: Mapping[str, float]) -> None:
        """Save at the next safe point; outside a loop the present is one, unless a body was left in the middle."""
        if self.points.leaving:
            return  # the final save is made; what came after it is repeated after the resume
        self.points.ask(metrics)
        if not self.loops.active:
            self.loops.judge()  # a checkpoint without what is tracked later would be the newest, and unusable
            with child_deaths_deferred():
                self.points.save_asked(whole=not self.loops.body_open)

    def wait(self) -> None:
        """See `Run.wait`."""
        self._drain_and_raise()

    # -- end ---

    def leave(self, error: BaseException | None) -> None:
        """Save what the way out allows and wait for what is in flight.

        Raises:
            Reclaimed: a notice is pending and the run is not finished.
            Superseded: a newer attempt exists, and the block ended cleanly.
            SaveFailed: saves failed, and the block ended cleanly.
        """
        with child_deaths_deferred():
            if error is None:
                self._leave_cleanly()
            elif self.watch.notice is not None and isinstance(error, Exception):
                self._leave_reclaimed(error)
            else:
                self._leave_with(error)

    def close(self) -> None:
        """Stop all threads and hand back handlers and hooks; report the end."""
        try:
            self.fanout.emit(
                ev.RunEnded(
                    step=self.loops.positions.total,
                    outcome=self.outcome,
                    code=self.code,
                    newest=self.saver.newest,
                )
            )
        finally:  # an impatient second Ctrl-C leaves no thread and no handler behind
            self.cleanup.close()

    def _leave_cleanly(self) -> None:
        self._end_as("failed", None)  # until the end says otherwise
        try:
            self._save_and_drain()
        except Superseded:  # a save just before, or the last one, found it out
            self._end_as("superseded", None)
            raise

    def _save_and_drain(self) -> None:
        notice = self.watch.notice
        if self.points.leaving:
            self._drain_and_raise()
            self._end_as("reclaimed", None)
            return
        self.loops.leave_open()
        finished = self.loops.all_ended
        if self.points.activity.ever_stepped and not self.points.did_something and not self.loops.outermost:
            text = "the optimizer stepped, but in no loop of the run, so nothing is counted or saved"
            self.fanout.emit(
                ev.Warned(message=f"{text}: iterate over run.steps(loader, ...) or run.range(n)")
            )
        try:
            self.loops.judge()
            if finished:
                self.points.save_end()
            else:
                self.points.save_left(body_open=self.loops.body_open)
        except BaseException:
            self._drain_and_log()
            raise
        self._drain_and_raise()
        if not finished and notice is not None and self.options.on_reclaim == "exit":
            self._end_as("reclaimed", self.options.exit_code)
            raise self.points.reclaimed(notice)
        self._end_as("finished" if finished else "left", None)

    def _leave_reclaimed(self, error: Exception) -> None:
        """Any error while a notice is pending - a dead worker, a broken pipe - means: the machine goes."""
        notice = self.watch.notice
        assert notice is not None, "left as reclaimed without a notice"
        self._end_as("reclaimed", self.options.exit_code)
        self._drain_and_log()
        if self.options.on_reclaim == "exit":
            raise self.points.reclaimed(notice) from error

    def _leave_with(self, error: BaseException) -> None:
        """The body's own exception goes on; what is in flight is finished first."""
        if isinstance(error, Reclaimed):
            self._end_as("reclaimed", self.options.exit_code)
        elif isinstance(error, Superseded):
            self._end_as("superseded", None)
        elif isinstance(error, KeyboardInterrupt):
            self._end_as("interrupted", None)
        else:
            self._end_as("failed", None)
        self._drain_and_log()

    def _drain_and_raise(self) -> None:
        drained = self.points.drain()
        self.saver.poll()
        self.saver.raise_failures()
        if not drained:
            raise SaveFailed(
                f"the last save was still being written after {self.options.drain_timeout}; "
                f"the newest checkpoint is {self.saver.newest or 'none'}. A larger drain_timeout= waits longer."
            )

    def _drain_and_log(self) -> None:
        drained = self.points.drain()
        try:
            self.saver.poll()
            self.saver.raise_failures()
        except (SpotsafeError, SystemExit) as error:
            _log.error("while leaving: %s", error)
        if not drained:
            _log.error("the last save was not finished in time; newest checkpoint: %s", self.saver.newest)

    def _end_as(self, outcome: str, code: int | None) -> None:
        self.outcome, self.code = outcome, code


def _start_watch(options: Options, fanout: Fanout, stack: ExitStack) -> Watch:
    grace_s = None if options.grace is None else options.grace.total_seconds()
    watch = Watch(detect(options.watch), emit=fanout.emit, clock=options.clock, grace_s=grace_s)
    signals = SignalWatch(report=watch.report, emit=fanout.emit, clock=options.clock, grace_s=grace_s)
    with child_deaths_deferred():  # exchanging a handler may run a pending one, DataLoader's raises
        signals.install()
    stack.callback(_uninstall, signals)
    for name in signals.sources:
        watch.add_source(name)
    watch.start()
    stack.callback(watch.stop)
    return watch


def _uninstall(signals: SignalWatch) -> None:
    with child_deaths_deferred():
        signals.uninstall()


def _start_ledger(setting: _Setting, claimed: Claimed, progress: _Progress, stack: ExitStack) -> None:
    """From the claim on, whatever happens is on record: also a start that fails."""
    fanout = setting.fanout
    ledger = Ledger(
        setting.store,
        claimed.record.attempt,
        clock=setting.options.clock,
        emit=fanout.emit,
        step=progress,
    )
    fanout.add(ledger)
    stack.callback(ledger.close)

    def record_failed_start(_: object, error: BaseException | None, __: object) -> None:
        if error is None:
            return
        if isinstance(error, RestartLoop):  # Python prints no message of a SystemExit with a code
            fanout.emit(ev.Warned(message=str(error)))
        outcome, code = _failed_start(error)
        newest = claimed.record.resumed_from
        fanout.emit(ev.RunEnded(step=progress(), outcome=outcome, code=code, newest=newest))

    stack.push(record_failed_start)


def _failed_start(error: BaseException) -> tuple[str, int | None]:
    if isinstance(error, RestartLoop):
        return STOPPED, EXIT_RESTART_LOOP
    # A store that does not answer says nothing about the program: three such starts are no restart loop.
    ill = isinstance(error, KeyboardInterrupt | StorageError)
    return "interrupted" if ill else "failed", None


def _restore(setting: _Setting, opened: Opened, *, emit: Callable[[Event], None]) -> SessionState:
    """Load the state into the tracked objects and give the session's own; fresh where there is none."""
    tracker, clock = setting.tracker, setting.options.clock
    if opened.loaded is None:
        if setting.options.init_from is not None:
            load_init_from(setting.options.init_from, tracker=tracker, emit=emit)
        return SessionState(positions=Positions(), rng=None, values={}, nonfinite=tracker.nonfinite())
    began = clock.monotonic()
    state = SessionState.read(opened.loaded.session_values())
    tracker.restore(opened.loaded.saved)
    if state.rng is not None:
        state.rng.restore()
    state = replace(state, nonfinite=_still_nonfinite(state.nonfinite, tracker))
    emit(ev.RestoreFinished(checkpoint=str(opened.loaded.name), seconds=clock.monotonic() - began))
    return state


def _still_nonfinite(before: frozenset[str], tracker: Tracker) -> frozenset[str]:
    """Of what was not finite where the run began: what has recovered since would be a decay if it went again."""
    if not before:
        return before
    now = tracker.nonfinite()
    return frozenset(name for name in before if name in now or name.split(".")[0] not in tracker.names)


def _assemble(
    setting: _Setting,
    opened: Opened,
    state: SessionState,
    *,
    watch: Watch,
    entered_at: float,
    stack: ExitStack,
) -> Attempt:
    """Connect the parts; what has to be closed goes on `stack`."""
    options, emit, positions = setting.options, setting.fanout.emit, state.positions
    writer = WriterThread(setting.store, emit=emit, clock=options.clock)
    stack.callback(writer.close)
    activity = Activity(on_stranger=lambda optimizer: _tell_stranger(optimizer, setting))
    activity.track(setting.tracker.optimizers)
    activity.start()
    stack.callback(activity.close)
    saver = Saver(
        tracker=setting.tracker,
        writer=writer,
        policy=options.policy,
        keep=options.keep,
        identity=setting.identity,
        lineage=_lineage(opened, nonfinite=state.nonfinite),
        clock=options.clock,
        emit=emit,
        last_step=positions.total,
    )
    points = SafePoints(
        tracker=setting.tracker,
        saver=saver,
        watch=watch,
        positions=positions,
        activity=activity,
        clock=options.clock,
        emit=emit,
        values=setting.values,
        restored_rng=state.rng,
        on_reclaim=options.on_reclaim,
        exit_code=options.exit_code,
        drain_timeout_s=options.drain_timeout.total_seconds(),
        entered_at=entered_at,
    )
    loops = Loops(
        engine=points,
        positions=positions,
        activity=activity,
        modules=lambda: list(setting.tracker.modules),
        on_stop=lambda loop, reason: emit(ev.LoopStopped(loop=loop, step=positions.total, reason=reason)),
    )
    stack.callback(loops.close)
    stack.callback(saver.close)
    return Attempt(
        claimed=opened.claimed,
        loops=loops,
        points=points,
        saver=saver,
        watch=watch,
        fanout=setting.fanout,
        options=options,
    )


def _tell_stranger(optimizer: Any, setting: _Setting) -> None:
    """An optimizer that was forgotten costs nothing until the first resume, and then nobody sees why."""
    if setting.tracker.holds_parameters_of(optimizer):
        name = type(optimizer).__name__
        setting.fanout.emit(
            ev.Warned(
                message=f"{name} updates tracked parameters but is not tracked: a resume starts it without its "
                f"state. Give it to the session, optimizer=..., or run.track(optimizer=...)"
            )
        )


def _lineage(opened: Opened, *, nonfinite: frozenset[str]) -> Lineage:
    choice = opened.choice
    return Lineage(
        record=opened.claimed.record,
        resumed_from=None if choice is None else choice.name,
        passed_over=frozenset() if choice is None else frozenset(choice.passed_over),
        nonfinite_before=nonfinite,
    )


def _started(setting: _Setting, opened: Opened, state: SessionState, watch: Watch) -> Event:
    choice, record = opened.choice, opened.claimed.record
    age_s = None if choice is None else setting.options.clock.wall() - choice.manifest.created
    return ev.RunStarted(
        url=setting.store.url,
        run=record.run,
        attempt=record.attempt,
        step=state.positions.total,
        resumed_from=None if choice is None else choice.name,
        age_s=age_s,
        watching=watch.sources,
    )
