"""An operation that takes time and no core: a native custom call that sleeps.

`jax.pure_callback` would do, but XLA runs a program with such a callback on the thread that issues it as soon as its
inputs are there, and then nothing overlaps. A custom call in the older calling convention is an operation like any
other. XLA says on standard error that this convention will go; ``prepare(..., quiet=True)`` keeps it from saying so.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

_Signature = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p))
_kept: list[Any] = []  # what XLA points to has to live as long as the process


@functools.cache
def sleeper(shape: tuple[int, ...], seconds: float | Callable[[], float]) -> Callable[[Any], Any]:
    """The identity on float32[shape] that takes that long, or as long as it is told each time, on the CPU."""
    nbytes = 4 * int(np.prod(shape))

    def sleep(out: int, inputs: Any) -> None:
        ctypes.memmove(out, inputs[0], nbytes)
        time.sleep(seconds() if callable(seconds) else seconds)

    name = f"manymesh_benchmark_sleep_{len(_kept)}"
    _kept.append(_Signature(sleep))
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(_kept[-1]), platform="cpu", api_version=0)
    return jax.ffi.ffi_call(name, jax.ShapeDtypeStruct(shape, np.float32), custom_call_api_version=1)
