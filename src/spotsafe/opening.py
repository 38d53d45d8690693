"""The start of an attempt: look, check, claim, look again, read. Everything before the first tracked object changes.

The order is the protocol's (rules 2, 3, 8, 9 and 11 of docs/DESIGN.md): whatever can be refused is refused before
the claim, and what is loaded is chosen after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from spotsafe.checkpoint.attempts import AttemptRecord, read_attempt, read_branch, read_run
from spotsafe.checkpoint.branch import Branch
from spotsafe.checkpoint.candidates import Candidate, Decoded, Listing, look
from spotsafe.checkpoint.catalog import check_history
from spotsafe.checkpoint.claim import claim, is_exclusive
from spotsafe.clock import Clock
from spotsafe.errors import (
    CheckpointNotFound,
    DamagedCheckpoint,
    NoUsableCheckpoint,
    RestartLoop,
    RunInUse,
    StateMismatch,
    StorageNotFound,
)
from spotsafe.events import CheckpointPassedOver, Event, SingleWriter, Warned
from spotsafe.identity import Identity
from spotsafe.initializing import check_initial_values
from spotsafe.ledger.occupancy import Occupancy
from spotsafe.ledger.reading import past_attempts, read_step
from spotsafe.options import Options
from spotsafe.policy.restarts import PastAttempt, restart_loop
from spotsafe.reader import (
    THREADS,
    Choice,
    Loaded,
    choose,
    load_chosen,
    read_description,
)
from spotsafe.storage.mounts import durability_doubt
from spotsafe.storage.store import Store
from spotsafe.tracking import Tracker

_TRIES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed:
    """An attempt that is ours, before anything is read."""

    record: AttemptRecord
    furthest_step: int
    """The furthest step that an earlier attempt is known to have reached; steps below it are made again."""
    restart_loop: str | None
    """Why this start should not go on, if the run restarts without getting anywhere."""
    single_writer: bool = False
    """The store cannot refuse to create what is there, so that nothing keeps two writers apart (rule 12)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """The state that a claimed attempt goes on from."""

    claimed: Claimed
    choice: Choice | None
    """Which checkpoint, and which newer ones were passed over; None for a fresh start."""
    loaded: Loaded | None
    """Its content, every byte verified."""


def claim_attempt(
    store: Store,
    *,
    options: Options,
    identity: Identity,
    tracker: Tracker,
    emit: Callable[[Event], None],
    decoded: Decoded | None = None,
) -> Claimed:
    """Look, refuse whatever can be refused, and claim the next attempt of the run.

    Args:
        store: the run.
        options: of the session.
        identity: who this process is.
        tracker: what is tracked.
        emit: told what happens.
        decoded: for `load_newest`, which mostly reads the same index again.

    Raises:
        StorageError: the store could not say what is there. Never taken for "nothing".
        CheckpointNotFound: there is none, with ``resume="must"``, or ``init_from`` has none.
        StateMismatch: the newest checkpoint, or else that of ``init_from``, does not fit the tracked objects.
        NoUsableCheckpoint: there are or were checkpoints, none can be used.
        UnsupportedFormat: a newer spotsafe wrote the newest.
        RunInUse: another job lives on this folder.
    """

    def find(listing: Listing) -> Choice | None:
        run = _run(store, listing, emit=emit) if 1 in listing.attempts else None
        branch = read_branch(store, listing)
        return _choose(store, listing, run=run, branch=branch, emit=emit, unusable={})

    listing, choice = _look_and(find, store)
    _check_resume(store, options, choice)
    if choice is not None:
        _check_shapes(store, choice.candidate, tracker, decoded)
    elif options.init_from is not None:
        check_initial_values(options.init_from, tracker=tracker)
    occupancy = Occupancy(store, identity=identity, clock=options.clock, emit=emit)
    if not options.takeover:
        occupancy.check(listing)
    loop = _restart_loop(store, listing, choice, options=options, emit=emit)
    furthest = read_step(store, listing.highest) if listing.attempts else 0
    record = claim(
        store,
        listing=listing,
        identity=identity,
        newest_seen=None if choice is None else str(choice.newest),
        wall=options.clock.wall(),
        resumed_from=None if choice is None else choice.name,
        passed_over=() if choice is None else sorted(choice.passed_over),
        passed_over_unhealthy_to=None if choice is None else choice.unhealthy_passed_to,
        run=None if choice is None else choice.manifest.run,
        # Two jobs that start at once see nobody before the claim; the second one meets the first one's record there.
        met=(lambda _: None) if options.takeover else occupancy.check_record,
    )
    exclusive = is_exclusive(store, record)
    if not exclusive:
        emit(SingleWriter(url=store.url, attempt=record.attempt))
    doubt = durability_doubt(store.url)
    if doubt is not None:
        emit(Warned(message=doubt))
    return Claimed(record=record, furthest_step=furthest, restart_loop=loop, single_writer=not exclusive)


