"""What no schedule of a run's attempts may break: the promises of docs/DESIGN.md, section 3, as rules of a search.

- Every published checkpoint is whole at every moment, unless a disk or a person has harmed it.
- The newest never goes back but by a rollback, and a healthy one never gives way to an unhealthy one.
- A start resumes from what was the newest when it claimed, or from something newer; never afresh beside a checkpoint.
- Nothing that an attempt resumed from is withdrawn before it has two newer ones, nor what it passed over by itself.
- No restore finds a file gone, unless a newer attempt has begun.
- No job supersedes the newest attempt of another one that lives, and none is kept out by one that is dead.
- A claim is one process's alone. Who was superseded before a save began, and publishes it, ends there.
- Whatever is left at the end, a new attempt can resume from the newest, and save.

What pins promise is in `keeping`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from spotsafe.checkpoint.branch import Branch, gone_back_to, is_set_aside
from spotsafe.checkpoint.layout import (
    ATTEMPTS,
    CHECKPOINTS,
    MANIFEST,
    PINS,
    CheckpointName,
    attempt_record,
    ledger_events,
    parse_attempt,
    parse_published,
)
from spotsafe.errors import (
    DamagedCheckpoint,
    NoUsableCheckpoint,
    RunInUse,
    StorageError,
    StorageNotFound,
    StorageUnavailable,
    Superseded,
)
from spotsafe.policy.retention import FLOOR
from spotsafe.testing import keeping
from spotsafe.testing.cloud import BLIND, DEAD, DONE, STALE, Cloud, Objects
from spotsafe.testing.parking import Body, Failure, Request
from spotsafe.testing.protocol import Plan, alone, attempt
from spotsafe.testing.schedules import LANDING, Broken, Choice, Step
from spotsafe.testing.seen import (
    Choosable,
    held,
    kept_by_a_rollback,
    manifest_at,
    names,
    newest,
    problem,
    published,
    record_at,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What the rules remember of a schedule."""

    newest: Choosable | None
    """What a resume would choose now."""
    branch: Branch = ()
    """The rollbacks that count, as the newest record has them."""
    rotten: frozenset[str] = frozenset()
    """Checkpoints that a disk or a person has harmed, or whose manifest came back when their files were gone."""
    doubtful: frozenset[CheckpointName] = frozenset()
    """Checkpoints that were being written when a person took away what they may need."""
    lost: frozenset[str] = frozenset()
    """Objects that a person has taken away."""
    owners: frozenset[tuple[int, str]] = frozenset()
    """Attempt and process."""
    taken: frozenset[str] = frozenset()
    """Processes whose record another one's claim has overwritten, on a store that ignores conditions."""
    bases: frozenset[tuple[str, Choosable | None]] = frozenset()
    """Process, and what was the newest when its claim was created."""
    origins: frozenset[tuple[int, CheckpointName]] = frozenset()
    """Attempt, and what it resumed from."""
    withdrawn: frozenset[CheckpointName] = frozenset()
    """Checkpoints whose manifest was published and is not any more."""
    passed: frozenset[tuple[str, CheckpointName]] = frozenset()
    """Process, and what its resume passed over."""
    saving: frozenset[tuple[str, CheckpointName]] = frozenset()
    """Process, and what it is writing."""
    behind: frozenset[str] = frozenset()
    """Processes whose present save began when a newer attempt had claimed."""
    restoring: frozenset[str] = frozenset()
    """Processes between claim and the end of the restore."""
    watching: frozenset[str] = frozenset()
    """Processes that have looked at a heartbeat."""
    company: frozenset[str] = frozenset()
    """Those of them in whose time an attempt that lived has beaten its heart."""
    over: frozenset[str] = frozenset()
    """Processes that have ended or are dead."""
    pins: keeping.Pins = frozenset()
    """Those that readers have placed, and who goes back."""
    faulty: frozenset[str] = frozenset()
    """Processes for which an operation has failed: they may end by a storage error."""


