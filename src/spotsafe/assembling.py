"""Starts an attempt: watch, claim, restore, connect the parts. A failure on the way leaves nothing running."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from spotsafe import events as ev, human
from spotsafe.activity import Activity
from spotsafe.attempt import Attempt
from spotsafe.checkpoint.candidates import Decoded
from spotsafe.checkpoint.catalog import refuse_parent
from spotsafe.checkpoint.index_values import FileEntry
from spotsafe.errors import RestartLoop
from spotsafe.events import Event, Fanout
from spotsafe.flight import Flight
from spotsafe.identity import Identity
from spotsafe.initializing import Initialized, load_initial_values
from spotsafe.ledger.reading import ended_at, writes_no_more
from spotsafe.ledger.record import Ledger
from spotsafe.loops import Loops
from spotsafe.machine import memory_now
from spotsafe.moments import Moments
from spotsafe.opening import Claimed, Opened, claim_attempt, load_newest, once
from spotsafe.options import Options
from spotsafe.outcomes import outcome_of
from spotsafe.overlap import Overlap
from spotsafe.policy.staging_memory import SlotChoice, choose_slots
from spotsafe.positions import Positions
from spotsafe.reclaim.children import child_deaths_deferred
from spotsafe.reclaim.detect import detect
from spotsafe.reclaim.signals import SignalWatch
from spotsafe.reclaim.watcher import Watch
from spotsafe.safepoint import SafePoints
from spotsafe.saver import Lineage, Saver
from spotsafe.session_state import SessionState
from spotsafe.startup import CLAIMED, LOADED, READ, WAITED, Startup
from spotsafe.storage.open import Reopening, same_place
from spotsafe.storage.store import Store
from spotsafe.tracking import Tracker
from spotsafe.writer.presence import await_writers
from spotsafe.writing import Writer, choose_writer


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What an attempt is given from outside."""

    store: Store
    where: Reopening | None
    """How another process opens the same store; None if it cannot."""
    options: Options
    identity: Identity
    tracker: Tracker
    values: dict[str, Any]
    """`run.values`; filled in place."""
    fanout: Fanout


def begin_attempt(setting: Setting) -> Attempt:
    """Watch, claim, restore.

    Raises:
        ValueError: the folder holds runs.
        SpotsafeError: see `claim_attempt` and `load_newest`; nothing keeps running then.
    """
    options, fanout = setting.options, setting.fanout
    startup = Startup(options.clock)
    emit = once(fanout.emit)
    decoded: Decoded = {}  # the newest index is read before the claim and after it, and mostly is the same
    refuse_parent(setting.store)
    with ExitStack() as stack:
        watch = _start_watch(options, fanout, stack)
        await_writers(
            same_place(setting.store.url),
            identity=setting.identity,
            clock=options.clock,
            limit_s=options.drain_timeout.total_seconds(),
            emit=fanout.emit,
        )
        startup.done(WAITED)
        claimed = claim_attempt(
            setting.store,
            options=options,
            identity=setting.identity,
            tracker=setting.tracker,
            emit=emit,
            decoded=decoded,
        )
        progress = _Progress(claimed.furthest_step)
        _start_ledger(setting, claimed, progress, stack)
        writer = _start_writer(setting, claimed, stack)
        startup.done(CLAIMED)
        opened = load_newest(setting.store, claimed, emit=emit, decoded=decoded, clock=options.clock)
        startup.done(READ)
        initialized = _initialize(setting, opened, emit=emit)
        state = _restore(setting, opened, emit=emit)
        progress.positions = state.positions
        setting.values.update(state.values)
        startup.done(LOADED)
        attempt = _connect(setting, opened, state, watch=watch, writer=writer, startup=startup, stack=stack)
        fanout.emit(_started(setting, opened, state, watch, initialized))
        progress.started = True
        attempt.cleanup = stack.pop_all()
        return attempt


# -- what watches and records ---


def _start_watch(options: Options, fanout: Fanout, stack: ExitStack) -> Watch:
    grace_s = None if options.grace is None else options.grace.total_seconds()
    watch = Watch(detect(options.watch), emit=fanout.emit, clock=options.clock, grace_s=grace_s)
    signals = SignalWatch(
        report=watch.report,
        emit=fanout.emit,
        clock=options.clock,
        grace_s=grace_s,
        exit_code=options.exit_code,
    )
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


