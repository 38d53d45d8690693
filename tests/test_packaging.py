"""What is installed: the wheel holds what the demo needs, and promises no more than was tried."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import spotsafe

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    """The wheel of this checkout, built without a network."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def metadata(wheel: zipfile.ZipFile):
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    return Parser().parsestr(wheel.read(name).decode())


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    """Every module, the marker for type checkers, and the demo's example; no tests, no caches."""
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    modules = {
        path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src" / "spotsafe").rglob("*.py")
    }

    assert names == modules | {"spotsafe/py.typed", "spotsafe/examples/train_gpt.py"}


def test_the_demo_finds_its_example_in_an_installed_wheel(wheel, tmp_path):
    """Without the repository the example comes from inside the package."""
    wheel.extractall(tmp_path)
    code = "from spotsafe.cli.demo import find_example; print(find_example())"
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )

    assert Path(result.stdout.strip()) == tmp_path / "spotsafe" / "examples" / "train_gpt.py"


def test_the_version_is_one(wheel):
    """The package, its metadata and the wheel agree."""
    assert metadata(wheel)["Version"] == spotsafe.__version__


def test_the_core_asks_for_lower_bounds_only(wheel):
    """An environment that has torch keeps every package it has: nothing is capped or pinned."""
    requirements = metadata(wheel).get_all("Requires-Dist")
    core = [one for one in requirements if "extra ==" not in one]

    assert len(core) == 9
    for one in requirements:
        assert re.fullmatch(r"[\w-]+>=[\d.]+", one.split(";")[0].strip()), one


def test_the_command_is_installed(wheel):
    """`spotsafe` is the command line."""
    (name,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]

    assert "spotsafe = spotsafe.cli.app:main" in wheel.read(name).decode()


def test_every_development_dependency_is_pinned():
    """A fresh environment of next year is the one of today."""
    pinned = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (ROOT / "requirements" / "dev.txt").read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    }
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    core = re.search(r"^dependencies = \[(.*?)^\]", text, flags=re.DOTALL | re.MULTILINE)
    extras = re.search(r"^\[project.optional-dependencies\](.*?)^\[", text, flags=re.DOTALL | re.MULTILINE)
    assert core is not None
    assert extras is not None
    named = set(re.findall(r'"([\w-]+)>=', core[1] + extras[1]))

    assert {"torch", "s3fs", "ruff"} <= named
    assert named <= pinned, named - pinned
