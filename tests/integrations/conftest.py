"""torch says each time that it saves without a process group, which is what is meant here."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

MEANT = "ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning"


def pytest_collection_modifyitems(items: Iterable[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(__file__.rpartition("/")[0]):
            item.add_marker(pytest.mark.filterwarnings(MEANT))
