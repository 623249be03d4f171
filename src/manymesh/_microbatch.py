"""`microbatch`: a function of a batch as a loop over its pieces.

Called inside ``mm.jit`` it leaves a marked scan, which the compiler runs under a pipeline schedule.
Called anywhere else it is the reference: a Python loop over the same pieces, reduced in their order; a scan over many
pieces where JAX traces it.
"""

from __future__ import annotations

import difflib
import functools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from . import _compat, schedules
from ._batch import Cut, check_arguments, in_words, is_whole, positions, rng_argnums, whole_by_keyword
from ._changed import changed
from ._draws import about_draws, same_in_each
from ._errors import MicrobatchError, ScheduleError
from ._findings import Finding
from ._mark import Recording, constrain, current_recording, is_spec
from ._means import is_mean, updated
from ._reductions import (
    ACCUMULATE,
    REDUCTIONS,
    Reduce,
    WeightedMean,
    dtype_as_reference,
    in_bytes,
    initial,
    reduce_reference,
    words_of,
)
from ._shown import joined, name_of
from ._single import check_single
from ._stands_for import stands_for
from ._types import PyTree

UNROLLED = 4  # microbatches; of more, JAX would compile each for itself where it traces the reference

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class LoopSpec:
    """What `microbatch` says about a loop.

    Attributes:
      name: name of the wrapped function.
      num_microbatches: number of pieces.
      schedule: the schedule object.
      interleave, num_stages: statements about the program, checked against it.
      custom_schedule: rows of task names for the custom schedule.
      dim: the dimension along which the batch was cut.
      accumulates: whether a result goes from one microbatch to the next, so that their order counts.
      of_losses: whether all results are sums and means of numbers, and there is no state.
    """

    name: str
    num_microbatches: int
    schedule: Any
    interleave: int | None = None
    num_stages: int | None = None
    custom_schedule: Any = None
    dim: int = 0
    accumulates: bool = True
    of_losses: bool = False


@dataclass(frozen=True)
class _Rows:
    """Stands for the custom schedule until the program's tasks are known."""

    name: str = "custom"


