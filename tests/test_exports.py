"""The public names: sorted, there, and without torch until one needs it."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import spotsafe

WITHOUT_TORCH = [
    "spotsafe",
    "spotsafe.clock",
    "spotsafe.console",
    "spotsafe.errors",
    "spotsafe.events",
    "spotsafe.human",
    "spotsafe.identity",
    "spotsafe.ledger.reading",
    "spotsafe.ledger.record",
    "spotsafe.policy.cost",
    "spotsafe.policy.deadline",
    "spotsafe.policy.interval",
    "spotsafe.policy.restarts",
    "spotsafe.policy.retention",
    "spotsafe.testing.clock",
    "spotsafe.testing.killing",
    "spotsafe.testing.sinks",
]


def test_the_public_names_are_sorted_and_there() -> None:
    """`__all__` is what a reader finds things in; each name of it can be had, and `dir` shows them."""
    names = list(spotsafe.__all__)

    assert names == sorted(set(names))
    assert not [name for name in names if not hasattr(spotsafe, name)]
    assert set(names) <= set(dir(spotsafe))


def test_every_public_name_is_documented() -> None:
    """Every class and function that `spotsafe` offers says what it is."""
    offered = {name: getattr(spotsafe, name) for name in spotsafe.__all__}

    silent = [
        name
        for name, value in offered.items()
        if (inspect.isclass(value) or inspect.isfunction(value)) and not (value.__doc__ or "").strip()
    ]

    assert silent == []


def test_an_unknown_name_is_an_attribute_error() -> None:
    """Loading names lazily does not turn typing mistakes into something else."""
    with pytest.raises(AttributeError, match="sesion"):
        spotsafe.sesion  # type: ignore[attr-defined]  # noqa: B018 - the mistake is the test


def test_policies_are_offered_at_the_top() -> None:
    """What stands in the options of a session is imported from `spotsafe` itself."""
    from spotsafe.policy import interval, retention

    assert (spotsafe.latest, spotsafe.best, spotsafe.every) == (
        retention.latest,
        retention.best,
        retention.every,
    )
    assert (spotsafe.every_steps, spotsafe.every_time) == (interval.every_steps, interval.every_time)


def test_what_needs_no_torch_imports_none() -> None:
    """Importing all of it takes no second and works where torch is not installed."""
    program = f"import sys; sys.modules['torch'] = None; import {', '.join(WITHOUT_TORCH)}"

    subprocess.run([sys.executable, "-c", program], check=True)
