"""The documents tell the truth: commands run, the diff applies, and nothing public is left out."""

from __future__ import annotations

import inspect
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

import spotsafe
from spotsafe.cli.app import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
ARCHITECTURE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
GUIDE = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
LONG = ("make ", "pip ")  # set up things or run for minutes; `.ci/run` and `make demo` run these


def blocks(language: str) -> list[str]:
    """The README's code of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


def commands() -> list[str]:
    return [line for block in blocks("sh") for line in block.splitlines() if line]


def code_lines(name: str) -> list[str]:
    """Lines of an example without the white space at their ends, as `git diff -w` sees them."""
    return [line.strip() for line in (ROOT / "examples" / name).read_text(encoding="utf-8").splitlines()]


def apply(diff: str, lines: list[str]) -> list[str]:
    """Apply a diff whose hunks are found by their text, white space aside."""
    for hunk in diff.split("@@\n"):
        parts = [(line[:1], line[1:].strip()) for line in hunk.splitlines()]
        before = [text for mark, text in parts if mark != "+"]
        after = [text for mark, text in parts if mark != "-"]
        places = [at for at in range(len(lines)) if lines[at : at + len(before)] == before]
        assert len(places) == 1, f"hunk found {len(places)} times:\n{hunk}"
        lines = [*lines[: places[0]], *after, *lines[places[0] + len(before) :]]
    return lines


def test_the_diff_turns_the_plain_example_into_ours():
    """What the README shows is all that has to change."""
    (diff,) = blocks("diff")

    assert apply(diff, code_lines("train_gpt_plain.py")) == code_lines("train_gpt.py")


def test_the_diff_is_four_lines():
    """Four lines change, two of which are new."""
    (diff,) = blocks("diff")
    marks = [line[:1] for line in diff.splitlines()]

    assert (marks.count("+"), marks.count("-")) == (4, 2)


def test_git_agrees(tmp_path):
    """`git diff -w` counts the same."""
    result = subprocess.run(
        ["git", "diff", "--no-index", "-w", "--numstat", "train_gpt_plain.py", "train_gpt.py"],
        cwd=ROOT / "examples",
        capture_output=True,
        text=True,
        check=False,
    )

    assert result.stdout.split()[:2] == ["4", "2"]


@pytest.mark.slow
def test_the_short_commands_run(tmp_path):
    """What a reader copies from the README works, in the order of the page, from a checkout."""
    short = [command for command in commands() if not command.startswith(LONG)]
    assert [command.split()[0] for command in short] == ["python", "spotsafe", "spotsafe", "spotsafe"]
    (tmp_path / "examples").symlink_to(ROOT / "examples")

    for command in short:
        words = shlex.split(command.replace("--steps 1000", "--steps 4 --layers 1 --width 32"))
        program = [sys.executable] if words[0] == "python" else [sys.executable, "-m", "spotsafe"]
        result = subprocess.run(
            [*program, *words[1:]], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"


def test_every_make_target_of_the_readme_is_there():
    """`make X` in the README is a target of the Makefile."""
    targets = re.findall(
        r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE
    )

    named = [command.split()[1] for command in commands() if command.startswith("make ")]

    assert set(named) <= set(targets)
    assert {"demo", "test", "test-quick", "lint", "bench", "prove"} == set(named)


def test_every_command_is_documented():
    """Each command of the command line stands in the README's table."""
    for name in main.list_commands(click.Context(main)):
        assert re.search(rf"^\| `spotsafe {name}\b", README, flags=re.MULTILINE), name


def test_what_is_not_done_yet_is_not_there():
    """A command that exists is not listed among those that come later."""
    (line,) = re.findall(r"^- The commands (.*)\.$", README, flags=re.MULTILINE)

    assert not set(re.findall(r"`([\w-]+)`", line)) & set(main.list_commands(click.Context(main)))


