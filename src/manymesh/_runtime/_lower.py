"""Executables for the fragments of a program whose layout is decided: all of them in one parallel wave."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from .. import _compat
from .._compat import Propagated, Var
from .._key import Keys
from .._layout._layout import Layout
from .._layout._solve import Specs, fragment_function, trace_fragment
from .._plan._instructions import Plan
from .._program import Fragment, Program
from .._task import mesh_devices
from ._compile import Executables, Request, run_requests, workers
from ._cuts import Cuts
from ._ownership import Ownership
from ._products import Products


@dataclass(eq=False)
class Lowered:
    """A program ready to run.

    Attributes:
      program: what it computes.
      plan: the instructions.
      layout: the sharding of every value.
      executables: one for each fragment; None for those of other processes.
      starts: for each fragment that is handed where pieces begin (`Cuts`), where they do.
    """

    program: Program
    plan: Plan
    layout: Layout
    executables: list[Any]
    starts: dict[int, tuple[int, ...]]

    def sharding(self, v: Var, s: int) -> NamedSharding:
        """The sharding of a value on a submesh."""
        return self.layout.sharding(v, s)

    @property
    def outputs(self) -> list[NamedSharding | None]:
        """The sharding of each result; None for a literal."""
        return [self.sharding(v, s) if _compat.is_var(v) else None for v, s in self.program.outputs]


def lower(
    program: Program,
    plan: Plan,
    layout: Layout,
    cache: Executables,
    *,
    owner: Ownership | None = None,
    compiler_options: dict[str, Any] | None = None,
    progress: Callable[[str], None] = lambda name: None,
) -> Lowered:
    """Compiles the fragments of a program that run here.

    Args:
      program, plan, layout: what to run, and how its values lie.
      cache: executables made before.
      owner: what runs here; by default everything.
      compiler_options: handed to XLA.
      progress: called with the name of each fragment that is compiled.
    """
    with ThreadPoolExecutor(workers(), "manymesh-compile") as pool:
        try:
            worker = _Lowerer(program, layout, cache, compiler_options, pool)
            own = [f for f in program.fragments if owner is None or owner.owns(f.submesh)]
            sizes: dict[int, int] = {}
            # Large ones first: no core waits for one at the end. But the smallest before them, for it is lowered at once,
            # and a core is busy while the largest is lowered.
            own.sort(key=lambda f: -_equations(f.jaxpr, sizes))
            own = own[-1:] + own[:-1]
            requests = [functools.partial(worker.request, f) for f in own]
            made = run_requests([f.name for f in own], requests, progress)
            executables: list[Any] = [None] * len(program.fragments)
            for f, executable in zip(own, made, strict=True):
                executables[f.index] = executable
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        finally:
            cache.settle(pool)
    return Lowered(program, plan, layout, executables, worker.starts)


class _Lowerer:
    def __init__(
        self,
        program: Program,
        layout: Layout,
        cache: Executables,
        options: dict[str, Any] | None,
        pool: ThreadPoolExecutor,
    ) -> None:
        self.program, self.layout, self.cache = program, layout, cache
        self.options, self.pool = options, pool
        self.keys = Keys()
        self.products = Products()
        self.starts: dict[int, tuple[int, ...]] = {}

    def request(self, f: Fragment) -> Request:
        """Asks for the executable of a fragment."""
        ins, outs = (tuple(self.layout.spec(v, f.submesh) for v in variables) for variables in (f.invars, f.outvars))
        donated = tuple(sorted(k for k, _ in self.layout.donation.get(f.index, ())))
        key = (self.keys(f.jaxpr), ins, outs, donated, tuple(sorted((self.options or {}).items())))
        mesh = self.layout.submeshes[f.submesh]
        cuts = Cuts.of(f, lambda v: self.layout.spec(v, f.submesh))
        if cuts.starts:
            self.starts[f.index] = cuts.starts
        return self.cache.request(self.pool, key, mesh, lambda: self._make(f, cuts, donated))

    def _make(self, f: Fragment, cuts: Cuts, donated: Sequence[int]) -> Callable[[], Any]:
        """Lowers a fragment; what is returned compiles it."""
        ins, outs = ([self.layout.sharding(v, f.submesh) for v in each] for each in (f.invars, f.outvars))
        jaxpr = cuts.jaxpr(f)
        mesh = self.layout.submeshes[f.submesh]
        ins += [NamedSharding(mesh, PartitionSpec())] * len(cuts.starts)
        if mesh.size == 1 and mesh_devices(mesh)[0].platform == "cpu":
            jaxpr = self.products.joined(jaxpr)
        with _compat.without_mesh(), _compat.wide_types(jaxpr):
            traced = trace_fragment(
                f, jaxpr, in_shardings=tuple(ins), out_shardings=outs, donate_argnums=donated, keep_unused=True
            )
            return functools.partial(traced.lower().compile, self.options)


def compile_and_look(program: Program, f: Fragment, ins: Specs, outs: Specs) -> Propagated:
    """The specs that XLA chooses for a fragment when it compiles it, where there is no pass that finds them alone."""
    mesh = program.submeshes[f.submesh]

    def shardings(specs: Specs) -> list[NamedSharding | None]:
        return [None if s is None else NamedSharding(mesh, s) for s in specs]

    fun = fragment_function(f)
    if f.invars and all(s is None for s in ins):  # something has to name the devices
        fun = _on_mesh(fun, mesh)
    with _compat.without_mesh(), _compat.wide_types(f.jaxpr):
        jitted = jax.jit(fun, in_shardings=shardings(ins), out_shardings=shardings(outs), keep_unused=True)
        compiled = jitted.lower(*[_compat.abstract(v.aval) for v in f.invars]).compile()
    found_in, found_out = compiled.input_shardings[0], compiled.output_shardings
    return Propagated(
        [_compat.as_named(t, mesh, len(v.aval.shape)).spec for t, v in zip(found_in, f.invars, strict=True)],
        [_compat.as_named(t, mesh, len(v.aval.shape)).spec for t, v in zip(found_out, f.outvars, strict=True)],
    )


def _on_mesh(fun: Callable[..., Any], mesh: Any) -> Callable[..., Any]:
    """A function of arrays that runs on the devices of a mesh, whose inputs XLA may shard as it likes."""

    def on_mesh(x: Any, *rest: Any) -> Any:
        free = PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * x.ndim)
        return fun(jax.lax.with_sharding_constraint(x, NamedSharding(mesh, free)), *rest)

    on_mesh.__name__ = on_mesh.__qualname__ = fun.__name__
    return on_mesh


def _equations(jaxpr: Any, known: dict[int, int]) -> int:
    """How many equations a computation has, with those of its calls and loops; ``known`` is for those counted before."""
    if id(jaxpr) not in known:
        eqns = _compat.open_jaxpr(jaxpr).eqns
        known[id(jaxpr)] = len(eqns) + sum(_equations(inner, known) for e in eqns for inner in _compat.jaxprs_in(e))
    return known[id(jaxpr)]
