"""``spotsafe unpin``: let a checkpoint go that was kept for a reader."""

from __future__ import annotations

import click

from spotsafe import human
from spotsafe.cli.output import print_json, say
from spotsafe.cli.target import check_run, json_option, open_target, target_argument
from spotsafe.pinning import unpin


@click.command("unpin", short_help="Let a pinned checkpoint go.")
@target_argument
@json_option
def command(target: str, *, as_json: bool) -> None:
    """Delete the pins of a checkpoint, whoever placed them; without @, all pins of the run."""
    store, _ = open_target(target)
    check_run(store)
    count = unpin(target)
    if as_json:
        print_json({"url": store.url, "removed": count})
    else:
        say(f"{human.count(count, 'pin')} removed")
