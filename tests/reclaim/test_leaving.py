"""How to leave follows from two options, which are checked at once."""

from __future__ import annotations

import pytest

from spotsafe.reclaim.leaving import Leaving, how_to_leave


def test_the_default_is_to_exit_with_143():
    """Stopped, not finished and not broken."""
    assert how_to_leave() == Leaving(raises=True, code=143)


def test_return_goes_on_after_the_loop():
    """The program decides; the code is kept for it."""
    assert how_to_leave(on_reclaim="return") == Leaving(raises=False, code=143)


@pytest.mark.parametrize("code", [0, 1, 143, 255])
def test_any_exit_code_of_a_process_can_be_chosen(code: int):
    """Launchers differ in what they restart on."""
    assert how_to_leave(exit_code=code).code == code


@pytest.mark.parametrize("way", ["", "stop", "Exit", None])
def test_another_way_is_a_value_error(way: object):
    """The two ways are named."""
    with pytest.raises(ValueError, match='write "exit" or "return"'):
        how_to_leave(on_reclaim=way)  # type: ignore[arg-type]  # the point of the test


@pytest.mark.parametrize("code", [-1, 256, 100_000])
def test_a_code_that_no_process_can_have_is_a_value_error(code: int):
    """The kernel would cut it to eight bits, and 256 would become success."""
    with pytest.raises(ValueError, match="0 to 255"):
        how_to_leave(exit_code=code)


@pytest.mark.parametrize("code", [True, "143", 143.0, None])
def test_a_code_that_is_no_int_is_a_type_error(code: object):
    """True would otherwise be exit code 1."""
    with pytest.raises(TypeError, match="0 to 255"):
        how_to_leave(exit_code=code)  # type: ignore[arg-type]  # the point of the test
