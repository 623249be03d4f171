"""The arguments of one call of a step: flat, named, and what they say about the program."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from .. import _compat, meta
from .._compiled import check_given_once, deleted, described, traced_argument
from .._distributed._world import world
from .._errors import ArgumentError
from .._implicit import registered
from .._runtime._exchange import everywhere
from .._runtime._fetch import fetch
from .._runtime._memories import DEVICE, host_kind, into, is_in_host_memory
from .._runtime._processes import committed_sharding
from .._shown import name_of
from .._topology import auto_mesh
from .._types import PyTree
from ..meta._rules import rules_of_flax
from ._step import Step


@dataclass(eq=False)
class Arguments:
    """One call's arguments, flat.

    Attributes:
      donated: positions of the leaves that are donated, where the settings of the step do not say it.
    """

    leaves: list[Any]
    treedef: Any
    static: tuple[tuple[Any, Any], ...]
    dyn_args: tuple[Any, ...]
    dyn_kwargs: dict[str, Any]
    donated: Collection[int] | None = None


def flatten(step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """One call's arguments, those that are static apart."""
    if not step.static_argnums and not step.static_argnames:
        leaves, treedef = jax.tree.flatten((args, kwargs))
        return Arguments(leaves, treedef, (), args, kwargs)
    static: list[tuple[Any, Any]] = []
    numbers = step.static_positions(len(args))
    if numbers or step.static_argnames:
        static = [(k, args[k]) for k in numbers]
        static += [(k, kwargs[k]) for k in sorted(kwargs) if k in step.static_argnames]
        for k, value in static:
            try:
                hash(value)
            except TypeError as error:
                raise ValueError(
                    f"mm.jit({step.name}): static argument {k!r} has to be hashable: {error}; an array is no static argument, and of a "
                    "list write a tuple"
                ) from None
    dyn_args = tuple(None if k in numbers else a for k, a in enumerate(args))
    dyn_kwargs = {k: v for k, v in kwargs.items() if k not in step.static_argnames}
    leaves, treedef = jax.tree.flatten((dyn_args, dyn_kwargs))
    return Arguments(leaves, treedef, tuple(static), dyn_args, dyn_kwargs)


def call_inside(
    step: Step,
    fun: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    own: Callable[[Any], Any],
    is_leaf: Callable[[Any], bool] | None = None,
) -> Any:
    """Calls the function of a step inside another one, of which it is a part: as under ``jax.jit``, with containers of its own.

    So what it changes in a dictionary that it is given stays unknown to its caller.

    Args:
      own: what it has in the place of a leaf of its arguments that is not static, and its caller in that of a result.
    """
    numbers = step.static_positions(len(args))

    def mapped(tree: PyTree) -> Any:
        return jax.tree.map(own, tree, is_leaf=is_leaf)

    own_args = [a if k in numbers else mapped(a) for k, a in enumerate(args)]
    own_kwargs = {k: v if k in step.static_argnames else mapped(v) for k, v in kwargs.items()}
    return mapped(fun(*own_args, **own_kwargs))


def array_of_host(x: Any) -> Any:
    """The array that a step makes of a value of the host, which may be read while it is traced; others as they are."""
    if isinstance(x, (np.ndarray, np.generic)) or type(x) in (bool, int, float, complex):
        with jax.ensure_compile_time_eval():
            return jnp.asarray(x)
    return x


def as_tuple(value: Any) -> tuple[Any, ...]:
    """The numbers or names of arguments that were given, as one or several; numbers as Python's ints."""
    if value is None:
        return ()
    several = (value,) if isinstance(value, str) or not isinstance(value, Iterable) else tuple(value)
    return tuple(int(x) if isinstance(x, np.integer) else x for x in several)


def check_options(options: object) -> None:
    """Refuses options of the compiler that are no names with values."""
    if options is not None and not isinstance(options, Mapping):
        raise ArgumentError(
            f"mm.jit: compiler_options has to be a dictionary, such as {{'xla_dump_to': 'folder'}}, found {type(options).__name__} "
            f"{options!r:.80}"
        )