def load_newest(
    store: Store,
    claimed: Claimed,
    *,
    emit: Callable[[Event], None],
    threads: int = THREADS,
    decoded: Decoded | None = None,
    clock: Clock | None = None,
) -> Opened:
    """Choose again, now that the claim keeps older attempts from deleting, and read it whole.

    Args:
        store: the run.
        claimed: from `claim_attempt`.
        emit: told what happens.
        threads: blocks read at the same time, as for `load_chosen`.
        decoded: as `claim_attempt` left it.
        clock: of the session.

    Raises:
        RestartLoop: this start should not go on. It is on record by now, so that a person who starts again
            after looking is not stopped for the same attempts.
        NoUsableCheckpoint: there are or were checkpoints, none can be used.
        StorageError: the store could not say.
    """
    if claimed.restart_loop is not None:
        raise RestartLoop(
            f"{store.url}: this run restarts without getting anywhere: {claimed.restart_loop}. "
            "Look at why they failed (their output, and `spotsafe ls`), then start it once more: this end is on "
            "record, and the next start goes on. restart_limits=spotsafe.Limits(...) changes the limits"
        )
    unusable: dict[str, str] = {}

    record = claimed.record

    def find(listing: Listing) -> Choice | None:
        return _choose(store, listing, run=record.run, branch=record.rollbacks, emit=emit, unusable=unusable)

    vanished = 0
    while vanished < _TRIES:  # one that proves damaged is noted in `unusable`, and never chosen again
        _, choice = _look_and(find, store)
        if choice is None:
            return Opened(claimed=claimed, choice=None, loaded=None)
        try:
            loaded = load_chosen(
                store, choice, emit=emit, unusable=unusable, threads=threads, decoded=decoded, clock=clock
            )
        except StorageNotFound:
            vanished += 1  # an older attempt's retention took it away meanwhile: list and choose again
            continue
        if loaded is not None:
            if not choice.manifest.health.healthy:
                emit(
                    Warned(
                        message=f"resuming from {choice.name} although it is unhealthy: there is no healthy one"
                    )
                )
            return Opened(claimed=claimed, choice=choice, loaded=loaded)
    raise NoUsableCheckpoint(
        f"{store.url}: {_TRIES} times a checkpoint vanished while it was read; does another job delete here?",
        url=store.url,
        reasons=unusable,
    )


def _look_and(find: Callable[[Listing], Choice | None], store: Store) -> tuple[Listing, Choice | None]:
    """Look at the run and choose, by two looks that show the same where nothing can be chosen.

    Another attempt that lives may publish new checkpoints and withdraw all that a listing shows while they are
    read, which is no fault of the run.
    """
    before: Listing | None = None
    for _ in range(_TRIES):
        listing = look(store)
        try:
            return listing, find(listing)
        except NoUsableCheckpoint:
            if before is not None and listing.names == before.names:
                raise
            before = listing
    listing = look(store)
    return listing, find(listing)


