"""``spotsafe fake-metadata``: a stand-in for a cloud's metadata service, to try a program against."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable

import click

_CLOUDS = {"aws": "spotsafe.testing.aws"}
"""Name of each -> the module whose `serve` it is."""


@click.command("fake-metadata")
@click.argument("cloud", type=click.Choice(list(_CLOUDS)))
@click.option(
    "--notice-in",
    type=click.FloatRange(0),
    default=60.0,
    show_default=True,
    help="Seconds until the machine's end is announced.",
)
@click.option(
    "--ahead",
    type=click.FloatRange(0),
    default=120.0,
    show_default=True,
    help="Seconds between the announcement and the end that it speaks of.",
)
@click.option(
    "--action", default="terminate", show_default=True, help="What is announced, in the cloud's words."
)
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="To listen on; 0 takes a free one.")
def command(cloud: str, *, notice_in: float, ahead: float, action: str, port: int) -> None:
    """Answer as the metadata service of CLOUD does, on 127.0.0.1, and announce that the machine goes.

    The first lines set the environment by which spotsafe, and the cloud's own libraries, find it. Run your program in
    another terminal with these. Ends at Ctrl-C.
    """
    serve: Callable[..., None] = importlib.import_module(_CLOUDS[cloud]).serve
    try:
        with contextlib.suppress(KeyboardInterrupt):
            serve(port=port, notice_after_s=notice_in, action=action, in_seconds=ahead, say=_say)
    except OSError as error:
        raise click.ClickException(f"port {port} cannot be listened on: {error.strerror}") from error


def _say(line: str) -> None:
    click.echo(line)