class ProtocolRules:
    """The promises of docs/DESIGN.md, section 3.

    Args:
        takers: processes with ``takeover=True``: they may supersede another job that lives, and nobody keeps them out.
        following: the attempt that comes at the end, when all have ended.
    """

    def __init__(
        self, *, takers: frozenset[str] = frozenset(), following: Callable[[Plan], Body] = attempt
    ) -> None:
        self._takers, self._following = takers, following

    def begin(self, objects: Objects) -> Memory:
        """See `Rules`."""
        return Memory(newest=newest(objects, frozenset()))

    def tolerates(self, memory: Memory, cloud: Cloud, choice: Choice, request: Request) -> bool:
        """See `Rules`: no listing is older than the claim of the attempt that asks, or it shows nothing at all.

        Pins are listed as they are: a deleter that is shown none has no other way to know of one.
        """
        if choice.fate == BLIND:
            return request.path == CHECKPOINTS and request.name == "names"
        if choice.fate == STALE:
            if request.path == PINS:
                return False
            own = [attempt_record(number) for number, who in memory.owners if who == choice.who]
            return all(path in cloud.past[-choice.place] for path in own)
        return True

    def after(self, memory: Memory, step: Step) -> Memory:
        """See `Rules`."""
        if step.choice.fate not in {DONE, STALE} and step.who not in memory.faulty:
            memory = replace(memory, faulty=memory.faulty | {step.who})
        if step.request.path.endswith("/heartbeat.json"):
            memory = replace(memory, watching=memory.watching | {step.who})
        if step.request.name == "rest" and any(who not in memory.over for _, who in memory.owners):
            memory = replace(memory, company=memory.company | memory.watching)
        if step.after is not step.before:
            memory = self._after_effect(memory, step)
        elif step.who in memory.restoring and not _superseded(memory, step):
            _check_nothing_gone(memory, step)
        for note in step.notes:
            memory = self._after_note(memory, step, note)
        if step.ended:
            _check_end(memory, step)
            if isinstance(step.error, RunInUse) and step.who in self._takers:
                raise Broken(f"{step.who} takes over, and ends by {step.error!r}")
        if step.ended or step.answer is DEAD:
            memory = replace(memory, over=memory.over | {step.who})
        return memory

    def end(self, memory: Memory, objects: Objects) -> None:
        """See `Rules`: a new attempt resumes from the newest, and can save.

        If the run's id is lost, a person takes the way out first that docs/DESIGN.md tells.
        """
        if memory.newest is None and memory.rotten:
            return  # nothing that is good is left
        if _is_misnamed(objects):
            objects = {path: data for path, data in objects.items() if path != attempt_record(1)}
        notes, after = alone(objects, Plan(), body=self._following)
        said = {note[0]: note[1:] for note in notes}
        wanted = None if memory.newest is None else memory.newest.name
        if "failed" in said:
            raise Broken(f"the next attempt fails: {said['failed'][0]!r}")
        if said["resumed from"] != (wanted,):
            raise Broken(f"the next attempt resumes from {said['resumed from'][0]} instead of {wanted}")
        if said["saved"] != (True, None, type(None), None):
            raise Broken(f"the save of the next attempt ends so: {said['saved']}")
        _check_whole(after, memory.rotten)

    def _after_effect(self, memory: Memory, step: Step) -> Memory:
        request = step.request
        if request.name in {"damage", "lose"}:
            return _harmed(memory, step)
        top, _, rest = request.path.partition("/")
        if top == ATTEMPTS:
            number = parse_attempt(rest)
            return memory if number is None else self._after_claim(memory, step, number)
        if top == PINS:
            _check_let_go(memory, step)
            return replace(memory, pins=keeping.after_effect(memory.pins, step))
        name = CheckpointName.parse(rest.partition("/")[0])
        if name is None or request.name in {"put", "put_large"}:
            return memory  # what is added takes nothing away
        if request.path == name.manifest and request.name in {"delete", "replace"}:
            _check_not_needed(memory, step, name)
            if name in names(step.before):
                keeping.check_kept(memory.pins, step, name)
        if (
            step.choice.who == LANDING
            and name in memory.withdrawn
            and request.name in {"create", "overwrite"}
        ):
            memory = _risen(memory, step, name)
        memory = _judged(memory, step, name)
        now = newest(step.after, memory.rotten, branch=memory.branch)
        if not memory.lost:  # retention counts those that were harmed: their manifests are there
            _check_forward(memory.newest, now)
        _check_whole(step.after, memory.rotten, chosen=gone_back_to(memory.branch))
        keeping.check_pinned_whole(memory.pins, step.after, memory.rotten)
        gone = names(step.before) - names(step.after) if request.path == name.manifest else frozenset()
        return replace(memory, newest=now, withdrawn=memory.withdrawn | gone)

    def _after_claim(self, memory: Memory, step: Step, number: int) -> Memory:
        if step.who not in self._takers and (number, step.who) not in memory.owners:
            _check_one_job(memory, step, number)
        return _claimed(memory, step, number)

    def _after_note(self, memory: Memory, step: Step, note: tuple[Any, ...]) -> Memory:
        match note:
            case ("claimed", int(number)):
                if (number, step.who) not in memory.owners:
                    raise Broken(f"{step.who} believes that attempt {number} is its own")
                memory = replace(memory, restoring=memory.restoring | {step.who})
            case ("passed over", names):
                passed = memory.passed | {(step.who, name) for name in names}
                memory = replace(memory, passed=passed)
            case ("resumed from", name):
                memory = _resumed(memory, step, name)
            case ("saves", CheckpointName() as name):
                memory = _save_begun(memory, step, name)
            case ("saved", published, superseded_by, kind, error):
                _check_saved(memory, step, published and superseded_by is None, kind, error)
                saving = frozenset(one for one in memory.saving if one[0] != step.who)
                memory = replace(memory, saving=saving)
            case ("pinned", CheckpointName() as name):
                busy = frozenset(who for who, _ in memory.saving)
                memory = replace(memory, pins=keeping.placed(memory.pins, step, name, saving=busy))
            case ("read", CheckpointName() as name, values):
                keeping.check_read(step, name, values)
        return memory


