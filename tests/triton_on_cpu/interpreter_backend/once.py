"""Triton's interpreter patches `triton.language` at every launch and every call of a device function.

That took two fifths of a test's time, and what a device function's call patches stays patched anyway. Here it is done
once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def patch_once() -> None:
    """Keep the first patch of each module that kernels reach `triton.language` by."""
    from triton.runtime import interpreter

    if isinstance(interpreter._patch_lang, functools.partial):
        return
    interpreter._patch_lang = functools.partial(_patched, interpreter, interpreter._patch_lang, set())


def _patched(interpreter: Any, patch: Callable[[Any], Any], done: set[int], function: Any) -> Any:
    """Patch for a function, unless that was done for one that reaches the same modules; nothing is taken back."""
    language = interpreter.tl
    reached = {id(value) for value in function.__globals__.values() if value is language or value is language.core}
    if not reached <= done:
        done |= reached
        patch(function)
    return interpreter._LangPatchScope()
