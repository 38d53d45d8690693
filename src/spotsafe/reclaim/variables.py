"""How the clouds' own libraries read their environment variables."""

from __future__ import annotations

from collections.abc import Mapping


def is_true(environ: Mapping[str, str], name: str) -> bool:
    """Whether a variable says ``true``, in any case, with or without blanks around it."""
    return environ.get(name, "").strip().lower() == "true"