def _save_begun(memory: Memory, step: Step, name: CheckpointName) -> Memory:
    late = _superseded(memory, step)
    return replace(
        memory,
        behind=memory.behind | {step.who} if late else memory.behind - {step.who},
        saving=memory.saving | {(step.who, name)},
        pins=keeping.after_save_began(memory.pins, step.who),
    )


def _check_saved(
    memory: Memory, step: Step, goes_on: bool, kind: type[BaseException], error: BaseException | None
) -> None:
    if goes_on and step.who in memory.behind:
        raise Broken(f"{step.who} was superseded before this save began, published it, and goes on")
    faulty = step.who in memory.faulty and issubclass(kind, StorageError)
    if error is not None and not faulty and not _superseded(memory, step):
        raise Broken(f"a save of {step.who} fails: {error!r}")


def _superseded(memory: Memory, step: Step) -> bool:
    """Whether a newer attempt exists, which may have swept away what this one was writing."""
    return step.who in memory.taken or attempt_record(_number(memory, step.who) + 1) in step.after


def _claimed(memory: Memory, step: Step, number: int) -> Memory:
    owners = memory.owners | {(number, step.who)}
    if step.request.path in step.before:
        if step.request.name != "overwrite" and (number, step.who) not in memory.owners:
            raise Broken(f"the record of attempt {number} is written again by {step.who}")
        others = {who for one, who in memory.owners if one == number}
        memory = replace(memory, taken=(memory.taken | others) - {step.who})
        if (number, step.who) in memory.owners:
            return memory  # a trial of what the store does, and its undoing
    branch = record_at(step.after[step.request.path], number).rollbacks
    if branch != memory.branch:
        _check_branch(memory, branch, number)
        now = newest(step.after, memory.rotten, branch=branch)
        memory = replace(memory, branch=branch, newest=now)
    bases = memory.bases | {(step.who, memory.newest)} if step.who not in dict(memory.bases) else memory.bases
    return replace(memory, owners=owners, bases=bases)