def test_the_commands_without_json_are_named():
    """Every command prints JSON, but for those that the README excepts."""
    (words,) = re.findall(r"all but\s+(.*?) have\s+`--json`", README)
    context = click.Context(main)
    without = {
        name
        for name in main.list_commands(context)
        if (command := main.get_command(context, name)) is not None
        and not any("--json" in option.opts for option in command.params)
    }

    assert set(re.findall(r"`([\w-]+)`", words)) == without


def test_every_attribute_of_a_run_is_documented():
    """What can be read of a run stands in the guide's table, or in the README as `run.NAME`."""
    names = {
        name
        for name, one in vars(spotsafe.Run).items()
        if isinstance(one, property) and not name.startswith("_")
    }

    (table,) = re.findall(r"^\| of a `run` .*?\n\n", GUIDE, flags=re.DOTALL | re.MULTILINE)
    documented = set(re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE))

    assert documented <= names
    assert all(f"`run.{name}`" in README for name in names - documented)


def test_every_variable_of_the_environment_is_documented():
    """Each that the package reads stands in the guide."""
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py")]
    read = {name for text in sources for name in re.findall(r'= "(SPOTSAFE_\w+)"', text)}

    assert read
    assert set(re.findall(r"^\| `(SPOTSAFE_\w+)` \|", GUIDE, flags=re.MULTILINE)) == read


def test_every_option_of_the_session_is_documented():
    """Each option stands in the README's table and in the docstring; nothing else does."""
    parameters = inspect.signature(spotsafe.session).parameters
    options = {name for name, one in parameters.items() if one.kind is inspect.Parameter.KEYWORD_ONLY}

    (table,) = re.findall(r"^\| option of `session` .*?\n\n", README, flags=re.DOTALL | re.MULTILINE)
    documented = set(re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE))

    assert documented == options
    docstring = inspect.getdoc(spotsafe.session) or ""
    assert all(re.search(rf"^    {name}: ", docstring, flags=re.MULTILINE) for name in options)


def test_exit_codes_are_documented():
    """The codes that launchers act on stand in the README."""
    from spotsafe import errors

    for code in (errors.EXIT_RECLAIMED, errors.EXIT_SUPERSEDED, errors.EXIT_RESTART_LOOP):
        assert re.search(rf"^\| {code} \|", README, flags=re.MULTILINE), code


def test_public_names_are_sorted_and_there():
    """`__all__` is sorted, and every name in it can be had."""
    assert spotsafe.__all__ == sorted(spotsafe.__all__)
    for name in spotsafe.__all__:
        assert getattr(spotsafe, name) is not None


def test_importing_the_package_imports_no_torch():
    """`import spotsafe` is for laptops too: torch comes when something needs it."""
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "import spotsafe"],
        capture_output=True,
        text=True,
        check=True,
    )
    imported = {line.split("|")[-1].strip() for line in result.stderr.splitlines()}

    assert "spotsafe" in imported
    assert not {name for name in imported if name.split(".")[0] == "torch"}


def test_the_code_map_names_every_module():
    """Whoever looks for a file finds it in ARCHITECTURE.md, and finds no file there that is gone."""
    package = ROOT / "src" / "spotsafe"
    files = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if path.name not in {"__init__.py", "__main__.py"}
    }
    names = {name.rpartition("/")[2] for name in files}
    (code_map,) = re.findall(r"^```\n(.*?)^```$", ARCHITECTURE, flags=re.DOTALL | re.MULTILINE)
    mapped = re.findall(r"\b(\w+\.py)\b", code_map)

    assert set(mapped) == names
    assert len(mapped) == len(files)


def test_links_inside_the_repository_lead_somewhere():
    """No link of a page leads to a file that is not there."""
    for page in ("README.md", "ARCHITECTURE.md"):
        for target in re.findall(r"\]\((?!http)([^)#]+)", (ROOT / page).read_text(encoding="utf-8")):
            assert (ROOT / target).exists(), f"{page}: {target}"
