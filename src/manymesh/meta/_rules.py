"""Logical axis rules: which device axes a logical name means, by priority.

Rules are an ordered list of pairs ``(logical name, device axes)``. They are read from the first to the
last, each once: a rule gives its device axes to the dimension of its name if that dimension is still
open and *all* of its device axes are still free, else it is passed over and a later rule for the same
name gets its chance. Priority belongs to rules, not to dimensions. A rule that maps to None closes its
name; a name that no rule closes or assigns is replicated.

Rules come as an argument, or from the surroundings: `set_logical_axis_rules` sets them for the process,
`logical_axis_rules` for a block. The surroundings are part of the key under which `jax.jit` caches traces
and executables, so a function compiled under other rules is never reused.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
from jax.sharding import PartitionSpec

from .. import _compat
from .._errors import AxisError
from ._axes import Names, check_names

Rule: TypeAlias = tuple[str, Any]
Rules: TypeAlias = tuple[Rule, ...]
RulesLike: TypeAlias = Iterable[tuple[str, Any]] | Mapping[str, Any]


class RulesFallback(enum.Enum):
    """What a constraint does with a name that no rule assigns. Where one is asked for, Flax's own will do."""

    AXIS_IS_UNSHARDED = "axis_is_unsharded"
    RAISE_ERROR = "raise_error"
    NO_CONSTRAINT = "no_constraint"


def as_fallback(fallback: object) -> RulesFallback:
    """One of our fallbacks; Flax's are told by their names.

    Raises:
      AxisError: this is no fallback.
    """
    if isinstance(fallback, enum.Enum) and fallback.name in RulesFallback.__members__:
        return RulesFallback[fallback.name]
    raise AxisError(
        f"fallback {fallback!r}: expected one of {', '.join(f'RulesFallback.{m.name}' for m in RulesFallback)}, "
        "of manymesh.meta or of flax.linen"
    )


def as_rules(rules: RulesLike | None) -> Rules | None:
    """Rules as a hashable tuple of pairs; None stays None.

    Args:
      rules: pairs ``(logical name, device axis | sequence of device axes | None)`` in order of priority, or a
        mapping of them in its own order.

    Raises:
      AxisError: this is no sequence of pairs, or a pair has entries of the wrong kind.
    """
    if rules is None:
        return None
    if type(rules) is tuple and _is_normal(rules):
        return rules
    if isinstance(rules, str) or not isinstance(rules, Iterable):
        raise AxisError(f"rules must be a sequence of pairs (logical name, device axes), found {rules!r}")
    return tuple(_as_rule(rule) for rule in (rules.items() if isinstance(rules, Mapping) else rules))


@functools.lru_cache(maxsize=256)
def _normal_by_value(rules: tuple[Any, ...]) -> bool:
    try:
        return tuple(map(_as_rule, rules)) == rules
    except AxisError:
        return False


def _is_normal(rules: tuple[Any, ...]) -> bool:
    try:
        return _normal_by_value(rules)
    except TypeError:  # a list among them cannot be hashed
        return False


def _as_rule(rule: Any) -> Rule:
    if isinstance(rule, (tuple, list)) and len(rule) == 2 and isinstance(rule[0], str):
        name, axes = rule
        if axes is None or isinstance(axes, str) or axes is PartitionSpec.UNCONSTRAINED:
            return name, axes
        if isinstance(axes, (tuple, list)) and all(isinstance(axis, str) for axis in axes):
            return name, tuple(axes)
    raise AxisError(
        f"rule {rule!r}: expected a pair (logical name, device axes), where the device axes are a string, "
        "a tuple of strings or None"
    )


# --- the surroundings -----------------------------------------------------------------------------

# A user context of JAX takes part in the cache keys of jit. Its value is this thread's, if the thread is in a
# `with` block, else the process's. Rules that the main thread is in count for the process, because threads
# that it starts inside the block (loaders, workers of a pool) must see them.
_context = jax.make_user_context(default_value=())
_for_process: list[Rules] = [()]
_local = threading.local()


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


def get_logical_axis_rules() -> Rules:
    """The rules of the surroundings.

    Returns:
      The rules of the innermost `logical_axis_rules` block that this thread is in; outside any, those that the main
      thread is in or that `set_logical_axis_rules` set; ``()`` if there are none.

    Example:
      >>> from manymesh import meta
      >>> with meta.logical_axis_rules([("hidden", "model")]):
      ...     meta.get_logical_axis_rules()
      (('hidden', 'model'),)
    """
    rules: Rules = _context.value
    return rules