@_compat.boundary
def microbatch(
    fun: Callable[P, R],
    dim: int = 0,
    size: int | None = None,
    argnum: int | Sequence[int] = 0,
    *,
    num_microbatches: int | None = None,
    schedule: schedules.ScheduleName | str | schedules.AbstractSchedule | None = None,
    reduce: Reduce = "sum",
    interleave: int | None = None,
    num_stages: int | None = None,
    unrolling: int | None = None,
    arg_shardings: Any = None,
    custom_schedule: Any = None,
    rng_argnum: int | None = None,
    state_argnum: int | None = None,
) -> Callable[P, R]:
    """Runs a function on pieces of a batch and combines the results.

    Args:
      fun: function of pytrees; commonly ``jax.value_and_grad`` of a loss.
      dim: dimension along which the leaves of the batch are cut.
      size: length of a piece along ``dim``. Give this or ``num_microbatches``.
      argnum: which positional argument is the batch, or several. All others, and all by keyword, go whole to each piece.
      num_microbatches: number of pieces.
      schedule: a name (``"gpipe"``, ``"1f1b"``, ...) or an object of `manymesh.schedules`; ``"1f1b"`` if None.
      reduce: how results combine, as one word or a pytree prefix of the result: ``sum``, ``mean``, ``max``,
        ``concat`` (along dimension 0, in microbatch order), ``stack``, ``last``, or a `WeightedMean`.
        A sum stays a sum: nothing is scaled unasked.
      interleave, num_stages: stages on each submesh, and in all, that the program has to have.
      unrolling: accepted for programs written for other systems; it changes nothing, as a plan is laid out whole.
      arg_shardings: pytree prefix of the batch with the sharding of a piece; of several one for all, or a tuple of one each.
      custom_schedule: rows for the schedule ``"custom"``, one a submesh, of task names or (microbatch, task name), those of
        a task in several stages with numbers, as fragments have them. What is in no task runs right before what needs it.
      rng_argnum: argument whose random keys become ``jax.random.fold_in(key, i)`` for microbatch ``i``.
      state_argnum: argument that goes from one microbatch to the next, such as the statistics of a batch
        normalisation: ``fun`` returns ``(result, next state)``. Results are reduced, the state is not.

    Returns:
      A function with the signature of ``fun``.

    Raises:
      MicrobatchError: the batch does not divide, a reduction is unknown, or the sizes contradict each other.
      ScheduleError: the schedule is unknown, or cannot run this program.

    Example:
      >>> import jax, jax.numpy as jnp, manymesh as mm
      >>> loss = lambda w, x: jnp.mean((x @ w) ** 2)
      >>> step = mm.microbatch(jax.value_and_grad(loss), argnum=1, num_microbatches=4, reduce="mean")
      >>> value, grad = step(jnp.ones(3), jnp.ones((8, 3)))
      >>> float(value)
      9.0
    """
    name = name_of(fun)
    _check_kinds(name, fun, rng_argnum, state_argnum, interleave, num_stages)
    cut = _cut(name, fun, argnum, dim, size, num_microbatches, (rng_argnum, state_argnum))
    _check_reductions(name, reduce)
    shardings = _of_each(name, arg_shardings, cut.argnums)
    custom_schedule = _custom_rows(name, schedule, custom_schedule)
    chosen = _chosen_schedule(schedule, custom_schedule)

    @_compat.boundary
    @functools.wraps(fun)
    def over_microbatches(*args: P.args, **kwargs: P.kwargs) -> PyTree:
        count = cut.count(args)
        check_arguments(name, args, cut.argnums, rng_argnum, state_argnum)
        record = current_recording()
        call = _Call(fun, args, kwargs, cut, count, reduce, shardings, rng_argnum, state_argnum)
        if record is None or _compat.manual_axes():
            return call.in_jax()
        if count == 1:
            before = set(record.tasks)
            result = call.reference()
            tasks = [task for mark, task in record.tasks.items() if mark not in before]
            check_single(name, tasks, chosen, custom_schedule, num_stages, interleave)
            return result
        spec = LoopSpec(name, count, chosen, interleave, num_stages, custom_schedule, cut.dim)
        suspect = [*call.about_parameters(name), *call.about_keywords(name)]
        record.findings.update((Finding(text), MicrobatchError) for text in suspect)
        try:
            return call.traced(record, spec)
        except Exception as error:
            pieces = [call.about_pieces(name)] if isinstance(error, (TypeError, ValueError)) else []
            for text in (*suspect, *pieces, *_about_modules(name, args)):
                error.add_note(text)
            raise

    over_microbatches.__name__ = name  # which a partial application does not have
    return over_microbatches


def _check_kinds(
    name: str, fun: object, rng_argnum: object, state_argnum: object, interleave: object, num_stages: object
) -> None:
    """Refuses what is no function, no position of an argument, or no number of stages."""
    if not callable(fun):
        raise MicrobatchError(
            f"microbatch: expected a function, found {type(fun).__name__} {fun!r:.80}; write "
            "microbatch(jax.value_and_grad(loss), ...)(params, batch), which calls it for each piece"
        )
    for label, number in (("rng_argnum", rng_argnum), ("state_argnum", state_argnum)):
        if number is not None and not is_whole(number):
            raise MicrobatchError(
                f"microbatch({name}): {label} has to be the position of one argument, found {number!r}"
            )
    for label, number in (("interleave", interleave), ("num_stages", num_stages)):
        _positive(name, label, number)


def _own(tree: PyTree) -> Any:
    """A tree with dictionaries and lists of its own: what a function changes in them is unknown to the next microbatch."""
    return jax.tree.map(lambda x: x, tree, is_leaf=lambda x: not isinstance(x, (dict, list, tuple)))


def _cut(
    name: str, fun: Any, argnum: Any, dim: Any, size: Any, num_microbatches: Any, others: Iterable[int | None]
) -> Cut:
    """How the batch is cut; it is hardly an argument that is differentiated, or one of ``others``."""
    argnums = positions(name, argnum)
    number, size, dim = _sizes(name, num_microbatches, size, dim)
    taken = (*(_compat.differentiated(fun) or ()), *(k for k in others if k is not None))
    return Cut(name, argnums, dim, size, number, taken)


