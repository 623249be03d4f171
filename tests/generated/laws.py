"""What holds for every program: the values of plain JAX, the same bits, states that stay where they are, memory of their own."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import pickle
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import manymesh as mm
from manymesh import _compat
from manymesh._plan._digest import digest
from manymesh._runtime._memories import HOST, into

from . import modules
from .coverage import primitives
from .known import works
from .operations import OPERATIONS
from .program import RULES, Program
from .wraps import NOTES

# Nearly all the time goes into compiling, and what is compiled runs on a few numbers twice.
_CHEAP = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_parallel_codegen_split_count": 1,
    "xla_cpu_use_fusion_emitters": False,  # saves the most; gone from the newest XLA
}


class LawBroken(AssertionError):
    """A generated program did what plain JAX does not do."""


@dataclass
class Outcome:
    """What came of one program.

    Attributes:
      primitives: how often each primitive is in the jaxpr of the step.
      remarks: whether something kept a law from being checked, in a word each.
    """

    primitives: dict[str, int]
    remarks: list[str] = field(default_factory=list)


@functools.cache
def cheap_options(fused: bool = True) -> dict[str, Any]:
    """Those options of the compiler that this one knows, and whether it may fuse."""
    known = {}
    for name, value in (_CHEAP if fused else {**_CHEAP, "xla_disable_hlo_passes": "fusion"}).items():
        try:
            jax.jit(lambda x: x + 1, compiler_options={name: value})(0)
        except Exception:
            continue
        known[name] = value
    return known


def _step(state, batch, key, scale, program, schedule):
    return program.step(state, batch, key, scale, schedule)


# One step for all programs, which are static: a fragment that an earlier program had too is not compiled again, and
# two fragments that are taken for equal and are not break a law.
@functools.cache
def _shared(donate: bool, fused: bool) -> Any:
    options = cheap_options(fused)
    return mm.jit(_step, static_argnums=(4, 5), donate_argnums=(0,) if donate else (), compiler_options=options)


def _compiled(program: Program, fused: bool) -> Any:
    pinned = program.in_shardings and program.state != "dict"
    if not pinned and program.collected is None:
        return _shared(program.donate, fused)
    return mm.jit(
        _step,
        static_argnums=(4, 5),
        donate_argnums=(0,) if program.donate else (),
        in_shardings=(_prefix(program), None, None, None) if pinned else None,
        out_shardings=None if program.collected is None else (None, _collected(program)),
        compiler_options=cheap_options(fused),
    )


def _collected(program: Program) -> NamedSharding:
    return NamedSharding(program.meshes()[program.collected], PartitionSpec())


def _prefix(program: Program) -> Any:
    """`in_shardings` of the state: kernels of single layers, and None for the rest."""
    pinned, state = program.shardings(), program.init()
    params = {name: {**dict.fromkeys(p), "kernel": pinned.get(name)} for name, p in state.params.items()}
    empty = jax.tree.map(lambda _: None, state)
    return empty.replace(params=params) if hasattr(empty, "replace") else _with_params(empty, params)


def _with_params(state: Any, params: Any) -> Any:
    if hasattr(state, "_replace"):
        return state._replace(params=params)
    return type(state)(**{**vars(state), "params": params})


@dataclass
class _Run:
    """Two steps: the results, what happened on the host, and whether the second one was compiled again."""

    results: list[Any]
    notes: set[str]
    again: bool = False


def check(program: Program, shared: Path | None = None) -> Outcome:
    """Runs two steps of a program and raises `LawBroken`, or an error, if anything differs from plain JAX.

    ``shared``: a folder in which processes that check the same program share what plain JAX makes of it.
    """
    outcome = Outcome({})
    expected = _reference(program, outcome) if shared is None else _shared_reference(program, outcome, shared)
    if not all(np.isfinite(x.value).all() for x in jax.tree.leaves(expected.results) if x.value.dtype.kind in "fc"):
        outcome.remarks.append("not finite")
    first = None
    for schedule in program.schedules:
        try:
            with program.registered():
                run = _run(program, schedule, expected.again)
        except mm.errors.ScheduleError:
            outcome.remarks.append(f"refused by {schedule}")
            continue
        _same_values(program, run, expected, outcome, schedule)
        if shared is None and program.framework is None:
            _one_plan(program, schedule)
            if program.mode == "train" and not program.in_shardings and program.collected is None:
                _from_host(program, schedule)
        # Of several processes each runs the effects of its own submeshes.
        if run.notes - expected.notes or (run.notes != expected.notes and jax.process_count() == 1):
            raise LawBroken(f"effects ran {sorted(run.notes)}, in plain JAX {sorted(expected.notes)}")
        if first is not None:
            _same_bits(run.results, first.results)
        first = first or run
    return outcome


def traced(program: Program) -> Outcome:
    """What plain JAX traces of a program; nothing is compiled or checked."""
    if program.framework is not None:
        return Outcome({}, ["traced only"])
    with mm.ignore_transforms():
        arguments = (program.init(), *_arguments(program), program, program.schedules[0])
        return Outcome(primitives(jax.jit(_step, static_argnums=(4, 5)).trace(*arguments).jaxpr), ["traced only"])


def _arguments(program: Program) -> tuple[Any, ...]:
    scale = 0.5 if program.weak else None
    return program.batch(), program.random_key(), scale


def _reference(
    program: Program, outcome: Outcome, noise: int | None = None, jit: bool = True, fused: bool = True
) -> _Run:
    """The same two steps as plain JAX."""
    if program.framework is not None:
        return _reference_of_modules(program, noise, fused)
    state, rest, results = program.init(), _arguments(program), []
    if noise is not None:
        state, rest = _perturbed((state, rest), noise)
    NOTES.clear()
    with mm.ignore_transforms():
        step = jax.jit(_step, static_argnums=(4, 5), compiler_options=cheap_options(fused))
        schedule = program.schedules[0]
        if noise is None and jit:
            outcome.primitives = primitives(step.trace(state, *rest, program, schedule).jaxpr)
        for _ in range(2):
            state, metrics = step(state, *rest, program, schedule)
            results.append(kept((state, metrics), plain=True))
    jax.effects_barrier()
    return _Run(results, set(NOTES))


def _shared_reference(program: Program, outcome: Outcome, folder: Path) -> _Run:
    """The same from a file, or into it: whichever process is first makes it, and the others wait."""
    path = folder / f"plain-{hashlib.sha256(program.to_json().encode()).hexdigest()}"
    try:
        path.with_suffix(".claimed").touch(exist_ok=False)
    except FileExistsError:
        deadline = time.monotonic() + 60
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        found = pickle.loads(path.read_bytes()) if path.exists() else None
        if found is None:
            return _reference(program, outcome)
        run, outcome.primitives = found
        return run
    written = pickle.dumps(None)
    try:
        run = _reference(program, outcome)
        with contextlib.suppress(AttributeError, pickle.PicklingError):  # a function of Optax in the state
            written = pickle.dumps((run, outcome.primitives))
    finally:
        aside = path.with_suffix(".part")
        aside.write_bytes(written)
        aside.rename(path)
    return run


def _run(program: Program, schedule: str | None, again: bool, fused: bool = True) -> _Run:
    """Two steps under a schedule, with what has to hold of their layouts."""
    if program.framework is not None:
        return _run_of_modules(program, schedule, again, fused)
    step, state, results = _compiled(program, fused), program.init(), []
    rest = (program.given_batch(), *_arguments(program)[1:])
    NOTES.clear()
    compiled = step.prepare(state, *rest, program, schedule)
    for part in getattr(compiled, "parts", {"": compiled}).values():
        _layout_before(part)
    for number in range(2):
        given = state
        if step.prepare(state, *rest, program, schedule) is not compiled:
            raise LawBroken("step 2 is traced and compiled anew")
        with counted_compilations() as made:
            state, metrics = step(state, *rest, program, schedule)
        if number == 1 and made and works("relayouts_compiled_ahead"):
            raise LawBroken(f"step 2 compiled {len(made)} programs")
        _layouts(program, compiled, state)
        for path, x in jax.tree_util.tree_leaves_with_path(metrics) if program.collected is not None else ():
            if not x.sharding.is_equivalent_to(_collected(program), x.ndim):
                raise LawBroken(f"result[1]{jax.tree_util.keystr(path)} lies as {x.sharding}, not as asked")
        if program.donate and program.mode != "forward" and number == 1 and works("donated_is_deleted"):
            alive = [p for p, x in jax.tree_util.tree_leaves_with_path(given) if not x.is_deleted()]
            if alive:
                raise LawBroken(f"donated and not deleted: {[jax.tree_util.keystr(p) for p in alive]}")
        results.append(kept((state, metrics)))
        if shared := shared_buffers((state, metrics), (rest, () if program.donate else given)):
            raise LawBroken(f"in one buffer: {shared}")
    jax.effects_barrier()
    return _Run(results, set(NOTES))


def _from_host(program: Program, schedule: str | None) -> None:
    """A state that comes in the memory of the host stays there, and its step is the same to the last bit."""
    step = mm.jit(_step, static_argnums=(4, 5), compiler_options=cheap_options())
    rest = (program.given_batch(), *_arguments(program)[1:], program, schedule)
    with program.registered():
        made, _ = _compiled(program, True)(program.init(), *rest)
        expected = kept(step(made, *rest))
        state, metrics = step(jax.tree.map(lambda x: into(x, HOST), made), *rest)
    _same_bits([kept((state, metrics))], [expected])
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        if x.sharding.memory_kind != HOST:
            raise LawBroken(f"state{jax.tree_util.keystr(path)} came from {HOST} and is in {x.sharding.memory_kind}")


def _one_plan(program: Program, schedule: str | None) -> None:
    """The same step is lowered to the same program wherever its parts lie in memory, as in other processes."""
    with program.registered():
        traced = _compiled(program, False).trace(program.init(), *_arguments(program), program, schedule)
        found = set()
        for number in range(3):
            elsewhere = [[object() for _ in range(1000 * number)], [{} for _ in range(300 * number)]]
            lowered = traced.lower()
            parts = getattr(lowered, "parts", {"": lowered})
            found.add(str([digest(part.program, part.plan) for part in parts.values()]))
            del elsewhere
    if len(found) > 1:
        raise LawBroken(f"lowered three times, it is {len(found)} programs")


def _reference_of_modules(program: Program, noise: int | None, fused: bool) -> _Run:
    """Two steps of the framework's own."""
    perturb = functools.partial(_perturbed, seed=noise) if noise is not None else lambda tree: tree
    with mm.ignore_transforms():
        options = None if fused else cheap_options(fused)
        run, arrays, state = modules.begin(program, program.schedules[0], False, perturb, options)
        results = []
        for _ in range(2):
            with counted_compilations() as made:
                state, metrics = run(state)
            results.append(kept((arrays(state), metrics), plain=True))
    return _Run(results, set(), bool(made))