@dataclass(slots=True)
class _Progress:
    """The furthest step that any attempt is known to have reached; what the ledger writes down."""

    reached_before: int
    positions: Positions | None = None
    started: bool = False
    """From then on the attempt tells how it ends, also if something goes wrong in its clean-up."""

    def __call__(self) -> int:
        now = 0 if self.positions is None else self.positions.total
        return max(self.reached_before, now)


def _start_ledger(setting: Setting, claimed: Claimed, progress: _Progress, stack: ExitStack) -> None:
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
        if error is None or progress.started:
            return
        if isinstance(error, RestartLoop):  # Python prints no message of a SystemExit with a code
            fanout.emit(ev.Warned(message=str(error)))
        outcome, code = outcome_of(error)
        newest = claimed.record.resumed_from
        fanout.emit(ev.RunEnded(step=progress(), outcome=outcome, code=code, newest=newest))

    stack.push(record_failed_start)


# -- the state ---


def _initialize(setting: Setting, opened: Opened, *, emit: Callable[[Event], None]) -> Initialized | None:
    """Give a fresh run its first values, if it is told where to take them from."""
    source = setting.options.init_from
    if opened.loaded is not None or source is None:
        return None
    return load_initial_values(source, tracker=setting.tracker, emit=emit, clock=setting.options.clock)


def _restore(setting: Setting, opened: Opened, *, emit: Callable[[Event], None]) -> SessionState:
    """Load the state into the tracked objects and give the session's own; fresh where there is none."""
    tracker, clock = setting.tracker, setting.options.clock
    if opened.loaded is None:
        return SessionState(positions=Positions(), rng=None, values={}, nonfinite=tracker.nonfinite())
    began = clock.monotonic()
    values = opened.loaded.session_values()
    read = None if values is None else SessionState.read(values)
    tracker.restore(opened.loaded.saved, give=True)
    if read is None:  # it was imported: no session has written it
        positions = Positions(total=opened.loaded.name.step)
        state = SessionState(positions=positions, rng=None, values={}, nonfinite=tracker.nonfinite())
    else:
        if read.rng is not None:
            read.rng.restore()
        nonfinite = _still_nonfinite(read.nonfinite, tracker) | tracker.nonfinite(tracker.as_made)
        state = replace(read, nonfinite=nonfinite)
    _tell_threads(state.threads, tracker, emit)
    emit(ev.RestoreFinished(checkpoint=str(opened.loaded.name), seconds=clock.monotonic() - began))
    return state


def _tell_threads(before: int | None, tracker: Tracker, emit: Callable[[Event], None]) -> None:
    """A sum on the CPU is cut by threads: with another number of them a resume differs in the last bits."""
    now = torch.get_num_threads()
    on_cpu = any(one.device.type == "cpu" for module in tracker.modules for one in module.parameters())
    if before in {None, now} or not on_cpu:
        return
    emit(
        ev.Warned(
            message=f"the checkpoint was written with {human.count(before or 0, 'thread')} of torch, this process has "
            f"{now}: results on the CPU may differ in their last bits. OMP_NUM_THREADS={before} or "
            f"torch.set_num_threads({before}) repeats them"
        )
    )


def _still_nonfinite(before: frozenset[str], tracker: Tracker) -> frozenset[str]:
    """Of what was not finite where the run began: what has recovered since would be a decay if it went again."""
    if not before:
        return before
    now = tracker.nonfinite()
    return frozenset(name for name in before if name in now or name.split(".")[0] not in tracker.names)


# -- the parts ---