def _sizes(name: str, num_microbatches: object, size: object, dim: object) -> tuple[int | None, int | None, int]:
    """The three as Python's ints, whatever type of whole number they came in."""
    if num_microbatches is None and size is None:
        raise MicrobatchError(f"microbatch({name}): give num_microbatches= or size=, the length of a piece")
    if not is_whole(dim):
        raise MicrobatchError(f"microbatch({name}): dim has to be the number of a dimension, found {dim!r}")
    return _positive(name, "num_microbatches", num_microbatches), _positive(name, "size", size), int(dim)


def _positive(name: str, label: str, number: object) -> int | None:
    if number is None:
        return None
    if is_whole(number) and number >= 1:
        return int(number)
    hint = "; // divides whole numbers" if isinstance(number, (float, np.floating)) else ""
    raise MicrobatchError(f"microbatch({name}): {label} has to be a positive int, found {number!r}{hint}")


def _chosen_schedule(schedule: Any, rows: object) -> Any:
    """The schedule object; of a custom one, what stands for it until the tasks are known."""
    return schedules.get("1f1b" if schedule is None else schedule) if rows is None else _Rows()


def _custom_rows(name: str, schedule: object, rows: Any) -> tuple[tuple[Any, ...], ...] | None:
    """The rows of a custom schedule, once they are rows of names, or of (microbatch, name)."""
    if rows is None:
        return None
    if schedule != "custom":
        raise ScheduleError(f"microbatch({name}): custom_schedule goes with schedule='custom', found {schedule!r}")
    if not _is_list(rows):
        raise ScheduleError(
            f"microbatch({name}): custom_schedule has to be one row of task names for each submesh, found {type(rows).__name__} {rows!r}"
        )
    found = []
    for r, row in enumerate(rows):
        if not _is_list(row):
            raise ScheduleError(
                f"microbatch({name}): row {r} of custom_schedule has to be a list of task names, found {type(row).__name__} {row!r}; "
                "each submesh has one row, in which a task stands once for each microbatch"
            )
        found.append(tuple(row))
        for entry in found[-1]:
            if not isinstance(entry, str) and not (
                isinstance(entry, tuple)
                and len(entry) == 2
                and isinstance(entry[0], (int, np.integer))
                and isinstance(entry[1], str)
            ):
                raise ScheduleError(
                    f"microbatch({name}): row {r} of custom_schedule holds {entry!r}; expected the name of a task, such as 'front', or "
                    "(microbatch, name), such as (0, 'front')"
                )
    return tuple(found)


def _is_list(rows: object) -> bool:
    """Whether something is a list of whatever kind, and neither text nor a mapping."""
    return isinstance(rows, Iterable) and not isinstance(rows, str | Mapping)


def _of_each(name: str, shardings: Any, argnums: tuple[int, ...]) -> tuple[Any, ...]:
    """What ``arg_shardings`` says of each argument that is cut."""
    if len(argnums) == 1 or is_spec(shardings):
        return (shardings,) * len(argnums)
    if not isinstance(shardings, (tuple, list)) or len(shardings) != len(argnums):
        found = f"{len(shardings)} of them" if isinstance(shardings, (tuple, list)) else f"{shardings!r:.80}"
        raise MicrobatchError(
            f"microbatch({name}): argnum names {len(argnums)} arguments, so that arg_shardings has to be one spec for all of them, "
            f"or a tuple with one for each; found {found}"
        )
    return tuple(shardings)


def _about_modules(name: str, args: Sequence[Any]) -> list[str]:
    """A sentence about NNX modules, which the loop takes for pytrees."""
    nnx: Any = sys.modules.get("flax.nnx")
    found = [k for k, x in enumerate(args) if nnx is not None and isinstance(x, nnx.Pytree)]
    return [
        f"microbatch({name}): argument {k} is a {type(args[k]).__name__}; for functions of NNX modules write "
        "manymesh.nnx.microbatch, inside manymesh.nnx.jit"
        for k in found[:1]
    ]


