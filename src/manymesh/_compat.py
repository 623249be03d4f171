"""The one door to what JAX does not publish, and to what changed between JAX versions.

Every function here has a name and a meaning of its own; no private module is handed on.
Served versions: JAX 0.10 to 0.12. A comment names the version that needs each branch.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, TypeGuard, TypeVar

import jax
import numpy as np
from jax._src import (
    api,
    api_util,
    clusters,
    compiler,
    config,
    core,
    distributed,
    sharding_impls,
    source_info_util,
    traceback_util,
    xla_bridge,
)
from jax._src import mesh as mesh_lib
from jax._src.array import ArrayImpl
from jax._src.interpreters.batching import BatchTrace
from jax._src.lax import lax as lax_internals
from jax._src.lib import _jax  # type: ignore[attr-defined]  # JAX re-exports these without saying so
from jax._src.lib.mlir import ir, passmanager  # type: ignore[attr-defined]  # JAX re-exports these without saying so
from jax.experimental import serialize_executable
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

try:
    from jaxlib.mlir.dialects import sdy
except ImportError:  # a jaxlib built without Shardy
    sdy = None  # type: ignore[assignment]  # a module, or nothing

# As in `jax.extend.core`, whose package brings Pallas with it: a tenth of the time that importing JAX takes.
Var = core.Var
Literal = core.Literal
Eqn = core.JaxprEqn
Jaxpr = core.Jaxpr
if TYPE_CHECKING:
    ClosedJaxpr = core.ClosedJaxpr
else:
    ClosedJaxpr = getattr(core, "ClosedJaxpr", core.Jaxpr)  # 0.12 has one class for both
DropVar = core.DropVar
Atom = Var | Literal  # what an equation reads
AbstractJaxpr = Jaxpr | ClosedJaxpr  # 0.12 has one class for both
AbstractValue = jax.core.AbstractValue
ConcreteArray = ArrayImpl  # the class of every array that is there, but for typed random keys

P = ParamSpec("P")
R = TypeVar("R")

# JAX hides these files where it hides its own: in tracebacks, and as the origin of an equation.
_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
traceback_util.register_exclusion(_HERE)
source_info_util.register_exclusion(_HERE)


def boundary(fun: Callable[P, R]) -> Callable[P, R]:
    """A public function whose errors end at the user's line: JAX's ``jax_traceback_filtering`` holds for it."""
    wrapped: Callable[P, R] = traceback_util.api_boundary(fun)
    return wrapped


def vmapped() -> int:
    """How many axes `jax.vmap` has taken away from the values that are computed here."""
    trace: Any = core.trace_ctx.trace
    count = 0
    while trace is not None:
        count += isinstance(trace, BatchTrace)
        trace = getattr(trace, "parent_trace", None)
    return count


def is_staging() -> bool:
    """Whether what is computed here is put into a program, of `jax.jit` for example, and not computed now."""
    return not core.trace_state_clean() and isinstance(jax.numpy.zeros(()), jax.core.Tracer)


def differentiated(fun: Any) -> tuple[int, ...] | None:
    """The arguments that a function made by `jax.grad` or `jax.value_and_grad` differentiates; None for another one."""
    for _ in range(4):  # each of them is inside a boundary, and jax.grad is around jax.value_and_grad
        code, closure = getattr(fun, "__code__", None), getattr(fun, "__closure__", None)
        if code is None or closure is None or code.co_filename not in (api.__file__, traceback_util.__file__):
            return None
        inside = dict(zip(code.co_freevars, closure, strict=True))
        if "argnums" in inside:
            numbers = inside["argnums"].cell_contents
            return (numbers,) if isinstance(numbers, int) else tuple(numbers)
        within = inside.get("value_and_grad_f") or inside.get("fun")
        fun = within.cell_contents if within is not None else None
    return None


def users_level() -> int:
    """The ``stacklevel`` at which the caller's warning points to the line that called into this package."""
    package = __name__.split(".")[0]
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None:
        module = frame.f_globals.get("__name__", "")
        if module.split(".")[0] != package and module != traceback_util.__name__:  # which is around public functions
            break
        frame, level = frame.f_back, level + 1
    return level


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
    return isinstance(atom, Var) and not isinstance(atom, DropVar)


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