def named(fun: Any, numbers: tuple[int, ...], names: tuple[str, ...]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Completes argument numbers by names and names by numbers, as ``jax.jit`` does.

    A negative number counts from the last argument that the function has, however many are given by name. Only where it
    takes any number of them does it count from the last that is given.
    """
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):
        return numbers, names
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if all(p.kind != p.VAR_POSITIONAL for p in parameters):
        numbers = tuple(k + len(positional) if k < 0 else k for k in numbers)
    nameless = {p.name for p in parameters if p.kind == p.POSITIONAL_ONLY}  # a keyword of that name is another argument
    in_range = (positional[k] for k in numbers if -len(positional) <= k < len(positional))
    more_names = tuple(name for name in in_range if name not in nameless)
    more_numbers = tuple(positional.index(n) for n in names if n in positional and n not in nameless)
    return tuple(sorted({*numbers, *more_numbers})), tuple(sorted({*names, *more_names}))


def surroundings() -> tuple[Any, ...]:
    """What is around a call and changes what a trace gives: settings of JAX, axis rules of ours and of Flax, if loaded."""
    return (_compat.trace_settings(), registered(), meta.get_logical_axis_rules(), _frozen(rules_of_flax()))


def _frozen(rules: Any) -> Any:
    return tuple(map(_frozen, rules)) if isinstance(rules, (list, tuple)) else rules


def places(leaves: list[Any]) -> tuple[Any, ...]:
    """Where arguments were put: the sharding of each, None for one that may go anywhere, or is in every process, or a tracer."""
    shared = everywhere() if world() is not None else None
    given = (None if isinstance(x, jax.core.Tracer) else committed_sharding(x) for x in leaves)
    return tuple(None if place == shared else place for place in given)


def check_apart(
    static: tuple[tuple[Any, ...], tuple[Any, ...]], donated: tuple[tuple[Any, ...], tuple[Any, ...]]
) -> None:
    """Refuses arguments that are to be static and donated: what is static has no buffer."""
    both = [x for one, other in zip(static, donated, strict=True) for x in one if x in other]
    if both:
        raise ArgumentError(
            f"mm.jit: argument {both[0]!r} is static and donated; a static argument has no buffer that could be given away"
        )


def check_named(label: str, fun: Any, numbers: tuple[Any, ...], names: tuple[Any, ...]) -> None:
    """Refuses numbers and names of arguments that the function does not have.

    Raises:
      ArgumentError: a number or a name is of another kind, or out of range.
    """
    for kind, given, wanted in (("argnums", numbers, int), ("argnames", names, str)):
        for x in given:
            if not isinstance(x, wanted) or isinstance(x, bool):
                raise ArgumentError(
                    f"mm.jit: {label}_{kind} takes {'numbers' if wanted is int else 'names'} of arguments, found "
                    f"{type(x).__name__} {x!r}"
                )
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):
        return
    kinds = {p.kind for p in parameters}
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    fun_name = name_of(fun)
    for k in numbers if inspect.Parameter.VAR_POSITIONAL not in kinds else ():
        if not -len(positional) <= k < len(positional):
            raise ArgumentError(
                f"mm.jit({fun_name}): {label}_argnums={k}, but the function has {len(positional)} positional arguments "
                f"({', '.join(positional)}), numbered from 0"
            )
    known = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for name in names if inspect.Parameter.VAR_KEYWORD not in kinds else ():
        if name not in known:
            raise ArgumentError(f"mm.jit({fun_name}): {label}_argnames={name!r}, but the arguments are called {known}")


def signature(x: Any) -> Any:
    """What a trace sees of a leaf."""
    if type(x) is _compat.ConcreteArray:  # almost every leaf; its own properties ask the aval, one by one
        aval = x.aval
        return (aval.shape, aval.dtype, aval.weak_type, host_kind(x.sharding))
    if isinstance(x, (np.ndarray, np.generic)):
        dtype = x.dtype
        if dtype in _compat.WIDE:  # JAX makes the same array of one of 32 bits, where 64 are switched off
            dtype = jax.dtypes.canonicalize_dtype(dtype)
        return (x.shape, dtype, False, None)
    if isinstance(x, jax.ShapeDtypeStruct):
        return (x.shape, _compat.traced_dtype(x), x.weak_type, host_kind(x.sharding))
    if isinstance(x, jax.Array):
        return (x.shape, x.dtype, getattr(x, "weak_type", False), host_kind(getattr(x, "sharding", None)))
    if type(x) in (bool, int, float, complex):  # as the array that a step makes of it, which comes back the next time
        return ((), jax.dtypes.canonicalize_dtype(type(x)), type(x) is not bool, None)
    return type(x)


def types_of(leaves: list[Any]) -> list[Any]:
    """What says as much as `signature` of each leaf, or more; that of an array mostly is the object that it was before."""
    return [x.aval if type(x) is _compat.ConcreteArray else signature(x) for x in leaves]


REFERENCE = (
    "a reference (jax.new_ref), which a step cannot write to on several submeshes: pass its value, ref[...], and return "
    "what is to be written; references that are made in the step can be used as everywhere"
)


def abstract(name: str, path: Any, x: Any, given: Arguments) -> jax.ShapeDtypeStruct:
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type)
    if isinstance(x, jax.core.Tracer):
        raise traced_argument(f"mm.jit({name}): argument{keystr(path)} is a tracer {x.aval.str_short()}")
    if _compat.is_ref(x):
        raise ArgumentError(f"mm.jit({name}): argument{keystr(path)} is {REFERENCE}")
    try:
        aval = jax.typeof(x)
    except OverflowError as error:  # a whole number of Python
        raise OverflowError(f"mm.jit({name}): argument{keystr(path)}: {error}") from None
    except TypeError:
        if isinstance(x, np.ndarray):
            raise ArgumentError(
                f"mm.jit({name}): argument{keystr(path)} is an array of dtype {x.dtype}, which JAX has not; leave it out of the "
                "arguments"
            ) from None
        if _has_fields(x):
            raise ArgumentError(
                f"mm.jit({name}): argument{keystr(path)} is a {type(x).__name__}, which JAX does not know as a pytree; register "
                "the class (jax.tree_util.register_dataclass), or, if there is no array in it, make it static (static_argnums, "
                "static_argnames) or close over it"
            ) from None
        raise ArgumentError(
            f"mm.jit({name}): argument{keystr(path)} is {type(x).__name__} {x!r:.80}, which is no array; make it static "
            f"(static_argnums, static_argnames) or close over it{_in_a_module(path, given)}"
        ) from None
    if (traced := _compat.traced_dtype(aval)) != aval.dtype:
        raise ArgumentError(
            f"mm.jit({name}): argument{keystr(path)} is an array of dtype {aval.dtype}, which is switched off here, so that the step "
            f"would be traced for {traced}; call it in the surroundings that made the array (jax.enable_x64(True), or the "
            f"setting jax_enable_x64), or convert it (x.astype({traced}))"
        )
    return _compat.abstract(aval)


def _has_fields(x: object) -> bool:
    """Whether something is an object of a dataclass, of a class of attrs, or another one that holds arrays."""
    if isinstance(x, type):
        return False
    described = dataclasses.is_dataclass(x) or hasattr(x, "__attrs_attrs__")
    held = jax.tree.leaves(getattr(x, "__dict__", None))
    return (described and not callable(x)) or any(isinstance(leaf, (jax.Array, np.ndarray)) for leaf in held)


def _in_a_module(path: Any, given: Arguments) -> str:
    """What to do about a leaf that is no array because it is part of an Equinox module."""
    node: Any = (given.dyn_args, given.dyn_kwargs)
    equinox = sys.modules.get("equinox")
    for key in path if equinox is not None else ():
        if hasattr(key, "name") and not hasattr(node, key.name):  # a module of Flax, of which only the state is here
            break
        if hasattr(key, "name"):
            if isinstance(node, equinox.Module):  # type: ignore[union-attr]  # there is a key to look at only if it is loaded
                return (
                    f"; it is part of the Equinox module {type(node).__name__}: arrays, static = eqx.partition(model, "
                    "eqx.is_array) takes it apart, and eqx.combine(arrays, static) in the step puts it together"
                )
            node = getattr(node, key.name)
        else:
            node = node[key.idx if hasattr(key, "idx") else key.key]
    return ""


def keystr(path: Any) -> str:
    """``args[0]['w']`` of a path into ``(args, kwargs)``."""
    which, *rest = path
    head = "args" if getattr(which, "idx", 0) == 0 else "kwargs"
    return f" {head}{jax.tree_util.keystr(tuple(rest))}"


def gathered(tree: PyTree) -> Any:
    """For the reference mode: arrays of different submeshes come to one device, those of all processes to each.

    What lies in the memory of the host comes to its devices, where a step has it. Host values are in every process already,
    so that one process alone can call the reference mode with them.
    """
    tree = jax.tree.map(
        lambda x: into(x, DEVICE) if not isinstance(x, jax.core.Tracer) and is_in_host_memory(x) else x, tree
    )
    arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)]
    if world() is not None:
        return fetch(tree) if any(committed_sharding(x) is not None for x in arrays) else tree
    places = [place for x in arrays if (place := committed_sharding(x)) is not None]
    if len({frozenset(place.device_set) for place in places}) > 1:
        there = SingleDeviceSharding(jax.devices()[0])  # the device alone would leave types that name an Explicit mesh
        return jax.tree.map(lambda x: jax.device_put(x, there) if isinstance(x, jax.Array) else x, tree)
    return jax.tree.map(_on_auto_axes, tree)  # JAX puts the others beside them


def _on_auto_axes(x: Any) -> Any:
    """A leaf as a step has it, whose axes are Auto whatever the mesh of the array says."""
    place = None if isinstance(x, jax.core.Tracer) else committed_sharding(x)
    if not isinstance(place, NamedSharding) or not isinstance(place.mesh, Mesh) or auto_mesh(place.mesh) == place.mesh:
        return x
    return jax.device_put(x, NamedSharding(auto_mesh(place.mesh), place.spec, memory_kind=place.memory_kind))


def donated_leaves(given: Arguments, argnums: tuple[int, ...], argnames: tuple[str, ...]) -> frozenset[int]:
    """Positions of the leaves of donated arguments."""
    if given.donated is not None:
        return frozenset(given.donated)
    count = len(given.dyn_args)
    numbers = {k % count for k in argnums if -count <= k < count} if count else set()
    paths = jax.tree_util.tree_leaves_with_path((given.dyn_args, given.dyn_kwargs))
    return frozenset(
        i
        for i, ((which, head, *_), _) in enumerate(paths)
        if (head.idx in numbers if which.idx == 0 else head.key in argnames)
    )


def check_donation(step: Step, given: Arguments) -> None:
    """Refuses one array in two places where a donation would take it away from the other one."""
    donated = donated_leaves(given, step.donate_argnums, step.donate_argnames)
    paths = _compat.leaves_with_paths((given.dyn_args, given.dyn_kwargs))
    check_given_once(step.name, given.leaves, frozenset(donated), lambda i: keystr(paths[i][0]).strip())


def check_values(step: Step, given: Arguments) -> None:
    """Refuses in a call descriptions and deleted arrays, which have no values, before anything is compiled for them."""
    for path, x in _compat.leaves_with_paths((given.dyn_args, given.dyn_kwargs)):
        if isinstance(x, jax.ShapeDtypeStruct):
            raise described(f"mm.jit({step.name}): argument{keystr(path)}", x)
        if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and not _compat.is_ref(x) and x.is_deleted():
            raise deleted(f"mm.jit({step.name}): argument{keystr(path)} of shape {x.shape}")
