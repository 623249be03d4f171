"""Rewriting a loop so that accumulators stay unreduced.

An unreduced value gets a leading dimension with one entry for each device group along the data
axes, sharded over them. The sum over the batch is done by each group on its own rows (`jax.shard_map` with
these axes manual, the others left to XLA), what is linear is mapped over the new dimension, and after the loop
the terms are added up.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from ... import _compat
from ..._compat import Atom, Eqn, Var
from ..._key import Key, Keys
from ..._mark import constraint_p
from ..._program._edit import Editor
from ..._program._flat import FlatProgram
from ..._program._nodes import Carry, Node, shape_and_dtype
from ..._program._placement import Placement
from ..._program._rewrite import Tags, making, substitute, trace_eqns
from ._dims import Analysis, Entry, Frame, Value, constraint_entries
from ._linear import is_zero, linear_operands
from ._links import SCATTERS, shape_of


@dataclass(frozen=True)
class _Over:
    """The mesh axes over which a value is in parts."""

    mesh: Mesh
    axes: tuple[str, ...]

    @property
    def count(self) -> int:
        """Number of parts."""
        return math.prod(self.mesh.shape[a] for a in self.axes)

    @property
    def key(self) -> tuple[AbstractMesh, tuple[str, ...]]:
        """What an equation over these axes says: submeshes of one shape share it."""
        return self.mesh.abstract_mesh, self.axes

    def spec(self, *rest: Entry) -> PartitionSpec:
        """Unreduced over the axes, and the other dimensions as given."""
        return PartitionSpec(self.axes, *rest)

    def constrained(self, x: jax.Array, *rest: Entry) -> jax.Array:
        """Unreduced that lie where they belong; dimensions that are not given are left to XLA."""
        free = (PartitionSpec.UNCONSTRAINED,) * (x.ndim - 1 - len(rest))
        constrained: jax.Array = lax.with_sharding_constraint(
            x, NamedSharding(self.mesh.abstract_mesh, self.spec(*rest, *free))
        )
        return constrained

    def spread(self, x: jax.Array) -> jax.Array:
        """A whole value as parts: the value, and zeros."""
        shape = (self.count, *x.shape)
        first = lax.eq(lax.broadcasted_iota(jnp.int32, shape, 0), jnp.zeros(shape, jnp.int32))
        whole = lax.broadcast_in_dim(x, shape, tuple(range(1, len(shape))))
        return self.constrained(lax.select(first, whole, jnp.zeros(shape, x.dtype)))


@dataclass(eq=False)
class Unreduced:
    """How one accumulator stays unreduced: each device group keeps its own terms ("parts") of the sum.

    Attributes:
      carry: the accumulator.
      submesh: where it is.
      axes: the mesh axes that the parts are over.
      values: the values that become parts, in their frames.
      slots: operands of equations that are read as parts.
      sums: equations that sum over the batch -> for each operand, the axes of each dimension that is summed.
      blocked: axes that shard one of the values themselves.
      gathered: operands of such sums -> dimensions whose axes the sum needs for another dimension.
    """

    carry: Carry
    submesh: int
    axes: tuple[str, ...] = ()
    values: dict[Value, None] = field(default_factory=dict)
    slots: dict[tuple[Frame, int], set[int]] = field(default_factory=lambda: defaultdict(set))
    sums: dict[tuple[Frame, int], tuple[dict[int, tuple[str, ...]], ...]] = field(default_factory=dict)
    blocked: set[str] = field(default_factory=set)
    gathered: dict[Value, set[int]] = field(default_factory=lambda: defaultdict(set))


def rewrite(
    flat: FlatProgram, index: int, seen: Analysis, plans: Sequence[Unreduced], placement: Placement
) -> FlatProgram:
    """Makes the accumulators of ``plans`` stay unreduced, and adds their terms up after the loop.

    Args:
      flat: the program.
      index: the loop.
      seen: the dimensions in its body, as it is before.
      plans: the accumulators, which agree on the values that they share.
      placement: where everything is.
    """
    over = {p.carry: _Over(placement.submeshes[p.submesh], p.axes) for p in plans}
    worker = _Rewriter(plans, over)
    edit = Editor(flat)
    changed: dict[Carry, Carry] = {}
    for p in plans:
        assert starts_at_zero(p.carry.init, flat.index.producer), "sums over microbatches start at zero"
        shape, dtype = shape_and_dtype(p.carry.inner)
        key = (over[p.carry].key, shape, dtype)
        start, (init,) = worker.traced(
            ("start", *key), partial(_zeros, over[p.carry].count, shape, dtype), [], layout_follows_loop=True
        )
        edit.before_loop(index, start)
        inner, final = _compat.new_var(init.aval), _compat.new_var(init.aval)
        worker.new[seen.top, p.carry.inner] = inner
        total, _ = worker.traced(("total", *key), _total, [final], mesh=over[p.carry].mesh)
        total[-1] = making(total[-1], [p.carry.final])
        edit.after_loop(index, total)
        changed[p.carry] = Carry(inner, p.carry.out, init, final)
    for i, (node, eqns) in enumerate(zip(seen.nodes, worker.body(seen.top), strict=True)):
        if len(eqns) == 1 and eqns[0] is node.eqn:
            continue  # nothing is left of one that does nothing to parts, such as a cast that only took away a weak type
        assert node.task is None or len(eqns) == 1, "a task stays one equation"
        mesh = None if node.task is not None else worker.mesh[seen.top, i]
        edit.replace_node(node, [replace(node, eqn=e, mesh=mesh) for e in eqns])
    for before, carry in changed.items():
        edit.replace_carry(index, before, [replace(carry, out=worker.new[seen.top, before.out])])
    return edit.result()


def _zeros(count: int, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
    """What the parts of an accumulator are before the first microbatch."""
    zeros: jax.Array = lax.optimization_barrier(jnp.zeros((count, *shape), dtype))
    return zeros


def starts_at_zero(v: Atom, made_by: Mapping[Var, Node]) -> bool:
    """Whether what an accumulator starts from is known to be zero."""
    while _compat.is_var(v):
        if v not in made_by or made_by[v].primitive not in ("broadcast_in_dim", "optimization_barrier"):
            return False
        v = made_by[v].eqn.invars[0]
    return isinstance(v, _compat.Literal) and bool(v.val == 0)


def _total(parts: jax.Array) -> jax.Array:
    """The sum of the parts, in at least 32 bits."""
    wide = parts.astype(jnp.promote_types(parts.dtype, jnp.float32)) if _is_narrow(parts.dtype) else parts
    return lax.reduce_sum(wide, axes=(0,)).astype(parts.dtype)


def _is_narrow(dtype: np.dtype) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating)) and dtype.itemsize < 4


class _Rewriter:
    """Equations of frames with parts in place of values; ``new`` has the variables of the parts."""

    def __init__(self, plans: Sequence[Unreduced], over: dict[Carry, _Over]) -> None:
        self.over = {key: over[p.carry] for p in plans for key in p.values}
        self.sums = {key: found for p in plans for key, found in p.sums.items()}
        self.inside = {frame: o for (frame, _), o in self.over.items()}
        self.gathered: dict[Value, tuple[Mesh, set[int]]] = {}
        for p in plans:
            for key, dims in p.gathered.items():
                self.gathered.setdefault(key, (over[p.carry].mesh, set()))[1].update(dims)
        self.whole: dict[Value, Var] = {}
        self.mesh: dict[tuple[Frame, int], Mesh] = {}  # of equations that were rewritten
        self.new: dict[Value, Var] = {}
        self._templates: dict[Hashable, tuple[list[Var], list[Eqn], list[Any]]] = {}

    def traced(
        self, key: Hashable, fun: Callable[..., Any], operands: Sequence[Atom], **tags: Unpack[Tags]
    ) -> tuple[list[Node], list[Any]]:
        """`trace_nodes`, once for all layers that are alike: ``key`` says what ``fun`` and its operands are."""
        if key not in self._templates:
            given = [_compat.new_var(v.aval) for v in operands]
            self._templates[key] = given, *trace_eqns(fun, given)
        given, eqns, outs = self._templates[key]
        env: dict[Var, Atom] = dict(zip(given, operands, strict=True))
        made = [Node(substitute(e, env), **tags) for e in eqns]
        return made, [env.get(v, v) if _compat.is_var(v) else v for v in outs]

    def body(self, frame: Frame) -> list[list[Eqn]]:
        """For each equation of a frame, the equations in its place."""
        return [self._gather(frame, i) + self._equation(frame, i) for i in range(len(frame.eqns))]

    def _gather(self, frame: Frame, i: int) -> list[Eqn]:
        """Gathers operands that a sum over the batch needs whole along other dimensions, once for all contractions."""
        if frame.eqns[i].primitive.name != "dot_general":
            return []
        made: list[Eqn] = []
        for v in frame.eqns[i].invars:
            if not _compat.is_var(v) or (frame, v) not in self.gathered or (frame, v) in self.whole:
                continue
            mesh, dims = self.gathered[frame, v]
            self.mesh[frame, i] = mesh
            spec = [None if d in dims else PartitionSpec.UNCONSTRAINED for d in range(len(shape_of(v)))]
            sharding = NamedSharding(mesh.abstract_mesh, PartitionSpec(*spec))
            key = ("gather", sharding, *shape_and_dtype(v))
            gather = partial(lax.with_sharding_constraint, shardings=sharding)
            nodes, (self.whole[frame, v],) = self.traced(key, gather, [v])
            made += [n.eqn for n in nodes]
        return made

    def _equation(self, frame: Frame, i: int) -> list[Eqn]:
        eqn = frame.eqns[i]
        if eqn.primitive.name == "dot_general" and any(
            (frame, v) in self.whole for v in eqn.invars if _compat.is_var(v)
        ):
            eqn = eqn.replace(invars=[self.whole.get((frame, v), v) if _compat.is_var(v) else v for v in eqn.invars])
        child = frame.inner.get(i)
        if child is not None and child in self.inside:
            self.mesh[frame, i] = self.inside[child].mesh
            return self._call(frame, i, child)
        becomes = [v for v in eqn.outvars if (frame, v) in self.over]
        if not becomes:
            return [eqn]
        over = self.over[frame, becomes[0]]
        self.mesh[frame, i] = over.mesh
        if (frame, i) in self.sums:
            made, outs = self._sum(eqn, self.sums[frame, i], over)
        elif eqn.primitive.name == "optimization_barrier":
            return [self._barrier(frame, eqn)]
        else:
            made, outs = self._linear(frame, i, over)
        self.new.update({(frame, v): out for v, out in zip(eqn.outvars, outs, strict=True) if _compat.is_var(v)})
        return [n.eqn.replace(source_info=eqn.source_info) for n in made]

    def _sum(self, eqn: Eqn, summed: Sequence[dict[int, tuple[str, ...]]], over: _Over) -> tuple[list[Node], list[Any]]:
        """The sum over the batch, of each device group's rows."""
        specs = tuple(
            PartitionSpec(
                *(tuple(a for a in dims.get(d, ()) if a in over.axes) or None for d in range(len(shape_of(v))))
            )
            for v, dims in zip(eqn.invars, summed, strict=True)
        )

        def sum_own_rows(*operands: Any) -> Any:
            if eqn.primitive.name in SCATTERS:  # into zeros with the new dimension, or XLA would make them first
                first, *rest = operands
                return jax.vmap(lambda zeros: eqn.primitive.bind(zeros, *rest, **eqn.params))(first[None])
            return lax.expand_dims(eqn.primitive.bind(*operands, **eqn.params), (0,))

        parts = jax.shard_map(
            sum_own_rows, mesh=over.mesh.abstract_mesh, in_specs=specs, out_specs=over.spec(),
            axis_names=set(over.axes), check_vma=False,
        )  # fmt: skip
        return self.traced(("sum", over.key, specs, _key(eqn)), parts, eqn.invars)

    def _linear(self, frame: Frame, i: int, over: _Over) -> tuple[list[Node], list[Any]]:
        """A linear equation, applied to each part."""
        eqn = frame.eqns[i]
        operands, whole, axes = [], [], []
        together = linear_operands(eqn)
        for k, v in enumerate(eqn.invars):
            is_parts = self._is_parts(frame, v)
            operands.append(self.new[frame, v] if is_parts else v)
            whole.append(not is_parts and k in together and not is_zero(frame, v))
            axes.append(0 if is_parts or whole[-1] else None)

        def each_part(*xs: jax.Array) -> Any:
            xs = tuple(over.spread(x) if w else x for x, w in zip(xs, whole, strict=True))
            return jax.vmap(lambda *ys: eqn.primitive.bind(*ys, **eqn.params), in_axes=tuple(axes))(*xs)

        fun: Callable[..., Any] = each_part
        if eqn.primitive.name == "sharding_constraint":
            rest = constraint_entries(eqn, over.mesh)
            fun = lambda x: over.constrained(x, *rest)  # noqa: E731
        elif eqn.primitive.name == "manymesh_constraint":
            fun = lambda x: constraint_p.bind(x, **{**eqn.params, "names": (over.axes, *eqn.params["names"])})  # noqa: E731
        return self.traced(("linear", over.key, tuple(axes), tuple(whole), _key(eqn)), fun, operands)

    def _is_parts(self, frame: Frame, v: Atom) -> bool:
        return _compat.is_var(v) and (frame, v) in self.over

    def _barrier(self, frame: Frame, eqn: Eqn) -> Eqn:
        outs = []
        for v, out in zip(eqn.invars, eqn.outvars, strict=True):
            if self._is_parts(frame, out):
                self.new[frame, out] = _compat.new_var(self.new[frame, v].aval)
            outs.append(self.new.get((frame, out), out))
        new: Eqn = eqn.replace(
            invars=[self.new.get((frame, v), v) if _compat.is_var(v) else v for v in eqn.invars], outvars=outs
        )
        return new

    def _call(self, frame: Frame, i: int, child: Frame) -> list[Eqn]:
        """A call or scan whose body works on parts."""
        eqn = frame.eqns[i]
        before: list[Eqn] = []
        operands = list(eqn.invars)
        for k, v in enumerate(child.invars):
            if (child, v) not in self.over:
                continue
            if self._is_parts(frame, operands[k]):
                operands[k] = self.new[frame, operands[k]]
            else:
                over = self.over[child, v]
                key = ("spread", over.key, *shape_and_dtype(operands[k]))
                nodes, (operands[k],) = self.traced(key, over.spread, [operands[k]])
                before += [n.eqn for n in nodes]
            self.new[child, v] = _compat.new_var(operands[k].aval)
        eqns = [e for new in self.body(child) for e in new]
        name = next(k for k in ("jaxpr", "call_jaxpr") if _compat.is_jaxpr(eqn.params.get(k)))
        body = _compat.with_body(
            eqn.params[name],
            [self.new.get((child, v), v) for v in child.invars],
            [self.new.get((child, v), v) if _compat.is_var(v) else v for v in child.outvars],
            eqns,
        )
        scan = _compat.scan_parts(eqn) if eqn.primitive.name == "scan" else None
        after: list[Eqn] = []
        outs = []
        for j, (out, result) in enumerate(zip(eqn.outvars, child.outvars, strict=True)):
            if not self._is_parts(child, result):
                outs.append(out)
                continue
            aval = self.new[child, result].aval
            if scan is None or j < scan.num_carry:
                outs.append(_compat.new_var(aval))
                self.new[frame, out] = outs[-1]
            else:  # one result a step: the steps come first, then the parts
                outs.append(_compat.new_var(_compat.stacked(aval, scan.length)))
                made, (self.new[frame, out],) = trace_eqns(lambda x: jnp.swapaxes(x, 0, 1), [outs[-1]])
                after += made
        return [*before, eqn.replace(invars=operands, outvars=outs, params={**eqn.params, name: body}), *after]


def _key(eqn: Eqn) -> Key:
    """What an equation computes, whatever its variables are called."""
    invars = list(dict.fromkeys(v for v in eqn.invars if _compat.is_var(v)))
    return Keys()(_compat.new_jaxpr(invars, [v for v in eqn.outvars if _compat.is_var(v)], [eqn]))
