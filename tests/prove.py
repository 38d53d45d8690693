"""`make prove`: run the tests marked `prove` and write what they counted to `tests/PROOF.md`."""

from __future__ import annotations

import datetime as dt
import importlib.metadata
import os
import platform
import sys
import tempfile
from pathlib import Path

import pytest

from tests import proof

PAGE = Path(__file__).with_name("PROOF.md")


class _Counter:
    """Counts how the tests came out."""

    def __init__(self) -> None:
        self.outcomes: dict[str, int] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.outcome] = self.outcomes.get(report.outcome, 0) + 1


def main() -> int:
    """Run, write the page, and answer pytest's exit status."""
    counter = _Counter()
    with tempfile.TemporaryDirectory() as folder:
        numbers = Path(folder, "numbers.jsonl")
        numbers.touch()
        os.environ[proof.FILE] = str(numbers)
        status = int(pytest.main(["-m", "prove", *sys.argv[1:]], plugins=[counter]))
        entries = proof.recorded(numbers)
    versions = {"Python": platform.python_version()}
    versions |= {name: importlib.metadata.version(name) for name in ("spotsafe", "torch", "numpy")}
    versions["Machine"] = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    summary = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counter.outcomes.items()))
    if sys.argv[1:]:
        summary += f"; not all of it, only {' '.join(sys.argv[1:])}"
    date = dt.datetime.now(dt.timezone.utc).date().isoformat()
    page = proof.render(entries, date=date, versions=versions, summary=summary or "nothing was run")
    PAGE.write_text(page, encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
