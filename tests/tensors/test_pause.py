"""Python's garbage collector, paused for a moment."""

from __future__ import annotations

import gc

import pytest

from spotsafe.tensors.pause import collection_paused


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_left_as_it_was(enabled: bool) -> None:
    """It pauses inside, after an error too, and a program that has switched it off keeps it off."""
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with collection_paused():
            assert not gc.isenabled()
        assert gc.isenabled() is enabled
        with pytest.raises(KeyError), collection_paused():
            raise KeyError
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()