def _run_of_modules(program: Program, schedule: str | None, again: bool, fused: bool) -> _Run:
    """Two steps of an adapter. What a block has is where the block is, and stays there.

    ``again``: the framework itself compiles the second step again, as NNX does under SM3, whose state has another
    structure after the first step.
    """
    options = None if fused else cheap_options(fused)
    run, arrays, state = modules.begin(program, schedule, True, options=options)
    results, before = [], {}
    for number in range(2):
        with counted_compilations() as made:
            state, metrics = run(state)
        if number == 1 and made and not again:
            raise LawBroken(f"step 2 compiled {len(made)} programs")
        found = arrays(state)
        for path, x in found.items():
            if number == 1 and not again and not x.sharding.is_equivalent_to(before[path].sharding, x.ndim):
                raise LawBroken(f"{path} lies as {x.sharding} after step 2, after step 1 as {before[path].sharding}")
        for i, path in modules.kernels(program).items():
            wanted = set(program.meshes()[program.layers[i].submesh].devices.flat)
            if found[path].devices() != wanted:
                raise LawBroken(f"{path} lies as {found[path].sharding}, its task is on {wanted}")
        results.append(kept((found, metrics)))
        if shared := shared_buffers((found, metrics)):
            raise LawBroken(f"in one buffer: {shared}")
        before = found
    return _Run(results, set())