def _connect(
    setting: Setting,
    opened: Opened,
    state: SessionState,
    *,
    watch: Watch,
    writer: Writer,
    startup: Startup,
    stack: ExitStack,
) -> Attempt:
    """Make the parts and join them; what has to be closed goes on `stack`."""
    options, emit, positions = setting.options, setting.fanout.emit, state.positions
    saver = _saver(setting, opened, state, writer, stack)
    activity = _start_activity(setting, stack)
    moments = Moments(
        tracker=setting.tracker,
        positions=positions,
        activity=activity,
        values=setting.values,
        restored_rng=state.rng,
    )
    flight = Flight()
    setting.fanout.add(flight)
    points = SafePoints(
        moments=moments,
        saver=saver,
        flight=flight,
        watch=watch,
        clock=options.clock,
        emit=emit,
        on_reclaim=options.on_reclaim,
        exit_code=options.exit_code,
        drain_timeout_s=options.drain_timeout.total_seconds(),
        startup=startup,
    )
    loops = Loops(
        engine=points,
        positions=positions,
        activity=activity,
        modules=lambda: list(setting.tracker.modules),
        on_stop=lambda loop, reason: emit(ev.LoopStopped(loop=loop, step=positions.total, reason=reason)),
    )
    stack.callback(loops.close)
    return Attempt(
        claimed=opened.claimed,
        loops=loops,
        activity=activity,
        points=points,
        saver=saver,
        watch=watch,
        fanout=setting.fanout,
        options=options,
    )


def _start_writer(setting: Setting, claimed: Claimed, stack: ExitStack) -> Writer:
    """While the state is read a writer process has the time to get ready."""
    store = setting.store
    writer = choose_writer(
        store,
        setting.where,
        options=setting.options,
        identity=setting.identity,
        emit=setting.fanout.emit,
        ended=(lambda attempt: writes_no_more(store, attempt)) if claimed.single_writer else None,
        ended_at=partial(ended_at, store),
    )
    stack.callback(writer.close)
    return writer


def _saver(setting: Setting, opened: Opened, state: SessionState, writer: Writer, stack: ExitStack) -> Saver:
    options, emit, choice = setting.options, setting.fanout.emit, opened.choice
    overlap = Overlap(tracker=setting.tracker, enabled=options.overlap, emit=emit, clock=options.clock)
    saver = Saver(
        tracker=setting.tracker,
        writer=writer,
        overlap=overlap,
        policy=options.policy,
        keep=options.keep,
        identity=setting.identity,
        lineage=Lineage(
            record=opened.claimed.record,
            resumed_from=None if choice is None else choice.name,
            passed_over=frozenset() if choice is None else frozenset(choice.passed_over),
            nonfinite_before=state.nonfinite,
            frozen=_lent(opened),
        ),
        clock=options.clock,
        emit=emit,
        choose_slots=partial(_choose_slots, options),
        last_step=state.positions.total,
    )
    stack.callback(saver.close)
    stack.callback(overlap.close)
    return saver


def _choose_slots(options: Options, needed: int, beside: int) -> SlotChoice:
    given = options.staging_memory
    return choose_slots(
        needed, beside=beside, memory=memory_now(), given=None if given == "auto" else int(given)
    )


def _lent(opened: Opened) -> tuple[FileEntry, ...]:
    """Files of the checkpoint resumed from that saves may refer to.

    Only if it is the newest: an older attempt that does not know yet that it is superseded may be deleting others.
    """
    choice, loaded = opened.choice, opened.loaded
    if choice is None or loaded is None or choice.passed_over:
        return ()
    if any(one.attempt >= loaded.name.attempt for one in opened.claimed.record.rollbacks):
        return ()
    return loaded.frozen


def _start_activity(setting: Setting, stack: ExitStack) -> Activity:
    activity = Activity(on_stranger=lambda optimizer: _tell_stranger(optimizer, setting))
    activity.track(setting.tracker.optimizers)
    activity.start()
    stack.callback(activity.close)
    return activity


def _tell_stranger(optimizer: Any, setting: Setting) -> None:
    """An optimizer that was forgotten costs nothing until the first resume, and then nobody sees why."""
    if setting.tracker.holds_parameters_of(optimizer):
        name = type(optimizer).__name__
        setting.fanout.emit(
            ev.Warned(
                message=f"{name} updates tracked parameters but is not tracked: a resume starts it without its "
                f"state. Give it to the session, optimizer=..., or run.track(optimizer=...)"
            )
        )


def _started(
    setting: Setting, opened: Opened, state: SessionState, watch: Watch, initialized: Initialized | None
) -> Event:
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
        single_writer=opened.claimed.single_writer,
        initialized_from=None if initialized is None else initialized.checkpoint,
        initialized=() if initialized is None else initialized.names,
    )
