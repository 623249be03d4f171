"""What `jit` was told about a function, and what its programs share."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .. import _compat
from .._calling import PLAIN, Calling
from .._errors import AxisError
from .._findings import Finding, sentences
from .._mark import Recording
from .._passes._scopes import scope_names
from .._runtime._compile import Executables

MOST_TOLD = 12  # sentences of one warning


@dataclass(eq=False)
class Step:
    """A function and the settings it is compiled with.

    Attributes:
      fun, name: the function, and what it is called in messages.
      static_argnums, static_argnames, donate_argnums, donate_argnames: complete, numbers as names and names as numbers.
      in_shardings, out_shardings, compiler_options, strict: as given to `jit`.
      calling: how its user calls it.
      executables: what was compiled for all programs of the function, by the settings of JAX that it was lowered under.
      warned: what was warned about already, and patterns.
      compiled_for: name of the step or of a part of it -> the types of the arguments of each of its programs, by what they
        are called; known where there are several processes.
    """

    fun: Callable[..., Any]
    name: str
    static_argnums: tuple[int, ...]
    static_argnames: tuple[str, ...]
    donate_argnums: tuple[int, ...]
    donate_argnames: tuple[str, ...]
    in_shardings: Any
    out_shardings: Any
    compiler_options: dict[str, Any] | None
    strict: bool
    calling: Calling = PLAIN
    executables: dict[Any, Executables] = field(default_factory=dict)
    warned: set[Finding | str] = field(default_factory=set)
    compiled_for: dict[str, list[dict[str, str]]] = field(default_factory=dict)

    def static_positions(self, count: int) -> tuple[int, ...]:
        """Which of so many arguments by position are static."""
        return tuple(sorted({k % count for k in self.static_argnums if -count <= k < count}))

    def report(self, record: Recording, closed: Any) -> None:
        """Warns of what was found while tracing, and, with the jaxpr, of patterns without a scope; each once.

        Raises:
          ManyMeshError: something was found, and the step is strict.
        """
        if self.strict and record.findings:
            error = next(iter(record.findings.values())) or AxisError
            raise error(f"mm.jit({self.name}, strict=True): {_told(sentences(record.findings))}")
        found = [f for f in record.findings if f not in self.warned]
        new, unmatched = sentences(found), {}
        if closed is not None and record.implicit:
            unmatched = record.implicit.unmatched(scope_names(closed, record.implicit.depth))
            new += [text for pattern, text in unmatched.items() if pattern not in self.warned]
        if new:
            warnings.warn(f"mm.jit({self.name}): {_told(new)}", stacklevel=_compat.users_level())
        self.warned.update(found, unmatched)  # but not where warnings are errors


def _told(texts: Sequence[str]) -> str:
    """The first of some sentences, and how many more there are: each layer may have its own."""
    more = len(texts) - MOST_TOLD
    return "; ".join(texts[:MOST_TOLD]) + (
        f"; and {more} more, which lower(...).findings of a step that is not strict lists" if more > 0 else ""
    )
