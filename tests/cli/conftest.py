"""Calls the command line inside this process and keeps what it printed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from click.testing import CliRunner, Result

from spotsafe.cli.app import main


@pytest.fixture
def call() -> Callable[..., Result]:
    """Run the command line with these arguments."""

    def run(*arguments: object) -> Result:
        return CliRunner().invoke(main, [str(argument) for argument in arguments], prog_name="spotsafe")

    return run
