"""Implicit tasks: parts of a program that become tasks by the names of their scopes.

`register_task` says which names, and where what carries them runs. The names are those of `jax.named_scope`,
which Flax gives to every module, so a model is placed with no edit. The registry is the one piece of state
that all threads of a process share; a trace takes a snapshot of it and never looks again.
"""

from __future__ import annotations

import difflib
import functools
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Never

from ._errors import ArgumentError, TaskError
from ._task import Task, axis_names, check_task, misplaced_error

Callback = Callable[[re.Match[str], bool], Task | None]


@dataclass(frozen=True)
class Defaults:
    """What a callback's task takes where it leaves something open."""

    task: Task = field(default_factory=Task)
    device_axes: tuple[str, ...] | None = None
    logical_axes: tuple[Any, ...] | None = None

    def complete(self, task: Task) -> Task:
        """The task with nothing left open that the defaults say."""
        name = task.name if task.name is not None else self.task.name
        rules = task.logical_axes if task.logical_axes is not None else self.logical_axes
        place = task if task.mesh is not None else self.task
        if place.mesh is None:
            return Task(name, logical_axes=rules)
        if place.has_named_axes:
            return Task(name, mesh=place.meshes or place.mesh, logical_axes=rules)
        axes = self.device_axes
        return Task(name, devices=place.mesh.devices, device_axes=axes, logical_axes=rules if axes else None)


@dataclass(frozen=True)
class Rule:
    """What `register_task` said.

    Attributes:
      pattern: the pattern, with its flags.
      task: the task of every match, complete but for its name; None where a callback decides.
      callback: from a match and whether it is backward to a task.
      defaults: for the callback's task.
    """

    pattern: re.Pattern[str]
    task: Task | None
    callback: Callback | None = field(default=None, hash=False)
    defaults: Defaults | None = None

    @functools.cached_property
    def depth(self) -> int:
        """How many nested scopes the pattern names: one, and one more for each slash that is in no set of characters."""
        return 1 + re.sub(r"\[\^?\]?(?:\\.|[^]\\])*\]", "", self.pattern.pattern).count("/")

    def match(self, name: str) -> re.Match[str] | None:
        """Matches what a scope is called (`names_of`), if it names as many scopes as the pattern does."""
        return self.pattern.fullmatch(name) if name.count("/") + 1 == self.depth else None

    def describe(self, match: re.Match[str], backward: bool) -> Task | None:
        """The task of a match, or None for "not a task"."""
        if self.callback is None:
            assert self.task is not None, "a rule without a callback has a task"
            return self.task.named(match.string)
        assert self.defaults is not None, "a rule with a callback has defaults"
        try:
            made = self.callback(match, backward)
            if made is None:
                return None
            if not isinstance(made, Task):
                raise ArgumentError(
                    f"register_task({self.pattern.pattern!r}): its callback has to return a manymesh.Task, or None for "
                    f'"not a task"; it returned {type(made).__name__} {made!r}'
                )
            return self.defaults.complete(made).named(match.string)
        except Exception as error:
            error.add_note(
                f"in the callback of register_task({self.pattern.pattern!r}), for the scope {match.string!r}"
            )
            raise


class Registration:
    """What `register_task` returns: the registration, which ends with `remove` or at the end of a ``with`` block."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule

    def __enter__(self) -> Registration:
        """The registration began when it was made."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends it."""
        self.remove()

    def remove(self) -> None:
        """Ends it; a second time does nothing."""
        with _lock:
            _registered[0] = _Registry(tuple(r for r in _registered[0].handles if r is not self))

    close = remove

    @property
    def active(self) -> bool:
        """Whether it has not ended."""
        return any(r is self for r in _registered[0].handles)

    def __repr__(self) -> str:
        state = "" if self.active else ", removed"
        return f"register_task({self._rule.pattern.pattern!r}{state})"


class _Registry:
    """All registrations that have not ended, and the rules that hold.

    Attributes:
      handles: in order of registration.
      rules: of each pattern the last rule, in the place of the first. One with a callback and one without are two, as
        the callback may leave a match to the other one.
    """

    def __init__(self, handles: tuple[Registration, ...] = ()) -> None:
        self.handles = handles
        rules = [handle._rule for handle in handles]
        self.rules = tuple({(rule.pattern, rule.callback is None): rule for rule in rules}.values())


