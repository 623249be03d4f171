"""`Compiled`: a step that is ready to run, and what can be asked of it."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, Sharding

from . import _compat
from ._calling import PLAIN
from ._cost._clock import Durations
from ._cost._estimate import Estimate
from ._distributed._world import world
from ._errors import ArgumentError, ProcessError
from ._hardware import Hardware
from ._layout._stacked import StackedValue
from ._measure import loop_costs, measure, measured_durations
from ._moved_again import MovedAgain
from ._plan._donation import hand_over
from ._plan._instructions import Plan, Receive, Run
from ._plan._number import arguments_elsewhere, handed_on, home_between_calls
from ._program import Program
from ._program._stacked import positions
from ._report import Memory, Report, make_report
from ._runtime._bind import bind
from ._runtime._bind_processes import Results, bind_processes
from ._runtime._exchange import copied, is_key
from ._runtime._execute import Executor
from ._runtime._lower import Lowered
from ._runtime._memories import DEVICE, into, is_in_host_memory, lying
from ._runtime._observe import Observer
from ._runtime._ownership import ownership
from ._runtime._stacks import Stacks
from ._runtime._transport import LocalTransport
from ._runtime._watch import observer_of
from ._shown import joined
from ._stages import Stage
from ._types import PyTree
from .schedules import Costs

MOST_NAMES = 4  # arguments by which the structure of a call differs
MOST_TEXT = 160  # characters of a structure; a module's is pages long


class Compiled(Stage):
    """A compiled step: callable with arguments of the structure it was compiled for.

    Attributes:
      program: the fragments and edges it runs.
      homes: `NamedSharding` of each leaf of the arguments at its home.
    """

    explain: Callable[[Any, list[Any]], Exception] | None = None  # what a result that is no number comes from
    estimate: Callable[[], Estimate]  # what the step costs by our own count
    results: Callable[[], PyTree]  # what it returns
    calling = PLAIN  # what its user calls it with
    static_argnums: tuple[int, ...] = ()  # counted from the first argument

    def __init__(
        self,
        lowered: Lowered,
        literals: dict[int, jax.Array],
        in_tree: Any,
        out_tree: Any,
        donated: tuple[int, ...],
        compilations: tuple[int, int],
        name: str,
        stacked_in: Sequence[StackedValue],
        stacked_out: Sequence[StackedValue],
        moved: dict[int, NamedSharding],
        arriving: dict[int, Sharding],
        names: Callable[[], Sequence[str]],
        asked: frozenset[int] = frozenset(),
        asked_in: frozenset[int] = frozenset(),
        memory_in: Mapping[int, str] | None = None,
        memory_out: Mapping[int, str] | None = None,
        weak_out: Mapping[int, bool] | None = None,
    ) -> None:
        self._lowered, self._in_tree, self._out_tree = lowered, in_tree, out_tree
        self._donated, self._compilations, self.name = donated, compilations, name
        program = self.program = lowered.program
        at = positions(in_tree.num_leaves, program.stacked_inputs)
        owner, processes = ownership(program.submeshes, jax.process_index()), world()
        stays = handed_on(program, lowered.plan, asked_in, asked)
        if processes is not None:  # there, results that are numbers are known in all of them
            avals = {i: _compat.abstract(program.invars[i].aval) for i in stays}
            stays = frozenset(i for i, aval in avals.items() if aval.shape or is_key(aval.dtype))
        self._stays = {k - len(program.consts) for k in stays}
        self._executor: Executor
        made = [s or getattr(literals[o], "sharding", None) for o, s in enumerate(lowered.outputs)]
        leaving = [moved.get(o, s) for o, s in enumerate(made)]
        if processes is None:
            self._executor = bind(
                program, lowered.plan, lowered, lowered.executables, owner, LocalTransport(),
                starts=lowered.starts, literals=literals, leaving=moved, donation=lowered.layout.donation,
                arriving={at[i].start: s for i, s in arriving.items() if len(at[i]) == 1}, stays=stays,
            )  # fmt: skip
        else:
            kept = asked.union(*(x.positions for x in stacked_out))
            results = Results(made, moved, kept, literals)
            self._executor = across = bind_processes(lowered, owner, results, processes, name, names, stays)
            leaving, moved = across.result_shardings, {}
        shift = len(program.consts)
        homes = [lowered.sharding(v, home_between_calls(program, v)) for v in program.invars[shift:]]
        self._stacks = stacks = Stacks(stacked_in, stacked_out, self._executor)
        for i, sharding in arriving.items():
            if len(at[i]) > 1:
                stacks.prepare(at[i].start, sharding)
        self.homes: list[Any] = stacks.of_arguments(homes, lambda x: x.sharding)
        self.homes = lying(self.homes, memory_in or {})
        # Blocks of a stack, and what is in several processes, comes to its devices before a call begins.
        self._comes_first = [i for i in memory_in or {} if processes is not None or len(at[i]) > 1]
        self._moved = tuple(moved.items())
        self._leaving: list[Any] = stacks.of_results(leaving, lambda x: x.sharding)
        self._leaving = lying(self._leaving, memory_out or {})
        self._memory_out = tuple((memory_out or {}).items())
        self._weak_out = tuple((weak_out or {}).items())
        self._handover = hand_over(lowered.plan, frozenset(shift + k for i in donated for k in at[i]))
        self._dies = donated
        self._avals = stacks.of_arguments(
            [v.aval for v in program.invars[shift:]], lambda x: jax.core.ShapedArray(x.aval.shape, x.aval.dtype)
        )

    def __repr__(self) -> str:
        made, reused = self._compilations
        return f"Compiled({self.name}: {outline(self.program, self._lowered.plan)}; {made} compiled, {reused} reused)"

    def _argument_types(self) -> Sequence[Any]:
        return self._avals

    @property
    def out_info(self) -> PyTree:
        """Shapes and dtypes of the result, in its structure, each with its sharding."""
        described = zip(jax.tree.leaves(self.results()), self._leaving, strict=True)
        return jax.tree.unflatten(self._out_tree, [x.update(sharding=s) for x, s in described])

    @property
    def input_shardings(self) -> Any:
        """`NamedSharding` of each argument at its home, in the structure ``(args, kwargs)``."""
        return jax.tree.unflatten(self._in_tree, self.homes)

    @property
    def output_shardings(self) -> Any:
        """`NamedSharding` of each result, in its structure."""
        return jax.tree.unflatten(self._out_tree, self._leaving)

    @_compat.boundary
    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Runs the step, with what the function that it was made of takes, but what is static."""
        return self.calling.call(lambda *args, **kwargs: self.run(self._flatten(*args, **kwargs)), args, kwargs)

    def _flatten(self, *args: PyTree, **kwargs: PyTree) -> list[Any]:
        """The leaves of arguments that are what the step was compiled for."""
        arguments = (self._with_statics(args), kwargs)
        leaves, tree = jax.tree.flatten(arguments)
        if tree != self._in_tree:
            raise ArgumentError(f"{self.name}: {self._how_structures_differ(arguments)}")
        for i, (x, aval) in enumerate(zip(leaves, self._avals, strict=True)):
            try:
                given = jax.typeof(x)
            except TypeError:
                raise ArgumentError(
                    f"{self.name}: argument {self._path(i)} was compiled as {aval.str_short()}, called with {type(x).__name__} "
                    f"{x!r:.80}, which is no array"
                ) from None
            if given.shape != aval.shape or given.dtype != aval.dtype:
                raise ArgumentError(
                    f"{self.name}: argument {self._path(i)} was compiled as {aval.str_short()}, called with "
                    f"{given.str_short()}; call the function that mm.jit returned, which compiles for each shape and dtype"
                )
        return leaves

    def _with_statics(self, args: tuple[PyTree, ...]) -> tuple[PyTree, ...]:
        """The arguments of a call, with None for those that are static, if they are left out as for JAX."""
        count = len(args) + len(self.static_argnums)
        if count == len(args) or count != len(self._in_tree.children()[0].children()):
            return args
        given = iter(args)
        return tuple(None if k in self.static_argnums else next(given) for k in range(count))

    def _how_structures_differ(self, given: PyTree) -> str:
        """Which arguments of a call are not there, or were not there when the step was compiled, and what to do."""
        ours = dict.fromkeys(self._path(i) for i in range(len(self._avals)))
        theirs = dict.fromkeys(_name_of_leaf(path) for path, _ in _compat.leaves_with_paths(given))
        missing, surplus = [x for x in ours if x not in theirs], [x for x in theirs if x not in ours]
        parts = [
            *([f"compiled with {joined(missing, MOST_NAMES)}, which the call does not have"] if missing else []),
            *([f"called with {joined(surplus, MOST_NAMES)}, which it was not compiled with"] if surplus else []),
        ] or list(_differing(self._in_tree, jax.tree.structure(given)))
        return (
            f"{'; '.join(parts)}; static arguments are left out of the call, or None where they are by position, and the function "
            "that mm.jit returned compiles for each structure"
        )

    def run(self, leaves: list[Any]) -> PyTree:
        """Runs the step on the flat list of the leaves with which a user calls it."""
        if self._moved_again.calls > 0:
            self._moved_again.look(leaves)
        processes = world()
        if processes is None:
            return self.call_flat(leaves)
        with processes.in_turn(self.name):
            return self.call_flat(leaves)

    @functools.cached_property
    def _moved_again(self) -> MovedAgain:
        return MovedAgain(self.name, self._homes_read(), self._path, self.calling.place[world() is not None])

    def _homes_read(self) -> list[Sharding | None]:
        """The home of each leaf of the arguments; None where nothing reads it."""
        at = positions(len(self.homes), self.program.stacked_inputs)
        found = zip(self.homes, self.places(), at, strict=True)
        return [home if taken and here.start not in self._stays else None for home, taken, here in found]

    def call_flat(self, leaves: list[Any], observer: Observer | None = None) -> PyTree:
        """Runs the step on the flat list of its arguments' leaves; an observer is told what is done."""
        self._check_usable(leaves)
        if observer is None:
            observer = observer_of(self.name, self._lowered)
        given = self._on_devices(leaves) if self._comes_first else leaves
        try:
            given = self._stacks.cut(given, observer)
            if _compat.checks_floats():
                with _compat.floats_looked_at():
                    results = self._executor(given, observer)
            else:
                results = self._executor(given, observer)
        except _compat.InternalFloatingPointError as error:
            raise (
                self.explain(error, leaves) if self.explain is not None else FloatingPointError(*error.args[:2])
            ) from None
        for o in self._handover.copied:
            if not hasattr(results[o], "sharding"):
                continue  # the gradient of an integer (float0) has no buffer, and other processes' results are not here
            results[o] = copied(results[o])
        if self._handover.taken:
            with _compat.without_mesh():
                for o in self._handover.taken:
                    results[o] = _take_over(results[o])
        for o, sharding in self._moved:
            results[o] = self._executor.bring(results[o], sharding)
        self._executor.finish(results)
        for i in self._dies:
            x = leaves[i]
            if isinstance(x, jax.Array) and not x.is_deleted():
                x.delete()
        results = self._into_memories(self._stacks.join(results))
        for o, weak in self._weak_out:
            if results[o].weak_type != weak:
                results[o] = _compat.retyped(results[o], weak)
        return jax.tree.unflatten(self._out_tree, results)

    def _into_memories(self, results: list[Any]) -> list[Any]:
        """Results, each in the memory in which it lies between steps."""
        for o, kind in self._memory_out:
            results[o] = into(results[o], kind)
        return results

    def _on_devices(self, leaves: list[Any]) -> list[Any]:
        """The leaves of a call, those that the executor cannot bring to their devices when they are read there already."""
        given = list(leaves)
        for i in self._comes_first:
            if is_in_host_memory(given[i]):
                given[i] = into(given[i], DEVICE)
        return given

    def bring(self, x: Any, sharding: NamedSharding) -> jax.Array:
        """An array, or a host value, with a sharding of this step: asynchronously, from any devices."""
        return self._executor.bring(x, sharding)

    def places(self) -> list[tuple[NamedSharding, ...]]:
        """The shardings with which the submeshes that read it take each leaf of the arguments."""
        program, lowered = self.program, self._lowered
        flat = [
            tuple(lowered.sharding(v, s) for s in program.input_submeshes[v])
            for v in program.invars[len(program.consts) :]
        ]
        return self._stacks.of_arguments(flat, lambda x: (x.sharding,))

    def runs_on(self) -> list[tuple[str, Mesh]]:
        """What each fragment is called, and the submesh on which it runs."""
        return [(f.name, self.program.submeshes[f.submesh]) for f in self.program.fragments]

    def _check_usable(self, leaves: list[Any]) -> None:
        self._check_each(leaves)
        # Of every call, not only of the one that compiles: XLA refuses such a buffer in its own words, or ends the process.
        if self._donated and len(set(map(id, leaves))) < len(leaves):
            check_given_once(self.name, leaves, frozenset(self._donated), self._path)

    def _check_each(self, leaves: Sequence[Any]) -> None:
        # Almost every leaf is a usable one of this class; isinstance(x, jax.Array) is slow.
        for i in [i for i, x in enumerate(leaves) if type(x) is not _compat.ConcreteArray or x.is_deleted()]:
            x = leaves[i]
            if isinstance(x, jax.Array) and (isinstance(x, jax.core.Tracer) or x.is_deleted()):
                raise self._unusable(i, x)
            if type(x) is jax.ShapeDtypeStruct:
                raise described(f"{self.name}: argument {self._path(i)}", x)

    def _unusable(self, i: int, x: Any) -> Exception:
        context = f"{self.name}: argument {self._path(i)} of shape {x.shape}"
        if isinstance(x, jax.core.Tracer):
            return traced_argument(f"{context} is a tracer")
        return deleted(context)

    def _path(self, i: int) -> str:
        """``args[0]['w']`` of the i-th leaf."""
        return _name_of_leaf(_compat.key_paths(self._in_tree)[i])

    @property
    def arguments(self) -> PyTree:
        """Shape, dtype and sharding of each argument at its home, in the structure ``(args, kwargs)``."""
        described = [
            jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=aval.weak_type)
            for aval, sharding in zip(self._avals, self.homes, strict=True)
        ]
        return jax.tree.unflatten(self._in_tree, described)

    @_compat.boundary
    def report(self, hardware: Hardware | None = None, *, times: Durations | None = None) -> Report:
        """What the step consists of and costs by XLA's figures, and where our own count before compiling was off.

        Args:
          hardware: what to predict the step's time for; that of the step's devices, where it is known, by default.
          times: measured durations to predict from instead, as from `durations`.
        """
        return make_report(
            self.estimate(), executables=self._lowered.executables, compilations=self._compilations,
            hardware=hardware, times=times,
        )  # fmt: skip

    @_compat.boundary
    def durations(self, *args: PyTree, repeats: int = 3, **kwargs: PyTree) -> Durations:
        """Times every fragment and every transfer: the step runs several times, one instruction at a time.

        Args:
          args, kwargs: arguments of the step; donated ones stay usable, for copies of them are used.
          repeats: how many times it runs after a first run that does not count. Each duration is a median.

        Returns:
          Seconds, for ``report(times=...)`` of this step and of its `Lowered`.

        Raises:
          ProcessError: there are several processes.
        """
        self._check_alone("durations")
        leaves = self.calling.take(self._flatten, args, kwargs)

        def arguments() -> list[Any]:
            return self._stacks.cut(self._spared(leaves))

        return measured_durations(self._lowered, self._executor, arguments, repeats)

    def _spared(self, leaves: Sequence[Any]) -> list[Any]:
        """The leaves of a call, of those that it would delete copies."""
        self._check_each(leaves)
        with _compat.without_mesh():
            return [jnp.copy(x) if i in self._donated else x for i, x in enumerate(leaves)]

    def memory_analysis(self) -> dict[Any, Memory]:
        """Live bytes at the peak of a call, for each device: `report().memory`."""
        return self.report().memory

    def cost_analysis(self) -> dict[str, Any]:
        """XLA's cost estimate for each fragment that this process runs, by name."""
        return {
            f.name: executable.cost_analysis()
            for f, executable in zip(self.program.fragments, self._lowered.executables, strict=True)
            if executable is not None
        }

    @_compat.boundary
    def measure(self, *args: PyTree, loop: int = 0, **kwargs: PyTree) -> Costs:
        """Times every task of a microbatch loop: the step runs once, one task at a time.

        Args:
          args, kwargs: arguments of the step; donated ones stay usable, for a copy of them is used.
          loop: which of the program's microbatch loops.

        Returns:
          The costs of one microbatch: seconds, and bytes a device for activations, taken as spread evenly over a
          submesh. `manymesh.schedules.simulate` and `search` take them.

        Raises:
          ArgumentError: the step has no such loop.
          ProcessError: there are several processes.

        Example:
          >>> import jax, jax.numpy as jnp, manymesh as mm
          >>> front, back = (mm.task(jnp.sin, name, devices=[i]) for i, name in enumerate(("front", "back")))
          >>> run = mm.microbatch(lambda x: back(front(x)), num_microbatches=4, reduce="concat")
          >>> costs = mm.jit(run).lower(jnp.ones(8)).compile().measure(jnp.ones(8))
          >>> len(costs.forward), costs.backward, len(costs.transfer)
          (2, None, 1)
        """
        if not isinstance(loop, int) or not 0 <= loop < len(self.program.loops):
            raise ArgumentError(
                f"{self.name}: measure(loop={loop}), but the step has {len(self.program.loops)} microbatch loops"
            )
        self._check_alone("measure")
        leaves = self._spared(self.calling.take(self._flatten, args, kwargs))
        return loop_costs(self._lowered, measure(self._executor, self._stacks.cut(leaves)), loop)

    def _check_alone(self, call: str) -> None:
        """Refuses to time a step of which other processes run a part."""
        if world() is not None:
            raise ProcessError(f"{self.name}: {call}() runs in one process; start the script without others")

    def as_text(self) -> str:
        """The optimized program of every fragment that this process runs."""
        return "\n\n".join(
            f"// fragment {f.name}, submesh {f.submesh}\n{executable.as_text()}"
            for f, executable in zip(self.program.fragments, self._lowered.executables, strict=True)
            if executable is not None
        )


