"""What the processes of a run have to agree about, as text and as digests: equal wherever the same step was traced.

Nothing here depends on the seed of hashes, on object identities or on the order of sets.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import marshal
import platform
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, Sharding

from .. import _compat
from .._key import IGNORED
from .._program import Fragment, Program
from ._instructions import Instruction, Plan, Run, Send, line
from ._number import variables_of

SECTIONS = ("arguments", "program", "plan", "layout", "donation", "versions")


def digest(
    program: Program,
    plan: Plan,
    *,
    arguments: Sequence[Sharding | None] = (),
    sharding: Callable[[_compat.Var, int], NamedSharding] | None = None,
    donation: Mapping[int, tuple[Any, ...]] | None = None,
) -> dict[str, str]:
    """A digest for each thing that processes have to agree about before they compile.

    Args:
      program: the step.
      plan: its plan.
      arguments: sharding with which each argument comes, None for a host value.
      sharding: that of a variable on a submesh, where layouts are known.
      donation: fragment -> what is donated to it, where that is known.

    Returns:
      Section -> hexadecimal digest. Two processes that traced the same step have equal ones, whatever their hash seeds.
    """
    texts = {
        name: lines(name, program, plan, arguments=arguments, sharding=sharding, donation=donation) for name in SECTIONS
    }
    digests = {name: _hash(text.encode() + b"\n" for text in texts[name]) for name in SECTIONS if name != "plan"}
    digests["plan"] = _hash(_plan_bytes(plan))
    return {name: digests[name] for name in SECTIONS}


def lines(
    section: str,
    program: Program,
    plan: Plan,
    *,
    arguments: Sequence[Sharding | None] = (),
    sharding: Callable[[_compat.Var, int], NamedSharding] | None = None,
    donation: Mapping[int, tuple[Any, ...]] | None = None,
) -> Iterator[str]:
    """What a section of the digest is about, line by line: where two processes differ, these show it.

    Args:
      section: one of `SECTIONS`.
      program, plan, arguments, sharding, donation: as for `digest`.
    """
    if section == "arguments":
        inputs = program.invars[len(program.consts) :]
        for k, v in enumerate(inputs):
            given = arguments[k] if k < len(arguments) else None
            yield f"argument {k}: {v.aval.str_short()} {_word(given)}"
    elif section == "program":
        yield from _program_lines(program)
    elif section == "plan":
        names = [f.name for f in program.fragments]
        yield f"{plan.num_slots} slots, inputs {plan.inputs}, results {plan.outputs}"
        yield from (line(i, names) for i in plan.instructions)
    elif section == "layout" and sharding is not None:
        yield from _layout_lines(program, sharding)
    elif section == "donation":
        chosen = plan.donatable if donation is None else donation
        yield from (f"{program.fragments[k].name}: {chosen[k]}" for k in sorted(chosen))
    elif section == "versions":
        yield f"Python {platform.python_version()}, jax {jax.__version__}, numpy {np.__version__}"


def _program_lines(program: Program) -> Iterator[str]:
    number = {v: k for k, v in enumerate(variables_of(program))}

    def atom(v: Any) -> str:
        return f"v{number[v]}" if _compat.is_var(v) else f"{_word(v.val)}:{v.aval.str_short()}"

    for k, mesh in enumerate(program.submeshes):
        yield f"submesh {k}: {_word(mesh)}"
    for k, const in enumerate(program.consts):
        yield f"constant {k}: {_constant(const)}"
    for v in program.invars:
        yield f"input {atom(v)}: {v.aval.str_short()} on {program.input_submeshes[v]}, home {program.home[v]}"
    for k, loop in enumerate(program.loops):
        ties = [[atom(v) for v in carry] for carry in loop.carries]
        pieces = [(atom(inner), [atom(v) for v in outer]) for inner, outer in (*loop.xs, *loop.ys)]
        yield f"loop {k} {loop.name}: {loop.num_microbatches} x {loop.schedule!r} on {loop.placement}; {ties}; {pieces}"
    for f in program.fragments:
        yield from _fragment_lines(f, number)
    for e in program.edges:
        yield f"edge {atom(e.var)}: {e.source} -> {e.target}, loop {e.loop}, {e.nbytes} bytes"
    yield f"order {program.order}; results {[(atom(v), s) for v, s in program.outputs]}"


def _fragment_lines(f: Fragment, number: Mapping[_compat.Var, int]) -> Iterator[str]:
    yield f"fragment {f.index} {f.name}: submesh {f.submesh}, loop {f.loop}, {f.kind} stage {f.stage}"
    yield from _jaxpr_lines(f.jaxpr, {v: f"v{number[v]}" for v in (*f.invars, *f.outvars)})


def _jaxpr_lines(jaxpr: Any, names: Mapping[_compat.Var, str]) -> Iterator[str]:
    """An open or closed jaxpr; variables that have no name get one in the order in which they occur."""
    parts = _compat.open_jaxpr(jaxpr)
    known = dict(names)

    def atom(v: Any) -> str:
        if not isinstance(v, _compat.Var):
            return f"{_word(v.val)}:{v.aval.str_short()}"
        if not _compat.is_var(v):
            return "_"
        return known.setdefault(v, f"a{len(known)}")

    def typed(variables: Iterable[Any]) -> str:
        return " ".join(f"{atom(v)}:{v.aval.str_short()}" for v in variables)

    yield f"  reads {typed([*parts.constvars, *parts.invars])} {[_constant(c) for c in parts.consts]}"
    for e in parts.eqns:
        params = ", ".join(f"{k}={_word(v)}" for k, v in sorted(e.params.items()) if k not in IGNORED)
        yield f"  {typed(e.outvars)} = {e.primitive.name}[{params}] {' '.join(atom(v) for v in e.invars)} {_compat.eqn_context(e)}"
    yield f"  gives {' '.join(atom(v) for v in parts.outvars)}"


def _layout_lines(program: Program, sharding: Callable[[_compat.Var, int], NamedSharding]) -> Iterator[str]:
    number = {v: k for k, v in enumerate(variables_of(program))}
    places: dict[tuple[int, int], Any] = {}
    for v in program.invars:
        places.update({(number[v], s): v for s in program.input_submeshes[v]})
    for f in program.fragments:
        places.update({(number[v], f.submesh): v for v in (*f.invars, *f.outvars)})
    for k, s in sorted(places):
        yield f"v{k} on {s}: {sharding(places[k, s], s).spec}"


def _plan_bytes(plan: Plan) -> Iterator[bytes]:
    """The plan as bytes. Version 2 of the format has no references, which depend on who else holds an object."""
    yield marshal.dumps((plan.num_slots, plan.inputs, plan.outputs), 2)
    yield marshal.dumps((_plain(plan.variables), _plain(plan.ports)), 2)
    yield marshal.dumps((sorted(plan.aliases.items()), sorted(plan.donatable.items())), 2)
    for start in range(0, len(plan.instructions), 4096):
        yield marshal.dumps([_fields(i) for i in plan.instructions[start : start + 4096]], 2)


def _fields(i: Instruction) -> tuple[Any, ...]:
    if isinstance(i, Run):
        return ("run", i.fragment, i.submesh, i.microbatch, i.inputs, i.outputs, i.free)
    if isinstance(i, Send):
        return ("send", i.submesh, i.target, tuple(i.tag), i.variables, i.inputs, i.free)
    return ("receive", i.submesh, i.source, tuple(i.tag), i.variables, i.outputs, i.free)


def _plain(tuples: Iterable[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    return [tuple(x) for x in tuples]


def _hash(chunks: Iterable[bytes]) -> str:
    state = hashlib.sha256()
    for chunk in chunks:
        state.update(chunk)
    return state.hexdigest()


def _is_key(x: Any) -> bool:
    return bool(jax.numpy.issubdtype(getattr(x, "dtype", np.float32), jax.dtypes.prng_key))


@functools.lru_cache(maxsize=4096)
def describe(sharding: Sharding | None) -> str:
    """A sharding, or the lack of one, as text that is the same in every process."""
    return _word(sharding)


def _constant(value: object) -> str:
    """A value that a function has closed over: an array, maybe of keys, or what becomes one."""
    return _word(value if isinstance(value, jax.Array) else np.asarray(value))


def _word(value: object) -> str:
    """A parameter, literal or setting as text that is the same in every process."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return repr(value)
    if _compat.is_jaxpr(value):
        return "{" + "; ".join(_jaxpr_lines(value, {})) + "}"
    if isinstance(value, (Mesh, AbstractMesh)):
        ids = [getattr(d, "id", d) for d in value.devices.flat] if isinstance(value, Mesh) else ""
        return f"{type(value).__name__}({dict(value.shape)}, {[str(t) for t in value.axis_types]}, {ids})"
    if isinstance(value, NamedSharding):
        return f"NamedSharding({_word(value.mesh)}, {value.spec}, {value.memory_kind})"
    if isinstance(value, Sharding):
        return f"{type(value).__name__} on {[d.id for d in _compat.device_order(value)]}"
    if isinstance(value, (np.ndarray, np.generic, jax.Array)):
        array = np.asarray(jax.random.key_data(value) if isinstance(value, jax.Array) and _is_key(value) else value)
        if array.size <= 4 and array.dtype != object:
            return f"{array.tolist()!r}:{array.dtype}{array.shape}"
        content = array.tobytes() if array.dtype != object else repr(array.tolist()).encode()
        return f"{array.dtype}{array.shape}:{hashlib.sha256(content).hexdigest()[:16]}"
    if isinstance(value, enum.Enum):
        return str(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(sorted(f"{_word(k)}: {_word(v)}" for k, v in value.items())) + "}"
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(map(_word, value))) + "}"
    if isinstance(value, (tuple, list)):
        fields = getattr(value, "_fields", None)
        words = [_word(v) for v in value]
        return f"{type(value).__name__}({', '.join(words if fields is None else map('='.join, zip(fields, words, strict=True)))})"
    if isinstance(value, functools.partial):
        return f"partial({_word(value.func)}, {_word(value.args)}, {_word(value.keywords)})"
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return re.sub(r" at 0x[0-9a-f]+|\bid=\d+", "", repr(value))
