"""What `make prove` writes down."""

from __future__ import annotations

from tests import proof


def test_nothing_is_written_outside_make_prove(monkeypatch):
    """Without the variable, recording does nothing and fails nothing."""
    monkeypatch.delenv(proof.FILE, raising=False)

    proof.record("kills", count=1)


def test_what_is_recorded_is_read_back_in_order(tmp_path, monkeypatch):
    """Each call is a line of its own."""
    path = tmp_path / "numbers"
    monkeypatch.setenv(proof.FILE, str(path))

    proof.record("kills over the whole life", kills=60, identical=60)
    proof.record("kills in a save", kills=12)

    assert proof.recorded(path) == [
        ("kills over the whole life", {"kills": 60, "identical": 60}),
        ("kills in a save", {"kills": 12}),
    ]


def test_the_page():
    """The page has the date, the versions, the verdict and every count."""
    page = proof.render(
        [("kills in a save", {"kills": 12, "identical_ends": 12})],
        date="2026-01-02",
        versions={"Python": "3.11.7"},
        summary="3 passed",
    )

    assert "- Date: 2026-01-02\n- Result: 3 passed\n- Python: 3.11.7\n" in page
    assert "| kills in a save | kills: 12, identical ends: 12 |" in page
