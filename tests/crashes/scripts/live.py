"""The script that the fork server runs: all of it is imported there already."""

from __future__ import annotations

from tests.crashes.process import main

main()
