"""Jaxprs and their equations: read, built and rewritten in one form for all versions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import jax
from jax._src import core, effects, source_info_util
from jax._src import pmap as pmap_lib
from jax.interpreters import partial_eval as pe
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from ._arrays import abstract
from ._tracing import without_mesh

# As in `jax.extend.core`, whose package brings Pallas with it: a tenth of the time that importing JAX takes.
Var = core.Var
Literal = core.Literal
Eqn = core.JaxprEqn
Jaxpr = core.Jaxpr
if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr as ClosedJaxpr  # type: ignore[attr-defined, unused-ignore]  # 0.12 only names it
else:
    ClosedJaxpr = getattr(core, "ClosedJaxpr", core.Jaxpr)  # 0.12 has one class for both
DropVar = core.DropVar
Atom = Var | Literal  # what an equation reads
AbstractJaxpr = Jaxpr | ClosedJaxpr  # 0.12 has one class for both
AbstractValue = jax.core.AbstractValue

PMAP_AXIS = "_internal_pmap_axis_name"  # of the mesh that `jax.pmap` makes where the user gives the axis no name

_debug_info: list[Any] = []


def _plain_debug_info() -> Any:
    """A debug-info record for jaxprs that we assemble ourselves."""
    if not _debug_info:
        _debug_info.append(jax.make_jaxpr(lambda: ())().jaxpr.debug_info)
    return _debug_info[0]


def shape(atom: Atom) -> tuple[int, ...]:
    """The shape of a variable or literal."""
    aval: Any = atom.aval
    return tuple(aval.shape)


def dtype(atom: Atom) -> Any:
    """The dtype of a variable or literal."""
    aval: Any = atom.aval
    return aval.dtype


def new_var(aval: Any) -> Var:
    """A fresh variable of the given abstract value."""
    return Var(aval)


def is_var(atom: object) -> TypeGuard[Var]:
    """Whether an atom is a variable that is used (not a literal, not dropped)."""
    return type(atom) is Var  # the only other kind of Var is DropVar


def new_jaxpr(invars: Sequence[Var], outvars: Sequence[Any], eqns: Sequence[Eqn]) -> Jaxpr:
    """A jaxpr without constants, made of equations that are already in order."""
    effects = set().union(*(e.effects for e in eqns)) if eqns else set()
    info = _plain_debug_info()
    info = info._replace(arg_names=("",) * len(invars), result_paths=("",) * len(outvars))
    return Jaxpr([], list(invars), list(outvars), list(eqns), effects, debug_info=info)


def with_eqns(jaxpr: Any, eqns: Sequence[Eqn], **more: bool) -> Any:
    """An open or closed jaxpr with other equations between the same inputs and results; ``more`` is what JAX notes of it."""
    inner = jaxpr.jaxpr if hasattr(jaxpr, "jaxpr") else jaxpr
    new = inner.replace(eqns=list(eqns), **more)
    return new if inner is jaxpr else jaxpr.replace(jaxpr=new)


_plain_call: list[Any] = []
_OF_OPERANDS = ("in_shardings", "in_layouts", "donated_invars")  # parameters of a call, each with an entry for each


def call_template() -> Eqn:
    """The equation that a call of some jitted function leaves."""
    if not _plain_call:
        with without_mesh(), jax.disable_jit(False):
            _plain_call.append(open_jaxpr(jax.make_jaxpr(jax.jit(lambda x: x + 1))(1.0)).eqns[0])
    eqn: Eqn = _plain_call[0]
    return eqn


def call_params(name: str, jaxpr: ClosedJaxpr, num_inputs: int, num_results: int) -> dict[str, Any]:
    params = dict(call_template().params)
    for key in _OF_OPERANDS:
        params[key] = params[key][:1] * num_inputs
    for key in ("out_shardings", "out_layouts"):
        params[key] = params[key][:1] * num_results
    return params | {"name": name, "jaxpr": jaxpr}


def call_eqn(name: str, jaxpr: Any, invars: Sequence[Any], outvars: Sequence[Any]) -> Eqn:
    """The equation that calling a jitted function of this name would have left, from its jaxpr, open or closed."""
    closed = jaxpr if isinstance(jaxpr, ClosedJaxpr) else close(jaxpr)
    params = call_params(name, closed, len(invars), len(outvars))
    eqn: Eqn = call_template().replace(invars=list(invars), outvars=list(outvars), params=params, effects=jaxpr.effects)
    return eqn


def call(name: str, jaxpr: ClosedJaxpr, operands: Sequence[Any]) -> list[Any]:
    """Calls a jitted function of this name, traced before."""
    params = call_params(name, jaxpr, len(operands), len(jaxpr.out_avals))
    return list(call_template().primitive.bind(*operands, **params))


def trace_jaxpr(name: str, jaxpr: Jaxpr, avals: Sequence[Any], **how: Any) -> jax.stages.Traced:
    """``jax.jit(fun, **how).trace(*avals)`` of a function that computes a jaxpr, which is not traced again for it.

    Args:
      name: that of the function.
      jaxpr: what it computes, without constants.
      avals: what the function is traced with; they have to be those of the jaxpr.
      how: arguments of `jax.jit`.
    """
    body = close(jaxpr)

    def stands_in(*args: Any) -> list[Any]:
        return call(name, body, args)

    stands_in.__name__ = stands_in.__qualname__ = name
    with jax.debug_key_reuse(False):  # it was checked in the whole, of which this is a part
        traced = jax.jit(stands_in, **how).trace(*avals)
    info = without_consts(traced.jaxpr).debug_info
    traced._params = {**traced._params, "jaxpr": close(jaxpr.replace(debug_info=info))}
    return traced


_plain_cond: list[Any] = []


def cond_eqn(index: Any, branches: Sequence[Jaxpr], operands: Sequence[Any], outvars: Sequence[Any]) -> Eqn:
    """The equation that a conditional would have left, from the jaxprs of its branches; ``index`` is an int32."""
    if not _plain_cond:
        with without_mesh(), jax.disable_jit(False):
            some = jax.make_jaxpr(lambda i, x: jax.lax.switch(i, [lambda x: x, lambda x: x + 1], x))(0, 1.0)
            _plain_cond.append(next(e for e in open_jaxpr(some).eqns if e.primitive.name == "cond"))
    template: Eqn = _plain_cond[0]
    params = template.params | {"branches": tuple(map(close, branches))}
    effects = set().union(*(b.effects for b in branches))
    new: Eqn = template.replace(invars=[index, *operands], outvars=list(outvars), params=params, effects=effects)
    return new


def without_high(jaxpr: Any) -> Any:
    """A jaxpr without JAX's high-level equations, of which XLA knows nothing: each is a call of what it stands for.

    On 0.12 ``searchsorted``, ``nonzero``, ``ldexp``, ``frexp`` and ``custom_root`` leave such. JAX replaces them when it
    compiles, and believes a jaxpr that says that it holds none; here they go before anything else is asked of a program,
    since functions of the user's, and tasks in them, are out of sight in one.
    """
    done: dict[int, tuple[Any, Any]] = {}  # one jaxpr that many equations share stays one; kept, so that ids last

    def low(jaxpr: Any) -> Any:
        if not jaxpr.is_high:
            return jaxpr
        if id(jaxpr) not in done:
            eqns = [low_eqn(e) for e in open_jaxpr(jaxpr).eqns]
            done[id(jaxpr)] = jaxpr, with_eqns(jaxpr, eqns, is_high=False)
        return done[id(jaxpr)][1]

    def low_eqn(eqn: Eqn) -> Eqn:
        if any(inner.is_high for inner in jaxprs_in(eqn)):
            return with_jaxprs(eqn, low)
        operands = [v.aval for v in eqn.invars]
        if not eqn.primitive.is_high(*operands, **eqn.params):
            return eqn
        with eqn.ctx.manager:
            body = jax.make_jaxpr(partial(eqn.primitive.to_lojax, **eqn.params))(*map(abstract, operands))
        name = type(eqn.params.get("_prim", eqn.primitive)).__name__
        params = call_params(name, low(body), len(eqn.invars), len(eqn.outvars))
        called: Eqn = eqn.replace(primitive=call_template().primitive, params=params, effects=body.effects)
        return called

    return low(jaxpr)


def close(jaxpr: Jaxpr) -> ClosedJaxpr:
    """A jaxpr without constants as a closed one."""
    return ClosedJaxpr(jaxpr, [])


def closed_over(traced: jax.stages.Traced) -> list[Any]:
    """The traced values that a function read from around it. Its jaxpr has them as operands, before those of the function."""
    return list(traced._consts)


def closing_over_nothing(closed: Any) -> tuple[ClosedJaxpr, list[Any]]:
    """A closed jaxpr that reads its constants, and those of jitted functions in it, as operands; and these constants.

    They are behind the operands that it had, each once. JAX itself does so for loops and branches.
    """
    done: dict[int, tuple[Any, ClosedJaxpr, list[Any]]] = {}  # the first is kept, so that ids last

    def opened(closed: Any) -> tuple[ClosedJaxpr, list[Any]]:
        if id(closed) not in done:
            parts = open_jaxpr(closed)
            consts = {id(c): (v, c) for v, c in zip(parts.constvars, parts.consts, strict=True)}
            alias = {v: consts[id(c)][0] for v, c in zip(parts.constvars, parts.consts, strict=True)}
            eqns = [with_constants(e, consts) if is_jit(e) else e for e in parts.eqns]
            new = closed
            if consts:
                # Two constants that are one object are one operand.
                eqns = [e.replace(invars=[alias.get(v, v) if is_var(v) else v for v in e.invars]) for e in eqns]
                outvars = [alias.get(v, v) if is_var(v) else v for v in parts.outvars]
                bare = new_jaxpr([*parts.invars, *(v for v, _ in consts.values())], outvars, eqns)
                new = close(bare.replace(is_high=closed.is_high))
            done[id(closed)] = closed, new, [c for _, c in consts.values()]
        return done[id(closed)][1:]

    def with_constants(eqn: Eqn, consts: dict[int, tuple[Var, Any]]) -> Eqn:
        body, inner = opened(eqn.params["jaxpr"])
        if not inner:
            return eqn
        added = [consts.setdefault(id(c), (new_var(v.aval), c))[0]
                 for v, c in zip(open_jaxpr(body).invars[len(eqn.invars):], inner, strict=True)]  # fmt: skip
        params = {**eqn.params, "jaxpr": body}
        for key in _OF_OPERANDS:
            params[key] = (*eqn.params[key], *call_template().params[key][:1] * len(added))
        called: Eqn = eqn.replace(invars=[*eqn.invars, *added], params=params)
        return called

    return opened(closed)


def with_body(jaxpr: Any, invars: Sequence[Var], outvars: Sequence[Any], eqns: Sequence[Eqn]) -> Any:
    """A jaxpr, open or closed, with other equations, operands and results, as many as before; constants stay."""
    inner = jaxpr.jaxpr if hasattr(jaxpr, "jaxpr") else jaxpr  # 0.12 has one class for both
    new = inner.replace(invars=list(invars), outvars=list(outvars), eqns=list(eqns))
    return new if inner is jaxpr else jaxpr.replace(jaxpr=new)


def stacked(aval: Any, count: int) -> Any:
    """The abstract value of ``count`` values with a dimension before theirs, without sharding."""
    return jax.core.ShapedArray((count, *aval.shape), aval.dtype, weak_type=getattr(aval, "weak_type", False))


class OpenJaxpr(NamedTuple):
    """A jaxpr taken apart; ``constvars`` pair with ``consts``."""

    constvars: list[Var]
    consts: list[Any]
    invars: list[Var]
    outvars: list[Any]
    eqns: list[Eqn]


def open_jaxpr(jaxpr: Any) -> OpenJaxpr:
    """Takes a jaxpr or closed jaxpr apart (0.12 has one class for both, 0.10 two)."""
    consts = list(getattr(jaxpr, "consts", ()) or ())
    inner = jaxpr.jaxpr if hasattr(jaxpr, "jaxpr") else jaxpr
    return OpenJaxpr(list(inner.constvars), consts, list(inner.invars), list(inner.outvars), list(inner.eqns))


def without_consts(closed: ClosedJaxpr) -> Jaxpr:
    """The open jaxpr in a closed one."""
    inner: Jaxpr = closed.jaxpr
    return inner


def is_jaxpr(value: object) -> TypeGuard[AbstractJaxpr]:
    """Whether a value is a jaxpr, open or closed."""
    return isinstance(value, (Jaxpr, ClosedJaxpr))


def called_jaxpr(eqn: Eqn) -> Any:
    """The jaxpr of a call that hands its operands to it one by one, and its results back; None for anything else."""
    if eqn.primitive.name in ("scan", "while", "cond", "shard_map"):
        return None
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        body = eqn.params.get(name)
        if is_jaxpr(body):
            parts = open_jaxpr(body)
            alike = len(parts.invars) == len(eqn.invars) and len(parts.outvars) == len(eqn.outvars)
            return body if alike else None
    return None


def is_jit(eqn: Eqn) -> bool:
    """Whether an equation is a call of a jitted function."""
    return eqn.primitive.name in ("jit", "pjit")


def jaxprs_in(eqn: Eqn) -> list[Any]:
    """The jaxprs that an equation holds: those of a call, of a loop, of branches."""
    values = [v for p in eqn.params.values() for v in (p if isinstance(p, (tuple, list)) else (p,))]
    return [v for v in values if is_jaxpr(v)]


def with_jaxprs(eqn: Eqn, change: Callable[[Any], Any]) -> Eqn:
    """The equation with what ``change`` makes of each jaxpr that it holds."""

    def changed(value: Any) -> Any:
        if is_jaxpr(value):
            return change(value)
        if isinstance(value, (tuple, list)) and any(map(is_jaxpr, value)):
            parts = [changed(v) for v in value]
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        return value

    new: Eqn = eqn.replace(params={k: changed(v) for k, v in eqn.params.items()})
    return new


def constrained_devices(eqn: Eqn) -> list[tuple[Any, ...]]:
    """The devices that a constraint of the user's, ``jax.device_put``, ``jax.shard_map`` or the shardings of a ``jax.jit`` name.

    None for one without devices.
    """
    if eqn.primitive.name == "sharding_constraint":
        targets = [eqn.params["sharding"]]
    elif eqn.primitive.name == "device_put":
        targets = list(eqn.params["devices"])
    elif eqn.primitive.name == "shard_map":
        targets = [eqn.params["mesh"]]
    elif is_jit(eqn):
        targets = [*eqn.params["in_shardings"], *eqn.params["out_shardings"]]
    else:
        return []
    found: list[tuple[Any, ...]] = []
    for target in targets:
        mesh = getattr(target, "mesh", target)
        if isinstance(mesh, Mesh):
            found.append(tuple(mesh.devices.flat))
        elif isinstance(target, jax.Device):
            found.append((target,))
        elif isinstance(target, Sharding) and not isinstance(
            target, NamedSharding
        ):  # of which the mesh may be one of no devices
            found.append(tuple(target.device_set))
    return found


def meshes_by_hand(eqn: Eqn) -> Iterator[tuple[Eqn, Mesh]]:
    """Each ``jax.shard_map`` on a mesh of devices in an equation, itself included, and that mesh."""
    if eqn.primitive.name == "shard_map" and isinstance(eqn.params["mesh"], Mesh):
        yield eqn, eqn.params["mesh"]
        return
    for jaxpr in jaxprs_in(eqn):
        for inner in open_jaxpr(jaxpr).eqns:
            yield from meshes_by_hand(inner)


def meshes_named(jaxpr: Any) -> Iterator[Mesh]:
    """The meshes of devices that a jaxpr names, in ``jax.shard_map`` and in shardings."""
    for eqn in open_jaxpr(jaxpr).eqns:
        said = [x.mesh for x in jax.tree.leaves(list(eqn.params.values())) if isinstance(x, NamedSharding)]
        if eqn.primitive.name == "shard_map":
            said.append(eqn.params["mesh"])
        yield from (mesh for mesh in said if isinstance(mesh, Mesh) and not mesh.empty)
        for inner in jaxprs_in(eqn):
            yield from meshes_named(inner)


def is_pmap(eqn: Eqn) -> bool:
    """Whether a ``shard_map`` equation is what ``jax.pmap`` leaves, which splits and joins what its function gets and makes."""
    inner: list[Any] = [e.source_info.traceback for e in open_jaxpr(eqn.params["jaxpr"]).eqns]
    return any(
        f.file_name == pmap_lib.__file__ for traceback in inner if traceback is not None for f in traceback.frames
    )


def on_abstract_mesh(jaxpr: Any, mesh: Mesh) -> Any:
    """The jaxpr with ``mesh`` left out of all that names it, so that it is the same on any devices: only axes are left."""

    def of(value: Any) -> Any:
        if is_jaxpr(value):
            eqns = open_jaxpr(value).eqns
            new = [changed(e) for e in eqns]
            return with_eqns(value, new) if any(a is not b for a, b in zip(eqns, new, strict=True)) else value
        if isinstance(value, Mesh):
            return mesh.abstract_mesh if value == mesh else value
        if isinstance(value, NamedSharding):
            return value.update(mesh=mesh.abstract_mesh) if value.mesh == mesh else value
        if isinstance(value, (tuple, list)):
            parts = [of(v) for v in value]
            if any(a is not b for a, b in zip(parts, value, strict=True)):
                return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        return value

    def changed(eqn: Eqn) -> Eqn:
        if eqn.primitive.name not in ("sharding_constraint", "shard_map") and not jaxprs_in(eqn):
            return eqn
        params = {k: of(v) for k, v in eqn.params.items()}
        same = all(params[k] is v for k, v in eqn.params.items())
        new: Eqn = eqn if same else eqn.replace(params=params)
        return new

    return of(jaxpr)


def manual_axes_of(eqn: Eqn) -> frozenset[str]:
    """The mesh axes that the body of a ``shard_map`` has for itself, under the names that versions give them."""
    named = eqn.params.get("newly_manual_axes", eqn.params.get("manual_axes"))
    return frozenset(eqn.params["mesh"].axis_names if named is None else named)


def out_specs_of(eqn: Eqn) -> Sequence[PartitionSpec]:
    """How the results of a ``shard_map`` lie."""
    specs: Sequence[PartitionSpec] = eqn.params["out_specs"]
    return specs


class ScanParts(NamedTuple):
    """What a ``scan`` equation says, in one form for all versions."""

    jaxpr: Any
    num_consts: int
    num_carry: int
    length: int
    reverse: bool


def scan_parts(eqn: Eqn) -> ScanParts:
    """Reads a ``scan`` equation. JAX 0.12 keeps the split of its operands in a tree."""
    p = eqn.params
    if "num_consts" in p:  # JAX 0.10, 0.11
        num_consts, num_carry = p["num_consts"], p["num_carry"]
    else:  # JAX 0.12
        consts, carry, _ = p["ft_in"].update(list(range(len(eqn.invars)))).unpack()
        num_consts, num_carry = len(list(consts)), len(list(carry))
    return ScanParts(p["jaxpr"], num_consts, num_carry, p["length"], p["reverse"])


class WhileParts(NamedTuple):
    """What a ``while`` equation says: its operands are the constants of its condition and of its body, and what it carries."""

    cond: Any
    cond_consts: int
    body: Any
    body_consts: int


def while_parts(eqn: Eqn) -> WhileParts:
    """Reads a ``while`` equation."""
    p = eqn.params
    return WhileParts(p["cond_jaxpr"], p["cond_nconsts"], p["body_jaxpr"], p["body_nconsts"])


def solver(eqn: Eqn) -> tuple[AbstractJaxpr, list[Any]] | None:
    """The jaxpr that solves the system of a ``custom_linear_solve`` equation, and its operands; None for another equation."""
    if eqn.primitive.name != "custom_linear_solve":
        return None
    lengths, jaxprs = eqn.params["const_lengths"], eqn.params["jaxprs"]
    start = lengths.matvec + lengths.vecmat
    right = eqn.invars[sum(lengths) :]
    return jaxprs.solve, [*eqn.invars[start : start + lengths.solve], *right]


def within(eqn: Eqn, outer: Eqn | None) -> Eqn:
    """An equation that was in a jaxpr of another one, with the name stack that it has outside of it."""
    if outer is None or not names_around(outer):
        return eqn
    source = eqn.source_info.replace(name_stack=outer.source_info.name_stack + eqn.source_info.name_stack)
    new: Eqn = eqn.replace(source_info=source)
    return new


def name_stack(eqn: Eqn) -> str:
    """The name stack of an equation, relative to the jaxpr that holds it."""
    return str(eqn.source_info.name_stack)


def names_around(eqn: Eqn) -> tuple[Any, ...]:
    """The parts of an equation's name stack, the outermost first."""
    parts: tuple[Any, ...] = eqn.source_info.name_stack.stack
    return parts


