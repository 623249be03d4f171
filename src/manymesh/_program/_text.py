"""A flat program as text, with names that depend on nothing but the program: equal programs print equally.

    inputs: a f32[2,2], b f32[4,2], c f32[]
    loop 0 step: 2 microbatches
      xs d f32[2,2] = e, f
      carry g f32[] = c, then h, at last i
    e f32[2,2] = slice(b) limit_indices=(2, 2) start_indices=(0, 0)
    f f32[2,2] = slice(b) limit_indices=(4, 2) start_indices=(2, 0)
    0: j f32[2,2] = task front(a, d)
         inputs: a f32[2,2], b f32[2,2]
         c f32[2,2] = dot_general(b, a)
         results: c
    0: k f32[] = reduce_sum(j) axes=(0, 1)
    0: h f32[] = add(g, k)
    results: i

Variables are named in order of appearance. A node of a loop's body begins with the loop's number. What else a node says
stands in brackets after the equation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from jax.sharding import PartitionSpec

from .. import _compat
from .._compat import AbstractJaxpr, Atom, Eqn, Var
from .._task import Task
from ._nodes import Loop, Node

_INDENT = "  "
# Parameters worth a look; the others follow from the shapes, or are long.
_SHOWN = (
    "axes", "axis", "broadcast_dimensions", "dimension", "dimensions", "permutation", "start_indices", "limit_indices",
    "new_dtype", "names", "y",
)  # fmt: skip
_SHORT = {"float": "f", "int": "i", "uint": "u", "complex": "c", "bfloat": "bf"}
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def text(
    invars: Sequence[Var],
    outvars: Sequence[Atom],
    nodes: Sequence[Node],
    loops: Sequence[Loop],
    tasks: Mapping[str, Task],
) -> str:
    """The text of a flat program."""
    names = _Names()
    lines = ["inputs: " + ", ".join(names.declared(v) for v in invars)]
    for i, loop in enumerate(loops):
        lines += [_INDENT * (k > 0) + line for k, line in enumerate(_loop(i, loop, names))]
    for n in nodes:
        scope = "" if n.loop is None else f"{n.loop}: "
        lines.append(scope + _equation(n.eqn, names, tasks, n) + _tags(n, names, tasks))
        lines += [_INDENT + line for line in _bodies(n.eqn, tasks)]
    lines.append("results: " + ", ".join(names(v) for v in outvars))
    return "\n".join(lines)


class _Names:
    """Names of variables, in order of appearance."""

    def __init__(self) -> None:
        self._known: dict[Var, str] = {}

    def __call__(self, atom: Atom) -> str:
        if not _compat.is_var(atom):
            return _literal(atom.val) if isinstance(atom, _compat.Literal) else "_"
        if atom not in self._known:
            self._known[atom] = _letters(len(self._known))
        return self._known[atom]

    def declared(self, atom: Atom) -> str:
        """The name with the shape and dtype."""
        return f"{self(atom)} {short(atom)}" if _compat.is_var(atom) else self(atom)


def _letters(number: int) -> str:
    name = ""
    number += 1
    while number:
        number, rest = divmod(number - 1, len(_LETTERS))
        name = _LETTERS[rest] + name
    return name


def _literal(value: object) -> str:
    array = np.asarray(value)
    return str(array.item()) if array.ndim == 0 and array.dtype != object else f"<{array.dtype}{list(array.shape)}>"


def short(atom: Atom) -> str:
    """The dtype and shape of a value: ``f32[4,2]``."""
    dtype, shape = str(getattr(atom.aval, "dtype", "?")), getattr(atom.aval, "shape", ())
    word = dtype.rstrip("0123456789")
    return f"{_SHORT.get(word, word)}{dtype[len(word) :]}[{','.join(map(str, shape))}]"


def _loop(index: int, loop: Loop, names: _Names) -> Iterator[str]:
    yield f"loop {index} {loop.spec.name}: {loop.spec.num_microbatches} microbatches"
    for p in loop.xs:
        yield f"xs {names.declared(p.inner)} = {', '.join(map(names, p.outer))}"
    for c in loop.carries:
        yield f"carry {names.declared(c.inner)} = {names(c.init)}, then {names(c.out)}, at last {names(c.final)}"
    for p in loop.ys:
        yield f"ys {', '.join(map(names, p.outer))} = {names(p.inner)}"


def _equation(eqn: Eqn, names: _Names, tasks: Mapping[str, Task], node: Node | None = None) -> str:
    operands = ", ".join(map(names, eqn.invars))
    outs = ", ".join(names.declared(v) for v in eqn.outvars)
    what = str(eqn.primitive.name)
    if node is not None and node.task is not None:
        what = f"task {_name(node.task, tasks)}" + ("", "_bwd", "_wgt")[node.phase]
    return f"{outs} = {what}({operands})" + "".join(_params(eqn))


def _params(eqn: Eqn) -> Iterator[str]:
    for key in _SHOWN:
        value = eqn.params.get(key)
        if value is not None:
            yield f" {key}={value}"
    spec = getattr(eqn.params.get("sharding"), "spec", None)
    if isinstance(spec, PartitionSpec):
        yield f" {spec}"


def _tags(n: Node, names: _Names, tasks: Mapping[str, Task]) -> str:
    words = [
        "backward" if n.backward and n.task is None else "",
        "layout follows loop" if n.layout_follows_loop else "",
        "unstacks" if n.unstacks else "",
        f"with {_name(n.colocated_with, tasks)}" if n.colocated_with is not None else "",
        f"on {dict(n.mesh.shape)}" if n.mesh is not None else "",
        *(f"if {names(index)} is {number}" for index, number in n.guard if n.is_guarded),
    ]
    said = [w for w in words if w]
    return f" [{', '.join(said)}]" if said else ""


def _name(mark: str, tasks: Mapping[str, Task]) -> str:
    known = tasks.get(mark)
    return f"{known.name}" if known is not None else f"unknown {mark}"


def _bodies(eqn: Eqn, tasks: Mapping[str, Task]) -> Iterator[str]:
    for value in eqn.params.values():
        for jaxpr in value if isinstance(value, (tuple, list)) else (value,):
            if _compat.is_jaxpr(jaxpr):
                yield from (_INDENT + line for line in _jaxpr(jaxpr, tasks))


def _jaxpr(jaxpr: AbstractJaxpr, tasks: Mapping[str, Task]) -> Iterator[str]:
    parts, names = _compat.open_jaxpr(jaxpr), _Names()
    yield "inputs: " + ", ".join(names.declared(v) for v in (*parts.constvars, *parts.invars))
    for eqn in parts.eqns:
        yield _equation(eqn, names, tasks)
        yield from (_INDENT + line for line in _bodies(eqn, tasks))
    yield "results: " + ", ".join(map(names, parts.outvars))
