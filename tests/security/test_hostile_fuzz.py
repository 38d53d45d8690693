"""Every file of a run changed at random, sealed again: an error of the tree or a result, and nothing outside touched.

Seeds come from hypothesis and are the same in every run; a failure prints the one that shows it.
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import spotsafe
from spotsafe.errors import SpotsafeError
from spotsafe.pinning import pin
from tests.security.forging import COMMANDS, command, forge_index, reseal, trained
from tests.session.rig import MANY_STARTS, Program

OUTSIDE = "../../../../precious"
NUMBERS: list[Any] = [
    -1,
    0,
    0.5,
    True,
    1 << 31,
    1 << 53,
    1 << 62,
    1 << 63,
    1 << 70,
    -(1 << 63),
    1e308,
    10**4000,
]
TEXTS: list[Any] = [
    "", "\x1b[2J", "../x", OUTSIDE, "/etc/passwd", "file:///etc/passwd", "a\nb", "x" * 5000, "$", "\u202e", "nan",
    "frozen-00000-000.safetensors", "a000001-s000000001-0001-00000000", "é" * 300,
]  # fmt: skip
OTHERS: list[Any] = [
    None, [], {}, [[]], [0, 1 << 62], [1 << 40], {"$": 1}, {"$": "deque", "maxlen": 1 << 62, "items": []},
    {"$": "int", "hex": "0x" + "f" * 9000}, {"$": "decimal", "text": "1e999999"}, {"$": "torch.dtype", "value": "onnx"},
    {"$": "range", "start": 0, "stop": 1 << 62, "step": 1}, {"$": "torch.Size", "value": [1 << 62, 1 << 62]},
    {"$": "tensor", "name": "model.first.weight"}, {"kind": "module"}, {"kind": "list", "items": [["a", {"kind": 1}]]},
]  # fmt: skip
KINDS = (
    "index",
    "index",
    "index",
    "index",
    "manifest",
    "attempt",
    "published",
    "pin",
    "ledger",
    "heartbeat",
    "data",
    "raw",
)


def places(node: Any) -> Iterator[tuple[Any, Any]]:
    """Container and key of everything inside a JSON document."""
    keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else []
    for key in keys:
        yield node, key
        yield from places(node[key])


def spoil(document: dict[str, Any], rng: random.Random) -> None:
    """One to three values replaced, left out, doubled or nested deeply."""
    for _ in range(rng.randint(1, 3)):
        container, key = rng.choice(list(places(document)))
        what = rng.random()
        if what < 0.1:
            del container[key]
        elif what < 0.2 and isinstance(container, list):
            container.extend(json.loads(json.dumps(container)))
        elif what < 0.25:
            deep: Any = 1
            for _ in range(rng.choice([60, 250])):
                deep = {"$": "tuple", "items": [deep]} if rng.random() < 0.5 else [deep]
            container[key] = deep
        else:
            alike = NUMBERS if isinstance(container[key], (int, float)) else TEXTS
            value = rng.choice(alike if rng.random() < 0.5 else [*NUMBERS, *TEXTS, *OTHERS])
            container[key] = json.loads(json.dumps(value)) if value != 10**4000 else 1 << 80
        if not list(places(document)):
            return


def attack(run: Path, kind: str, rng: random.Random) -> None:
    """Change one file of a kind, with the seals and digests that belong to it."""
    if kind == "index":
        forge_index(run, lambda index: spoil(index, rng))
    elif kind in {"manifest", "attempt", "pin"}:
        pattern = {
            "manifest": "checkpoints/*/manifest.json",
            "attempt": "attempts/*.json",
            "pin": "pins/*.json",
        }
        reseal(rng.choice(sorted(run.glob(pattern[kind]))), lambda members: spoil(members, rng))
    elif kind in {"ledger", "heartbeat"}:
        pattern = {"ledger": "ledger/*/events-*.json", "heartbeat": "ledger/*/heartbeat.json"}
        path = rng.choice(sorted(run.glob(pattern[kind])) or [run / "ledger" / "000001" / "heartbeat.json"])
        members = json.loads(path.read_bytes()) if path.exists() else {"step": 1, "more": [1]}
        spoil(members, rng)
        path.write_text(json.dumps(members))
    elif kind == "published":
        rng.choice(sorted(run.glob("attempts/*.published"))).write_text(rng.choice(TEXTS))
    else:
        pattern = "checkpoints/*/*.safetensors" if kind == "data" else "*/*"
        path = rng.choice(sorted(one for one in run.rglob(pattern) if one.is_file()))
        data = bytearray(path.read_bytes())
        for _ in range(3):
            data[rng.randrange(min(len(data), 200))] = rng.randrange(256)
        path.write_bytes(data)


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    """A whole run, with a pin and two attempts."""
    run = trained(tmp_path_factory.mktemp("good") / "run")
    with Program().session(run, restart_limits=MANY_STARTS):
        pass
    pin(str(run), hours=1)
    return run


def check(good: Path, place: Path, seed: int, *, every: bool) -> None:
    rng = random.Random(seed)
    outside, run = place / "precious", place / "a" / "b" / "run"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(good, run)
    outside.write_bytes(b"precious")
    attack(run, rng.choice(KINDS), rng)
    for name in COMMANDS if every else rng.sample(COMMANDS, 2):
        command(name, run, place / "out.pt")
    for read in (lambda: spotsafe.load(run), lambda: resume(run)):
        with contextlib.suppress(SpotsafeError):
            read()
    (place / "out.pt").unlink(missing_ok=True)
    assert sorted(one.name for one in place.iterdir()) == ["a", "precious"]
    assert [one.name for one in (place / "a").rglob("*") if one.parent.name in {"a", "b"}] == ["b", "run"]
    assert outside.read_bytes() == b"precious"


def resume(run: Path) -> None:
    with Program().session(run, restart_limits=MANY_STARTS, takeover=True):
        pass


SAME = {"derandomize": True, "deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}


@settings(max_examples=6, **SAME)
@given(seed=st.integers(0, 1 << 32))
def test_a_few_changed_runs(good, tmp_path_factory, seed):
    """Two commands, a load and a resume on each."""
    check(good, tmp_path_factory.getbasetemp() / "few", seed, every=False)


@pytest.mark.slow
@settings(max_examples=250, **SAME)
@given(seed=st.integers(0, 1 << 32))
def test_many_changed_runs(good, tmp_path_factory, seed):
    """Every command, a load and a resume on each."""
    check(good, tmp_path_factory.getbasetemp() / "many", seed, every=True)