def shared_buffers(results: Any, held: Any = ()) -> list[tuple[str, str]]:
    """Pairs of arrays in one buffer: two results, or a result and something that the caller holds already."""
    # An array that waits for a callback, asked where it is, would keep Python from the callback.
    jax.block_until_ready([x for x in jax.tree.leaves((results, held)) if isinstance(x, jax.Array)])
    at = {place: "what the caller holds" for x in jax.tree.leaves(held) for place in _buffers(x)}
    shared = []
    for path, x in jax.tree_util.tree_leaves_with_path(results):
        name = f"result{jax.tree_util.keystr(path)}"
        shared += [(at[place], name) for place in _buffers(x) if at.setdefault(place, name) != name]
    return shared


def _buffers(x: Any) -> list[tuple[int, int]]:
    """Device and address of what this process has of an array."""
    if not isinstance(x, jax.Array):
        return []
    pieces = _compat.pieces(_compat.key_words(x))
    return [(next(iter(p.devices())).id, p.unsafe_buffer_pointer()) for p in pieces if p.size]


def _layout_before(compiled: Any) -> None:
    """The layout that was there before compilation is what XLA takes and gives, value by value."""
    lowered = compiled._lowered
    for f, executable in zip(lowered.program.fragments, lowered.executables, strict=True):
        if executable is None:
            continue  # another process has it
        # Behind what a fragment reads comes where pieces of a batch begin.
        shardings = (*executable.input_shardings[0][: len(f.invars)], *executable.output_shardings)
        for v, sharding in zip((*f.invars, *f.outvars), shardings, strict=True):
            decided = lowered.layout.decisions[v, f.submesh]
            if not sharding.is_equivalent_to(lowered.layout.sharding(v, f.submesh), len(v.aval.shape)):
                raise LawBroken(f"{v.aval.str_short()} in {f.name} lies as {sharding}, the layout says {decided}")


