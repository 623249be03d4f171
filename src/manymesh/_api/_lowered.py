"""The third stage: a step split over its submeshes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from .. import _compat
from .._compiled import Compiled, outline
from .._layout._donation import donation_pairs
from .._layout._layout import Layout
from .._layout._solve import solve
from .._layout._stacked import Joints, stacked_inputs, stacked_outputs
from .._plan._instructions import Plan
from .._program import Program
from .._progress import compiling
from .._runtime._compile import Executables
from .._runtime._lower import compile_and_look, lower
from .._runtime._stacks import collapsed
from .._shown import Shown
from .._task import mesh_devices
from .._topology import PlannedDevice, auto_mesh, require_devices
from ._floats import explain_float
from ._names import names_of_values
from ._step import Step


@dataclass(eq=False, repr=False)
class Lowered(Shown):
    """A step split over its submeshes, laid out, not yet compiled.

    Attributes:
      program: fragments and edges.
      plan: the instructions of one call.
      follows_arguments: whether it has no task, and is where its arguments are.
    """

    _step: Step
    _in_tree: Any
    _out_tree: Any
    program: Program
    plan: Plan
    _asked: dict[int, NamedSharding]
    _arriving: dict[int, NamedSharding]
    _found: dict[int, Sharding]
    _wanted: dict[int, NamedSharding]
    _states: list[tuple[int, int]]
    _donated: frozenset[int]
    _joints: Joints
    _plain: Callable[..., Any]
    follows_arguments: bool

    @functools.cached_property
    def layout(self) -> Layout:
        """The sharding of every value on every submesh, the rule that decided it, and what is donated to what.

        Found without compiling, also for `planned_devices`; it is what the arrays then have.
        """
        program = self.program
        layout = solve(
            program, asked=self._asked, arriving=self._arriving, wanted=self._made_in_place(), states=self._states,
            names=names_of_values(program, self._in_tree, self._out_tree),
            look=None if self._is_planned() else functools.partial(compile_and_look, program),
        )  # fmt: skip
        return replace(layout, donation=donation_pairs(program, layout, self.plan.donatable))

    @functools.cached_property
    def arguments(self) -> Any:
        """Shape, dtype and sharding of each argument at its home, in the structure ``(args, kwargs)``.

        Found without compiling. What `manymesh.checkpoint.argument_of` gives is a part of it.
        """
        program, layout = self.program, self.layout
        described = []
        for v in program.invars[len(program.consts) :]:
            places = program.input_submeshes[v]
            sharding = layout.sharding(v, program.home[v] if program.home[v] in places else places[0])
            weak = bool(getattr(v.aval, "weak_type", False))
            described.append(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, sharding=sharding, weak_type=weak))
        stacked = stacked_inputs(program, layout, self._joints)
        return jax.tree.unflatten(self._in_tree, collapsed(described, stacked, lambda x: x.aval))

    def _is_planned(self) -> bool:
        """Whether a submesh has devices that nobody has."""
        return any(isinstance(d, PlannedDevice) for mesh in self.program.submeshes for d in mesh_devices(mesh))

    def as_text(self) -> str:
        """The program and the instructions of one call, readable."""
        return f"{self.program.as_text()}\n{self.plan.text([f.name for f in self.program.fragments])}"

    def __repr__(self) -> str:
        return f"Lowered({self._step.name}: {outline(self.program, self.plan)}; compile() makes it ready to run)"

    @_compat.boundary
    def compile(self) -> Compiled:
        """Compiles every fragment.

        Raises:
          MeshError: a submesh has `planned_devices`.
        """
        step = self._step
        require_devices(step.name, self.program.submeshes)
        executables = step.executables.setdefault(_compat.trace_settings(), Executables())
        before = (executables.compiled, executables.reused)
        direct = self._made_in_place()
        layout = self.layout
        with compiling(step.name, len(self.program.fragments)) as progress:
            lowered = lower(
                self.program, self.plan, layout, executables,
                compiler_options=step.compiler_options, progress=progress,
            )  # fmt: skip
        literals = {
            o: jax.device_put(
                _host_value(v), self._wanted.get(o, NamedSharding(self.program.submeshes[s], PartitionSpec()))
            )
            for o, (v, s) in enumerate(self.program.outputs)
            if not _compat.is_var(v)
        }
        moved = {o: s for o, s in self._wanted.items() if o not in direct and o not in literals}
        made = (executables.compiled - before[0], executables.reused - before[1])
        compiled = Compiled(
            lowered, literals, self._in_tree, self._out_tree, tuple(sorted(self._donated)), made, step.name,
            stacked_inputs(self.program, layout, self._joints), stacked_outputs(self.program, layout, self._joints, moved),
            moved, self._found,
        )  # fmt: skip
        compiled.explain = functools.partial(explain_float, step.name, self._plain)
        return compiled

    def _made_in_place(self) -> dict[int, Any]:
        """The wanted shardings that a fragment can give its result; another task's submesh, or a second layout of one
        value, is reached by moving the finished result."""
        direct: dict[int, Any] = {}
        made: dict[Any, int] = {}
        for o, sharding in self._wanted.items():
            v, s = self.program.outputs[o]
            mesh = sharding.mesh
            if _compat.is_var(v) and isinstance(mesh, Mesh) and auto_mesh(mesh) == self.program.submeshes[s]:
                first = made.setdefault(v, o)
                if self._wanted[first].spec == sharding.spec:
                    direct[o] = sharding
        return direct


def _host_value(literal: Any) -> Any:
    """A literal result; a plain Python number stays weakly typed, as from jax.jit."""
    value = np.asarray(literal.val, literal.aval.dtype)
    return value.item() if literal.aval.weak_type else value