_lock = threading.Lock()
_registered = [_Registry()]  # replaced as a whole, under the lock; read without


def register_task(
    pattern: str | re.Pattern[str],
    *misplaced: Never,
    task: Task | None = None,
    name: str | None = None,
    mesh: Any = None,
    devices: Any = None,
    device_axes: Any = None,
    logical_axes: Any = None,
    callback: Callback | None = None,
) -> Registration:
    """Makes tasks of the parts of a program whose scope has a certain name.

    Inside ``mm.jit``, all that was computed in a scope of that name becomes one task, as if `task` had wrapped it:
    forward, backward and rematerialised parts each. Scopes are those of ``jax.named_scope`` and of Flax modules,
    whose scope has the name of the module (``Dense_0``), with the method's after a dot if it is not ``__call__``
    (``embed.attend``). Plain ``jax.jit``, eager calls and the reference mode know nothing of it.

    A pattern has to match a whole name: ``layer_1`` does not match ``layer_10``. With slashes it is a path, and matches
    the names of as many scopes, each directly in the one before, as the tree of parameters has them: ``h/0`` is the scope
    ``0`` directly in ``h`` and no other zero, ``encoder/layer/(\\d+)`` a layer of an encoder wherever that is. Of nested scopes
    the outermost that matches decides, of several patterns the first one registered. Inside a task made with `task` nothing is matched; such a task inside a matched scope merges with it.
    The same pattern again, both with a callback or both without, takes the place of the one before until it is removed.

    In the body of a scan, an outermost scope is also called ``name[i]`` in iteration ``i``, so that ``layers\\[(\\d+)\\]``
    places stacked layers one by one; a list of meshes splits the iterations over them, as for `Task`.

    Two calls of one scope cannot be told apart by name. They become one task, cut in two only where something else
    is computed between them from the first for the second.

    Args:
      pattern: a regular expression.
      task: a ready `Task`; without a callback it excludes the arguments below.
      name: name of the task; defaults to that of the scope.
      mesh, devices, device_axes, logical_axes: as for `Task`.
      callback: ``callback(match, is_backward)`` returns the `Task` of a match, or None for "not a task". The other
        arguments are then defaults for what its Task leaves open. A pure function; programs are compiled anew for another one.

    Returns:
      A handle. Its ``remove()`` ends the registration, and so does the end of a ``with`` block over it.

    Raises:
      TypeError: ``pattern`` is no text, ``task`` no `Task`, ``callback`` not callable or returns something else.
      ValueError: ``pattern`` is no regular expression; nothing says where or what the task is; as for `Task`. While
        compiling: a `task` on other devices inside a matched scope.

    Example:
      >>> import jax, jax.numpy as jnp, manymesh as mm
      >>> def model(x):
      ...     for i in range(4):
      ...         with jax.named_scope(f"layer_{i}"):
      ...             x = jnp.sin(x) + i
      ...     return x
      >>> two = lambda match, is_backward: mm.Task(devices=[int(match[1]) // 2])
      >>> with mm.register_task(r"layer_(\\d+)", callback=two):
      ...     program = mm.jit(model).lower(jnp.ones(8)).program
      >>> [(f.name, f.submesh) for f in program.fragments]
      [('layer_0', 0), ('layer_1', 0), ('layer_2', 1), ('layer_3', 1)]
    """
    compiled = _compiled(pattern)
    where = f"register_task({compiled.pattern!r})"
    if misplaced:
        raise misplaced_error(where, "one pattern", misplaced[0])
    placement = {"mesh": mesh, "devices": devices, "device_axes": device_axes, "logical_axes": logical_axes}
    placement = {k: v for k, v in placement.items() if v is not None}
    if task is not None:
        check_task(where, task)
    if task is not None and placement:
        raise TaskError(
            f"{where}: task= is a complete description; give it alone, or {', '.join(placement)} without it"
        )
    if callback is not None and not callable(callback):
        raise ArgumentError(
            f"{where}: callback has to be a function of a match and a bool, found {type(callback).__name__} {callback!r}"
        )
    if callback is None and task is None and name is None and not placement:
        raise TaskError(
            f"{where}: says nothing about the task; give mesh= or devices=, a task=, a callback=, or a name= (where it "
            "runs is then inferred)"
        )
    if callback is None:
        described = task if task is not None else Task(name, **placement)
        rule = Rule(compiled, described if name is None else described.named(name))
    else:
        rule = Rule(compiled, None, callback, _defaults(task, name, placement))
    return _added(Registration(rule))