def _as(x: Any, aval: Any) -> Any:
    """A value in the dtype of another one; where that is a number without a dtype of its own, it is one too."""
    if jax.typeof(x).dtype == aval.dtype:  # a number that the step itself says has no dtype of its own
        return x
    return x * np.ones((), aval.dtype).item() if aval.weak_type else jnp.asarray(x, aval.dtype)


def _fold_in(key: Any, i: int) -> Any:
    return jax.random.fold_in(key, i)


def _folded(key: Any, count: int) -> Any:
    """The keys of all microbatches, in one array."""
    typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    kind = str(jax.random.key_impl(key)) if typed else _compat.default_key_kind()
    numbers = jnp.arange(count)
    if "unsafe" in kind or not ("fry" in kind or "rbg" in kind):  # not promised to be the same under vmap
        # In a call of its own: a scan beside that of the microbatches would be taken for a loop over them.
        return jax.jit(lambda key: jax.lax.map(functools.partial(jax.random.fold_in, key), numbers))(key)
    return jax.vmap(jax.random.fold_in, (None, 0))(key, numbers)


_OTHER_WORDS = {"average": "mean", "avg": "mean", "add": "sum"}  # what others call reductions


def _check_reductions(name: str, reduce: Any) -> None:
    for word in jax.tree.leaves(reduce, is_leaf=lambda r: r is reduce is None or isinstance(r, WeightedMean)):
        if not isinstance(word, WeightedMean) and word not in REDUCTIONS:
            near = difflib.get_close_matches(_OTHER_WORDS.get(str(word), str(word)), REDUCTIONS, 1)
            hint = f"; did you mean {near[0]!r}?" if near else "."
            raise MicrobatchError(
                f"microbatch({name}): unknown reduction {word!r}{hint} It is one of {', '.join(REDUCTIONS)}, or mm.WeightedMean(...)"
            )