def with_names(eqn: Eqn, parts: Sequence[Any]) -> Eqn:
    """The equation with a name stack of other parts."""
    stack = type(eqn.source_info.name_stack)(tuple(parts))
    new: Eqn = eqn.replace(source_info=eqn.source_info.replace(name_stack=stack))
    return new


def source_line(eqn: Eqn) -> str:
    """``file.py:12 (function)`` of the user's code behind an equation, or an empty string."""
    try:
        return str(source_info_util.summarize(eqn.source_info))
    except Exception:  # a traceback that JAX cannot summarise must not hide the error we report
        return ""


def with_line(eqn: Eqn, outer: Eqn | None) -> Eqn:
    """An equation of a library's, with the line of the user's from which the one that holds it is; another one as it is."""
    if outer is None or source_line(eqn):
        return eqn
    new: Eqn = eqn.replace(source_info=eqn.source_info.replace(traceback=outer.source_info.traceback))
    return new


def line_within(eqn: Eqn) -> str:
    """As `source_line`, of the first equation in it that has one where it has none itself, as what a library made of a function."""
    line = source_line(eqn)
    return line or next((found for j in jaxprs_in(eqn) for e in open_jaxpr(j).eqns if (found := line_within(e))), "")


def eqn_context(eqn: Eqn) -> tuple[Any, ...]:
    """What `jax.experimental.compute_on`, `jax.threefry_partitionable` and the like say about an equation; hashable."""
    ctx = eqn.ctx
    return (ctx.compute_type, str(ctx.xla_metadata) if ctx.xla_metadata else None, ctx.threefry_partitionable)


def keeps_order(eqn: Eqn) -> bool:
    """Whether an equation has an effect that JAX has in the order of the program."""
    return any(effects.ordered_effects.contains(effect) for effect in eqn.effects)


def dce(jaxpr: Jaxpr, used_outputs: Sequence[bool]) -> tuple[Jaxpr, list[bool]]:
    """Removes dead code, also inside nested calls. Returns the jaxpr and which inputs it uses."""
    out, used = pe.dce_jaxpr(jaxpr, list(used_outputs))
    return out, list(used)
