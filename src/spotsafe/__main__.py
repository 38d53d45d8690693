"""``python -m spotsafe`` is the command line."""

from __future__ import annotations

from spotsafe.cli.app import main

if __name__ == "__main__":
    main(prog_name="spotsafe")
