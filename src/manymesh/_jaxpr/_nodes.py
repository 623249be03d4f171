"""The flat form of a program: equations in order, with what they stand for, and loops beside them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _compat


@dataclass(eq=False, slots=True)
class Node:
    """One equation of the flat program.

    Attributes:
      eqn: the equation, its variables those of the flat program.
      task: mark of the task it is, or None for an unmarked equation.
      backward: whether it belongs to a backward pass.
      loop: the loop whose body it is in, or None.
      deferred: whether it only prepares what a loop takes in (a piece of a batch, a zero accumulator); its
        sharding follows the loop's.
      apart: whether it takes a stacked value apart, layer by layer. It stays out of the layers' fragments, which
        would otherwise differ by their index.
      beside: mark of the task on whose submesh it runs, though it is no part of it.
      stack: its name stack: the scopes it was traced in. Empty for what no user wrote.
      weight: whether it is the half of a backward task that only makes weight gradients.
      mesh: the submesh of an unmarked equation that names axes of it; None where placement is free.
    """

    eqn: Any
    task: str | None = None
    backward: bool = False
    loop: Loop | None = None
    deferred: bool = False
    weight: bool = False
    apart: bool = False
    beside: str | None = None
    stack: str = ""
    mesh: Any = None

    @property
    def phase(self) -> int:
        """0 forward, 1 backward, 2 the weight-gradient half of a split backward."""
        return 2 if self.weight else int(self.backward)

    @property
    def inputs(self) -> list[Any]:
        """The variables that the equation reads; literals left out."""
        return [v for v in self.eqn.invars if _compat.is_var(v)]

    @property
    def outputs(self) -> list[Any]:
        """The variables that the equation makes and somebody may read."""
        return [v for v in self.eqn.outvars if _compat.is_var(v)]


@dataclass(eq=False, slots=True)
class Carry:
    """A value that one microbatch hands to the next: ``inner`` is read, ``out`` replaces it."""

    inner: Any
    out: Any
    init: Any
    final: Any


@dataclass(eq=False, slots=True)
class Pieces:
    """A value of the body that is another one for each microbatch: cut from an input, or collected."""

    inner: Any
    outer: tuple[Any, ...]


@dataclass(eq=False, slots=True)
class Loop:
    """A microbatch loop: its body is in the flat list once, tagged with this loop.

    Attributes:
      spec: what `microbatch` said (name, number of microbatches, schedule).
      carries: accumulators.
      cut: values that enter the body piece by piece.
      collected: values that leave the body piece by piece.
    """

    spec: Any
    carries: list[Carry] = field(default_factory=list)
    cut: list[Pieces] = field(default_factory=list)
    collected: list[Pieces] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Flat:
    """A whole program, flat: nodes in an order in which every value is made before it is read.

    ``stacked`` has the slices of values that an unrolled scan stacked.
    """

    invars: list[Any]
    outvars: list[Any]
    nodes: list[Node]
    loops: list[Loop]
    consts: dict[Any, Any]
    stacked: dict[Any, list[Any]] = field(default_factory=dict)


def nbytes(aval: Any) -> int:
    """Bytes of a value; a typed random key counts as its raw words."""
    dtype = aval.dtype
    width: int = 8 if jnp.issubdtype(dtype, jax.dtypes.extended) else int(np.dtype(dtype).itemsize)
    return int(math.prod(aval.shape)) * width


def trace_nodes(fun: Callable[..., Any], operands: Sequence[Any], **tags: Any) -> tuple[list[Node], list[Any]]:
    """Equations of a small function applied to variables of a flat program, as nodes.

    Returns:
      The nodes, and the variables (or literals) that hold the results.
    """
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in operands]
    with _compat.without_mesh():
        parts = _compat.open_jaxpr(jax.make_jaxpr(fun)(*avals))
    assert not parts.consts, "internal functions close over nothing"
    env = dict(zip(parts.invars, operands, strict=True))
    nodes = [Node(substitute(eqn, env), **tags) for eqn in parts.eqns]
    return nodes, [env.get(v, v) if _compat.is_var(v) else v for v in parts.outvars]


def substitute(eqn: Any, env: dict[Any, Any]) -> Any:
    """The equation with its operands replaced, and fresh result variables entered into ``env``.

    Structural: parameters, source information and nested jaxprs stay what they are.
    """
    invars = [env.get(v, v) if _compat.is_var(v) else v for v in eqn.invars]
    outvars = []
    for v in eqn.outvars:
        if _compat.is_var(v):
            env[v] = _compat.new_var(v.aval)
            outvars.append(env[v])
        else:
            outvars.append(v)
    return eqn.replace(invars=invars, outvars=outvars)


def rename(flat: Flat, alias: dict[Any, Any]) -> None:
    """Reads every variable of ``alias`` under its other name, in the whole program."""

    def now(v: Any) -> Any:
        while _compat.is_var(v) and v in alias:
            v = alias[v]
        return v

    for n in flat.nodes:
        if any(v in alias for v in n.inputs):
            n.eqn = n.eqn.replace(invars=[now(v) for v in n.eqn.invars])
    flat.outvars = [now(v) for v in flat.outvars]
    flat.stacked = {now(v): [now(w) for w in column] for v, column in flat.stacked.items()}
    for loop in flat.loops:
        for c in loop.carries:
            c.out, c.init = now(c.out), now(c.init)
        for p in loop.cut:
            p.outer = tuple(now(v) for v in p.outer)
        for p in loop.collected:
            p.inner = now(p.inner)


# Calls that mean no more than their body once derivatives were taken, with the names of their body.
_INLINED = {
    "jit": ("jaxpr",),
    "pjit": ("jaxpr",),
    "checkpoint": ("jaxpr",),
    "remat2": ("jaxpr",),
    "remat": ("jaxpr",),
    "closed_call": ("call_jaxpr",),
    "custom_jvp_call": ("call_jaxpr",),
    "custom_vjp_call": ("call_jaxpr", "fun_jaxpr"),
}


def inlined(eqns: list[Any]) -> tuple[list[Any], dict[Any, Any]]:
    """Equations with plain calls opened, so that what is inside can be told apart."""
    env: dict[Any, Any] = {}
    out: list[Any] = []

    def walk(inner: list[Any], sub: dict[Any, Any]) -> None:
        for e in inner:
            names = _INLINED.get(e.primitive.name, ())
            body = next((e.params[n] for n in names if _compat.is_jaxpr(e.params.get(n))), None)
            parts = _compat.open_jaxpr(body) if body is not None else None
            if parts is None or parts.consts:
                out.append(substitute(e, sub))
                continue
            operands = [sub.get(v, v) if _compat.is_var(v) else v for v in e.invars]
            deeper = dict(zip(parts.invars, operands, strict=True))
            walk(parts.eqns, deeper)
            for outer, result in zip(e.outvars, parts.outvars, strict=True):
                if _compat.is_var(outer):
                    sub[outer] = deeper.get(result, result) if _compat.is_var(result) else result

    walk(eqns, env)
    return out, env