def _layouts(program: Program, compiled: Any, state: Any) -> None:
    """The next state lies where the step takes it, and moments lie as their parameters do."""
    wanted = jax.tree.leaves(compiled.input_shardings[0][0])
    with_paths = jax.tree_util.tree_leaves_with_path(state)
    for (path, x), sharding in zip(with_paths, wanted, strict=True):
        if not x.ndim and jax.process_count() > 1:
            continue  # a copy in every process
        if not x.sharding.is_equivalent_to(sharding, x.ndim) and works("state_layouts"):
            raise LawBroken(f"state{jax.tree_util.keystr(path)} lies as {x.sharding}, the step takes it as {sharding}")
    _constrained_kernels(program, compiled)
    if not works("mirrored_layouts") or program.mode == "forward":  # no arithmetic ties what is only handed through
        return
    params = {path[1:]: x for path, x in with_paths if _name(path[0]) == "params"}
    for path, x in with_paths:
        for key, p in params.items():
            # A moment of a parameter that several submeshes use may be on another one of them than the parameter.
            mirrors = path[-len(key) :] == key and x.shape == p.shape and x.sharding.device_set == p.sharding.device_set
            mirrors = mirrors and _name(path[0]) != "params"
            if mirrors and not x.sharding.is_equivalent_to(p.sharding, x.ndim):
                raise LawBroken(
                    f"state{jax.tree_util.keystr(path)} lies as {x.sharding}, its parameter as {p.sharding}"
                )


