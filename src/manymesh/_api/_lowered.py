"""The third stage: a step split over its submeshes."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from .. import _compat
from .._compiled import Compiled, outline
from .._cost._clock import Durations
from .._cost._estimate import Estimate, estimate
from .._distributed._agree import agree
from .._distributed._world import World, world
from .._hardware import Hardware
from .._layout._donation import donation_pairs
from .._layout._layout import Layout
from .._layout._solve import solve
from .._layout._stacked import Joints, stacked_inputs, stacked_outputs
from .._plan._digest import digest, lines
from .._plan._instructions import Plan
from .._plan._number import home_between_calls
from .._program import Program
from .._program._stacked import positions
from .._progress import compiling
from .._report import Memory, Report, make_report
from .._runtime._compile import Executables
from .._runtime._exchange import everywhere, put
from .._runtime._lower import compile_and_look, lower
from .._runtime._memories import in_memories
from .._runtime._ownership import check_joined, ownership
from .._runtime._stacks import collapsed
from .._stages import Stage
from .._task import mesh_devices
from .._topology import PlannedDevice, auto_mesh, require_devices
from .._types import PyTree
from ._arguments import check_options
from ._floats import explain_float
from ._names import differences, names_of_inputs, names_of_values
from ._step import Step


@dataclass(eq=False, repr=False)
class Lowered(Stage):
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
    _constant: list[int]
    _donated: frozenset[int]
    _joints: Joints
    _plain: Callable[..., Any]
    follows_arguments: bool
    _committed: list[Sharding | None]
    _values: tuple[str, ...]  # of each host value what it is called, and in short what it is
    _memory_in: dict[int, str]  # argument -> the kind of memory in which it lies between steps, if that is the host's
    _memory_out: dict[int, str]  # the same of results
    _statics: tuple[tuple[Any, Any], ...]  # (position or name, value)
    _weak: tuple[bool, ...]  # of each result whether it is weakly typed, where it was traced
    findings: tuple[str, ...] = ()

    def _argument_types(self) -> list[Any]:
        described = jax.tree.leaves(self.arguments)
        return [jax.core.ShapedArray(x.shape, x.dtype, weak_type=x.weak_type) for x in described]

    @property
    def out_info(self) -> Any:
        """Shapes and dtypes of the result, in its structure, each with its sharding."""
        stacked = stacked_outputs(self.program, self.layout, self._joints, self._moved_results())
        within = {k: x for x in stacked for k in x.positions}
        leaves = []
        for o, (v, s) in enumerate(self.program.outputs):
            if o not in within:
                sharding = self._wanted.get(o, self.layout.sharding(v, s) if _compat.is_var(v) else None)
                leaves.append(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, sharding=sharding))
            elif o == within[o].positions.start:
                leaves.append(within[o].aval)
        leaves = [x.update(weak_type=weak) for x, weak in zip(leaves, self._weak, strict=True)]
        return jax.tree.unflatten(self._out_tree, in_memories(leaves, self._memory_out))

    @functools.cached_property
    def _estimate(self) -> Estimate:
        """What the step costs by our own count; made when it is first asked for."""
        at, shift = positions(self._in_tree.num_leaves, self.program.stacked_inputs), len(self.program.consts)
        late = frozenset(shift + at[i].start for i in self._memory_in if len(at[i]) == 1 and world() is None)
        given, _ = self._in_tree.children()
        leaves = given.children()[0].num_leaves if given.num_leaves else 0
        first = range(at[leaves - 1].stop if leaves else 0)
        with _compat.without_mesh():
            return estimate(self.program, self.plan, self.layout, self._states, self.findings, late, first)

    @_compat.boundary
    def report(self, hardware: Hardware | None = None, *, times: Durations | None = None) -> Report:
        """What the step will cost, without compiling and without devices: FLOPs, bytes, what crosses, memory, time.

        Args:
          hardware: what to predict the step's time for; that of the step's devices, where it is known, by default.
          times: measured durations to predict from instead, as from ``Compiled.durations``.

        Returns:
          A `Report`. Its figures are our own count; that of the compiled step has XLA's, and how far ours were off.

        Example:
          >>> import jax, jax.numpy as jnp, manymesh as mm
          >>> from manymesh.inspect import Hardware
          >>> front, back = (mm.task(lambda w, x: x @ w, n, devices=[i]) for i, n in enumerate(("front", "back")))
          >>> x = jax.ShapeDtypeStruct((64, 64), "float32")
          >>> report = mm.jit(lambda v, w, x: back(w, front(v, x))).lower(x, x, x).report(Hardware.h100())
          >>> [(task.name, task.forward_flops) for task in report.tasks]
          [('front', 524288.0), ('back', 524288.0)]
          >>> report.values[0].name, report.values[0].nbytes
          ('front -> back', 16384)
        """
        return make_report(self._estimate, hardware=hardware, times=times)

    def memory_analysis(self) -> dict[Any, Memory]:
        """Live bytes at the peak of a call, for each device, by our own count: ``report().memory``."""
        return self.report().memory

    def cost_analysis(self) -> dict[str, dict[str, float]]:
        """Our own count of one run of each fragment on each of its devices, in XLA's words, by the fragment's name."""
        return {
            f.name: {"flops": w.flops, "bytes accessed": w.bytes_read + w.bytes_written}
            for f, w in zip(self.program.fragments, self._estimate.works, strict=True)
        }

    @functools.cached_property
    def layout(self) -> Layout:
        """The sharding of every value on every submesh, the rule that decided it, and what is donated to what.

        Found without compiling, also for `planned_devices`; it is what the arrays then have.
        """
        program = self.program
        with _compat.without_mesh():
            layout = solve(
                program, asked=self._asked, arriving=self._arriving, wanted=self._made_in_place(), states=self._states,
                constant=self._constant, names=names_of_values(program, self._in_tree, self._out_tree),
                look=None if self._is_planned() else functools.partial(compile_and_look, program),
            )  # fmt: skip
            donation = donation_pairs(program, layout, self.plan.donatable)
            return replace(layout, submeshes=self._meshes_of_caller, donation=donation)

    @functools.cached_property
    def _meshes_of_caller(self) -> tuple[Mesh, ...]:
        """The submeshes as the caller has them: with axes of type Explicit where a sharding that is asked for, or given, says so.

        Inside of tasks all axes are Auto. What comes back is for code around the step, which may not join arrays of both types.
        """
        said = (*self._arriving.values(), *self._asked.values(), *self._wanted.values())  # the last has its way
        explicit = {auto_mesh(s.mesh): s.mesh for s in said if isinstance(s.mesh, Mesh) and auto_mesh(s.mesh) != s.mesh}
        return tuple(explicit.get(mesh, mesh) for mesh in self.program.submeshes)

    @functools.cached_property
    def arguments(self) -> PyTree:
        """Shape, dtype and sharding of each argument at its home, in the structure ``(args, kwargs)``.

        Found without compiling. What `manymesh.checkpoint.argument_of` gives is a part of it.
        """
        program, layout = self.program, self.layout
        described = []
        for v in program.invars[len(program.consts) :]:
            sharding = layout.sharding(v, home_between_calls(program, v))
            weak = bool(getattr(v.aval, "weak_type", False))
            described.append(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, sharding=sharding, weak_type=weak))
        stacked = stacked_inputs(program, layout, self._joints)
        leaves = collapsed(described, stacked, lambda x: x.aval)
        return jax.tree.unflatten(self._in_tree, in_memories(leaves, self._memory_in))

    def _is_planned(self) -> bool:
        """Whether a submesh has devices that nobody has."""
        return any(isinstance(d, PlannedDevice) for mesh in self.program.submeshes for d in mesh_devices(mesh))

    def as_text(self) -> str:
        """The program and the instructions of one call, readable."""
        return f"{self.program.as_text()}\n{self.plan.text([f.name for f in self.program.fragments])}"

    def __repr__(self) -> str:
        return f"Lowered({self._step.name}: {outline(self.program, self.plan)}; compile() makes it ready to run)"

    @_compat.boundary
    def compile(self, compiler_options: Mapping[str, Any] | None = None) -> Compiled:
        """Compiles every fragment.

        Args:
          compiler_options: handed to XLA for every fragment, after those of ``mm.jit``.

        Raises:
          MeshError: a submesh has `planned_devices`.
          ProcessError: processes derived different programs, or did not join each other.
        """
        check_options(compiler_options)
        processes = world()
        try:
            return self._compiled(processes, compiler_options)
        finally:
            if processes is not None:
                processes.is_ready()  # however it ended: the others wait no longer for this one than for any

    def _compiled(self, processes: World | None, compiler_options: Mapping[str, Any] | None) -> Compiled:
        step = self._step
        require_devices(step.name, self.program.submeshes)
        options = {**(step.compiler_options or {}), **(compiler_options or {})}
        executables = step.executables.setdefault(_compat.trace_settings(), Executables())
        before = (executables.compiled, executables.reused)
        layout = self.layout
        owner = ownership(self.program.submeshes, jax.process_index())
        if processes is None:
            check_joined(step.name, self.program.submeshes)
        else:
            self._agree(processes, layout)
        with compiling(step.name, len(self.program.fragments)) as progress:
            lowered = lower(
                self.program, self.plan, layout, executables,
                owner=owner, compiler_options=options or None, progress=progress,
            )  # fmt: skip
        literals = {
            o: put(_host_value(v), self._wanted.get(o) or self._literal_sharding(v, s))
            for o, (v, s) in enumerate(self.program.outputs)
            if not _compat.is_var(v)
        }
        moved = self._moved_results()
        made = (executables.compiled - before[0], executables.reused - before[1])
        compiled = Compiled(
            lowered, literals, self._in_tree, self._out_tree, tuple(sorted(self._donated)), made, step.name,
            stacked_inputs(self.program, layout, self._joints), stacked_outputs(self.program, layout, self._joints, moved),
            moved, self._found, functools.partial(names_of_inputs, self.program, self._in_tree),
            frozenset(self._wanted), frozenset(self._asked), self._memory_in, self._memory_out, self._types_to_see_to(),
        )  # fmt: skip
        compiled.explain = functools.partial(explain_float, step.name, self._plain, self.program)
        compiled.estimate, compiled.results, compiled.calling = (
            lambda: self._estimate,
            lambda: self.out_info,
            step.calling,
        )
        compiled.static_argnums = step.static_positions(len(self._in_tree.children()[0].children()))
        return compiled

    def _types_to_see_to(self) -> dict[int, bool]:
        """Results that are weakly typed where the step was traced or where they are made -> whether they are to be.

        JAX joins the branches of a conditional, and what a loop starts from with what it makes; here they stand by themselves.
        What changes its layout on the way loses the weakness of its type.
        """
        at = positions(len(self._weak), self.program.stacked_outputs)
        made = [_compat.abstract(self.program.outputs[places.start][0].aval).weak_type for places in at]
        return {o: weak for o, weak in enumerate(self._weak) if weak or made[o]}

    def _moved_results(self) -> dict[int, NamedSharding]:
        """The results that get the wanted sharding when they are finished."""
        direct = self._made_in_place()
        return {o: s for o, s in self._wanted.items() if o not in direct and _compat.is_var(self.program.outputs[o][0])}

    def _literal_sharding(self, literal: Any, s: int) -> NamedSharding:
        """Where a literal result is put that nobody wants anywhere; scalars are readable in every process."""
        if world() is not None and not literal.aval.shape:
            return everywhere()
        return NamedSharding(self.program.submeshes[s], PartitionSpec())

    def _agree(self, processes: World, layout: Layout) -> None:
        """Refuses to compile what other processes did not derive alike.

        Raises:
          ProcessError: they did not; with the lines that differ.
        """
        self._found = {}  # where uncommitted arguments are is each process's own affair
        said: dict[str, Any] = {
            "arguments": self._committed, "sharding": layout.sharding, "donation": layout.donation
        }  # fmt: skip

        def text(section: str) -> Iterable[str]:
            if section == "values":
                return self._values
            return self._named(section, lines(section, self.program, self.plan, **said))

        label = f"the compilation of {self._step.name}"
        with processes.in_turn(label):
            number = processes.begin(label, busy="compiling", unlike=self._unlike())
            sections = digest(self.program, self.plan, **said)
            sections["values"] = hashlib.sha256("\n".join(self._values).encode()).hexdigest()
            agree(processes, f"mm.jit({self._step.name})", number, sections, text, self._settings)

    def _unlike(self) -> str:
        """How the arguments, static ones too, and JAX's settings differ from those for which it was compiled before, if it was."""
        arguments = self.program.invars[len(self.program.consts) :]
        named = zip(names_of_inputs(self.program, self._in_tree), arguments, strict=True)
        weak = {True: " (weakly typed)", False: ""}
        types = {name: v.aval.str_short() + weak[_compat.abstract(v.aval).weak_type] for name, v in named}
        types |= {f"static argument {k!r}": f"{value!r:.80}" for k, value in self._statics} | _compat.named_settings()
        known = self._step.compiled_for.setdefault(self._step.name, [])
        found = differences(types, known)
        known.append(types)
        return found

    def _settings(self) -> Iterable[str]:
        """What may make processes derive different programs from the same lines."""
        donated = {"donate_argnums": self._step.donate_argnums, "donate_argnames": self._step.donate_argnames}
        return (f"{name}: {value}" for name, value in {**donated, **_compat.named_settings()}.items())

    def _named(self, section: str, said: Iterable[str]) -> Iterable[str]:
        """The lines of a section, with the names that users know: ``args[0]['w']: float32[4]`` for ``argument 0: ...``."""
        if section != "arguments":
            return said
        names = names_of_inputs(self.program, self._in_tree)
        return (f"{name}:{line.partition(':')[2]}" for name, line in zip(names, said, strict=True))

    def _made_in_place(self) -> dict[int, Any]:
        """The wanted shardings that results have when the plan ends; a second layout of one value on one submesh, and devices
        of no submesh, are reached by moving the finished result."""
        direct: dict[int, Any] = {}
        made: dict[Any, int] = {}
        for o, sharding in self._wanted.items():
            v, s = self.program.outputs[o]
            mesh = sharding.mesh
            if _compat.is_var(v) and mesh == self._meshes_of_caller[s]:
                first = made.setdefault((v, s), o)
                if self._wanted[first].spec == sharding.spec:
                    direct[o] = sharding
        return direct


def _host_value(literal: Any) -> Any:
    """A literal result; a plain Python number stays weakly typed, as from jax.jit."""
    value = np.asarray(literal.val, literal.aval.dtype)
    return value.item() if literal.aval.weak_type else value
