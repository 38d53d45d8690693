"""How long `spotsafe ls` takes on 200 checkpoints, from the start of the interpreter to its end.

The limit is half a second. Needs no torch.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.cli import runs

CHECKPOINTS = 200
LIMIT_S = 0.5
RUNS = 7


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        runs.run(Path(folder), *range(CHECKPOINTS))
        for name, arguments in {"ls": ["ls", folder], "ls --json": ["ls", folder, "--json"]}.items():
            spans = [_seconds(arguments) for _ in range(RUNS)]
            verdict = "ok" if min(spans) < LIMIT_S else "TOO SLOW"
            print(
                f"spotsafe {name}, {CHECKPOINTS} checkpoints: best {min(spans):.3f} s, "
                f"median {statistics.median(spans):.3f} s (limit {LIMIT_S} s): {verdict}"
            )


def _seconds(arguments: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "spotsafe", *arguments], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
