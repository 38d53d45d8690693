"""``spotsafe import``: a checkpoint made of a file of another kind."""

from __future__ import annotations

from collections.abc import Sequence

import click

from spotsafe import human
from spotsafe.cli.output import print_json, say
from spotsafe.cli.target import json_option, open_target
from spotsafe.errors import SpotsafeError


@click.command("import", short_help="Begin a run with what such a file holds.")
@click.argument("source", type=click.Path(exists=True))
@click.argument("url")
@click.option("--name", metavar="NAME", help="What to call a file that is one state_dict.  [default: model]")
@click.option(
    "--rename",
    "renames",
    multiple=True,
    metavar="OLD=NEW",
    help="What to call an entry of the file; optimizer_states.0 is the first in a list. May be repeated.",
)
@click.option(
    "--only", multiple=True, metavar="NAME", help="Take only what has this name then. May be repeated."
)
@click.option("--strip", default="", metavar="PREFIX", help="Leave out at the beginning of names, as module.")
@click.option(
    "--optimizer-order",
    metavar="MODULE",
    help="Parameters have numbers in the order of this module, group by group, and it has no buffers.",
)
@click.option("--step", type=click.IntRange(min=0), default=0, show_default=True, help="The step it is of.")
@json_option
def command(
    source: str,
    url: str,
    *,
    name: str | None,
    renames: Sequence[str],
    only: Sequence[str],
    strip: str,
    optimizer_order: str | None,
    step: int,
    as_json: bool,
) -> None:
    """Make the first checkpoint of a new run at URL of SOURCE, without running code that may be in it.

    SOURCE is a .safetensors file, a file of torch.save (.pt, .pth, .bin, .ckpt) that holds tensors and plain values,
    or a folder of torch.distributed.checkpoint. A file that is a state_dict becomes one module, --name; of any other
    dict every entry becomes an object, under the name that the program tracks it by: --rename
    model_state_dict=model. A program starts with the weights by init_from=URL, with
    InitFrom(URL, what="all") also with the optimizer.

    State of an optimizer is stored under the names of its parameters if the file has them. Mostly it only has
    numbers: then --optimizer-order says what they mean, if every parameter group has its parameters in the order of
    the module's state_dict. It is compared with shapes and counts, but only you know. Without it the state is
    imported as plain values, which no optimizer is restored from.
    """
    from spotsafe.exchange.importing import import_values, read_foreign

    store, selector = open_target(url)
    if selector is not None:
        raise click.UsageError("URL is a new run; --step says which step it is")
    try:
        values = read_foreign(source, name=name, strip=strip, rename=_renames(renames), only=only)
        done = import_values(store, values, step=step, optimizer_order=optimizer_order)
    except SpotsafeError:
        raise
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    except OSError as error:
        raise click.ClickException(f"{source} cannot be read: {error}") from error
    if as_json:
        print_json({"url": store.url, "checkpoint": str(done.name), "step": step, "tensors": done.tensors,
                    "data_bytes": done.total_bytes, "objects": dict(done.objects),
                    "unordered": dict(done.unordered)})  # fmt: skip
        return
    objects = ", ".join(f"{key} ({kind})" for key, kind in done.objects.items())
    say(f"{store.url}: checkpoint {done.name} of {human.count(done.tensors, 'tensor')}: {objects}")
    for key, why in done.unordered.items():
        say(
            f"{key} is plain state, which no optimizer is restored from: {why} (see --optimizer-order)",
            err=True,
        )


def _renames(texts: Sequence[str]) -> dict[str, str]:
    renames: dict[str, str] = {}
    for text in texts:
        old, _, new = text.rpartition("=")
        if not old or not new:
            raise click.UsageError(f"--rename is OLD=NEW, not {text!r}")
        if old in renames:
            raise click.UsageError(f"--rename {old} is given twice")
        renames[old] = new
    return renames
