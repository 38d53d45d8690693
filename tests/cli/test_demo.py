"""`spotsafe demo`: green as it is, red when any one thing is not restored."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from spotsafe.cli.demo import find_example
from tests.ahead import begin_all

BROKEN = Path(__file__).with_name("broken_gpt.py")
# A step takes long enough that the metadata service, asked once a second, is heard before the run is over.
SMALL = ("--layers", "2", "--width", "64", "--batch-size", "32", "--workers", "0")
STEPS = 48


def demo(*arguments: object, script_arguments: tuple[str, ...] = SMALL) -> tuple[int, dict]:
    """Exit code and JSON of a small demo."""
    command = [sys.executable, "-m", "spotsafe", "demo", "--json", "--steps", str(STEPS)]
    result = subprocess.run(
        [*command, *map(str, arguments), "--", *script_arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.stdout, result.stderr
    return result.returncode, json.loads(result.stdout)


@pytest.fixture(scope="module")
def demos(request):
    """Demos by what they do not restore, two at a time: each trains with one thread."""
    with ThreadPoolExecutor(2) as pool:
        yield begin_all(request, pool, without, of="broken")
        pool.shutdown(cancel_futures=True)


def without(broken: str) -> tuple[int, dict]:
    """The demo of a program that does not restore one thing."""
    return demo("--script", BROKEN, script_arguments=("--broken", broken, *SMALL))


@pytest.mark.slow
def test_the_demo_is_green(tmp_path):
    """A notice, a kill in a step and one in a save leave no trace in what is trained."""
    code, answer = demo("--dir", tmp_path / "kept")

    assert code == 0, answer
    assert answer["identical"]
    assert answer["as_planned"]
    notice, in_step, in_save, end = answer["attempts"]
    assert (notice["exit_status"], notice["steps_lost"]) == (143, 0)
    assert in_step["exit_status"] == in_save["exit_status"] == -9
    assert in_save["steps_lost"] > 0
    assert (end["exit_status"], end["last_step"]) == (0, STEPS - 1)
    assert all(one["equal"] for one in answer["checks"])
    assert (tmp_path / "kept" / "interrupted" / "checkpoints").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("broken", "found_by"),
    [
        ("rng", {"loss of every step", "random numbers"}),
        ("dropout_seed", {"loss of every step", "random numbers"}),
        ("moments", {"loss of every step", "weights", "optimizer"}),
        ("scheduler", {"weights", "learning rate schedule"}),
        ("position", {"sample ids", "loss of every step"}),
    ],
)
def test_the_demo_is_red_when_something_is_not_restored(demos, broken, found_by):
    """Each thing that is left out at a resume makes the demo fail, in the row that is about it."""
    code, answer = demos[broken].result()

    different = {check["what"] for check in answer["checks"] if not check["equal"]}
    assert code == 1, answer
    assert not answer["identical"]
    assert found_by <= different


def test_a_folder_with_something_in_it_is_refused(tmp_path, call):
    """Results of two demos must not mix."""
    (tmp_path / "old").write_text("x")

    result = call("demo", "--dir", tmp_path)

    assert result.exit_code == 2
    assert "not empty" in result.stderr


def test_a_script_that_fails_is_an_error_with_its_output(tmp_path, call):
    """What went wrong is shown, not only that it did."""
    script = tmp_path / "fails.py"
    script.write_text("raise SystemExit('no such luck')")

    result = call("demo", "--script", script)

    assert result.exit_code == 1
    assert "no such luck" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_example_is_found():
    """In a checkout as well as in an installed package."""
    assert find_example().name == "train_gpt.py"


def test_the_example_inside_an_installed_package(tmp_path, monkeypatch):
    """An installed wheel carries the example; a package without it says so."""
    import click

    import spotsafe

    package = tmp_path / "site-packages" / "spotsafe"
    (package / "examples").mkdir(parents=True)
    monkeypatch.setattr(spotsafe, "__file__", str(package / "__init__.py"))
    with pytest.raises(click.ClickException, match=r"train_gpt\.py is not there"):
        find_example()

    (package / "examples" / "train_gpt.py").write_text("")

    assert find_example() == package / "examples" / "train_gpt.py"
