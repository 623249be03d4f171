"""Where a value came from that is no number, under ``jax_debug_nans`` and ``jax_debug_infs``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from .. import _compat
from .._compat import AbstractJaxpr, Atom, Eqn, Var
from .._distributed._world import world
from .._mark import ignore_transforms
from .._program import Program
from .._program._calls import call_body
from .._runtime._processes import committed_sharding
from .._task import Task
from ._arguments import gathered


def explain_float(
    name: str, plain: Callable[..., Any], program: Program, error: Any, leaves: Sequence[Any]
) -> FloatingPointError:
    """The public error for a fragment whose result is no number.

    As `jax.jit` does, the step is run once more, in reference mode and operation by operation, to find the line. Of a run of
    several processes, of which the others know nothing of it, the fragment alone is, where it has all that it reads.

    Args:
      name: name of the step.
      plain: the step as a function of its leaves.
      program: that of the step, or of its part.
      error: what the fragment's executable raised: its name, ``nan`` or ``inf``, and what it has read.
      leaves: the arguments.
    """
    made_by, kind, *read = error.args
    what = {"nan": "NaN", "inf": "an infinity"}.get(kind, kind)
    fragment = next((f for f in program.fragments if f.name == made_by), None)
    place, where = fragment.called() if fragment is not None else f"fragment {made_by!r}", ""
    alone = world() is not None and any(committed_sharding(x) is not None for x in leaves)
    try:
        with ignore_transforms(), jax.disable_jit(), _compat.floats_looked_at():
            if not alone:
                plain(*gathered(list(leaves)))
            elif fragment is not None and read and all(x.is_fully_addressable for x in read[0]):
                ByOperation(_compat.close(fragment.jaxpr), program.tasks)(*read[0])
    except FloatingPointError as found:
        notes = getattr(found, "__notes__", ())
        place = next((note.removeprefix("in ") for note in notes if note.startswith("in task ")), place)
        line = found.line if isinstance(found, _FoundFloat) else _compat.users_frame(found)
        where = f", at {line}" if line else ""
    except Exception:  # arguments that are gone, or code that cannot run eagerly: the fragment has to do
        where = ""
    return FloatingPointError(
        f"mm.jit({name}): {what} in a result of {place}{where}; jax_debug_{kind}s is set, which looks at every result"
    )


class _FoundFloat(FloatingPointError):
    """Of one operation, with the line of the user's that it was traced from."""

    def __init__(self, text: str, line: str) -> None:
        super().__init__(text)
        self.line = line


@dataclass(frozen=True)
class ByOperation:
    """What a part of a step computes, as a function that does one operation after the other and looks at each result.

    Attributes:
      jaxpr: the computation.
      tasks: mark of each task -> the task.
    """

    jaxpr: AbstractJaxpr
    tasks: Mapping[str, Task]

    def __call__(self, *leaves: Any) -> list[Any]:
        return self._run(self.jaxpr, leaves, None, "")

    def _run(self, jaxpr: AbstractJaxpr, operands: Sequence[Any], task: Task | None, line: str) -> list[Any]:
        parts = _compat.open_jaxpr(jaxpr)
        env: dict[Var, Any] = dict(zip(parts.constvars, parts.consts, strict=True))
        env |= zip(parts.invars, operands, strict=True)

        def values(atoms: Sequence[Atom]) -> list[Any]:
            return [v.val if isinstance(v, _compat.Literal) else env[v] for v in atoms]

        for eqn in parts.eqns:
            given = values(eqn.invars)
            body, here = call_body(eqn), _compat.source_line(eqn) or line
            if body is None:
                made = _looked_at(eqn, given, task, here)
            else:
                made = self._run(body, given, self.tasks.get(str(eqn.params.get("name")), task), here)
            env |= zip(eqn.outvars, made, strict=True)
        return values(parts.outvars)


def _looked_at(eqn: Eqn, operands: Sequence[Any], task: Task | None, line: str) -> list[Any]:
    """The results of an operation that is no call."""
    variables = [_compat.new_var(v.aval) for v in eqn.invars]
    alone = _compat.new_jaxpr(variables, eqn.outvars, [eqn.replace(invars=[*variables])])
    try:
        made: list[Any] = jax.core.eval_jaxpr(alone, [], *operands)
        return made
    except FloatingPointError as error:
        found = _FoundFloat(str(error), line)
        if task is not None:
            found.add_note(f"in task {task.name!r}")
        raise found from None
