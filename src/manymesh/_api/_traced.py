"""The second stage: a step as one jaxpr."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from .. import _compat
from .._collector import collector_paused
from .._distributed._values import fingerprint
from .._distributed._world import world
from .._errors import ArgumentError, AxisError, MeshError, PlacementError
from .._findings import sentences
from .._layout._names import resolve_constraints
from .._mark import Recording
from .._passes._build import build
from .._passes._flatten import AcrossError, runs_across
from .._passes._unrolled import unrolled
from .._plan._emit import emit
from .._program import Program
from .._runtime._memories import HOST, host_kind
from .._runtime._processes import committed_sharding
from .._shown import joined
from .._stages import Stage
from .._topology import auto_mesh
from .._types import PyTree
from ._arguments import Arguments, donated_leaves
from ._boxes import with_parameter
from ._findings import note_accumulation, note_donated, note_dropped, note_opened, note_outside, note_pipeline
from ._hosted import Whole, lower_parts
from ._lowered import Lowered
from ._names import names_of_arguments, names_of_results, paths_of_arguments, paths_of_results, users_keys
from ._outside import Outside
from ._parts import split
from ._shardings import check_fit, check_submeshes, committed, default_device, expand, mesh_of, note_renamed, on_devices
from ._step import Step


@dataclass(eq=False, repr=False)
class Traced(Stage):
    """A step as one jaxpr, with the meaning of its marks.

    Attributes:
      jaxpr: the closed jaxpr of the step.
    """

    _step: Step
    _given: Arguments
    _record: Recording
    jaxpr: Any
    _shapes: Any
    _out_tree: Any
    _plain: Callable[..., Any]
    _moved: dict[int, Any]
    _pairs: list[tuple[int, int]] | None = None
    _constant: tuple[int, ...] = ()
    _memories: Mapping[int, str] = field(default_factory=dict)

    @property
    def fun_name(self) -> str:
        """What the function is called."""
        return self._step.name

    @functools.cached_property
    def _donated(self) -> frozenset[int]:  # type: ignore[override]
        return donated_leaves(self._given, self._step.donate_argnums, self._step.donate_argnames)

    @property
    def _in_tree(self) -> Any:
        return self._given.treedef

    def _argument_types(self) -> list[Any]:
        return list(self.jaxpr.in_avals)

    @property
    def out_avals(self) -> PyTree:
        """Shape and dtype of each result, as a `jax.core.ShapedArray`, in its structure."""
        return jax.tree.unflatten(self._out_tree, list(self.jaxpr.out_avals))

    @property
    def out_info(self) -> Any:
        """Shapes and dtypes of the result, in its structure."""
        return jax.tree.unflatten(self._out_tree, [_compat.abstract(s) for s in self._shapes])

    def __repr__(self) -> str:
        names = [t.name or "unnamed" for t in self._record.tasks.values()]
        return (
            f"Traced({self._step.name}: {len(self.jaxpr.jaxpr.eqns)} equations, {len(self.jaxpr.in_avals)} inputs, "
            f"{len(self._shapes)} results, tasks {joined(sorted(set(names)), 8) or 'none'}; lower() splits it)"
        )

    @_compat.boundary
    def lower(self, **options: object) -> Lowered:
        """Splits the step over its submeshes and lays out the instructions.

        Raises:
          ArgumentError: options were given, as ``jax.export`` does; there are none.
        """
        if options:
            raise ArgumentError(
                f"lower: found {', '.join(sorted(options))}, but takes no options; jax.export writes one program for one "
                "mesh, and a step has several: export jax.jit of the same function, in which tasks are plain functions"
            )
        with _compat.without_mesh():
            return self._lower()

    def _lower(self) -> Lowered:
        step, given = self._step, self._given
        wanted_in, asked_out = self._asked()
        wanted_out = {**self._moved, **asked_out}
        pinned_out = {i: auto_mesh(s.mesh) for i, s in wanted_out.items()}
        given_away = frozenset() if _compat.checks_floats() else self._donated
        pairs = self._states(given_away) if self._pairs is None else self._pairs
        memory_in, memory_out = self._lying(wanted_in, asked_out, pairs)
        wanted_in = {i: on_devices(s) for i, s in wanted_in.items()}
        wanted_out = {o: on_devices(s) for o, s in wanted_out.items()}
        pinned_in = {i: auto_mesh(s.mesh) for i, s in wanted_in.items()}
        put = {i: s for i, x in enumerate(given.leaves) if (s := committed(x)) is not None}
        if given.donated is None:  # by `donate_argnums`, and not as what a part of a step makes
            note_donated(self._record, self.jaxpr, given_away, names_of_arguments(given.treedef))
        if long := unrolled(self.jaxpr, self._record):
            self._record.findings.update(dict.fromkeys(long, PlacementError))
            step.report(self._record, None)  # before what takes long
        parts = None
        try:
            with collector_paused():
                program = build(
                    self.jaxpr, self._record, pinned_in, pinned_out, pairs,
                    shardings_in=wanted_in, shardings_out=wanted_out, arriving=put,
                    names=paths_of_arguments(given.treedef), result_names=paths_of_results(self._out_tree),
                )  # fmt: skip
        except AxisError as error:
            raise with_parameter(error, given) from None
        except AcrossError:
            parts = split(self.jaxpr, runs_across(self._record), self._record.loops)
            if parts is None:
                raise
        if parts is not None:
            note_opened(self._record, parts.opened)
            whole = Whole(
                step, given, self._record, self.jaxpr, self._shapes, self._out_tree, self._moved, wanted_in, pairs, given_away,
                memory_in, memory_out,
            )  # fmt: skip
            return lower_parts(whole, parts, lambda *of_part: Traced(*of_part)._lower())
        note_pipeline(self._record, program)
        if program is not None:
            note_accumulation(self._record, program)
            note_outside(self._record, program)
        if self._pairs is None:  # of a step in parts another one may run the task
            fragments = program.fragments if program is not None else ()
            note_dropped(self._record, {name for f in fragments for name in f.tasks}, self.jaxpr)
        follows = program is None
        if program is None:
            program = self._without_tasks()
        outside = Outside(program, given.leaves, self._shapes)
        tasks = program.tasks.values()
        names = [f" {name}" for name in names_of_arguments(given.treedef)]
        check_submeshes("in_shardings", outside.whole_in(wanted_in), names, tasks)
        note_renamed(self._record, "in_shardings", outside.whole_in(wanted_in), names, tasks)
        names = [f" {name}" for name in names_of_results(self._out_tree)]
        check_submeshes("out_shardings", outside.whole_out(wanted_out), names, tasks)
        note_renamed(self._record, "out_shardings", outside.whole_out(wanted_out), names, tasks)
        try:
            program, findings = resolve_constraints(program)
        except AxisError as error:
            raise with_parameter(error, given) from None
        self._record.findings.update(dict.fromkeys(findings, AxisError))
        step.report(self._record, self.jaxpr)
        donated = frozenset(k for i in given_away for k in outside.inputs(i))
        states = [
            (i, o)
            for pair in pairs
            for i, o in outside.pairs(*pair)
            if program.outputs[o][1] == program.home[program.invars[i]]
        ]
        with collector_paused():
            plan = emit(program, donated)
        arriving = outside.arriving()
        found = {i: s for i, x in enumerate(given.leaves) if (s := getattr(x, "sharding", None)) is not None}
        return Lowered(
            step, given.treedef, self._out_tree, program, plan, outside.shardings_in(wanted_in),
            outside.shardings_in(arriving), found, outside.shardings_out(wanted_out), states,
            [k for i in self._constant for k in outside.inputs(i)], given_away,
            outside.joints({**arriving, **wanted_in}, wanted_out), self._plain, follows,
            [committed_sharding(x) for x in given.leaves], self._host_values(), memory_in, memory_out,
            given.static,
            tuple(bool(_compat.abstract(x).weak_type) for x in self._shapes), tuple(sentences(self._record.findings)),
        )  # fmt: skip

    def _lying(
        self, asked_in: Mapping[int, Any], asked_out: Mapping[int, Any], pairs: Iterable[tuple[int, int]]
    ) -> tuple[dict[int, str], dict[int, str]]:
        """Arguments and results that lie in the memory of the host between steps: position -> the kind of memory.

        What the user says counts, and else a state stays in the memory in which it comes. Of a step in parts the whole says it.
        """
        if self._pairs is not None:
            return {}, {}
        memory_in = {}
        for i, x in enumerate(self._given.leaves):
            kind = host_kind(asked_in.get(i, getattr(x, "sharding", None)))
            if kind is not None:
                memory_in[i] = kind
        put = {**{o: s.memory_kind for o, s in self._moved.items()}, **self._memories}
        said = {**put, **{o: s.memory_kind for o, s in asked_out.items()}}
        kept = {o: memory_in[i] for i, o in pairs if i in memory_in}
        return memory_in, {o: kind for o, kind in {**kept, **said}.items() if kind == HOST}

    def _asked(self) -> tuple[dict[int, Any], dict[int, Any]]:
        """What ``in_shardings`` and ``out_shardings`` say of each argument and result, where they say something."""
        step, given = self._step, self._given
        static = {k for k, _ in given.static}
        dynamic = tuple(a for k, a in enumerate(given.dyn_args) if k not in static)
        wanted_in = {} if step.in_shardings is None else expand("in_shardings", step.in_shardings, dynamic)
        out = jax.tree.unflatten(self._out_tree, self._shapes)
        wanted_out = {} if step.out_shardings is None else expand("out_shardings", step.out_shardings, out)
        if wanted_in:
            shapes = [tuple(np.shape(x)) for x in given.leaves]
            check_fit("in_shardings", wanted_in, shapes, names_of_arguments(given.treedef))
        if wanted_out:
            check_fit("out_shardings", wanted_out, [x.shape for x in self._shapes], names_of_results(self._out_tree))
        return wanted_in, wanted_out

    def _host_values(self) -> tuple[str, ...]:
        """What the host values among the arguments are, where other processes should have been given the same."""
        if world() is None:
            return ()
        found = zip(names_of_arguments(self._given.treedef), map(fingerprint, self._given.leaves), strict=True)
        return tuple(f"{name}: value {short}" for name, short in found if short is not None)

    def _without_tasks(self) -> Program:
        """The program where no task and no sharding says what runs where: everything is where its arguments are.

        If these are nowhere yet, the function may name a mesh, as for ``jax.shard_map``.
        """
        committed = {i: m for i, x in enumerate(self._given.leaves) if (m := mesh_of(x)) is not None}
        said = (*committed.values(), *map(auto_mesh, _compat.meshes_named(self.jaxpr)))
        default = said[0] if said else Mesh(np.array([default_device()]), ("device",))
        everything = {i: default for i in range(len(self._given.leaves))}
        results = {i: default for i in range(len(self._shapes))}
        try:
            program = build(self.jaxpr, self._record, committed, {}) if committed else None
        except MeshError:  # arguments on several backends; one place then
            program = None
        program = program or build(self.jaxpr, self._record, everything, results)
        if program is None:  # nothing comes in and nothing goes out
            program = Program((default,), (), (), (), (), (), (), {}, {}, ())
        return program

    def _states(self, donated: frozenset[int]) -> list[tuple[int, int]]:
        """(input, result) pairs where the result is the next value of the input."""
        shapes = jax.tree.unflatten(self._out_tree, self._shapes)
        results: dict[Any, list[int]] = {}
        for o, (keys, leaf) in enumerate(jax.tree_util.tree_leaves_with_path(shapes)):
            path = users_keys(keys)
            for start in range(len(path) + 1):
                results.setdefault((path[start:], leaf.shape, leaf.dtype), []).append(o)
        pairs, taken = [], set()
        inputs = jax.tree_util.tree_leaves_with_path((self._given.dyn_args, self._given.dyn_kwargs))
        for i, ((keys, _), aval) in enumerate(zip(inputs, self.jaxpr.in_avals, strict=True)):
            path = users_keys(keys)
            if len(path) == 2 and i not in donated:
                continue  # a bare array and a result of its shape are not the same thing over time
            for o in results.get((path[2:], aval.shape, aval.dtype), ()):
                if o not in taken:
                    pairs.append((i, o))
                    taken.add(o)
                    break
        return pairs
