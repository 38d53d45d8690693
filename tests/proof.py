"""Numbers that tests write down for `tests/PROOF.md`: how often something was done and came out right.

A test calls `record("what was done", kills=60, identical=60)`. Outside `make prove` that does nothing.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

FILE = "SPOTSAFE_PROOF"
"""Environment variable: the file to which lines of JSON are appended."""


def record(name: str, **numbers: float) -> None:
    """Append one line; safe from several processes at once."""
    path = os.environ.get(FILE)
    if path:
        line = json.dumps({"name": name, "numbers": numbers}) + "\n"
        with open(path, "a", encoding="utf-8") as file:
            file.write(line)


def recorded(path: Path) -> list[tuple[str, dict[str, float]]]:
    """What was written down, in order."""
    entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [(entry["name"], entry["numbers"]) for entry in entries]


def render(
    entries: list[tuple[str, dict[str, float]]], *, date: str, versions: dict[str, str], summary: str
) -> str:
    """The page for people."""
    lines = [
        "# Proof",
        "",
        "Written by `make prove`; do not edit.",
        "",
        f"- Date: {date}",
        f"- Result: {summary}",
        *(f"- {name}: {version}" for name, version in versions.items()),
        "",
        "| what | counts |",
        "|---|---|",
    ]
    for name, numbers in entries:
        counts = ", ".join(f"{key.replace('_', ' ')}: {value:,}" for key, value in numbers.items())
        lines.append(f"| {name} | {counts} |")
    return "\n".join(lines) + "\n"
