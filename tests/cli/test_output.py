"""How results are printed."""

from __future__ import annotations

import contextlib
import io
import json

import pytest

from spotsafe.cli import output

COLUMNS = ("name", "steps>")


class _Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def on_a_terminal(*arguments: object, monkeypatch: pytest.MonkeyPatch, **options: str) -> str:
    """What `print_table` prints there."""
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm")
    with contextlib.redirect_stdout(_Terminal()) as stream:
        output.print_table(*arguments, **options)
    return stream.getvalue()


def test_plain_columns_in_a_pipe(capsys):
    """Aligned by spaces, numbers to the right, no trailing blanks: fit for awk."""
    output.print_table(COLUMNS, [("a", "7"), ("long", "1000")], title="runs")

    assert capsys.readouterr().out == "runs\nname  steps\na         7\nlong   1000\n"


def test_a_table_on_a_terminal(monkeypatch):
    """A terminal gets a table with a rule; text in brackets is no markup."""
    out = on_a_terminal(COLUMNS, [("[red]a", "7")], title="runs", monkeypatch=monkeypatch)

    assert "[red]a" in out
    assert "\N{BOX DRAWINGS LIGHT HORIZONTAL}" in out
    assert "runs" in out


def test_a_long_table_stays_fast_on_a_terminal(monkeypatch):
    """Rows by the hundred are printed plain."""
    rows = [("a", str(number)) for number in range(200)]

    out = on_a_terminal(COLUMNS, rows, monkeypatch=monkeypatch)

    assert len(out.splitlines()) == 201
    assert "\N{BOX DRAWINGS LIGHT HORIZONTAL}" not in out


def test_no_rows(capsys):
    """An empty table is its header."""
    output.print_table(COLUMNS, [])

    assert capsys.readouterr().out == "name  steps\n"


def test_json_has_no_words_that_json_lacks(capsys):
    """NaN and infinities become null at any depth; everything else stays."""
    output.print_json(
        {"a": float("nan"), "b": [1.5, float("inf"), {"c": -float("inf")}], "d": None, "e": "x"}
    )

    assert json.loads(capsys.readouterr().out) == {
        "a": None,
        "b": [1.5, None, {"c": None}],
        "d": None,
        "e": "x",
    }
