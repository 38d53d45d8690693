"""``spotsafe demo``: a proof on this machine that interruptions leave no trace in what is trained."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

import spotsafe
from spotsafe.cli.output import print_json
from spotsafe.cli.target import json_option


@click.command("demo", short_help="Train through a reclaim and two kills, and compare.")
@click.option(
    "--dir",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    help="Keep checkpoints, logs and traces here (a new or empty folder). Without it they are deleted.",
)
@click.option("--steps", default=240, show_default=True, type=click.IntRange(min=24), help="Steps to train.")
@click.option(
    "--script",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Train this instead of the small GPT; it must take the same options and write the same trace.",
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@json_option
def command(
    *, folder: Path | None, steps: int, script: Path | None, arguments: tuple[str, ...], as_json: bool
) -> None:
    """Train a small GPT through a reclaim and two kills, and compare the result bit for bit.

    First a reference is trained without interruption. Then the same is trained again: a fake AWS metadata service
    announces a reclaim, and the run saves and exits; it is started again and killed in the middle of a step; again,
    and killed in the middle of a save; again, and trained to the end. Last, every loss, every sample and both last
    checkpoints are compared.

    ARGUMENTS behind -- are given to the training script, such as: spotsafe demo -- --layers 2

    It takes one to two minutes on two cores. Exit code 1 if anything differs.
    """
    from spotsafe.cli.demo_compare import Check, compare_snapshots, compare_steps
    from spotsafe.cli.demo_report import good, print_report, progress, report
    from spotsafe.cli.demo_story import (
        Plan,
        read_snapshot,
        run_folder,
        train_interrupted,
        train_reference,
    )

    began = time.monotonic()
    with _workplace(folder) as place, progress(steps=steps) as audience:
        plan = Plan(
            script=script or find_example(),
            folder=place,
            steps=steps,
            save_every=max(2, steps // 12),
            arguments=arguments,
        )
        reference = train_reference(plan, audience)
        attempts = train_interrupted(plan, audience)
        expected, faults = read_snapshot(run_folder(plan, "reference"))
        found, more_faults = read_snapshot(run_folder(plan, "interrupted"))
    whole = Check(
        what="digests of both last checkpoints",
        equal=not (faults or more_faults),
        detail="; ".join([*faults, *more_faults]) or "all good",
    )
    checks = [
        *compare_steps(reference, [attempt.steps for attempt in attempts]),
        whole,
        *compare_snapshots(expected, found),
    ]
    seconds = time.monotonic() - began
    if as_json:
        print_json(report(attempts, checks, seconds=seconds))
    else:
        print_report(attempts, checks, seconds=seconds)
    sys.exit(0 if good(attempts, checks) else 1)


def find_example() -> Path:
    """The training script: inside the installed package, or beside it in a checkout of the repository."""
    package = Path(spotsafe.__file__).parent
    for folder in (package / "examples", package.parent.parent / "examples"):
        script = folder / "train_gpt.py"
        if script.is_file():
            return script
    raise click.ClickException("the example train_gpt.py is not there; install spotsafe anew")


@contextmanager
def _workplace(folder: Path | None) -> Iterator[Path]:
    """The folder for everything; a temporary one is deleted in the end."""
    if folder is None:
        with tempfile.TemporaryDirectory(prefix="spotsafe-demo-") as temporary:
            yield Path(temporary)
        return
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise click.UsageError(f"--dir {folder} is not empty; results of two demos must not mix")
    yield folder.resolve()