def _choose(
    store: Store,
    listing: Listing,
    *,
    run: str | None,
    branch: Branch,
    emit: Callable[[Event], None],
    unusable: Mapping[str, str],
) -> Choice | None:
    choice = choose(store, listing, run=run, emit=emit, unusable=unusable, branch=branch)
    _check_rolled_back(store, choice, branch)
    if choice is None:
        check_history(store, listing=listing, reasons=unusable)
    return choice


def _check_resume(store: Store, options: Options, choice: Choice | None) -> None:
    if options.resume == "must" and choice is None:
        raise CheckpointNotFound(f'{store.url} has no checkpoint, and resume="must" asks for one')
    if options.resume == "never" and choice is not None:
        raise RunInUse(
            f'{store.url} has checkpoints, the newest is {choice.newest}, and resume="never" wants none: '
            "use another folder"
        )


def _check_shapes(store: Store, candidate: Candidate, tracker: Tracker, decoded: Decoded | None) -> None:
    """Names and shapes against the newest usable checkpoint, before anything is claimed."""
    try:
        description = read_description(store, candidate, decoded=decoded)
    except (DamagedCheckpoint, StorageNotFound):
        return  # found out again, and walked back from, when it is read as a whole
    problems = tracker.check(tensors=description.tensors, state=description.state)
    if problems:
        lines = "\n  ".join(problems)
        raise StateMismatch(
            f"checkpoint {candidate.name} does not fit the program:\n  {lines}\n"
            "Nothing was changed. Restore the program of then, or start a new run, with init_from= if its values "
            "are still wanted",
            problems=problems,
        )


def _check_rolled_back(store: Store, choice: Choice | None, branch: Branch) -> None:
    """After a rollback there is at least the checkpoint that was gone back to, or something is badly wrong."""
    if choice is None and branch:
        last = branch[-1]
        raise NoUsableCheckpoint(
            f"{store.url} was rolled back to {last.to} by attempt {last.attempt}, and neither that checkpoint nor "
            f"an older or newer one is there any more. Nothing was started afresh. `spotsafe ls {store.url}` shows "
            "what is set aside; `spotsafe rollback` can go back to it",
            url=store.url,
        )


def _restart_loop(
    store: Store, listing: Listing, choice: Choice | None, *, options: Options, emit: Callable[[Event], None]
) -> str | None:
    starting = PastAttempt(
        attempt=listing.highest + 1,
        started_wall=options.clock.wall(),
        end=None,
        new_published=False,
        passed_over_unhealthy_to=None if choice is None else choice.unhealthy_passed_to,
    )
    limits = options.restart_limits
    records = _records(store, listing.attempts[-(limits.starts_per_hour + 1) :], emit=emit)
    return restart_loop([*past_attempts(store, records, limits=limits), starting], limits=limits)


def _run(store: Store, listing: Listing, *, emit: Callable[[Event], None]) -> str | None:
    """The run's id as far as it can be read; without it, what the checkpoints say stands."""
    try:
        return read_run(store, listing)
    except StorageNotFound:
        return None
    except DamagedCheckpoint as error:
        emit(Warned(message=f"{error}; this attempt is left out of account"))
        return None


def _records(store: Store, attempts: Sequence[int], *, emit: Callable[[Event], None]) -> list[AttemptRecord]:
    """What can be read of these attempts' records: here they are evidence, and a damaged one stops nothing."""
    found = []
    for number in attempts:
        try:
            found.append(read_attempt(store, number))
        except StorageNotFound:
            continue
        except DamagedCheckpoint as error:
            emit(Warned(message=f"{error}; this attempt is left out of account"))
    return found


def once(emit: Callable[[Event], None]) -> Callable[[Event], None]:
    """An `emit` for the whole start: the run is looked at twice, what is wrong with it is said once."""
    said: set[Event] = set()

    def emit_once(event: Event) -> None:
        if isinstance(event, CheckpointPassedOver | Warned):
            if event in said:
                return
            said.add(event)
        emit(event)

    return emit_once