def _constrained_kernels(program: Program, compiled: Any) -> None:
    """A kernel that one task reads lies as the program says it does."""
    if program.together is not None or program.viewed in ("reshaped", "normalized"):  # what is kept is not what is read
        return
    state = compiled.input_shardings[0][0]
    params = state["params"] if program.state == "dict" else state.params
    for layer in program.layers:
        alone = sum(other.parameter == layer.parameter for other in program.layers) == 1
        if layer.annotated == "never" or not alone or layer.wrap != "plain" or layer.between or program.in_shardings:
            continue
        if layer.annotated == "outside" and not works("constraint_outside"):
            continue
        rules, mesh = dict(RULES), program.meshes()[layer.submesh]
        wanted = NamedSharding(mesh, PartitionSpec(*(rules.get(n) for n in layer.kernel_axes)))
        found = jax.tree.leaves(params[f"w{layer.parameter}"]["kernel"])[0]
        if not found.is_equivalent_to(wanted, 2):
            raise LawBroken(f"the kernel of layer {layer} lies as {found}, the program says {wanted}")


def _name(entry: Any) -> str:
    return str(getattr(entry, "name", getattr(entry, "key", entry)))


class counted_compilations:
    """Lists the compilations that happen in its block."""

    def __enter__(self) -> list[str]:
        self.made: list[str] = []
        _LISTENING.append(self.made)
        return self.made

    def __exit__(self, *_: Any) -> None:
        _LISTENING.remove(self.made)


_LISTENING: list[list[str]] = []


def _listen(event: str, duration: float, **_: Any) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        for made in _LISTENING:
            made.append(event)


jax.monitoring.register_event_duration_secs_listener(_listen)


# Comparing


@dataclass(frozen=True)
class Leaf:
    """An array of a result as it was before the next step took its buffer: its type, and its numbers."""

    type: str
    weak: bool
    value: np.ndarray


def kept(tree: Any, plain: bool = False) -> Any:
    """A tree of `Leaf` in place of arrays; all processes take part, except in what is ``plain`` JAX's of each."""

    def leaf(x: Any, value: Any) -> Leaf:
        if not hasattr(x, "dtype"):  # a number stays one without jit
            x = value = jnp.asarray(x)
        aval = jax.typeof(x)
        return Leaf(f"{aval.dtype}{list(aval.shape)}", getattr(aval, "weak_type", False), _on_host(value))

    return jax.tree.map(leaf, tree, tree if plain or jax.process_count() == 1 else mm.fetch(tree))


def _on_host(x: Any) -> np.ndarray:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x, np.float64 if jnp.issubdtype(x.dtype, jnp.floating) else None)


def _coarse(program: Program) -> bool:
    names = [n for layer in program.layers for n in (*layer.operations, layer.between) if n]
    return any(OPERATIONS[n].coarse for n in names) or "bf16" in program.optimizer


