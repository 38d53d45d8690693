"""``spotsafe pin``: keep a checkpoint from being deleted while somebody reads it."""

from __future__ import annotations

import math

import click

from spotsafe import human
from spotsafe.cli.output import print_json, say
from spotsafe.cli.target import check_run, json_option, open_target, target_argument
from spotsafe.pinning import pin


@click.command("pin", short_help="Keep a checkpoint from being deleted for a while.")
@target_argument
@click.option("--hours", type=click.FloatRange(min=0, min_open=True), default=24.0, show_default=True,
              help="The pin ends by itself after so many hours.")  # fmt: skip
@json_option
def command(target: str, *, hours: float, as_json: bool) -> None:
    """Keep a checkpoint from being deleted by the retention of its run, for a while.

    Without @ it is the latest of the run. `spotsafe unpin` lets it go; `spotsafe ls` shows what is pinned.
    """
    if not math.isfinite(hours):
        raise click.BadParameter("a number of hours, such as 24", param_hint="--hours")
    store, _ = open_target(target)
    check_run(store)
    pinned = pin(target, hours=hours)
    if as_json:
        print_json({"url": store.url, "checkpoint": pinned.name, "step": pinned.step, "until": pinned.until})
    else:
        say(f"{pinned.url} stays for {human.duration(hours * 3600)}, or until: spotsafe unpin {pinned.url}")
