"""What a scan reads in every round and that is large, but made of little, such as a causal mask, is made in the scan.

The gradient of a scan, as JAX takes it, computes before the forward scan what no round changes: one that masks the scores of
an attention then reads the mask, and what stands in its place, in every round from memory, each as large as the scores. In
the scan XLA makes them where they are read, at no cost; by itself it moves neither way what is large.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from .. import _compat
from .._compat import Eqn, Var
from .._program._edit import Editor
from .._program._flat import FlatProgram
from .._program._nodes import nbytes
from .._program._rewrite import with_atoms
from ._scans import scan_like

LARGE = 1 << 14  # bytes; below that, it is as well where it is
# What XLA fuses into whatever reads it.
CHEAP = frozenset(
    [
        "iota",
        "broadcast_in_dim",
        "reshape",
        "squeeze",
        "expand_dims",
        "transpose",
        "convert_element_type",
        "select_n",
        "add",
        "sub",
        "mul",
        "neg",
        "max",
        "min",
        "abs",
        "ge",
        "gt",
        "le",
        "lt",
        "eq",
        "ne",
        "and",
        "or",
        "xor",
        "not",
        "rem",
        "clamp",
        "sign",
        "floor",
    ]
)
_ENTERED = ("jit", "pjit", "closed_call", "remat", "checkpoint", "scan", "while", "cond")


def make_in_loops(flat: FlatProgram) -> FlatProgram:
    """Moves what is made of little into the scans of tasks that read it."""
    worker, edit = _Worker(), Editor(flat)
    for n in flat.nodes:
        eqn = worker.inside(n.eqn) if n.task is not None else n.eqn
        if eqn is not n.eqn:
            edit.replace_node(n, [replace(n, eqn=eqn)])
    return edit.result()


class _Worker:
    """Rewrites jaxprs; the same object for the same object, so that equal layers stay equal."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Any]] = {}  # by id, with the jaxpr so that the id stays its own

    def inside(self, eqn: Eqn) -> Eqn:
        """The equation with its jaxprs rewritten; itself where nothing changes."""
        if eqn.primitive.name not in _ENTERED or all(self.changed(j) is j for j in _compat.jaxprs_in(eqn)):
            return eqn
        return _compat.with_jaxprs(eqn, self.changed)

    def changed(self, jaxpr: Any) -> Any:
        """The jaxpr, open or closed; itself where nothing changes."""
        if id(jaxpr) not in self._known:
            self._known[id(jaxpr)] = jaxpr, self._rewritten(jaxpr)
        return self._known[id(jaxpr)][1]

    def _rewritten(self, jaxpr: Any) -> Any:
        parts = _compat.open_jaxpr(jaxpr)
        made: dict[Var, Eqn] = {}  # by what is cheap
        eqns: list[Eqn] = []
        moved = False
        for before in parts.eqns:
            eqn = self.inside(before)
            if _is_cheap(eqn):
                made.update(dict.fromkeys(eqn.outvars, eqn))
            new = _with_its_own(eqn, made) if eqn.primitive.name == "scan" else None
            moved |= new is not None
            eqns += [eqn] if new is None else new
        if moved:  # what was made before the scan may be read by nobody now
            outs = list(parts.outvars)
            eqns = _compat.dce(_compat.new_jaxpr(parts.invars, outs, eqns), [True] * len(outs))[0].eqns
        elif all(a is b for a, b in zip(eqns, parts.eqns, strict=True)):
            return jaxpr
        return _compat.with_eqns(jaxpr, eqns)


def _is_cheap(eqn: Eqn) -> bool:
    """Whether an equation costs nothing where its result is read."""
    if eqn.primitive.name in ("jit", "pjit"):
        return all(_is_cheap(e) for j in _compat.jaxprs_in(eqn) for e in _compat.open_jaxpr(j).eqns)
    return eqn.primitive.name in CHEAP and not eqn.effects


def _with_its_own(eqn: Eqn, made: Mapping[Var, Eqn]) -> list[Eqn] | None:
    """A scan that makes what is large of its constants in each round; None where there is none such."""
    scan = _compat.scan_parts(eqn)
    inner = _compat.open_jaxpr(scan.jaxpr)
    pairs = list(zip(inner.invars, eqn.invars, strict=True))
    own: dict[Var, Var] = {}
    for v, o in pairs[: scan.num_consts]:
        if _compat.is_var(o) and o in made and nbytes(o.aval) > LARGE:
            _, read = _chain([o], made)
            if 2 * sum(nbytes(x.aval) for x in read) <= nbytes(o.aval):
                own[v] = o
    if not own or inner.consts:
        return None
    chain, read = _chain(list(own.values()), made)
    consts = [(v, o) for v, o in pairs[: scan.num_consts] if v not in own] + [(x, x) for x in read]
    both = [*consts, *pairs[scan.num_consts :]]
    outs = [own.get(v, v) if _compat.is_var(v) else v for v in inner.outvars]
    body = [*chain, *(with_atoms(e, own) for e in inner.eqns)]
    new, made_now = scan_like([v for v, _ in both], outs, body, eqn, [o for _, o in both], len(consts))
    if any(a is not b for a, b in zip(new[-1].outvars, made_now, strict=True)):
        return None  # JAX has made something else of it
    return [*new[:-1], with_atoms(new[-1], {}, eqn.outvars)]


def _chain(wanted: Sequence[Var], made: Mapping[Var, Eqn]) -> tuple[list[Eqn], list[Var]]:
    """The equations that make some values, in their order, and what they read."""
    needed: set[int] = set()
    read: dict[Var, None] = {}
    pending = list(wanted)
    while pending:
        v = pending.pop()
        if v not in made:
            read[v] = None
        elif id(made[v]) not in needed:
            needed.add(id(made[v]))
            pending += [x for x in made[v].invars if _compat.is_var(x)]
    return [eqn for eqn in dict.fromkeys(made.values()) if id(eqn) in needed], list(read)