def _differing(ours: Any, theirs: Any) -> Iterator[str]:
    """Where two structures of ``(args, kwargs)`` with leaves of the same names differ, each as a sentence."""
    for which, a, b in zip(("args", "kwargs"), ours.children(), theirs.children(), strict=True):
        names, others = ([f"{which}[{k!r}]" for k in x.node_data()[1] or range(len(x.children()))] for x in (a, b))
        if names != others:  # some have no leaf
            yield f"compiled with {joined(names, MOST_NAMES) or f'no {which}'}, called with {joined(others, MOST_NAMES) or f'no {which}'}"
            continue
        for name, one, other in zip(names, a.children(), b.children(), strict=True):
            if one != other:
                ours, theirs = _around_difference(str(one), str(other))
                yield f"compiled with {name} of structure {ours}, called with {theirs}"


def _around_difference(one: str, other: str) -> tuple[str, str]:
    """What two texts say where they begin to differ, and a little around it; short texts whole."""
    if max(len(one), len(other)) <= MOST_TEXT:
        return one, other
    at = next((k for k, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    start = max(0, at - MOST_TEXT // 2)
    return _cut_out(one, start), _cut_out(other, start)


def _cut_out(text: str, start: int) -> str:
    shown = " ".join(text[start : start + MOST_TEXT].split())
    return f"{'...' if start else ''}{shown}{'...' if start + MOST_TEXT < len(text) else ''}"


def _name_of_leaf(path: Sequence[Any]) -> str:
    """``args[0]['w']``, of the path in ``(args, kwargs)``."""
    which, *rest = path
    return f"{'kwargs' if which.idx else 'args'}{jax.tree_util.keystr(tuple(rest))}"


def outline(program: Program, plan: Plan) -> str:
    """What a step consists of, in half a line."""
    kinds = Counter(type(i) for i in plan.instructions)
    loops = ", ".join(
        f"{loop.num_microbatches} microbatches "
        + (f"under {getattr(loop.schedule, 'name', loop.schedule)}" if loop.in_order else "one after the other")
        for loop in program.loops
    )
    transfers = kinds[Receive] + sum(1 for _ in arguments_elsewhere(program, plan))
    words = f"{len(program.fragments)} fragments on {len(program.submeshes)} submeshes, {kinds[Run]} launches and "
    return f"{words}{transfers} transfers a call{', ' * bool(loops)}{loops}"


def check_given_once(name: str, leaves: Sequence[Any], donated: frozenset[int], path: Callable[[int], str]) -> None:
    """Refuses one array in two places where a donation would take it away from the other one.

    Args:
      name: name of the step.
      leaves: those of the arguments of a call.
      donated: positions of those that are donated.
      path: what the leaf in a position is called.
    """
    seen: dict[int, int] = {}
    for i, x in enumerate(leaves):
        k = seen.setdefault(id(x), i)
        if k != i and isinstance(x, jax.Array) and not donated.isdisjoint((i, k)):
            raise ValueError(
                f"mm.jit({name}): arguments {path(k)} and {path(i)} are one array of shape {x.shape}, and it is donated; "
                "donate neither, or pass a copy (jnp.copy) as one of them"
            )


def traced_argument(argument: str) -> ArgumentError:
    """The error for an argument of a call that is part of a transformation."""
    return ArgumentError(
        f"{argument}; a step of mm.jit runs as programs of its own, on one submesh or several, and cannot be a part of jax.jit, "
        "jax.grad, jax.vmap or jax.eval_shape: apply these inside the function that mm.jit wraps, or use the step's own eval_shape"
    )


def described(argument: str, x: jax.ShapeDtypeStruct) -> ArgumentError:
    """The error for an argument of a call that describes an array and is none."""
    return ArgumentError(
        f"{argument} is a jax.ShapeDtypeStruct, which describes {jax.core.ShapedArray(x.shape, x.dtype).str_short()} and has no values; "
        "call the step with an array, or write lower, prepare or eval_shape, which need none"
    )


def deleted(argument: str) -> RuntimeError:
    """The error for an argument of a call that was an array."""
    return RuntimeError(
        f"{argument}: Array has been deleted. It was donated to an earlier call, which deletes it: pass what that call "
        "returned in its place, or do not donate this argument"
    )


# A donated argument that is handed through, also by way of states of microbatches, is deleted, and the result has its buffer,
# as jax.jit does it.
_take_over = jax.jit(lambda x: x, donate_argnums=0)
