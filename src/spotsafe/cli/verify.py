"""``spotsafe verify``: read everything and compare it with its digests."""

from __future__ import annotations

import sys

import click

from spotsafe import human
from spotsafe.checkpoint.verify import Good, verify
from spotsafe.cli.output import print_json, say
from spotsafe.cli.target import existing, json_option, open_target, target_argument


@click.command("verify", short_help="Read every byte and compare it with its digest.")
@target_argument
@json_option
def command(target: str, *, as_json: bool) -> None:
    """Read all bytes of checkpoints and compare them with their digests.

    Without @ it is every checkpoint of the run. Exit code 1 and a list of the faults if something differs.
    """
    store, selector = open_target(target)
    records, good = [], Good()
    for name in existing(store, selector):
        faults = [{"file": fault.file, "reason": fault.reason} for fault in verify(store, name, good=good)]
        records.append({"name": str(name), "step": name.step, "faults": faults})
        if not as_json:
            say(f"{name}: {'good' if not faults else human.count(len(faults), 'fault')}")
            for fault in faults:
                say(f"  {fault['file']}: {fault['reason']}")
    damaged = sum(bool(record["faults"]) for record in records)
    if as_json:
        print_json({"url": store.url, "good": not damaged, "checkpoints": records})
    if damaged:
        say(f"{damaged} of {human.count(len(records), 'checkpoint')} damaged", err=True)
        sys.exit(1)