def _check_one_job(memory: Memory, step: Step, number: int) -> None:
    mine = record_at(step.after[step.request.path], number)
    for before, who in memory.owners:
        if before != number - 1 or who in memory.over or who == step.who:
            continue
        if ledger_events(before, 1) in step.after:
            continue  # it has recorded its end, and has only to hear that
        theirs = record_at(step.after[attempt_record(before)], before)
        if (theirs.job, theirs.arguments) != (mine.job, mine.arguments) and not theirs.is_rollback:
            raise Broken(f"{step.who} supersedes {who}, which is of another job and alive")


def _check_branch(memory: Memory, branch: Branch, number: int) -> None:
    """Only a rollback changes what counts."""
    if not branch or branch[-1].attempt != number:
        raise Broken(f"attempt {number} is no rollback, and forgets {memory.branch} for {branch}")
    if is_set_aside(branch[-1].name, branch):
        raise Broken(f"attempt {number} goes back to {branch[-1].to}, and that does not count")


def _harmed(memory: Memory, step: Step) -> Memory:
    """Who changes what is stored has harmed what needs it; who takes it away also what is just being written."""
    harmed = {str(one.name) for one in published(step.after) if problem(one, step.after)}
    harmed |= keeping.harmed(memory.pins, step.after)
    lost = memory.lost
    doubtful = memory.doubtful
    if step.request.name == "lose":
        doubtful = doubtful | {name for _, name in memory.saving}
        lost = lost | {step.request.path}
    rotten = memory.rotten | harmed
    now = newest(step.after, rotten, branch=memory.branch)
    bases = frozenset(
        (who, base and newest(step.after, rotten, branch=memory.branch, up_to=base.name))
        for who, base in memory.bases
    )
    return replace(memory, rotten=rotten, doubtful=doubtful, lost=lost, newest=now, bases=bases)


def _judged(memory: Memory, step: Step, name: CheckpointName) -> Memory:
    """One that was in doubt is published: now it shows whether it was harmed."""
    if name not in memory.doubtful:
        return memory
    harmed = {str(one.name) for one in published(step.after) if one.name == name and problem(one, step.after)}
    return replace(memory, rotten=memory.rotten | harmed)


def _risen(memory: Memory, step: Step, name: CheckpointName) -> Memory:
    """A manifest that lands when its files are gone is one that a resume passes over, if it must not take it."""
    now = newest(step.after, memory.rotten, branch=memory.branch)
    if now is not None and now.name == name:
        raise Broken(f"{name} was withdrawn, and its manifest comes back as the newest")
    return replace(memory, rotten=memory.rotten | {str(name)})


def _resumed(memory: Memory, step: Step, name: CheckpointName | None) -> Memory:
    who, base = step.who, dict(memory.bases)[step.who]
    taken = base is not None and _superseded(memory, step) and base.name not in names(step.after)
    if base is not None and not taken and not _as_good(step.after, name, base):
        raise Broken(f"{who} resumes from {name}, but {base.name} was there when it claimed")
    if name is not None:
        number = _number(memory, who)
        if is_set_aside(name, _branch_of(step.after, number)):
            raise Broken(f"{who} resumes from {name}, which a rollback has set aside")
        memory = replace(memory, origins=memory.origins | {(number, name)})
    return replace(memory, restoring=memory.restoring - {who})


def _is_misnamed(objects: Objects) -> bool:
    """Whether a late claim has taken the run's id, and nobody lived to leave the mark that tells it."""
    record = objects.get(attempt_record(1))
    if record is None or any(parse_published(path.removeprefix(f"{ATTEMPTS}/")) for path in objects):
        return False
    return any(manifest.run != record_at(record, 1).run for manifest in published(objects))


def _number(memory: Memory, who: str) -> int:
    """The attempt of a process; 0 if it has none."""
    return max((number for number, owner in memory.owners if owner == who), default=0)


def _branch_of(objects: Objects, number: int) -> Branch:
    return record_at(objects[attempt_record(number)], number).rollbacks if number else ()


def _as_good(objects: Objects, name: CheckpointName | None, base: Choosable) -> bool:
    if name is None or name == base.name:
        return name is not None
    manifest = manifest_at(name.manifest, objects.get(name.manifest, b""))
    healthy = (
        manifest is None or manifest.health.healthy
    )  # one that is gone was taken away by a newer attempt
    return (healthy, name) > (base.healthy, base.name)