def _compiled(pattern: Any) -> re.Pattern[str]:
    text = pattern.pattern if isinstance(pattern, re.Pattern) else pattern
    if not isinstance(text, str):
        raise ArgumentError(
            f"register_task: the pattern has to be a regular expression as text, found {type(pattern).__name__} {pattern!r}"
        )
    try:
        return re.compile(pattern)
    except re.error as error:
        raise TaskError(
            f"register_task({pattern!r}): no regular expression: {error}; re.escape makes one of a plain name"
        ) from None


def _defaults(task: Task | None, name: str | None, placement: dict[str, Any]) -> Defaults:
    """The arguments as defaults; checked here as far as they make a task of their own."""
    axes, rules = placement.get("device_axes"), placement.get("logical_axes")
    if task is None:
        alone = "mesh" not in placement and "devices" not in placement
        described = Task(name) if alone else Task(name, **placement)
        pairs = None if rules is None else tuple(rules.items() if isinstance(rules, Mapping) else map(_frozen, rules))
        return Defaults(described, None if axes is None else axis_names(axes), pairs)
    return Defaults(task if name is None else task.named(name), None, task.logical_axes)


def _frozen(rule: Any) -> Any:
    return tuple(tuple(part) if isinstance(part, list) else part for part in rule) if isinstance(rule, list) else rule


# What else wants to hear of a registration, by its pattern.
told: list[Callable[[str], None]] = []


def _added(handle: Registration) -> Registration:
    for tell in told:
        tell(handle._rule.pattern.pattern)
    with _lock:
        _registered[0] = _Registry((*_registered[0].handles, handle))
    return handle


def clear_tasks() -> None:
    """Ends every registration of `register_task`.

    Example:
      >>> import manymesh as mm
      >>> handle = mm.register_task("encoder", devices=[0])
      >>> mm.clear_tasks()
      >>> handle
      register_task('encoder', removed)
    """
    with _lock:
        _registered[0] = _Registry()


def registered() -> tuple[Rule, ...]:
    """The rules that hold now, in order of registration. Equal rules make equal snapshots."""
    return _registered[0].rules


@dataclass(frozen=True)
class Iteration:
    """A step of an unrolled scan, among the scopes around an equation.

    Attributes:
      index, length: which step of how many.
      layers: which scans step through the layers that are here: 0 this one, 1 the one around it.
    """

    index: int
    length: int
    layers: tuple[int, ...] = field(default=(0,), compare=False)

    def __str__(self) -> str:
        return ":".join(["\x00" + str(self.index), str(self.length), *map(str, self.layers)])


Path = tuple[str | Iteration, ...]

# What JAX writes around the scopes that were open when a transformation began.
_TRANSFORMS = frozenset({
    "jvp", "transpose", "vmap", "pmap", "jit", "pjit", "linearize", "checkpoint", "remat", "custom_jvp",
    "custom_vjp", "shard_map", "rematted_computation",
})  # fmt: skip
_PARTS = re.compile(r"([^/()]+)(\(?)")


