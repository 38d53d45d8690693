"""`make prove`: run the tests marked `prove` and write what they counted to `tests/PROOF.md`.

They run in two processes side by side, for much of their time is spent waiting for disks, servers and children.
"""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import os
import platform
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from xml.etree import ElementTree as ET

from tests import proof

PAGE = Path(__file__).with_name("PROOF.md")
CRASHES = "tests/crashes"  # takes about as long as all the others
SHARES = ([CRASHES], ["--ignore", CRASHES])


class Share:
    """Some of the tests, in a process of their own.

    Args:
        number: of the share, for its files.
        arguments: for pytest.
        folder: for what it writes.
    """

    def __init__(self, number: int, arguments: list[str], folder: Path) -> None:
        self.numbers, self._report = folder / f"{number}.jsonl", folder / f"{number}.xml"
        self.numbers.touch()
        self._command = [
            sys.executable,
            "-m",
            "pytest",
            "-m",
            "prove",
            f"--junitxml={self._report}",
            *arguments,
        ]

    def run(self) -> int:
        """Run to the end, and answer pytest's exit status."""
        environment = {**os.environ, proof.FILE: str(self.numbers)}
        return subprocess.run(self._command, env=environment, check=False).returncode

    def outcomes(self) -> Counter[str]:
        """How the tests came out; a process that died says nothing about the tests that it had run."""
        if not self._report.exists():
            return Counter({"process died": 1})
        found: Counter[str] = Counter()
        for case in ET.parse(self._report).iter("testcase"):
            problem = next((one.tag for one in case if one.tag in {"failure", "error", "skipped"}), "passed")
            found[problem] += 1
        return found


def main() -> int:
    """Run, write the page, and answer whether anything failed."""
    chosen = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as pool:
        parts = [chosen] if chosen else list(SHARES)
        shares = [Share(number, part, Path(folder)) for number, part in enumerate(parts)]
        statuses = list(pool.map(Share.run, shares))
        entries = [entry for share in shares for entry in proof.recorded(share.numbers)]
        outcomes = sum((share.outcomes() for share in shares), Counter[str]())
    versions = {"Python": platform.python_version()}
    versions |= {name: importlib.metadata.version(name) for name in ("spotsafe", "torch", "numpy")}
    versions["Machine"] = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    summary = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
    if chosen:
        summary += f"; not all of it, only {' '.join(chosen)}"
    date = dt.datetime.now(dt.timezone.utc).date().isoformat()
    page = proof.render(entries, date=date, versions=versions, summary=summary or "nothing was run")
    PAGE.write_text(page, encoding="utf-8")
    return max(statuses)


if __name__ == "__main__":
    sys.exit(main())
