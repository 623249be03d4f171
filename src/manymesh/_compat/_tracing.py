"""What surrounds a trace: transformations, settings, meshes; and primitives of our own."""

from __future__ import annotations

import contextlib
import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import api, api_util, config, core, sharding_impls, traceback_util
from jax._src import mesh as mesh_lib
from jax._src.interpreters.batching import BatchTrace
from jax._src.lax import lax as lax_internals
from jax.experimental import jet
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from ._arrays import abstract


def vmapped() -> tuple[tuple[str, ...], ...]:
    """The axes that `jax.vmap` has taken away from the values that are computed here, innermost first.

    Returns:
      For each the device axes that its ``spmd_axis_name`` gives to it.
    """
    trace: Any = core.trace_ctx.trace
    taken: list[tuple[str, ...]] = []
    while trace is not None:
        if isinstance(trace, BatchTrace):
            taken.append(tuple(trace.axis_data.spmd_name or ()))
        trace = getattr(trace, "parent_trace", None)
    return tuple(taken)


def is_staging() -> bool:
    """Whether what is computed here is put into a program, of `jax.jit` for example, and not computed now."""
    return not core.trace_state_clean() and isinstance(jax.numpy.zeros(()), jax.core.Tracer)


def differentiated(fun: Any) -> tuple[int, ...] | None:
    """The arguments that a function made by `jax.grad` or `jax.value_and_grad` differentiates; None for another one.

    Those of Flax NNX count too, also inside a function of ours that wraps it.
    """
    flax: Any = sys.modules.get("flax.nnx.transforms.autodiff")
    if flax is not None and getattr(fun, "__module__", None) == flax.__name__:
        fun = inspect.unwrap(fun)
    files = (api.__file__, traceback_util.__file__, getattr(flax, "__file__", None))
    for _ in range(4):  # each of them is inside a boundary, and jax.grad is around jax.value_and_grad
        code, closure = getattr(fun, "__code__", None), getattr(fun, "__closure__", None)
        if code is None or closure is None or code.co_filename not in files:
            return None
        inside = dict(zip(code.co_freevars, closure, strict=True))
        if (found := inside.get("jax_argnums", inside.get("argnums"))) is not None:
            numbers = found.cell_contents
            return (numbers,) if isinstance(numbers, int) else tuple(numbers)
        within = inside.get("value_and_grad_f") or inside.get("fun")
        fun = within.cell_contents if within is not None else None
    return None


@contextlib.contextmanager
def without_mesh() -> Iterator[None]:
    """Hides an ambient mesh (``jax.set_mesh``) while a program is traced, split or laid out, or a fragment compiled."""
    empty = mesh_lib.empty_concrete_mesh
    with sharding_impls._internal_use_concrete_mesh(empty), jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        yield


@contextlib.contextmanager
def wide_types(jaxpr: Any) -> Iterator[None]:
    """Keeps the 64-bit values of a computation whose author switched them on for a part of the program, while it is lowered."""
    with wide_values((*jaxpr.invars, *(v for eqn in jaxpr.eqns for v in eqn.outvars))):
        yield


@contextlib.contextmanager
def wide_values(variables: Iterable[Any]) -> Iterator[None]:
    """Keeps the values of variables of 64 bits as they are, where these are switched off by now."""
    with wide_dtypes(getattr(v.aval, "dtype", None) for v in variables):
        yield


@contextlib.contextmanager
def wide_dtypes(dtypes: Iterable[Any]) -> Iterator[None]:
    """Keeps arrays of dtypes of 64 bits as they are, where these are switched off by now."""
    wide = not config.enable_x64.value and any(dtype in WIDE for dtype in dtypes)
    with jax.enable_x64(True) if wide else contextlib.nullcontext():
        yield


def traced_dtype(aval: Any) -> Any:
    """The dtype that a trace gives to an operand described as an abstract value: of 32 bits where 64 are switched off."""
    if config.enable_x64.value or aval.dtype not in WIDE:
        return aval.dtype
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX's, of what our own error says
        return jax.typeof(abstract(aval)).dtype


WIDE = frozenset(map(np.dtype, ("float64", "complex128", "int64", "uint64")))  # what is switched off by default
_recording_token = jax.make_user_context(default_value=None)


@contextlib.contextmanager
def separate_jit_caches(token: object) -> Iterator[None]:
    """Inside, functions that the user jitted are traced anew for each distinct ``token``.

    Without it a function first called outside ``mm.jit`` would hand its cached jaxpr, which
    holds no task, to the trace of a program.
    """
    with _recording_token(token):
        yield


def set_for_all_threads(context: Any, value: object) -> None:
    """Gives a context of `jax.make_user_context` its value in every thread that is in no block of its own."""
    setting = context if hasattr(context, "set_global") else context._obj  # before JAX 0.10.2
    setting.set_global(value)


