"""Lines of the user's: where errors end, where warnings point, what hides from tracebacks."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from jax._src import source_info_util, traceback_util
from jax._src.interpreters import batching

F = TypeVar("F", bound=Callable[..., Any])

# JAX hides these files where it hides its own: in tracebacks, and as the origin of an equation.
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
traceback_util.register_exclusion(_HERE)
source_info_util.register_exclusion(_HERE)


def boundary(fun: F) -> F:
    """A public function whose errors end at the user's line: JAX's ``jax_traceback_filtering`` holds for it."""
    wrapped: F = traceback_util.api_boundary(fun)
    return wrapped


def users_level() -> int:
    """The ``stacklevel`` at which the caller's warning points to the line that called into this package."""
    package = __name__.split(".")[0]
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None:
        module = frame.f_globals.get("__name__", "")
        if module.split(".")[0] != package and module != traceback_util.__name__:  # which is around public functions
            break
        frame, level = frame.f_back, level + 1
    return level


def users_frame(error: BaseException) -> str:
    """``file.py:12 (function)`` of the innermost line of a traceback that belongs to no library; empty if there is none."""
    frames = [
        (frame.f_code.co_filename, line, frame.f_code.co_name)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if traceback_util.include_filename(frame.f_code.co_filename)
    ]
    if not frames and error.__cause__ is not None:  # a backward pass: the line of the operation that it is of
        return users_frame(error.__cause__)
    own = [frame for frame in frames if "site-packages" not in frame[0]] or frames
    return f"{own[-1][0]}:{own[-1][1]} ({own[-1][2]})" if own else ""


def is_of_vmap(error: BaseException) -> bool:
    """Whether an operation raised it as `jax.vmap` gave it one more axis."""
    return any(frame.f_code.co_filename == batching.__file__ for frame, _ in traceback.walk_tb(error.__traceback__))
