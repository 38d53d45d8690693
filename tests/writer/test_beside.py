"""Work beside the writing: done when it is asked for, and never going on behind an error."""

from __future__ import annotations

import threading

import pytest

from spotsafe.writer.beside import WORTH_IT, beside


@pytest.mark.parametrize("size", [0, WORTH_IT - 1, WORTH_IT, 10 * WORTH_IT])
def test_results_and_errors(size: int) -> None:
    """A future gives what the work gave, or raises what it raised."""
    with beside(size) as begin:
        good, bad = begin(lambda: 7), begin(lambda: int("x"))
        assert good.result() == 7
        with pytest.raises(ValueError, match="invalid literal"):
            bad.result()


def test_little_work_is_done_at_once() -> None:
    """No threads are made for it."""
    with beside(WORTH_IT - 1) as begin:
        assert begin(threading.get_ident).result() == threading.get_ident()


def test_much_work_goes_on_while_we_write() -> None:
    """The caller does not wait for it: two kinds of work can even wait for the caller."""
    go_on = threading.Event()
    with beside(WORTH_IT) as begin:
        waiting = [begin(lambda: go_on.wait(timeout=60)) for _ in range(2)]
        assert not any(one.done() for one in waiting)
        go_on.set()
        assert all(one.result() for one in waiting)


def test_nothing_goes_on_behind_an_error() -> None:
    """The memory may be used again when the error arrives: what had begun is over, the rest never begins."""
    go_on = threading.Event()
    ended: list[bool] = []
    with pytest.raises(KeyboardInterrupt), beside(WORTH_IT) as begin:
        futures = [begin(lambda: ended.append(go_on.wait(timeout=60))) for _ in range(5)]
        futures[-1].add_done_callback(lambda _future: go_on.set())  # it is done when it is cancelled
        raise KeyboardInterrupt
    assert ended == [True, True]
    assert all(future.done() for future in futures)
    assert futures[-1].cancelled()