def _same_values(program: Program, run: _Run, expected: _Run, outcome: Outcome, schedule: str | None) -> None:
    """Structures, shapes and dtypes are equal; numbers to within what the order of sums may change."""
    tree, wanted = jax.tree.structure(run.results), jax.tree.structure(expected.results)
    if tree != wanted:
        raise LawBroken(f"the result has structure {tree}, in plain JAX {wanted}")
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(expected.results)]
    pairs = list(zip(paths, jax.tree.leaves(run.results), jax.tree.leaves(expected.results), strict=True))
    for path, a, e in pairs:
        if a.type != e.type or (a.weak != e.weak and works("weak_types")):
            raise LawBroken(f"result{path} is {a.type}, weak {a.weak}; in plain JAX {e.type}, weak {e.weak}")
    tolerance = 5e-2 if _coarse(program) else 5e-5
    off = [path for path, a, e in pairs if not _close(a.value, e.value, tolerance, 0.0)]
    if not off:
        return
    # Where a little noise in the arguments moves plain JAX as far, the difference says nothing.
    spread = _spread(program, expected)
    really = [
        f"result{path}: {a.value.ravel()[:4]}, in plain JAX {e.value.ravel()[:4]}"
        for (path, a, e), s in zip(pairs, spread, strict=True)
        if not _close(a.value, e.value, tolerance, s)
    ]
    if really:
        # Under jax.jit XLA may round once where eager JAX rounds twice: no element equals the maximum of its row any more,
        # whose gradient is then 0/0, or x/0. Which rows it meets depends on what is fused with what. And XLA makes mistakes:
        # what JAX computes operation by operation is the truth.
        try:
            with jax.disable_jit():
                eager = jax.tree.leaves(_reference(program, Outcome({}), jit=False).results)
        except ValueError:  # it refuses a scan of nothing
            eager = [e for *_, e in pairs]
        values = [(a.value, e.value, x.value) for (_, a, e), x in zip(pairs, eager, strict=True)]
        nan = any(np.isnan(e).any() for _, e, _ in values if e.dtype.kind == "f")
        if all(_close(a, x, tolerance, s) for (a, _, x), s in zip(values, spread, strict=True)):
            outcome.remarks.append("NaN under plain jax.jit alone" if nan else "plain jax.jit differs from plain JAX")
            return
        if nan and all(
            _close(*_where_both_are(a, e), tolerance, 0.0) or _close(a, e, tolerance, s)
            for (a, e, _), s in zip(values, spread, strict=True)
        ):
            outcome.remarks.append("NaN in other rows than under plain jax.jit")
            return
        if any(np.isnan(a).any() or np.isnan(e).any() for a, e, _ in values if e.dtype.kind == "f"):
            # The same of one of our executables: without fusion each value is computed once.
            wanted = jax.tree.leaves(_reference(program, Outcome({}), fused=False).results)
            with program.registered():
                unfused = jax.tree.leaves(_run(program, schedule, expected.again, fused=False).results)
            if all(_close(u.value, e.value, tolerance, s) for u, e, s in zip(unfused, wanted, spread, strict=True)):
                outcome.remarks.append("NaN where XLA fuses")
                return
    if really:
        raise LawBroken(f"{len(really)} of {len(pairs)} values differ: " + "; ".join(really[:4]))
    outcome.remarks.append("badly conditioned")


def _close(a: np.ndarray, e: np.ndarray, tolerance: float, spread: Any) -> bool:
    if a.dtype.kind not in "fc":
        return bool(np.all((a == e) | (np.asarray(spread) > 0)))
    scale = max(1.0, float(np.max(np.abs(e), initial=0.0, where=np.isfinite(e))))
    with np.errstate(invalid="ignore"):
        near = np.abs(a - e) <= tolerance * scale + 30 * spread
    return bool(np.all(near | (np.isnan(a) & np.isnan(e)) | (a == e)))


def _where_both_are(a: np.ndarray, e: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of both where the second is not finite somewhere; all of them where it is."""
    if a.dtype.kind != "f" or np.isfinite(e).all():
        return a, e
    there = np.isfinite(a) & np.isfinite(e)
    return a[there], e[there]


def _spread(program: Program, expected: _Run) -> list[Any]:
    """How far each value of plain JAX moves under noise of a millionth in the arguments."""
    out = [np.zeros(x.value.shape) for x in jax.tree.leaves(expected.results)]
    for seed in range(4):
        moved = jax.tree.leaves(_reference(program, Outcome({}), noise=seed).results)
        for i, (m, e) in enumerate(zip(moved, jax.tree.leaves(expected.results), strict=True)):
            with np.errstate(invalid="ignore"):
                out[i] = np.fmax(out[i], np.abs(m.value.astype(np.float64) - e.value.astype(np.float64)))
    return out


def _perturbed(tree: Any, seed: int) -> Any:
    rng = np.random.default_rng(seed)

    def moved(x):
        if not isinstance(x, jax.Array) or x.dtype != jnp.float32:
            return x
        return x * jnp.asarray(1 + 1e-6 * rng.normal(size=x.shape), jnp.float32)

    return jax.tree.map(moved, tree)


def _same_bits(actual: Any, expected: Any) -> None:
    for (path, a), e in zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        if not np.array_equal(a.value, e.value, equal_nan=a.value.dtype.kind in "fc"):
            raise LawBroken(f"result{jax.tree_util.keystr(path)} differs between schedules of one class")
