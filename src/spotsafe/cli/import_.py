"""``spotsafe import``: a checkpoint made of a file of another kind."""

from __future__ import annotations

import click

from spotsafe import human
from spotsafe.cli.output import print_json, say
from spotsafe.cli.target import json_option, open_target
from spotsafe.errors import SpotsafeError


@click.command("import")
@click.argument("source", type=click.Path(exists=True))
@click.argument("url")
@click.option(
    "--name", default="model", show_default=True, help="What to call a file that is one state_dict."
)
@click.option("--step", type=click.IntRange(min=0), default=0, show_default=True, help="The step it is of.")
@click.option("--strip", default="", metavar="PREFIX", help="Leave out at the beginning of names, as module.")
@json_option
def command(source: str, url: str, *, name: str, step: int, strip: str, as_json: bool) -> None:
    """Make the first checkpoint of a new run at URL of SOURCE, without running code that may be in it.

    SOURCE is a .safetensors file, a file of torch.save (.pt, .pth, .bin, .ckpt) that holds tensors and plain values,
    or a folder of torch.distributed.checkpoint. A file that is a state_dict becomes one module, --name; of any other
    dict every entry becomes an object. A program starts with the weights by init_from=URL.
    """
    from spotsafe.exchange.importing import import_values, read_foreign

    store, selector = open_target(url)
    if selector is not None:
        raise click.UsageError("URL is a new run; --step says which step it is")
    try:
        values = read_foreign(source, name=name, strip=strip)
    except SpotsafeError:
        raise
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    except OSError as error:
        raise click.ClickException(f"{source} cannot be read: {error}") from error
    done = import_values(store, values, step=step)
    if as_json:
        print_json({"url": store.url, "checkpoint": str(done.name), "step": step, "tensors": done.tensors,
                    "bytes": done.total_bytes, "objects": dict(done.objects)})  # fmt: skip
        return
    objects = ", ".join(f"{key} ({kind})" for key, kind in done.objects.items())
    say(f"{store.url}: checkpoint {done.name} of {human.count(done.tensors, 'tensor')}: {objects}")
