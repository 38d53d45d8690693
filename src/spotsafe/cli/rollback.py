"""``spotsafe rollback``: go back to an older checkpoint, on purpose."""

from __future__ import annotations

import time
from typing import Any

import click

from spotsafe import human
from spotsafe.checkpoint.layout import CheckpointName
from spotsafe.checkpoint.rollback import Plan, plan_rollback, roll_back
from spotsafe.checkpoint.verify import verify
from spotsafe.cli.output import print_json, say
from spotsafe.cli.target import check_run, json_option, open_target, target_argument
from spotsafe.clock import SystemClock
from spotsafe.console import Console
from spotsafe.errors import DamagedCheckpoint
from spotsafe.identity import Identity
from spotsafe.ledger.occupancy import Occupancy
from spotsafe.storage.store import Store

_SHOWN = 10


@click.command("rollback", short_help="Let a run go on from an older checkpoint.")
@target_argument
@click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
@click.option(
    "--takeover", is_flag=True, help="Do it although a job seems to run; that job ends at its next save."
)
@click.option("--no-verify", is_flag=True, help="Do not read all bytes of the checkpoint first.")
@json_option
def command(target: str, *, dry_run: bool, takeover: bool, no_verify: bool, as_json: bool) -> None:
    """Let a run go on from an older checkpoint: TARGET is URL@STEP, or URL@ and a checkpoint's full name.

    The training command stays the same; its next start goes on from there. Newer checkpoints are set aside, not
    deleted: a rollback to one of them brings it back.
    """
    store, selector = open_target(target)
    if selector is None:
        raise click.UsageError(f"which checkpoint? Write {target}@STEP; `spotsafe ls {target}` shows them")
    check_run(store)
    try:
        plan = plan_rollback(store, selector)
    except ValueError as error:
        if isinstance(error, DamagedCheckpoint):
            raise
        raise click.UsageError(str(error)) from error
    attempt = None
    if not plan.is_done:
        if not no_verify:
            _check_whole(store, plan)
        if not dry_run:
            plan, attempt = _roll_back(store, plan, takeover=takeover)
    if as_json:
        print_json(_record(store, plan, attempt=attempt, dry_run=dry_run))
    else:
        _print(store, plan, attempt=attempt)


def _roll_back(store: Store, plan: Plan, *, takeover: bool) -> tuple[Plan, int | None]:
    """What was done in the end, and the attempt that says so; None if nothing was left to do."""
    identity = Identity.of_this_process()
    if takeover:
        return plan, roll_back(store, plan, identity=identity, wall=time.time()).attempt
    occupancy = Occupancy(
        store,
        identity=identity,
        clock=SystemClock(),
        emit=Console().emit,
        remedy="Stop it first, or pass --takeover: it then ends at its next save",
    )
    occupancy.check(plan.listing)
    # Again: a job that was watched and has ended meanwhile may have saved and deleted.
    plan = plan_rollback(store, str(plan.target.name))
    if plan.is_done:
        return plan, None
    done = roll_back(store, plan, identity=identity, wall=time.time(), met=occupancy.check_record)
    return plan, done.attempt


def _check_whole(store: Store, plan: Plan) -> None:
    name = plan.target.name
    faults = verify(store, name)
    if faults:
        more = f" and {human.count(len(faults) - 1, 'more fault')}" if len(faults) > 1 else ""
        reason = f"{faults[0].reason}{more}; a start would pass it over. Nothing was changed"
        raise DamagedCheckpoint(checkpoint=str(name), file=faults[0].file, reason=reason)


def _record(store: Store, plan: Plan, *, attempt: int | None, dry_run: bool) -> dict[str, Any]:
    return {
        "url": store.url,
        "checkpoint": str(plan.target.name),
        "step": plan.target.name.step,
        "attempt": attempt,
        "done": attempt is not None or plan.is_done,
        "dry_run": dry_run,
        "set_aside": [str(name) for name in plan.sets_aside],
        "brought_back": [str(name) for name in plan.brings_back],
    }


def _print(store: Store, plan: Plan, *, attempt: int | None) -> None:
    name = plan.target.name
    if plan.is_done:
        say(f"{store.url} goes on from step {name.step:,} anyway ({name}); nothing to do")
        return
    would = "would go" if attempt is None else "goes"
    says = "nothing was changed" if attempt is None else f"attempt {attempt} says so"
    say(f"{store.url} {would} on from step {name.step:,} ({name}) at its next start; {says}")
    _print_names("set aside, not deleted; a rollback to it brings it back", plan.sets_aside)
    _print_names("counts again", plan.brings_back)


def _print_names(words: str, names: tuple[CheckpointName, ...]) -> None:
    for name in names[:_SHOWN]:
        say(f"  {name}: {words}")
    if len(names) > _SHOWN:
        say(f"  and {len(names) - _SHOWN:,} more")