def _check_forward(before: Choosable | None, after: Choosable | None) -> None:
    if before is None or before == after:
        return
    if (
        after is None
        or after.healthy < before.healthy
        or (after.healthy == before.healthy and after.name < before.name)
    ):
        raise Broken(f"the newest goes back from {before.name} to {None if after is None else after.name}")


def _check_whole(objects: Objects, rotten: frozenset[str], *, chosen: str | None = None) -> None:
    for manifest in [*published(objects), *(held(objects, chosen) if chosen else ())]:
        if str(manifest.name) not in rotten:
            text = problem(manifest, objects)
            if text:
                raise Broken(f"{manifest.name} is published, and {text}")


def _check_nothing_gone(memory: Memory, step: Step) -> None:
    path = step.request.path
    gone = isinstance(step.answer, Failure) and step.answer.kind is StorageNotFound
    if not gone or not path.startswith(f"{CHECKPOINTS}/") or path.endswith(MANIFEST):
        return
    if path not in memory.lost and path.split("/")[1] not in memory.rotten:
        raise Broken(f"the restore of {step.who} finds {path} gone")


def _check_let_go(memory: Memory, step: Step) -> None:
    """What a person went back to, and which only its pin still has, stays until there are two newer ones."""
    chosen = gone_back_to(memory.branch)
    if chosen is None or not held(step.before, chosen) or held(step.after, chosen):
        return
    name = CheckpointName.parse(chosen)
    assert name is not None
    if name not in names(step.after) and not _may_go(memory.branch, step, name):
        raise Broken(f"{step.who} lets go of {name}, which was gone back to, and withdrawn")


def _may_go(branch: Branch, step: Step, name: CheckpointName) -> bool:
    """Whether this is what the branch goes on from, and two newer healthy ones count there."""
    there = [one for one in published(step.before) if not is_set_aside(one.name, branch)]
    newer = [one for one in there if one.name > name and one.health.healthy]
    return gone_back_to(branch) == str(name) and len(newer) >= FLOOR


def _check_not_needed(memory: Memory, step: Step, name: CheckpointName) -> None:
    """What an attempt resumed from stays until it has two newer ones; what it passed over it does not touch.

    What a person went back to may be withdrawn by an attempt that lived then: its pin keeps it whole, until there are
    two newer ones.
    """
    if (step.who, name) in memory.passed:
        raise Broken(f"{step.who} withdraws {name}, which its resume passed over")
    if name in names(step.before) and is_set_aside(name, _branch_of(step.after, _number(memory, step.who))):
        raise Broken(f"{step.who} withdraws {name}, which a rollback has set aside")
    if _may_go(memory.branch, step, name) or kept_by_a_rollback(step.after, str(name)):
        return
    deleting = [number for number, owner in memory.owners if owner == step.who]
    for number, origin in memory.origins:
        if origin != name or not deleting or max(deleting) > number:
            continue
        if _may_go(_branch_of(step.after, number), step, name):
            continue  # though somebody has gone back elsewhere since
        newer = [one for one in published(step.before) if one.name > origin and one.health.healthy]
        if max(deleting) < number or len(newer) < FLOOR:
            raise Broken(f"{step.who} withdraws {name}, which attempt {number} resumed from")


def _check_end(memory: Memory, step: Step) -> None:
    error = step.error
    if error is None:
        return
    if isinstance(error, Superseded):
        if not _superseded(memory, step):
            raise Broken(f"{step.who} ends as superseded, and is the newest")
        return
    if isinstance(error, StorageUnavailable) and step.who in memory.faulty:
        return
    if isinstance(error, NoUsableCheckpoint) and (memory.lost or _is_misnamed(step.after)):
        return  # all may need the file that a person took away, or are taken for another run's
    if isinstance(error, RunInUse) and step.who in memory.company | memory.faulty:
        return
    if isinstance(error, DamagedCheckpoint) and str(error.checkpoint) in memory.rotten:
        return  # a reader says so, who wants this one or none
    raise Broken(f"{step.who} ends by {error!r}")
