"""The command ``spotsafe``: finds the command that was asked for and turns errors into one clear line.

Exit codes: 0 done; 1 it could not be done, or what was checked is not right; 2 the command line is wrong.
"""

from __future__ import annotations

import importlib
from typing import Any

import click

from spotsafe.errors import SpotsafeError
from spotsafe.human import one_line

_LONGEST = 4000  # characters of an error; a name in it may have any length

_COMMANDS = {
    "demo": "demo",
    "ls": "ls",
    "show": "show",
    "verify": "verify",
    "gc": "gc",
    "rollback": "rollback",
    "pin": "pin",
    "unpin": "unpin",
    "export": "export",
    "import": "import_",
    "watch": "watch",
    "fake-metadata": "fake_metadata",
}
"""Name of each command -> its module."""


class _Commands(click.Group):
    """Commands by name, each imported only when it is used, so that ``ls`` does not pay for ``demo``."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names, as in the help."""
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name."""
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"spotsafe.cli.{_COMMANDS[cmd_name]}")
        command: click.Command = module.command
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run it. What spotsafe raises on purpose is a message for a person, not a traceback."""
        try:
            return super().invoke(ctx)
        except SpotsafeError as error:
            text = one_line(str(error))
            text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
            raise click.ClickException(text) from error


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="spotsafe")
def main() -> None:
    """Training resilience for PyTorch on machines that can vanish at any second.

    TARGET is the folder or URL of a run, such as runs/gpt or s3://bucket/run-0412. Where one checkpoint is
    meant, add @latest, @best (or @best:METRIC, @best:METRIC:max), @STEP, or @ and the checkpoint's full name.

    Exit codes: 0 done; 1 not done, or what was checked is not right; 2 the command line is wrong.
    """