def _call_template() -> Eqn:
    """The equation that a call of some jitted function leaves."""
    if not _plain_call:
        with without_mesh(), jax.disable_jit(False):
            _plain_call.append(open_jaxpr(jax.make_jaxpr(jax.jit(lambda x: x + 1))(1.0)).eqns[0])
    eqn: Eqn = _plain_call[0]
    return eqn


def _call_params(name: str, jaxpr: ClosedJaxpr, num_inputs: int, num_results: int) -> dict[str, Any]:
    params = dict(_call_template().params)
    for key in ("in_shardings", "in_layouts", "donated_invars"):
        params[key] = params[key][:1] * num_inputs
    for key in ("out_shardings", "out_layouts"):
        params[key] = params[key][:1] * num_results
    return params | {"name": name, "jaxpr": jaxpr}


def call_eqn(name: str, jaxpr: Any, invars: Sequence[Any], outvars: Sequence[Any]) -> Eqn:
    """The equation that calling a jitted function of this name would have left, from its jaxpr, open or closed."""
    closed = jaxpr if isinstance(jaxpr, ClosedJaxpr) else close(jaxpr)
    params = _call_params(name, closed, len(invars), len(outvars))
    eqn: Eqn = _call_template().replace(
        invars=list(invars), outvars=list(outvars), params=params, effects=jaxpr.effects
    )
    return eqn