def set_logical_axis_rules(rules: RulesLike) -> None:
    """Replaces the rules of the surroundings.

    Inside a `logical_axis_rules` block, until the block ends; outside, for every thread of the process
    that is in no block of its own.

    Args:
      rules: as in `logical_axis_rules`; ``()`` removes them.

    Raises:
      AxisError: this is no sequence of pairs.

    Example:
      >>> from manymesh import meta
      >>> meta.set_logical_axis_rules([("batch", "data")])
      >>> meta.logical_to_mesh_axes(("batch", None))
      P('data', None)
      >>> meta.set_logical_axis_rules(())
    """
    new = as_rules(rules) or ()
    blocks: list[Any] = getattr(_local, "blocks", None) or []
    if not _is_main() and blocks:
        blocks[-1].__exit__(None, None, None)
        blocks[-1] = _context(new)
        blocks[-1].__enter__()
        return
    _for_process[-1 if _is_main() else 0] = new
    _compat.set_for_all_threads(_context, _for_process[-1])


@contextlib.contextmanager
def logical_axis_rules(rules: RulesLike) -> Iterator[None]:
    """Surrounds a block with rules, which replace those around it.

    A function compiled by `jax.jit` under other rules is compiled again, never reused. The rules count
    for the thread that enters the block; those of the main thread also for every thread
    that has entered none of its own, so that threads started inside the block see them.

    Args:
      rules: pairs ``(logical name, device axis | tuple of device axes | None)`` in order of priority.

    Raises:
      AxisError: this is no sequence of pairs.

    Example:
      >>> from manymesh import meta
      >>> with meta.logical_axis_rules([("batch", "data"), ("hidden", "model")]):
      ...     meta.logical_to_mesh_axes(("batch", "embed", "hidden"))
      P('data', None, 'model')
    """
    new = as_rules(rules) or ()
    if _is_main():
        _for_process.append(new)
        _compat.set_for_all_threads(_context, new)
        try:
            yield
        finally:
            _for_process.pop()
            _compat.set_for_all_threads(_context, _for_process[-1])
        return
    blocks = _local.__dict__.setdefault("blocks", [])
    blocks.append(_context(new))
    blocks[-1].__enter__()
    try:
        yield
    finally:
        blocks.pop().__exit__(None, None, None)


def rules_of_flax() -> Any:
    """The rules that Flax has around a call, as it has them; none where Flax is not loaded."""
    flax: Any = sys.modules.get("flax.core.spmd") or sys.modules.get("flax.linen")
    found = flax.get_logical_axis_rules() if hasattr(flax, "get_logical_axis_rules") else ()
    return found[:-1] if isinstance(found, tuple) and found and isinstance(found[-1][0], AnyOther) else found


class AnyOther(str):
    """The name of a last rule that says nothing, and hears of each name that Flax looks up.

    Flax has no word for a name that no rule knows: it compares it with the name of each rule, and replicates the dimension.
    """

    hear: Callable[[str], None]

    def __new__(cls, hear: Callable[[str], None]) -> AnyOther:
        """A name that tells ``hear`` what it is compared with."""
        self = super().__new__(cls, "any other name")
        self.hear = hear
        return self

    def __eq__(self, other: object) -> bool:
        """Equals nothing."""
        if isinstance(other, str) and not isinstance(other, AnyOther):
            self.hear(other)
        return False

    __hash__ = str.__hash__


def rules_around() -> Rules:
    """The rules of the surroundings for names in a task, or where one may come: ours, and those of Flax for other names."""
    ours = get_logical_axis_rules()
    known = {name for name, _ in ours}
    return (*ours, *(rule for rule in as_rules(rules_of_flax()) or () if rule[0] not in known))


# --- resolution -----------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def rules_in_task(own: Rules, others: Rules, device_axes: tuple[str, ...]) -> Rules:
    """The rules by which a task reads names.

    Args:
      own: those of the task, which come first.
      others: for names that the task does not know: those around it, or of a box. They were written for the whole mesh: an axis
        that the submesh lacks means replication there.
      device_axes: the axes of the submesh.
    """
    known = {name for name, _ in own}
    return (*own, *((name, _cut(target, device_axes)) for name, target in others if name not in known))


def _cut(target: Any, device_axes: tuple[str, ...]) -> Any:
    if isinstance(target, str):
        return target if target in device_axes else None
    if isinstance(target, tuple):
        return tuple(axis for axis in target if axis in device_axes) or None
    return target


@dataclass(frozen=True)
class Resolution:
    """What rules made of names.

    Attributes:
      axes: device axes for each dimension; None where it is replicated.
      rules: index of the rule that decided each dimension; None where no rule did.
      open: positions of names that neither a rule nor a device axis of that name assigned.
      passed_over: for each open position, pairs of a rule's index and the device axes of it that were taken.
      unknown: names that no rule knows and that are no device axes.
    """

    axes: Names
    rules: tuple[int | None, ...]
    open: tuple[int, ...]
    passed_over: tuple[tuple[tuple[int, tuple[str, ...]], ...], ...]
    unknown: tuple[str, ...] = ()

    @property
    def spec(self) -> PartitionSpec:
        """The device axes as a `PartitionSpec`."""
        return PartitionSpec(*self.axes)


