"""Pure functions of the format, remembered: a search calls them with the same few values again and again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from spotsafe.checkpoint import attempts, catalog, claim, deleting, index, manifest, publish
from spotsafe.checkpoint.candidates import read_candidate
from spotsafe.writer import upload

_PLACES = (
    (attempts, "decode_record"),
    (claim, "encode_record"),
    (deleting, "encode_marker"),
    (index, "decode_index"),
    (manifest, "decode"),
    (publish, "encode_manifest"),
)


@contextmanager
def remembered() -> Iterator[None]:
    """Within it, what a function answered once it answers again without work; errors are not kept."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name in _PLACES:
            patch.setattr(module, name, _remembering(getattr(module, name), key=_hashable))
        patch.setattr(upload, "block_digests", _remembering(upload.block_digests, key=bytes))
        encode_index = _remembering(upload.encode_index, key=repr)
        patch.setattr(upload, "encode_index", lambda index, **_: encode_index(index))
        # Several threads of one process have no order.
        patch.setattr(
            catalog, "read_many", lambda store, names: [read_candidate(store, name) for name in names]
        )
        yield


def _remembering(function: Callable[..., Any], *, key: Callable[[Any], Any]) -> Callable[..., Any]:
    known: dict[Any, Any] = {}

    def answer(first: Any, **rest: Any) -> Any:
        place = (key(first), *rest.values())
        if place not in known:
            if len(known) > 100_000:
                known.clear()
            known[place] = function(first, **rest)
        return known[place]

    return answer


def _hashable(value: Any) -> Any:
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return value