def call(name: str, jaxpr: ClosedJaxpr, operands: Sequence[Any]) -> list[Any]:
    """Calls a jitted function of this name, traced before."""
    params = _call_params(name, jaxpr, len(operands), len(jaxpr.out_avals))
    return list(_call_template().primitive.bind(*operands, **params))


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

    def low(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return type(value)(map(low, value)) if any(map(is_jaxpr, value)) else value
        if not is_jaxpr(value) or not value.is_high:
            return value
        if id(value) not in done:
            eqns = [low_eqn(e) for e in open_jaxpr(value).eqns]
            done[id(value)] = value, with_eqns(value, eqns, is_high=False)
        return done[id(value)][1]

    def low_eqn(eqn: Eqn) -> Eqn:
        operands = [v.aval for v in eqn.invars]
        if not eqn.primitive.is_high(*operands, **eqn.params):
            return eqn
        if jaxprs_in(eqn):
            return eqn.replace(params={k: low(p) for k, p in eqn.params.items()})
        with eqn.ctx.manager:
            body = jax.make_jaxpr(partial(eqn.primitive.to_lojax, **eqn.params))(*map(abstract, operands))
        name = type(eqn.params.get("_prim", eqn.primitive)).__name__
        params = _call_params(name, low(body), len(eqn.invars), len(eqn.outvars))
        return eqn.replace(primitive=_call_template().primitive, params=params, effects=body.effects)

    return low(jaxpr)


def close(jaxpr: Jaxpr) -> ClosedJaxpr:
    """A jaxpr without constants as a closed one."""
    return ClosedJaxpr(jaxpr, [])


def with_body(jaxpr: Any, invars: Sequence[Var], outvars: Sequence[Any], eqns: Sequence[Eqn]) -> Any:
    """A jaxpr, open or closed, with other equations, operands and results, as many as before; constants stay."""
    inner = jaxpr.jaxpr if hasattr(jaxpr, "jaxpr") else jaxpr  # 0.12 has one class for both
    new = inner.replace(invars=list(invars), outvars=list(outvars), eqns=list(eqns))
    return new if inner is jaxpr else jaxpr.replace(jaxpr=new)


def stacked(aval: Any, count: int) -> Any:
    """The abstract value of ``count`` values with a dimension before theirs, without sharding."""
    return jax.core.ShapedArray((count, *aval.shape), aval.dtype)


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


def constrained_devices(eqn: Eqn) -> list[tuple[Any, ...]]:
    """The devices that a constraint of the user's, or ``jax.device_put``, names; none for one without devices."""
    if eqn.primitive.name == "sharding_constraint":
        targets = [eqn.params["sharding"]]
    elif eqn.primitive.name == "device_put":
        targets = list(eqn.params["devices"])
    else:
        return []
    meshes = [t.mesh for t in targets if isinstance(t, NamedSharding) and isinstance(t.mesh, Mesh)]
    return [tuple(mesh.devices.flat) for mesh in meshes] + [(t,) for t in targets if isinstance(t, jax.Device)]


def manual_axes_of(eqn: Eqn) -> frozenset[str]:
    """The mesh axes that the body of a ``shard_map`` has for itself, under the names that versions give them."""
    named = eqn.params.get("newly_manual_axes", eqn.params.get("manual_axes"))
    return frozenset(eqn.params["mesh"].axis_names if named is None else named)


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


def name_stack(eqn: Eqn) -> str:
    """The name stack of an equation, relative to the jaxpr that holds it."""
    return str(eqn.source_info.name_stack)


def source_line(eqn: Eqn) -> str:
    """``file.py:12 (function)`` of the user's code behind an equation, or an empty string."""
    try:
        return str(source_info_util.summarize(eqn.source_info))
    except Exception:  # a traceback that JAX cannot summarise must not hide the error we report
        return ""


def eqn_context(eqn: Eqn) -> tuple[Any, ...]:
    """What `jax.experimental.compute_on` and the like say about an equation; hashable."""
    return (eqn.ctx.compute_type, str(eqn.ctx.xla_metadata) if eqn.ctx.xla_metadata else None)


def dce(jaxpr: Jaxpr, used_outputs: Sequence[bool]) -> tuple[Jaxpr, list[bool]]:
    """Removes dead code, also inside nested calls. Returns the jaxpr and which inputs it uses."""
    out, used = pe.dce_jaxpr(jaxpr, list(used_outputs))
    return out, list(used)


@contextlib.contextmanager
def without_mesh() -> Iterator[None]:
    """Hides an ambient mesh (``jax.set_mesh``) while a program is traced or a fragment compiled."""
    empty = mesh_lib.empty_concrete_mesh
    with sharding_impls._internal_use_concrete_mesh(empty), jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        yield


_recording_token = jax.make_user_context(default_value=None)


@contextlib.contextmanager
def separate_jit_caches(token: object) -> Iterator[None]:
    """Inside, functions that the user jitted are traced anew for each distinct ``token``.

    Without it a function first called outside ``mm.jit`` would hand its cached jaxpr, which
    holds no task, to the trace of a program.
    """
    with _recording_token(token):
        yield


def linear_identity(
    name: str,
    lower: Callable[..., Any],
    batch: Callable[[dict[str, Any], int], dict[str, Any]],
    *,
    keeps_mesh: bool = True,
) -> Any:
    """A primitive that is the identity under every transformation and keeps its parameters.

    Args:
      name: name of the primitive.
      lower: ``lower(x, **params)``: what it becomes in an executable.
      batch: the parameters under ``vmap``, from those without and the position of the new dimension.
      keeps_mesh: whether the result is traced on the mesh of the operand; if not, on none.
    """
    prim = core.Primitive(name)

    def batched(args: Any, dims: Any, **params: Any) -> Any:
        return prim.bind(*args, **batch(params, dims[0])), dims[0]

    prim.def_impl(lambda x, **_: x)
    prim.def_abstract_eval(lambda x, **_: x if keeps_mesh else _without_mesh(x))
    ad.deflinear2(prim, lambda ct, _, **params: [prim.bind(ct, **params)])
    batching.primitive_batchers[prim] = batched
    mlir.register_lowering(prim, mlir.lower_fun(lower, multiple_results=False))
    return prim


def manual_axes() -> tuple[str, ...]:
    """The axes that a surrounding `jax.shard_map` has cut by hand."""
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)