@functools.lru_cache(maxsize=1 << 14)
def path_of(stack: str) -> Path:
    """The scopes around an equation, from its name stack: what transformations added is left out.

    The backward pass of ``jax.checkpoint`` repeats the scopes around it (``transpose(jvp(model))/jvp(model)/layer``):
    what a transformation repeats counts once, so that it is the path of the forward pass.
    """
    path: list[str | Iteration] = []
    begins: list[bool] = []  # whether a transformation stands right before it
    transformed = False
    for name, opens in _PARTS.findall(stack):
        if name == "rematted_computation" or (opens and name in _TRANSFORMS):
            transformed = True
            continue
        if name.startswith("\x00"):
            index, length, *layers = map(int, name[1:].split(":"))
            path.append(Iteration(index, length, tuple(layers)))
        else:
            path.append(name)
        begins.append(transformed)
        transformed = False
    start = 0
    while start < len(path):
        for size in range(1, (len(path) - start) // 2 + 1):
            again = start + size
            if begins[again] and path[start:again] == path[again : again + size]:
                del path[start:again], begins[start:again]
                start = -1
                break
        start += 1
    return tuple(path)


def iterations_of(path: Path) -> tuple[Iteration, ...]:
    """Those of the unrolled scans on a path, the outermost first."""
    return tuple([part for part in path if isinstance(part, Iteration)])


def called(path: Path, at: int, depth: int) -> tuple[str, ...]:
    """The names of the scope at a position of a path, alone and after up to ``depth - 1`` of the scopes around it.

    One directly in a scan's body has the name of its iteration too.
    """
    before = path[at - 1] if at else None
    scopes = tuple(name for name in path[: at + 1] if isinstance(name, str))
    return names_of(scopes[-depth:], before.index if isinstance(before, Iteration) else None)


def names_of(scopes: tuple[str, ...], index: int | None) -> tuple[str, ...]:
    """What the last of nested scopes is called: its name, and as a path with those around it.

    Args:
      scopes: names of scopes, the outermost first.
      index: the iteration of the scan in whose body the last one directly is.
    """
    names = ["/".join(scopes[k:]) for k in reversed(range(len(scopes)))]
    return tuple(names if index is None else [*names, *(_in_iteration(name, index) for name in names)])


def _in_iteration(name: str, index: int) -> str:
    """The other name of a scope directly in the body of a scan."""
    return f"{name}[{index}]"


@dataclass(frozen=True)
class Matched:
    """An equation's place in a task.

    Attributes:
      scope: the path to the scope that matched, the same for the forward and the backward pass.
      task: the task.
      pattern: the pattern that matched.
    """

    scope: Path
    task: Task
    pattern: str

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the scopes on the path, in any iteration."""
        return tuple([part for part in self.scope if isinstance(part, str)])

    @property
    def iterations(self) -> tuple[Iteration, ...]:
        """Those of the scans around the scope, the outermost first."""
        return iterations_of(self.scope)


class Matcher:
    """The rules of one trace, and what they say about scopes. Asks each callback once about each name and phase."""

    def __init__(self, rules: Iterable[Rule] = ()) -> None:
        self.rules = tuple(rules)
        self.depth = max((rule.depth for rule in self.rules), default=1)
        self._tasks: dict[tuple[int, str, bool], Task | None] = {}
        self._matched: dict[tuple[str, bool], Matched | None] = {}
        self._used: set[int] = set()  # the rules, by number, whose pattern matched some name
        self._placed: set[str] = set()  # the patterns that made a task of some scope
        self._covered: dict[str, Matched] = {}  # what a scope in a matched one is called -> that one
        # A pattern for one name is looked up by it, so that of one for each layer not all are tried on every layer.
        self._for_one: dict[str, list[int]] = {}
        self._for_many: list[int] = []
        for number, rule in enumerate(self.rules):
            name = re.sub(r"\\(\W)", r"\1", rule.pattern.pattern)
            if rule.pattern.pattern == re.escape(name) and rule.pattern.flags == re.UNICODE:
                self._for_one.setdefault(name, []).append(number)
            else:
                self._for_many.append(number)
        self._for_iterations = {number for number, rule in enumerate(self.rules) if _may_match_iteration(rule.pattern)}

    def __bool__(self) -> bool:
        return bool(self.rules)

    def match(self, stack: str, backward: bool) -> Matched | None:
        """The task of an equation with this name stack."""
        if not self.rules:
            return None
        key = (stack, backward)
        if key not in self._matched:
            self._matched[key] = self._find(path_of(stack), backward)
        return self._matched[key]

    def _find(self, path: Path, backward: bool) -> Matched | None:
        for at, part in enumerate(path):
            if isinstance(part, str):
                found = self.task(called(path, at, self.depth), backward)
                if found is not None:
                    matched = Matched(path[: at + 1], *found)
                    self._placed.add(matched.pattern)
                    for inner in range(at + 1, len(path)):
                        if isinstance(path[inner], str):
                            self._covered.update(dict.fromkeys(called(path, inner, self.depth), matched))
                    return matched
        return None

    def task(self, names: tuple[str, ...], backward: bool) -> tuple[Task, str] | None:
        """The task of a scope, which may have several names, and the pattern that made it."""
        by_name = [number for name in names for number in self._for_one.get(name, ())]
        for number in sorted(by_name + self._for_many) if by_name else self._for_many:
            rule = self.rules[number]
            for name in names:
                key = (number, name, backward)
                if key not in self._tasks:
                    match = rule.match(name)
                    self._tasks[key] = None if match is None else rule.describe(match, backward)
                    if match is not None:
                        self._used.add(number)
                made = self._tasks[key]
                if made is not None:
                    return made, rule.pattern.pattern
        return None

    def tasks(self, scopes: tuple[str, ...], iterations: range, backward: bool) -> Iterator[Task]:
        """The tasks of the last of nested scopes, in the iterations of the scan that it is directly in, if it is in one."""
        indices: Iterable[int | None] = iterations if iterations and self._for_iterations else (None,)
        for index in indices:
            found = self.task(names_of(scopes, index), backward)
            if found is not None:
                yield found[0]

    def unmatched(self, scopes: Mapping[str, int]) -> dict[str, str]:
        """Patterns that match none of a program's scopes, or only such as are in tasks elsewhere -> a sentence about each.

        Args:
          scopes: what each scope is called -> the iterations of the scan that it is directly in; 0 outside scans.
        """
        found = {}
        for number, rule in enumerate(self.rules):
            pattern = rule.pattern.pattern
            if (outer := self._elsewhere(rule)) is not None:
                found[pattern] = (
                    f"register_task({pattern!r}) places nothing: what it matches is in the scope {outer.names[-1]!r}, which "
                    f"register_task({outer.pattern!r}) places on other devices, and of nested scopes the outermost that "
                    "matches decides; make that pattern match less"
                )
                continue
            if number in self._used or self._matches_one(number, scopes):
                continue
            plain = re.sub(r"\\[a-zA-Z]|[\\^$.|?*+()\[\]{}]", "", pattern)
            known = [*scopes, *(_in_iteration(name, 0) for name, length in scopes.items() if length)]
            near = difflib.get_close_matches(plain, known, 3, 0.0)
            said = f"the nearest names are {near}" if near else "the program has no scopes; jax.named_scope makes them"
            found[pattern] = (
                f"register_task({pattern!r}) matches no scope of this program, so it places nothing; a pattern has to match "
                f"a whole name, or with slashes the names of as many nested scopes; {said}"
            )
        return found

    def _elsewhere(self, rule: Rule) -> Matched | None:
        """A task on other devices than the rule says, of a scope that is around one that the rule matches."""
        if rule.pattern.pattern in self._placed or rule.task is None or rule.task.mesh is None:
            return None
        around = (outer for name, outer in self._covered.items() if rule.match(name))
        return next((x for x in around if x.task.mesh not in (None, rule.task.mesh)), None)

    def _matches_one(self, number: int, scopes: Mapping[str, int]) -> bool:
        matches = self.rules[number].match
        if any(matches(name) for name in scopes):
            return True
        counted = scopes.items() if number in self._for_iterations else ()
        return any(matches(_in_iteration(name, i)) for name, length in counted for i in range(length))


def _may_match_iteration(pattern: re.Pattern[str]) -> bool:
    """Whether a pattern may match a name with the number of an iteration: one of letters and digits alone cannot."""
    return re.search(r"[][.\\]", re.sub(r"\\[dwsbBAZ]", "", pattern.pattern)) is not None