def linear_identity(
    name: str,
    lower: Callable[..., Any],
    batch: Callable[[dict[str, Any], int, tuple[str, ...]], dict[str, Any]],
    *,
    keeps_mesh: bool = True,
    of_values: bool = False,
) -> Any:
    """A primitive that is the identity under every transformation and keeps its parameters.

    Args:
      name: name of the primitive.
      lower: ``lower(x, **params)``: what it becomes in an executable.
      batch: the parameters under ``vmap``, from those without, the position of the new dimension and the device axes
        that its ``spmd_axis_name`` gives to it.
      keeps_mesh: whether the result is traced on the mesh of the operand; if not, on none.
      of_values: whether the parameters are those of values alone: tangents and cotangents come without.
    """
    prim: Any = core.Primitive(name)
    prim.is_identity = True

    def batched(axis: Any, args: Any, dims: Any, **params: Any) -> Any:
        (dim,) = dims
        return prim.bind(*args, **(params if dim is None else batch(params, dim, tuple(axis.spmd_name or ())))), dim

    def with_tangent(primals: Any, tangents: Any, **params: Any) -> Any:
        value, (tangent,) = prim.bind(*primals, **params), tangents
        if type(tangent) is ad.Zero:
            return value, ad.Zero(jax.typeof(value).to_tangent_aval())
        return value, prim.bind(tangent)

    def with_series(primals: Any, series: Any, **params: Any) -> Any:
        of_terms = {} if of_values else params
        return prim.bind(*primals, **params), [prim.bind(*terms, **of_terms) for terms in zip(*series, strict=True)]

    prim.def_impl(lambda x, **_: x)
    prim.def_abstract_eval(lambda x, **_: x if keeps_mesh else on_no_mesh(x))
    ad.deflinear2(prim, lambda ct, _, **params: [prim.bind(ct, **params)])
    if of_values:
        ad.primitive_jvps[prim] = with_tangent
    batching.fancy_primitive_batchers[prim] = batched
    jet.jet_rules[prim] = with_series  # type: ignore[assignment]  # typed by its first entry
    mlir.register_lowering(prim, mlir.lower_fun(lower, multiple_results=False))
    return prim


def manual_axes() -> tuple[str, ...]:
    """The axes that a surrounding `jax.shard_map` has cut by hand."""
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)


InternalFloatingPointError = api_util.InternalFloatingPointError


def checks_floats() -> bool:
    """Whether ``jax_debug_nans`` or ``jax_debug_infs`` holds; a step then has to be repeatable."""
    return bool(config.debug_nans.value or config.debug_infs.value)


@contextlib.contextmanager
def floats_looked_at() -> Iterator[None]:
    """Has JAX look at every result of the block where ``jax_debug_nans`` or ``jax_debug_infs`` holds.

    Once a thread has left a ``with jax.debug_nans(...)``, also one of JAX's own (`jax.numpy.var`), JAX does not look there at
    what compiled functions return, unless the setting is the thread's own. The thread is left as it was.
    """
    hook = api._post_hook_state
    before = hook.get_local()
    try:
        with config.debug_nans(config.debug_nans.value), config.debug_infs(config.debug_infs.value):
            yield
    finally:
        hook.set_local(before)


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


# Those of JAX that change what is traced, planned or compiled, and that people set.
_NAMED_SETTINGS = (
    "jax_debug_infs",
    "jax_debug_nans",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_threefry_partitionable",
)


def named_settings() -> dict[str, str]:
    """The settings of JAX that change programs, as they hold now, as text."""
    return {name: str(getattr(jax.config, name, None)) for name in _NAMED_SETTINGS}


def default_key_kind() -> str:
    """The implementation of random keys that are plain arrays."""
    return str(config.default_prng_impl.value)


def jit_is_disabled() -> bool:
    """Whether `jax.disable_jit` holds."""
    return bool(config.disable_jit.value)


def with_weak_type(x: Any, weak: bool) -> Any:
    """An array of the same dtype whose dtype is weak, as that of a Python number is, or not."""
    return lax_internals._convert_element_type(x, x.dtype, weak_type=weak)


def on_no_mesh(aval: Any) -> Any:
    """An abstract value that does not say how it lies; of 64 bits, it is one of 64 bits to a trace where these are switched off."""
    return jax.core.ShapedArray(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def escaped(consts: Sequence[Any]) -> Exception | None:
    """JAX's error for a value that a traced function has let out, where one is among those that another closed over."""
    for x in consts:
        if isinstance(x, jax.core.Tracer):
            found: Exception = core.escaped_tracer_error(x)
            return found
    return None


def typed(x: Any, aval: Any) -> Any:
    """A value with the type of another one, where that says how it lies on Explicit axes."""
    sharding = _explicit(aval)
    if sharding is None:
        return x
    with jax.sharding.use_abstract_mesh(sharding.mesh.abstract_mesh):
        return jax.sharding.reshard(x, sharding)


def untyped(x: Any) -> Any:
    """A value whose type does not say how it lies; it lies there as before."""
    sharding = _explicit(jax.typeof(x))
    if sharding is None:
        return x
    sizes, names = sharding.mesh.axis_sizes, sharding.mesh.axis_names
    mesh = AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec()))


def is_typed(aval: Any) -> bool:
    """Whether a type says how its values lie."""
    return _explicit(aval) is not None


def _explicit(aval: Any) -> NamedSharding | None:
    """The sharding in a type, if it has Explicit axes."""
    sharding = getattr(aval, "sharding", None)
    return sharding if sharding is not None and AxisType.Explicit in sharding.mesh.axis_types else None