InternalFloatingPointError = api_util.InternalFloatingPointError


def checks_floats() -> bool:
    """Whether ``jax_debug_nans`` or ``jax_debug_infs`` holds; a step then has to be repeatable."""
    return bool(config.debug_nans.value or config.debug_infs.value)


def users_frame(error: BaseException) -> str:
    """``file.py:12 (function)`` of the innermost line of a traceback that belongs to no library; empty if there is none."""
    frames = [
        (frame.f_code.co_filename, line, frame.f_code.co_name)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if traceback_util.include_filename(frame.f_code.co_filename)
    ]
    if not frames and error.__cause__ is not None:  # a backward pass: the line of the operation that it is of
        return users_frame(error.__cause__)
    own = [frame for frame in frames if "site-packages" not in frame[0]] or frames
    return f"{own[-1][0]}:{own[-1][1]} ({own[-1][2]})" if own else ""


_last_settings: list[tuple[Any, tuple[Any, ...]]] = [(None, ())]


def trace_settings() -> tuple[Any, ...]:
    """The settings and surroundings by which JAX itself tells traces apart, and those that `jax.jit` adds; hashable.

    An ambient mesh counts for nothing, for it is hidden while a step is traced.
    """
    raw = (config.trace_context(), default_key_kind(), config.debug_nans.value, config.debug_infs.value)
    last, settings = _last_settings[0]
    if raw != last:  # which is seldom, and every call of a step asks
        settings = (*(None if isinstance(x, (Mesh, AbstractMesh)) else x for x in raw[0]), *raw[1:])
        _last_settings[0] = raw, settings
    return settings


def default_key_kind() -> str:
    """The implementation of random keys that are plain arrays."""
    return str(config.default_prng_impl.value)


def jit_is_disabled() -> bool:
    """Whether `jax.disable_jit` holds."""
    return bool(config.disable_jit.value)


def with_weak_type(x: Any, weak: bool) -> Any:
    """An array of the same dtype whose dtype is weak, as that of a Python number is, or not."""
    return lax_internals._convert_element_type(x, x.dtype, weak_type=weak)


