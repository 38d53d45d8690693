"""How results are printed: tables on a terminal, plain aligned columns in a pipe, JSON for programs."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click

from spotsafe.human import printable

_PRETTY_ROWS = 60
"""Longer tables are printed plain on a terminal too: rich takes a millisecond for each row."""


def say(text: str, *, err: bool = False) -> None:
    """Print a line. What a checkpoint or a folder says may be in it, and is shown, not obeyed, by the terminal."""
    click.echo(_cell(text), err=err)


def print_json(value: Mapping[str, Any]) -> None:
    """Print one JSON object. Numbers that JSON cannot say (NaN, infinities) become null."""
    click.echo(json.dumps(_sayable(value), indent=2))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "") -> None:
    """Print a table; columns whose name ends in ``>`` are aligned to the right."""
    names = [column.rstrip(">") for column in columns]
    rows = [[_cell(cell) for cell in row] for row in rows]
    rights = [column.endswith(">") for column in columns]
    if not sys.stdout.isatty() or len(rows) > _PRETTY_ROWS:
        _print_plain(names, rights, rows, title=title)
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(
        box=box.SIMPLE_HEAD, title=Text(_cell(title)) if title else None, title_justify="left", pad_edge=False
    )
    for name, right in zip(names, rights, strict=True):
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console().print(table)


def _print_plain(
    names: Sequence[str], rights: Sequence[bool], rows: Sequence[Sequence[str]], *, title: str
) -> None:
    lines = [names, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(names))]
    if title:
        say(title)
    for line in lines:
        cells = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, rights, strict=True)
        ]
        click.echo("  ".join(cells).rstrip())


def _cell(text: str) -> str:
    return printable(text).replace("\n", "\\n")


def _sayable(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _sayable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_sayable(item) for item in value]
    return value
