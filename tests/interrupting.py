"""Ctrl-C at a chosen place: between any two instructions of a function."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from types import FrameType
from typing import Any


def interrupt(work: Callable[[], object], *, at: int, inside: Collection[str]) -> bool:
    """Call `work`, and raise KeyboardInterrupt before one of its instructions.

    Args:
        work: what to call.
        at: before how many instructions, from 0.
        inside: names of the functions whose instructions count. What other packages do is one instruction.

    Returns:
        Whether it came so far.
    """
    left = at

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left
        if frame.f_code.co_name not in inside or "spotsafe" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left < 0:
                sys.settrace(before)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False
