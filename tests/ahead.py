"""Work that several tests wait for one after another, done by several cores at the same time."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Executor, Future
from typing import TypeVar

import pytest

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


def begin_all(
    request: pytest.FixtureRequest, pool: Executor, work: Callable[[K], T], *, of: str
) -> Mapping[K, Future[T]]:
    """Begin the work of every chosen test of a module, in their order.

    Args:
        request: of the module's fixture that gives the answer to the tests.
        pool: does the work.
        work: takes the value of the parameter.
        of: the name of the parameter that the tests differ by.
    """
    tests = [item for item in request.session.items if isinstance(item, pytest.Function)]
    mine = [item for item in tests if request.fixturename in item.fixturenames and item.path == request.path]
    return {
        value: pool.submit(work, value) for value in dict.fromkeys(item.callspec.params[of] for item in mine)
    }