def parts_of(axes: Any) -> tuple[str, ...]:
    """The device axes in one entry of a spec; none for None and for ``PartitionSpec.UNCONSTRAINED``."""
    if isinstance(axes, str):
        return (axes,)
    return tuple(axes) if isinstance(axes, (tuple, list)) else ()


@functools.lru_cache(maxsize=8192)
def resolve(names: Names, rules: Rules, device_axes: tuple[str, ...] | None = None) -> Resolution:
    """Assigns device axes to names by priority of rule.

    Args:
      names: one entry a dimension: a name, a tuple of names, None or ``PartitionSpec.UNCONSTRAINED``.
      rules: normal rules, from `as_rules`.
      device_axes: the axes of the mesh, where names may also name these directly and a tuple may hold logical names.
        Without them only strings are resolved; tuples are device axes and stay.

    Raises:
      AxisError: a name stands at two dimensions.
    """
    strings = [part for name in names for part in parts_of(name)]
    twice = sorted({name for name in strings if strings.count(name) > 1})
    if twice:
        raise AxisError(
            f"names {names}: {', '.join(map(repr, twice))} stands at more than one dimension; "
            "a rule could not tell them apart, give each dimension a name of its own"
        )
    direct = set(strings if device_axes is None else device_axes)
    is_open = [isinstance(n, str) or (isinstance(n, tuple) and not direct.issuperset(n)) for n in names]
    result: list[Any] = [None if o else name for name, o in zip(names, is_open, strict=True)]
    decided: list[int | None] = [None] * len(names)
    passed: dict[int, list[tuple[int, tuple[str, ...]]]] = {}
    taken = {part for entry in result for part in parts_of(entry)}
    position_of = {name: i for i, name in enumerate(names) if isinstance(name, str)}
    for index, (name, axes) in enumerate(rules):
        position = position_of.get(name)
        if position is None or decided[position] is not None:
            continue
        conflict = tuple(part for part in parts_of(axes) if part in taken)
        if conflict:
            passed.setdefault(position, []).append((index, conflict))
            continue
        result[position], decided[position] = axes, index
        taken.update(parts_of(axes))
    still_open = [i for i, o in enumerate(is_open) if o and decided[i] is None]
    unknown: tuple[str, ...] = ()
    if device_axes is not None:
        unknown = _name_directly(names, rules, device_axes, still_open, result, taken)
    return Resolution(
        tuple(result), tuple(decided), tuple(still_open), tuple(tuple(passed.get(i, ())) for i in still_open), unknown
    )


def _name_directly(
    names: Names, rules: Rules, device_axes: tuple[str, ...], still_open: list[int], result: list[Any], taken: set[str]
) -> tuple[str, ...]:
    """Gives open dimensions the device axes of their own names; returns the names that are not known at all."""
    known = {name for name, _ in rules}
    unknown: list[str] = []
    for i in list(still_open):
        found: list[str] = []
        for part in parts_of(names[i]):
            if part in known and isinstance(names[i], tuple):
                axes = parts_of(resolve((part,), rules, device_axes).axes[0])
            else:
                axes = (part,) if part in device_axes else ()
            if not axes and part not in known:
                unknown.append(part)
            found += [axis for axis in axes if axis not in found]
        if found and taken.isdisjoint(found):
            result[i] = found[0] if isinstance(names[i], str) else tuple(found)
            taken.update(found)
            still_open.remove(i)
    return tuple(unknown)


def logical_to_mesh_axes(array_dim_names: Iterable[Any] | None, rules: RulesLike | None = None) -> PartitionSpec | None:
    """The device axes that rules give to the dimensions of an array.

    Args:
      array_dim_names: one logical name a dimension; None for a dimension that is not sharded. None for
        the whole means no spec.
      rules: pairs in order of priority; the rules of the surroundings by default.

    Returns:
      A `PartitionSpec` with one entry for each name, or None.

    Raises:
      AxisError: a name stands at two dimensions, or the rules are no pairs.

    Example:
      >>> from manymesh import meta
      >>> rules = [("batch", "x"), ("features", "x"), ("heads", "y"), ("batch", "z")]
      >>> meta.logical_to_mesh_axes(("batch", "length", "heads", "features"), rules)
      P('x', None, 'y', None)
    """
    if array_dim_names is None:
        return None
    found = get_logical_axis_rules() if rules is None else as_rules(rules)
    return resolve(check_names(array_dim_names, "logical_to_mesh_axes"), found or ()).spec