@dataclass
class _Call:
    fun: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    cut: Cut
    count: int
    reduce: Any
    arg_shardings: tuple[Any, ...]  # of each argnum
    rng_argnum: int | None
    state_argnum: int | None

    @property
    def argnums(self) -> tuple[int, ...]:
        """The arguments that are the batch."""
        return self.cut.argnums

    @property
    def dim(self) -> int:
        """The dimension that is cut."""
        return self.cut.dim

    @property
    def name(self) -> str:
        """What the function is called in errors."""
        return name_of(self.fun)

    def reference(self) -> PyTree:
        """The definition: a Python loop, reduced in microbatch order."""
        outs = []
        state = None if self.state_argnum is None else self.args[self.state_argnum]
        structure = jax.tree.structure(state)
        for i in range(self.count):
            args, kwargs = _own((list(self.args), self.kwargs))
            if self.state_argnum is not None:
                args[self.state_argnum] = state
            for n, k in enumerate(self.argnums):
                args[k] = self._constrained(n, jax.tree.map(functools.partial(self._piece, i=i), args[k]))
            if self.rng_argnum is not None:
                args[self.rng_argnum] = jax.tree.map(functools.partial(_fold_in, i=i), args[self.rng_argnum])
            out = self.fun(*args, **kwargs)
            if self.state_argnum is not None:
                out, state = state_of(self.name, self.state_argnum, out, structure)
            outs.append(out)
        words = words_of(self.name, self.reduce, _arrays(self.name, outs[0]))
        leaves = [jax.tree.leaves(o) for o in outs]
        reduced = [reduce_reference(w, [row[j] for row in leaves]) for j, w in enumerate(words.per_leaf)]
        for j, count in enumerate(words.counts):
            if count is not None:
                values, counts = ([jnp.asarray(row[n]) for row in leaves] for n in (j, count))
                parts = [x * c.astype(x.dtype) for x, c in zip(values, counts, strict=True)]
                reduced[j] = functools.reduce(jnp.add, parts) / functools.reduce(jnp.add, counts).astype(parts[0].dtype)
        result = jax.tree.unflatten(jax.tree.structure(outs[0]), reduced)
        return result if self.state_argnum is None else (result, state)

    def in_jax(self) -> PyTree:
        """The loop where there is no schedule: outside of `mm.jit`, and in ``jax.shard_map``, in which no task can be."""
        alone = self.count <= UNROLLED or not _compat.is_staging()
        # A scan would have to know in which axes of a ``shard_map`` its sums vary.
        return self.reference() if alone or _compat.manual_axes() else self.scanned()

    def scanned(self) -> PyTree:
        """The same as a scan, which JAX compiles once and not for each microbatch; where it can be none, as a loop after all."""
        out_tree: list[Any] = []
        try:
            leaves = self._scan(None, self.name, self.args, self.kwargs, out_tree)
        except MicrobatchError:  # of a state that grows, say, which is right here and not in `mm.jit`
            return self.reference()
        return jax.tree.unflatten(out_tree[-1][0], leaves)

    def _check_sums(
        self, record: Recording, name: str, shape: PyTree, summed: Sequence[bool], jaxpr: Any, batch: int
    ) -> None:
        """Finds results that are added up although each is something given, such as parameters, plus what a piece adds."""
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(shape)]
        found = updated(jaxpr, (i for i, k in enumerate(summed) if k), batch)
        if found:
            which = joined([f"result{paths[i]}" for i in found])
            text = (
                f"microbatch({name}): reduce='sum' adds up {self.count} values of {which}, each of which is what the function is given plus "
                "what a piece adds to it, as parameters after a step are: microbatch the gradient alone, "
                "jax.value_and_grad(loss), and update once with its result; what goes from one piece to the next is a state, state_argnum="
            )
            record.findings[Finding(text)] = MicrobatchError

    def _check_next(self, name: str, i: int, new: Any) -> None:
        """Refuses a part of the state, the i-th leaf, whose shape a microbatch changes, or its dtype."""
        state = self.args[self.state_argnum]  # type: ignore[index]  # there is one
        path, old = jax.tree_util.tree_leaves_with_path(state)[i]
        check_next(name, f"the state args[{self.state_argnum}]{jax.tree_util.keystr(path)}", jax.typeof(old), new)

    def _constrained(self, n: int, piece: PyTree) -> PyTree:
        """A piece of the n-th batch argument with the sharding that the caller asked for."""
        wanted = self.arg_shardings[n]
        return piece if wanted is None else constrain("microbatch: arg_shardings", piece, wanted)

    def about_pieces(self, name: str) -> str:
        """A sentence about what is cut into which pieces: of that come shapes that do not fit, or that a class refuses."""
        length = self._length()
        which = ", ".join(f"args[{k}]" for k in self.argnums)
        # A class of the user's may look at the shapes of what it is made of.
        classes = "CustomNode" in str(jax.tree.structure([self.args[k] for k in self.argnums]))
        stacked = (
            "; all pieces together are put into one such object, too, whose leaves have a dimension more, in front"
        )
        beside, instead = self.cut.beside(self.args, length), self.cut.instead(self.args)
        hint = beside + instead * (not beside or self.cut.argnums == (0,)) if not self.about_keywords(name) else ""
        return (
            f"microbatch({name}): each of {self.count} microbatches has {length // self.count} of {length} along dimension "
            f"{self.dim} of {which}{stacked if classes else ''}{hint}"
        )

    def about_parameters(self, name: str) -> list[str]:
        """Sentences about arguments that are cut and differentiated: often parameters, as argnum was forgotten."""
        both = _compat.differentiated(self.fun) or ()
        if not set(both) <= set(self.argnums):  # something else is differentiated too, and that is the parameters
            return []
        words = jax.tree.leaves(self.reduce)
        if any(word in ("concat", "stack") for word in words):  # gradients of a batch are one, too
            return []
        others = in_words([f"argnum={k}" for k in self.cut.others(self.args)], "or")
        return [
            f"microbatch({name}): argnum={k} is the batch, which is cut into {self.count} pieces, and {name} differentiates the "
            "same argument; if that is the parameters, write "
            f"{others or f'argnum={1 - k if k in (0, 1) else 0}'}, or whichever is the batch"
            for k in both
        ]

    def about_keywords(self, name: str) -> list[str]:
        """A sentence about keyword arguments that are as long as the batch, and are not cut."""
        length = self._length()
        keywords = [f"{keyword}=" for keyword in whole_by_keyword(self.kwargs, self.dim, length)]
        return [
            f"microbatch({name}): {in_words(keywords)}, of length {length} along dimension {self.dim} as the batch, "
            f"{'goes' if len(keywords) == 1 else 'go'} whole to each microbatch, beside {length // self.count} of the batch, for "
            "arguments given by keyword are not cut; pass by position, and name in argnum, what is to be cut, and close over what "
            "each microbatch is to have whole"
        ] * bool(keywords)

    def _length(self) -> int:
        """The length of the batch along the dimension that is cut."""
        return next(int(np.shape(x)[self.dim]) for k in self.argnums for x in jax.tree.leaves(self.args[k]))

    def _piece(self, x: Any, i: int) -> Any:
        length = np.shape(x)[self.dim] // self.count
        index = [slice(None)] * np.ndim(x)
        index[self.dim] = slice(i * length, (i + 1) * length)
        return x[tuple(index)]

    def traced(self, record: Any, spec: LoopSpec) -> Any:
        """The loop as a marked scan."""
        dynamic, static, treedef = _split((self.args, self.kwargs))
        mark = record.new_mark(spec.name)
        record.loops[mark] = spec
        out_tree: list[Any] = []

        def loop(*values: jax.Array) -> list[Any]:
            args, kwargs = _join(values, static, treedef)
            leaves = self._scan(record, spec.name, args, kwargs, out_tree)
            return leaves

        loop.__name__ = loop.__qualname__ = mark
        leaves = jax.jit(loop)(*dynamic)
        words = out_tree[-1][1]
        numbers = all(w in ("sum", "mean", "weighted") and not np.shape(x) for w, x in zip(words, leaves, strict=False))
        record.loops[mark] = replace(
            spec, accumulates=any(w in ACCUMULATE for w in words), of_losses=numbers and self.state_argnum is None
        )
        return jax.tree.unflatten(out_tree[-1][0], leaves)

    def _scan(
        self, record: Recording | None, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out_tree: list[Any]
    ) -> list[Any]:
        stacked = [jax.tree.map(self._stack, args[k]) for k in self.argnums]
        keys = None
        if self.rng_argnum is not None:
            keys = jax.tree.map(functools.partial(_folded, count=self.count), args[self.rng_argnum])

        state: list[Any] = []
        if (k := self.state_argnum) is not None:
            remedy = "a state is of arrays and numbers; close over what else the function needs"
            state = jax.tree.leaves(_arrays(name, args[k], f"the state args[{k}]", remedy))
        structure = None if self.state_argnum is None else jax.tree.structure(args[self.state_argnum])

        named = (*self.argnums, self.rng_argnum, self.state_argnum)
        replaced = {k % len(args) for k in named if k is not None}
        fixed, layout = jax.tree.flatten(([None if i in replaced else x for i, x in enumerate(args)], kwargs))

        def one(pieces: PyTree, key: Any, state: list[Any]) -> PyTree:
            """The result, and the next values of the parts of the state that change, by position."""
            # Objects such as Variables of NNX belong to the function that made them: here they are made anew.
            own, kwargs = jax.tree.unflatten(layout, fixed)
            full: list[Any] = list(own)
            for n, (k, piece) in enumerate(zip(self.argnums, pieces, strict=True)):
                full[k] = self._constrained(n, piece)
            if self.rng_argnum is not None:
                full[self.rng_argnum] = key
            if self.state_argnum is not None:
                full[self.state_argnum] = jax.tree.unflatten(structure, state)
            out = _arrays(name, self.fun(*full, **kwargs))
            _check_unchanged(name, fixed, (own, kwargs))
            if self.state_argnum is None:
                return out, {}
            out, following = state_of(name, self.state_argnum, out, structure)
            pairs = enumerate(zip(state, jax.tree.leaves(following), strict=True))
            return out, {i: new for i, (old, new) in pairs if new is not old}

        stands_for(one, self.fun)
        jitted = jax.jit(one)
        first = (*jax.tree.map(_first, (stacked, keys)), state)
        shape, changing = jax.eval_shape(jitted, *first)
        avals = jax.tree.leaves(shape)
        for i, new in changing.items():
            self._check_next(name, i, new)
        words = words_of(self.name, self.reduce, shape)
        first_word = words.per_leaf[0] if words.per_leaf else None
        is_loss = first_word == "sum" and not avals[0].shape and _compat.differentiated(self.fun) is not None
        if record is not None and is_loss and is_mean(jitted.trace(*first).jaxpr, 0, len(jax.tree.leaves(first))):
            text = (
                f"microbatch({name}): reduce='sum' adds up {self.count} losses each of which is a mean, so that the loss "
                f"and its gradients are {self.count} times those of the whole batch; write reduce='mean'"
            )
            record.findings[Finding(text)] = MicrobatchError
        if record is not None and "sum" in words.per_leaf and _compat.differentiated(self.fun) is None:
            traced = jitted.trace(*first).jaxpr
            self._check_sums(
                record, name, shape, [w == "sum" for w in words.per_leaf], traced, len(jax.tree.leaves(first))
            )
        if record is not None:
            piece, rows = jitted.trace(*first).jaxpr, self._length() // self.count
            if (line := same_in_each(piece, len(jax.tree.leaves(first)), self.dim, rows)) is not None:
                free = [k for k in rng_argnums(name, self.args) if k not in replaced]
                record.findings[Finding(about_draws(name, self.count, line, free))] = MicrobatchError
        left = shape if structure is None else (shape, args[self.state_argnum])
        out_tree.append((jax.tree.structure(left), [*words.per_leaf, *("last" for _ in changing)]))

        def body(carry: PyTree, xs: PyTree) -> tuple[Any, list[Any]]:
            summed, moving = carry
            found, moved = jitted(*xs, [moving.get(i, x) for i, x in enumerate(state)])
            out = jax.tree.leaves(found)
            out = [o if k is None else o * out[k].astype(o.dtype) for o, k in zip(out, words.counts, strict=True)]
            out = [in_bytes(w, o) for w, o in zip(words.per_leaf, out, strict=True)]
            kept = iter(summed)
            new = [ACCUMULATE[w](next(kept), o) for w, o in zip(words.per_leaf, out, strict=True) if w in ACCUMULATE]
            ys = [o for w, o in zip(words.per_leaf, out, strict=True) if w in ("stack", "concat")]
            return (new, {**moving, **moved}), ys  # a value that has got its dtype may stay as it is

        start = [initial(w, a) for w, a in zip(words.per_leaf, avals, strict=True) if w in ACCUMULATE]
        moving = {i: _as(state[i], a) for i, a in changing.items()}
        (carry, moving), ys = jax.lax.scan(body, (start, moving), (stacked, keys), length=self.count)
        carried, collected = iter(carry), iter(ys)
        result = [
            next(carried) if w in ACCUMULATE else np.zeros(a.shape, a.dtype) if w == "float0" else next(collected)
            for w, a in zip(words.per_leaf, avals, strict=True)
        ]
        totals = [None if k is None else result[k] for k in words.counts]
        finished = [self._finish(w, r, total) for w, r, total in zip(words.per_leaf, result, totals, strict=True)]
        final = [moving.get(i, x) for i, x in enumerate(state)]
        return [dtype_as_reference(w, r, a) for w, r, a in zip(words.per_leaf, finished, avals, strict=True)] + final

    def _finish(self, word: str, value: Any, total: Any) -> Any:
        if word == "mean":
            return value / self.count
        if word == "weighted":
            return value / total.astype(value.dtype)
        if word == "concat":
            return value.reshape((value.shape[0] * value.shape[1], *value.shape[2:]))
        return value

    def _stack(self, x: Any) -> Any:
        """``x`` with a leading dimension of microbatches."""
        d = self.dim % x.ndim
        shape = (*x.shape[:d], self.count, x.shape[d] // self.count, *x.shape[d + 1 :])
        return jnp.moveaxis(x.reshape(shape), d, 0)


def _arrays(
    name: str,
    tree: PyTree,
    called: str = "result",
    remedy: str = "return arrays and numbers alone, and keep the rest outside of the loop",
) -> PyTree:
    """A tree of arrays, such as what a function returned for a microbatch; JAX's own words for others count from our tuples."""
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        try:
            jax.typeof(x)
        except TypeError:
            raise MicrobatchError(
                f"microbatch({name}): {called}{jax.tree_util.keystr(path)} is {type(x).__name__} {x!r:.80}, no array; {remedy}"
            ) from None
    return tree


def _check_unchanged(name: str, given: list[Any], after: tuple[list[Any], dict[str, Any]]) -> None:
    """Refuses a function that changes objects among its arguments in place: each microbatch is given them anew."""
    if (lost := changed(given, after)) is not None:
        raise MicrobatchError(
            f"microbatch({name}): the function changes {lost} in place, which would be lost, for every microbatch is given what "
            "the call was given; use manymesh.nnx.microbatch for modules of Flax NNX, "
            "which carries it from one microbatch to the next, or return what is new, as with state_argnum="
        )


def state_of(name: str, argnum: int, out: PyTree, structure: Any) -> tuple[Any, Any]:
    """What a function returned as result and next state.

    Args:
      name: name of the function.
      argnum: position of the state among its arguments.
      out: what it returned.
      structure: that of the state it was given.
    """
    if isinstance(out, tuple) and len(out) == 2:
        if jax.tree.structure(out[1]) == structure:
            return out
        found = f"a state of {jax.tree.structure(out[1])}"
    else:
        found = "no pair"
    raise MicrobatchError(
        f"microbatch({name}): with state_argnum={argnum}, the function has to return a pair (result, next state), "
        f"the state in the structure in which it came, {structure}; it returned {found}"
    )


def check_next(name: str, called: str, before: Any, new: Any) -> None:
    """Refuses what goes from one microbatch to the next, if one changes its shape, or its dtype.

    A number without a dtype of its own, as Python has them, becomes what it meets, as in `jax.lax.scan`.

    Args:
      name: name of the function.
      called: what goes from one microbatch to the next.
      before: its abstract value before a microbatch.
      new: that after one.
    """
    if before.shape != new.shape:
        raise MicrobatchError(
            f"microbatch({name}): {called} of shape {before.shape} becomes one of shape {new.shape}; under mm.jit "
            "all microbatches run one program, so that a state keeps its shape: begin with room for all of it, and write what "
            "each microbatch adds into its place"
        )
    becomes = before.weak_type and jnp.promote_types(before.dtype, new.dtype) == new.dtype
    if before.dtype != new.dtype and not becomes:
        raise MicrobatchError(
            f"microbatch({name}): {called} of dtype {before.dtype} becomes one of dtype {new.dtype}; under mm.jit "
            f"all microbatches run one program, so that a state keeps its dtype: begin with one of dtype {new.dtype}, or return "
            f"it as {before.dtype}"
        )


def _first(stacked: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(stacked.shape[1:], stacked.dtype, weak_type=jax.typeof(stacked).weak_type)


def _split(tree: PyTree) -> tuple[list[Any], list[Any], Any]:
    leaves, treedef = jax.tree.flatten(tree)
    is_array = [isinstance(x, (jax.Array, np.ndarray, np.generic)) for x in leaves]
    dynamic = [x for x, a in zip(leaves, is_array, strict=True) if a]
    static = [_HOLE if a else x for x, a in zip(leaves, is_array, strict=True)]
    return dynamic, static, treedef


def _join(values: Sequence[Any], static: list[Any], treedef: Any) -> PyTree:
    it = iter(values)
    return jax.tree.unflatten(treedef, [next(it) if s is _HOLE else s for s in static])


_HOLE = object()
