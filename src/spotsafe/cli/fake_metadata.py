"""``spotsafe fake-metadata``: a stand-in for a cloud's metadata service, to try a program against."""

from __future__ import annotations

import contextlib

import click

from spotsafe.testing.alibaba import FakeAlibabaMetadata
from spotsafe.testing.aws import FakeAwsMetadata
from spotsafe.testing.azure import FakeAzureMetadata
from spotsafe.testing.gcp import FakeGcpMetadata
from spotsafe.testing.metadata import FakeMetadata, serve
from spotsafe.testing.tencent import FakeTencentMetadata

_CLOUDS: dict[str, type[FakeMetadata]] = {
    "aws": FakeAwsMetadata,
    "gcp": FakeGcpMetadata,
    "azure": FakeAzureMetadata,
    "alibaba": FakeAlibabaMetadata,
    "tencent": FakeTencentMetadata,
}


@click.command("fake-metadata", short_help="Stand in for a cloud's metadata service.")
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
@click.option("--action", help="What is announced, in the cloud's words.  [default: that the machine goes]")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="To listen on; 0 takes a free one.")
def command(cloud: str, *, notice_in: float, ahead: float, action: str | None, port: int) -> None:
    """Answer as the metadata service of CLOUD does, on 127.0.0.1, and announce that the machine goes.

    The first lines set the environment by which spotsafe, and the cloud's own libraries, find it. Run your program in
    another terminal with these. Ends at Ctrl-C.
    """
    fake = _CLOUDS[cloud](port=port)
    action = fake.actions[0] if action is None else action
    if action not in fake.actions:
        raise click.BadParameter(
            f"{cloud} has no {action!r}; it is one of {', '.join(fake.actions)}", param_hint="--action"
        )
    try:
        with contextlib.suppress(KeyboardInterrupt):
            serve(fake, notice_after_s=notice_in, action=action, in_seconds=ahead, say=_say)
    except OSError as error:
        raise click.ClickException(f"port {port} cannot be listened on: {error.strerror}") from error


def _say(line: str) -> None:
    click.echo(line)
