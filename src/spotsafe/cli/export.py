"""``spotsafe export``: a checkpoint as a file that other tools open."""

from __future__ import annotations

import click

from spotsafe import human
from spotsafe.cli.output import print_json, say
from spotsafe.cli.target import check_run, json_option, open_target, target_argument
from spotsafe.errors import SpotsafeError


@click.command("export", short_help="Write a checkpoint as a file that other tools open.")
@target_argument
@click.argument("out", type=click.Path())
@click.option("--all", "everything", is_flag=True, help="All values that such a file can hold.")
@click.option("--force", is_flag=True, help="Replace what is there.")
@json_option
def command(target: str, out: str, *, everything: bool, force: bool, as_json: bool) -> None:
    """Write the weights of a checkpoint to OUT: a .safetensors or .pt file, or a folder for torch.distributed.

    Without @ it is the latest of the run. Every byte is verified. The weights of one module have the keys of its
    state_dict; those of several, and everything else, begin with the name that was tracked. What the file cannot
    hold besides tensors is left out and listed; a tensor that it cannot hold is an error. OUT appears when it is
    whole.
    """
    from spotsafe.exchange.exporting import export, form_of
    from spotsafe.loading import with_checkpoint

    store, _ = open_target(target)
    try:
        form_of(out)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    check_run(store)
    try:
        done, name = with_checkpoint(
            target, lambda opened: (export(opened, out, everything=everything, force=force), opened.name)
        )
    except SpotsafeError:
        raise
    except ValueError as error:  # @best where there are several metrics
        raise click.UsageError(str(error)) from error
    if as_json:
        print_json({"path": done.path, "form": done.form, "checkpoint": name, "tensors": done.tensors,
                    "left_out": list(done.left_out)})  # fmt: skip
        return
    say(f"{done.path}: {human.count(done.tensors, 'tensor')} of {name}")
    if done.left_out:
        say(f"left out, for such a file cannot hold them: {', '.join(done.left_out)}", err=True)
