"""Executables for the fragments of a program, and the shardings that tie them together.

Fragments compile in dataflow order: what a fragment reads has the sharding its producer gave it, what
it makes is left to XLA unless something pins it. Values that are one value over time (an accumulator,
a piece of a batch and its place in the body, a state and its update) share one sharding, found once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from .. import _compat
from .._key import Keys
from .._mark import placed_on
from .._passes._wants import first_constraint
from .._program import Fragment, Program
from .._reshard._plan import Step, adapt_spec, plan_transfer
from ._compile import Executables, Request, first_touches, run_requests, workers
from ._instructions import Plan, Transfer


@dataclass(eq=False)
class Lowered:
    """A program ready to run.

    Attributes:
      program: what it computes.
      plan: the instructions.
      executables: one for each fragment.
      arrivals: sharding of each (input position, submesh).
      outputs: sharding of each result; None for a literal.
      transfers: position of a `Transfer` in the plan -> steps for each of its values.
    """

    program: Program
    plan: Plan
    executables: list[Any]
    arrivals: dict[tuple[int, int], NamedSharding]
    outputs: list[NamedSharding | None]
    transfers: dict[int, tuple[tuple[Step, ...], ...]]


class _Groups:
    """Variables that have to share a sharding."""

    def __init__(self) -> None:
        self.parent: dict[Any, Any] = {}

    def find(self, v: Any) -> Any:
        while v in self.parent:
            v = self.parent[v]
        return v

    def join(self, a: Any, b: Any) -> None:
        a, b = self.find(a), self.find(b)
        if a is not b:
            self.parent[a] = b


def lower(
    program: Program,
    plan: Plan,
    cache: Executables,
    *,
    given: dict[int, Any],
    wanted: dict[int, Any],
    states: Iterable[tuple[int, int]],
    compiler_options: dict[str, Any] | None = None,
    progress: Callable[[str], None] = lambda name: None,
) -> Lowered:
    """Compiles every fragment of a program.

    Args:
      program, plan: what to run.
      cache: executables made before.
      given: input position -> sharding it arrives with.
      wanted: result position -> sharding it has to have.
      states: (input, result) positions where the result replaces the input and has to keep its sharding.
      compiler_options: handed to XLA.
      progress: called with the name of each fragment that is compiled.
    """
    with ThreadPoolExecutor(workers(), "manymesh-compile") as pool:
        try:
            return _Lowerer(program, plan, cache, compiler_options, pool).run(given, wanted, states, progress)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        finally:
            cache.settle()


class _Lowerer:
    def __init__(
        self, program: Program, plan: Plan, cache: Executables, options: Any, pool: ThreadPoolExecutor
    ) -> None:
        self.program, self.plan, self.cache = program, plan, cache
        self.options, self.pool = options, pool
        self.groups = _Groups()
        self.keys = Keys()
        self.known: dict[tuple[Any, int], NamedSharding] = {}
        self.crossing = {(e.var, e.target): e.source for e in program.edges}
        self.wanted_by_reader = {
            (v, f.submesh): spec
            for f in reversed(program.fragments)
            for v in f.invars
            if (v, f.submesh) in self.crossing
            and (spec := first_constraint(f.jaxpr, v, program.submeshes[f.submesh])) is not None
        }
        for loop in program.loops:
            for inner, out, init, final in loop.carries:
                for v in (out, init, final):
                    if _compat.is_var(v):
                        self.groups.join(v, inner)
            for inner, outer in (*loop.cut, *loop.collected):
                for v in outer:
                    if _compat.is_var(v):
                        self.groups.join(v, inner)

    def run(
        self,
        given: dict[int, Any],
        wanted: dict[int, Any],
        states: Iterable[tuple[int, int]],
        progress: Callable[[str], None],
    ) -> Lowered:
        program = self.program
        for i, o in states:
            v, (out, s) = program.invars[i], program.outputs[o]
            if o not in wanted and _compat.is_var(out) and program.home[v] == s:
                self.groups.join(out, v)
        for o, sharding in wanted.items():
            out, s = program.outputs[o]
            if _compat.is_var(out):
                self.known[self.groups.find(out), s] = NamedSharding(program.submeshes[s], sharding.spec)
        for i, sharding in given.items():
            v = program.invars[i]
            for s in program.arrivals[v]:
                mesh = program.submeshes[s]
                spec = adapt_spec(sharding.spec, v.aval.shape, mesh)
                if s == program.home[v] or sharding.mesh.axis_names == mesh.axis_names:
                    self.known.setdefault((self.groups.find(v), s), NamedSharding(mesh, spec))
        executables = self._executables(progress)
        arrivals = {}
        for i, v in enumerate(program.invars):
            for s in program.arrivals[v]:
                arrivals[i, s] = self._sharding(v, s)
        outputs = [self._sharding(v, s) if _compat.is_var(v) else None for v, s in program.outputs]
        return Lowered(program, self.plan, executables, arrivals, outputs, self._transfers())

    def _executables(self, progress: Callable[[str], None]) -> list[Any]:
        """An executable for each fragment, compiled side by side where no sharding is waited for."""
        order = self._order()
        # The first fragment that touches a value may decide its sharding; the others wait for that one only.
        touched = [
            {
                key
                for v in (*f.invars, *f.outvars)
                if self._known(v, f.submesh) is None
                for key in self._keys(v, f.submesh)
            }
            for f in order
        ]
        requests = [functools.partial(self._compile, f) for f in order]
        made = run_requests([f.name for f in order], requests, first_touches(touched), progress)
        by_index = {f.index: executable for f, executable in zip(order, made, strict=True)}
        return [by_index[f.index] for f in self.program.fragments]

    def _keys(self, v: Any, s: int) -> list[Any]:
        """What a fragment on ``s`` that reads or makes ``v`` may decide, or has to wait for."""
        root = self.groups.find(v)
        return [root, (root, s), (root, self.crossing.get((v, s), s))]

    def _order(self) -> list[Fragment]:
        """Dataflow order, with what only feeds a loop after that loop, and what only prepares inputs at the end.

        A moment's decay, say, knows nothing about shardings; the fragment that adds the gradient does.
        """
        inputs = set(self.program.invars)
        ordered: list[Fragment] = []
        late: list[Fragment] = []
        last: list[Fragment] = []
        for item in self.program.order:
            if item >= 0:
                f = self.program.fragments[item]
                prepares = not f.tasks and bool(f.invars) and inputs.issuperset(f.invars)
                (late if f.deferred else last if prepares else ordered).append(f)
            else:
                ordered += self.program.body(-1 - item)
                loop = self.program.loops[-1 - item]
                fed = {init for _, _, init, _ in loop.carries if _compat.is_var(init)}
                fed |= {v for _, outer in loop.cut for v in outer if _compat.is_var(v)}
                ordered += [f for f in late if not fed.isdisjoint(f.outvars)]
                late = [f for f in late if fed.isdisjoint(f.outvars)]
        return ordered + late + last

    def _sharding(self, v: Any, s: int) -> NamedSharding:
        """The sharding of a value on a submesh; replicated if nothing ever said more."""
        found = self._known(v, s)
        if found is None:
            found = self.known[self.groups.find(v), s] = NamedSharding(self.program.submeshes[s], PartitionSpec())
        return found

    def _known(self, v: Any, s: int) -> NamedSharding | None:
        key = (self.groups.find(v), s)
        if key not in self.known and self.program.submeshes[s].size == 1:
            self.known[key] = NamedSharding(self.program.submeshes[s], PartitionSpec())
        if key not in self.known and (v, s) in self.crossing:
            mesh = self.program.submeshes[s]
            wanted = self.wanted_by_reader.get((v, s))
            source = self._known(v, self.crossing[v, s])
            if wanted is not None:
                self.known[key] = NamedSharding(mesh, wanted)
            elif source is not None:
                self.known[key] = NamedSharding(mesh, adapt_spec(source.spec, v.aval.shape, mesh))
        return self.known.get(key)

    def _compile(self, f: Fragment) -> Request:
        mesh = self.program.submeshes[f.submesh]
        ins = [self._known(v, f.submesh) for v in f.invars]
        if all(s is None for s in ins):
            # Something has to name the submesh: what can be sharded in one way only.
            ins = [None if v.aval.shape else self._sharding(v, f.submesh) for v in f.invars]
        outs: list[NamedSharding | None] = [self._known(v, f.submesh) for v in f.outvars]
        if not f.invars:
            outs = [s or NamedSharding(mesh, PartitionSpec()) for s in outs]
        tied = {self.groups.find(v) for v in f.outvars} & {self.groups.find(v) for v in f.invars}
        executable = yield from self._executable(f, ins, outs)
        found_in, found_out = _shardings_of(executable, f, mesh, ins, outs)
        # A tiling without a name, or named after another mesh of these devices, would reach the user as such.
        found = (*executable.input_shardings[0], *executable.output_shardings)
        changed = not all(isinstance(t, NamedSharding) and t.mesh == mesh for t in found)
        for v, s in zip(f.outvars, found_out, strict=True):
            key = (self.groups.find(v), f.submesh)
            if key[0] in tied and key not in self.known:
                # An accumulator or a state: what the computation makes decides, what it reads follows.
                read = {found_in[k] for k, w in enumerate(f.invars) if self.groups.find(w) is key[0]}
                changed |= read != {s}
                self.known[key] = s
        if changed:
            ins = [self._known(v, f.submesh) or found_in[k] for k, v in enumerate(f.invars)]
            outs = [self._known(v, f.submesh) or found_out[k] for k, v in enumerate(f.outvars)]
            executable = yield from self._executable(f, ins, outs)
            found_in, found_out = _shardings_of(executable, f, mesh, ins, outs)
        for variables, shardings in ((f.invars, found_in), (f.outvars, found_out)):
            for v, s in zip(variables, shardings, strict=True):
                self.known.setdefault((self.groups.find(v), f.submesh), s)
        return executable

    def _executable(self, f: Fragment, ins: list[Any], outs: list[Any]) -> Request:
        donated = self.plan.donated.get(f.index, ())
        options = tuple(sorted((self.options or {}).items()))
        specs = tuple(tuple(None if s is None else s.spec for s in shardings) for shardings in (ins, outs))
        key = (self.keys(f.jaxpr), specs, donated, options)
        mesh = self.program.submeshes[f.submesh]
        return self.cache.request(self.pool, key, mesh, lambda: self._make(f, ins, outs, donated))

    def _make(self, f: Fragment, ins: list[Any], outs: list[Any], donated: tuple[int, ...]) -> Callable[[], Any]:
        """Lowers a fragment; what is returned compiles it."""
        avals = [_compat.abstract(v.aval) for v in f.invars]

        def fragment(*args: Any) -> Any:
            return jax.core.eval_jaxpr(f.jaxpr, [], *args)

        fragment.__name__ = fragment.__qualname__ = f.name
        mesh = self.program.submeshes[f.submesh]
        if f.invars and all(s is None for s in ins):
            fragment = _on_mesh(fragment, mesh)
        with _compat.without_mesh(), _compat.unusable_donation_is_fine(), placed_on(mesh):
            jitted = jax.jit(fragment, in_shardings=ins, out_shardings=outs, donate_argnums=donated, keep_unused=True)
            return functools.partial(jitted.lower(*avals).compile, self.options)

    def _transfers(self) -> dict[int, tuple[tuple[Step, ...], ...]]:
        result = {}
        for i, ins in enumerate(self.plan.instructions):
            if isinstance(ins, Transfer):
                result[i] = tuple(
                    plan_transfer(v.aval.shape, self._sharding(v, ins.source), self._sharding(v, ins.target))
                    for v in ins.variables
                )
        return result


def _on_mesh(fun: Callable[..., Any], mesh: Any) -> Callable[..., Any]:
    """A function of arrays that runs on the devices of a mesh, whose inputs XLA may shard as it likes."""

    def on_mesh(x: Any, *rest: Any) -> Any:
        free = PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * x.ndim)
        return fun(jax.lax.with_sharding_constraint(x, NamedSharding(mesh, free)), *rest)

    on_mesh.__name__ = on_mesh.__qualname__ = fun.__name__
    return on_mesh


def _shardings_of(
    executable: Any, f: Fragment, mesh: Any, ins: list[Any], outs: list[Any]
) -> tuple[list[Any], list[Any]]:
    """What an executable takes and gives, in terms of our mesh; what we asked for stays as we said it."""
    found_in, found_out = executable.input_shardings[0], executable.output_shardings
    return (
        [s or _compat.as_named(t, mesh, len(v.aval.shape)) for s, t, v in zip(ins, found_in, f.invars, strict=True)],
        [s or _compat.as_named(t, mesh, len(v.aval.shape)) for s, t, v in zip(outs, found_out, f.outvars, strict=True)],
    )