def _without_mesh(aval: Any) -> Any:
    return jax.core.ShapedArray(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def abstract(aval: Any) -> jax.ShapeDtypeStruct:
    """The shape, dtype and weak type of an abstract value, without sharding."""
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def as_named(sharding: Any, mesh: Any, ndim: int) -> NamedSharding:
    """The sharding of a compiled value of ``ndim`` dimensions in terms of a mesh.

    XLA answers with a raw tiling where JAX cannot name it; a tiling that the mesh's axes cannot
    express becomes replication, which the caller then asks XLA for.
    """
    if isinstance(sharding, NamedSharding) and sharding.mesh == mesh:
        return NamedSharding(mesh, sharding.spec)
    try:
        tiling = sharding._to_xla_hlo_sharding(ndim)
        return NamedSharding(mesh, sharding_impls.parse_flatten_op_sharding(tiling, mesh)[0])
    except Exception:  # the parser has no error type of its own
        return NamedSharding(mesh, PartitionSpec())


def pieces(x: Any) -> list[Any]:
    """The arrays of the single devices that an array consists of, in the order of its sharding's devices.

    They share its memory. `jax.Array.addressable_shards` gives them too, at five times the cost.
    """
    return list(x._arrays)


def assemble(aval: jax.ShapeDtypeStruct, arrays: Sequence[Any]) -> jax.Array:
    """The array that consists of arrays of single devices, in the order of its sharding's devices, without a copy."""
    assert aval.sharding is not None, "an array has a sharding"
    plain = jax.core.ShapedArray(aval.shape, aval.dtype, weak_type=bool(aval.weak_type))
    return ArrayImpl(plain, aval.sharding, list(arrays), committed=True, _skip_checks=True)


def device_order(sharding: Any) -> list[Any]:
    """The devices of a sharding in the order of its shards."""
    return list(sharding._device_assignment)


class Propagated(NamedTuple):
    """Device axes for each dimension of what a computation takes and gives."""

    inputs: list[PartitionSpec]
    outputs: list[PartitionSpec]


def propagate(
    fun: Callable[..., Any], avals: Sequence[Any], mesh: AbstractMesh, ins: Sequence[Any], outs: Sequence[Any]
) -> Propagated | None:
    """The shardings that XLA's partitioner would find for a computation, by its propagation pass alone.

    No device is needed, and no code is generated.

    Args:
      fun: the computation, flat.
      avals: what it takes.
      mesh: what it runs on.
      ins, outs: the spec of each input and result; None to find it.

    Returns:
      A spec for each input and result, in the axes of ``mesh``. None where this jaxlib has no such pass, or where the
      computation cannot be lowered without devices.
    """
    if sdy is None:
        return None

    def shardings(specs: Sequence[Any]) -> list[Any]:
        return [None if s is None else NamedSharding(mesh, s) for s in specs]

    platform = jax.default_backend()
    with without_mesh(), config.use_shardy_partitioner(True):
        jitted = jax.jit(fun, in_shardings=tuple(shardings(ins)), out_shardings=shardings(outs), keep_unused=True)
        try:
            lowered = jitted.trace(*avals).lower(lowering_platforms=(platform,))
        except ValueError as error:
            if "require devices" not in str(error):
                raise
            return None  # a callback: JAX lowers it for devices only
    module = lowered.compiler_ir("stablehlo")
    with module.context:
        operation = module.operation.clone().operation  # JAX may keep the module for another compilation
        passmanager.PassManager.parse("builtin.module(sdy-propagation-pipeline)").run(operation)
        (main,) = (o for o in operation.regions[0].blocks[0] if o.attributes.get("sym_name") == _main())
        found = [_specs_of(main, name) for name in ("arg_attrs", "res_attrs")]
    # What JAX adds, tokens of ordered effects, comes first; a typed key has a dimension more than we know of.
    return Propagated(
        *(each[len(each) - n :] if n else [] for each, n in zip(found, (len(ins), len(outs)), strict=True))
    )


def _main() -> Any:
    return ir.StringAttr.get("main")


def _specs_of(main: Any, name: str) -> list[PartitionSpec]:
    """The specs of the inputs or of the results of an MLIR function."""
    kind = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value)
    count = len(kind.inputs if name == "arg_attrs" else kind.results)
    if name not in main.attributes:
        return [PartitionSpec()] * count
    return [_spec_of(ir.DictAttr(attributes)) for attributes in ir.ArrayAttr(main.attributes[name])]


def _spec_of(attributes: Any) -> PartitionSpec:
    if "sdy.sharding" not in attributes:
        return PartitionSpec()
    entries: list[Any] = []
    for dim in map(sdy.DimensionShardingAttr, sdy.TensorShardingAttr(attributes["sdy.sharding"]).dimension_shardings):
        axes = [sdy.AxisRefAttr(axis) for axis in dim.axes]
        whole = [a for a in axes if a.sub_axis_info is None]  # a part of an axis has no name in JAX
        names = tuple(str(a.name) for a in axes) if len(whole) == len(axes) else ()
        entries.append(names if len(names) > 1 else names[0] if names else None)
    return PartitionSpec(*entries)


