"""Where a value came from that is no number, under ``jax_debug_nans`` and ``jax_debug_infs``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from .. import _compat
from .._mark import ignore_transforms
from .._program import Program
from ._arguments import gathered


def explain_float(
    name: str, plain: Callable[..., Any], program: Program, error: Any, leaves: Sequence[Any]
) -> FloatingPointError:
    """The public error for a fragment whose result is no number.

    As `jax.jit` does, the step is run once more, in reference mode and operation by operation, to find the line.

    Args:
      name: name of the step.
      plain: the step as a function of its leaves.
      program: that of the step, or of its part.
      error: what the fragment's executable raised: its name, and ``nan`` or ``inf``.
      leaves: the arguments.
    """
    fragment, kind = error.args[0].removeprefix("jit(").removesuffix(")"), error.args[1]
    what = {"nan": "NaN", "inf": "an infinity"}.get(kind, kind)
    place, where = next((f.called() for f in program.fragments if f.name == fragment), f"fragment {fragment!r}"), ""
    try:
        with ignore_transforms(), jax.disable_jit():
            plain(*gathered(list(leaves)))
    except FloatingPointError as found:
        notes = [note for note in getattr(found, "__notes__", ()) if note.startswith("in task ")]
        place = notes[0].removeprefix("in ") if notes else place
        line = _compat.users_frame(found)
        where = f", at {line}" if line else ""
    except Exception:  # arguments that are gone, or code that cannot run eagerly: the fragment has to do
        where = ""
    return FloatingPointError(
        f"mm.jit({name}): {what} in a result of {place}{where}; jax_debug_{kind}s is set, which looks at every result"
    )
