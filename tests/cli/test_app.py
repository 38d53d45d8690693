"""The command line as a whole: names, help, errors, and what it imports."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from spotsafe.cli.app import main

COMMANDS = ("demo", "ls", "show", "verify")


def test_help_names_every_command(call):
    """Whoever asks for help sees all commands, each with a line of its own."""
    result = call("--help")

    assert result.exit_code == 0
    listed = result.stdout.split("Commands:")[1].split()
    assert [word for word in listed if word in COMMANDS] == list(COMMANDS)


def test_no_line_of_the_help_is_cut_off():
    """On a terminal of 80 columns each command says in one whole sentence what it does."""
    lines = (
        CliRunner().invoke(main, ["--help"], terminal_width=80).stdout.partition("Commands:")[2].splitlines()
    )

    assert [line for line in lines if line and not line.endswith(".")] == []
    assert not any(line.endswith("...") for line in lines)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(call, name):
    """Each command has a text, `--json`, and words for each of its options."""
    result = call(name, "--help")
    command = main.get_command(click.Context(main), name)

    assert result.exit_code == 0
    assert command is not None
    assert command.help
    assert "--json" in result.stdout
    assert "\\b" not in result.stdout  # click's mark for text that is not to be wrapped
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, parameter.name


def test_an_unknown_command(call):
    """A misspelt command is a usage error."""
    result = call("lss", "x")

    assert result.exit_code == 2
    assert "lss" in result.stderr


def test_a_missing_target(call):
    """A missing argument is a usage error that names it."""
    result = call("ls")

    assert result.exit_code == 2
    assert "TARGET" in result.stderr


@pytest.mark.parametrize("command", ["ls", "show", "verify"])
def test_a_path_that_is_a_file(tmp_path, call, command):
    """One clear line, no traceback, exit code 1."""
    file = tmp_path / "file"
    file.write_text("x")

    result = call(command, file)

    assert result.exit_code == 1
    assert result.stderr.startswith("Error: ")
    assert "is a file" in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("command", ["ls", "show", "verify"])
@pytest.mark.parametrize(
    ("target", "todo"),
    [
        ("run/checkpoints", "the run is the folder above: {path}/run"),
        ("run/attempts/", "the run is the folder above: {path}/run"),
        (
            "run/checkpoints/a000001-s000000020-0004-9a52b2a0",
            "for that checkpoint: spotsafe show {path}/run@a000001-s000000020-0004-9a52b2a0",
        ),
        ("run@lates", "behind @ goes latest, best, a step, or a checkpoint's full name"),
    ],
)
def test_a_path_into_a_run_or_a_wrong_word_behind_the_at(tmp_path, call, command, target, todo):
    """The message says what was meant, instead of only that there is no run."""
    result = call(command, f"{tmp_path}/{target}")

    assert result.exit_code == 1
    assert result.stderr.endswith(f"; {todo.format(path=tmp_path)}\n")


def test_an_unknown_protocol(call):
    """A URL that nothing can open is a mistake on the command line."""
    result = call("ls", "nonsense://bucket/run")

    assert result.exit_code == 2
    assert "nonsense" in result.stderr


def test_version(call):
    """`--version` tells it."""
    assert call("--version").stdout.startswith("spotsafe, version ")


def test_runs_as_a_module_and_without_torch(tmp_path):
    """`python -m spotsafe` is the same program, and torch is not loaded to look at a run."""
    code = (
        "import sys, runpy; sys.argv = ['spotsafe', 'ls', sys.argv[1]]\n"
        "try: runpy.run_module('spotsafe', run_name='__main__')\n"
        "except SystemExit as leaving: print(leaving.code, 'torch' in sys.modules)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )

    assert result.stdout == "1 False\n"
    assert "is neither a run nor" in result.stderr