class _Loader(serialize_executable._JaxPjrtUnpickler):
    """Reads what `save_executable` wrote with the devices of another mesh in place of those it was written for."""

    def __init__(self, file: io.BytesIO, source: Mesh, target: Mesh) -> None:
        targets = list(target.devices.flat)
        super().__init__(file, targets[0].client, targets)  # type: ignore[no-untyped-call]
        self.devices_by_id = {old.id: new for old, new in zip(source.devices.flat, targets, strict=True)}
        self.options = compiler.get_compile_options(
            1, len(targets), np.array([[d.id for d in targets]]), backend=targets[0].client
        )

    def persistent_load(self, pid: Any) -> Any:
        if pid[0] == "exec":
            # Without options the executable would still be assigned to the devices that it was compiled for.
            return self.backend.deserialize_executable(pid[1], self.execution_devices, self.options)
        return super().persistent_load(pid)  # type: ignore[no-untyped-call]


def caches_on_disk() -> bool:
    """Whether JAX keeps executables on disk."""
    return all(getattr(jax.config, name) for name in ("jax_enable_compilation_cache", "jax_compilation_cache_dir"))


def save_executable(compiled: Any) -> Any:
    """An executable in a form that `load_executable` reads, or None if there is none.

    There is none where host callbacks or constants of this process are part of it.
    """
    unloaded = compiled._executable._unloaded_executable
    if unloaded.host_callbacks or unloaded.keepalive or unloaded.ordered_effects or unloaded.unordered_effects:
        return None
    try:
        return serialize_executable.serialize(compiled)
    except Exception:  # backends say in their own ways that they cannot
        return None


def load_executable(saved: Any, source: Mesh, target: Mesh) -> Any:
    """An executable saved for the devices of one mesh, loaded for those of another; None where that does not work."""
    if saved is None:
        return None
    data, in_tree, out_tree = saved
    try:
        unloaded, args_info, no_kwargs = _Loader(io.BytesIO(data), source, target).load()
        loaded = unloaded.load()
    except Exception:  # as above
        return None
    return jax.stages.Compiled(loaded, [], in_tree.unflatten(args_info), out_tree, no_kwargs=no_kwargs)


def backends_have_started() -> bool:
    """Whether JAX has looked for devices, after which it takes no settings about processes any more."""
    return xla_bridge.backends_are_initialized()


def cluster_name() -> str | None:
    """The kind of cluster that JAX finds in the environment (Slurm, Kubernetes, Open MPI, TPU pods), if any."""
    for kind in clusters.ClusterEnv._cluster_types:
        if not kind.opt_in_only_method and kind.is_env_present():
            return kind.__name__.removesuffix("Cluster")
    return None


def coordination_client() -> Any:
    """The client of the service through which processes find each other; None in a process of its own."""
    return distributed.global_state.client


def coordinator_address() -> str | None:
    """Where that service is."""
    return distributed.global_state.coordinator_address


def start_coordination_service(address: str, processes: int, heartbeat_timeout: int) -> Any:
    """Hosts that service here; it stops when what is returned is dropped.

    Args:
      address: ``host:port`` to listen on.
      processes: how many will come.
      heartbeat_timeout: seconds of silence after which it takes a process for dead.
    """
    return _jax.get_distributed_runtime_service(address, processes, heartbeat_timeout=heartbeat_timeout)


def transfers_across_hosts() -> bool:
    """Whether the backend itself moves arrays between processes, as JAX asks it."""
    return bool(getattr(xla_bridge.get_backend(), "supports_cross_host_transfers", False))


def key_words(x: Any) -> Any:
    """The plain array of words that a typed random key consists of, without a computation; other arrays as they are."""
    return getattr(x, "_base_array", x)


def process_numbers() -> tuple[int, int]:
    """The number of this process and how many there are, without looking for devices."""
    return distributed.global_state.process_id, distributed.global_state.num_processes


def key_kind(dtype: Any) -> Any:
    """How typed random keys of a dtype are made."""
    return dtype._impl.name


def as_device_dtype(x: Any) -> tuple[Any, bool]:
    """The dtype that a host value has as an array, and whether that is weak."""
    aval = jax.typeof(x)
    return aval.dtype, bool(aval.weak_type)
