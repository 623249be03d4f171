"""How the results of microbatches combine: a word for each, in the reference and in the loop that a schedule runs."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np

from . import _compat
from ._errors import MicrobatchError
from ._types import PyTree

Reduction = Literal["sum", "mean", "max", "concat", "stack", "last"]
REDUCTIONS = get_args(Reduction)


@dataclass(frozen=True)
class WeightedMean:
    """A mean over pieces that count differently, such as tokens behind a mask.

    Every floating-point result is averaged over the microbatches with the weight that ``fun`` returns, so that
    it equals the full-batch result; the weight itself, and integers, are summed. In a pytree prefix it does so with its part of
    the result, and the weight may be anywhere in the result.

    Args:
      count: the weight among the results of ``fun``: the last component of its path (a dictionary key or an
        attribute), or a function from the result to the leaf.

    Example:
      >>> import jax.numpy as jnp, manymesh as mm
      >>> def loss(batch):
      ...     return {"loss": jnp.mean(batch), "tokens": jnp.sum(batch >= 0)}
      >>> mm.microbatch(loss, num_microbatches=2, reduce=mm.WeightedMean("tokens"))(jnp.arange(4.0))["loss"].item()
      1.5
    """

    count: str | Callable[[Any], Any]


# One word for all, or a pytree prefix of the result with a word for each part.
Reduce: TypeAlias = Reduction | WeightedMean | tuple[Any, ...] | list[Any] | Mapping[Any, Any]

ACCUMULATE: dict[str, Callable[[Any, Any], Any]] = {
    "sum": jnp.add,
    "mean": jnp.add,
    "weighted": jnp.add,
    "max": jnp.maximum,
    "last": lambda old, new: new,
}


def initial(word: str, aval: Any) -> Any:
    start = jnp.full(aval.shape, _least(aval.dtype) if word == "max" else 0, aval.dtype)
    start = start.astype(_carried_dtype(word, aval.dtype))
    return _compat.with_weak_type(start, True) if aval.weak_type else start


def _carried_dtype(word: str, dtype: Any) -> Any:
    """The dtype of a result between microbatches: JAX's executables do not take arrays of parts of bytes from others."""
    if jnp.issubdtype(dtype, jnp.integer) and _limits(dtype).bits < 8:
        return jnp.uint8 if jnp.issubdtype(dtype, jnp.unsignedinteger) else jnp.int8
    if jnp.issubdtype(dtype, jnp.floating) and _limits(dtype).bits < 8 and word not in ("sum", "mean", "weighted"):
        return jnp.float16  # what is added up is rounded at every step, as in the reference
    return dtype


def _limits(dtype: Any) -> Any:
    about: Any = jnp.finfo if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo
    return about(dtype)


def in_bytes(word: str, value: Any) -> Any:
    dtype = _carried_dtype(word, value.dtype)
    return value if dtype == value.dtype else value.astype(dtype)


def _least(dtype: Any) -> Any:
    """What is not greater than any value of a dtype."""
    if dtype == jnp.bool_:
        return False
    if not jnp.issubdtype(dtype, jnp.floating):
        return _limits(dtype).min
    infinite = np.asarray(-np.inf).astype(dtype)
    return _limits(dtype).min if np.isnan(infinite.astype(np.float32)) else infinite


def dtype_as_reference(word: str, value: Any, aval: Any) -> Any:
    """A reduced value, whose dtype is that of the reference, as weak as there."""
    if word == "float0" or not aval.weak_type and _carried_dtype(word, aval.dtype) == aval.dtype:
        return value
    if word == "weighted":  # its terms are products with the count, which is not weak
        return _compat.with_weak_type(value.astype(aval.dtype), False)
    one = jax.ShapeDtypeStruct((1,), aval.dtype, weak_type=aval.weak_type)
    kept = jax.eval_shape(lambda x: reduce_reference(word, [x, x]), one)
    return _compat.with_weak_type(value.astype(kept.dtype), kept.weak_type)


def reduce_reference(word: str, values: list[Any]) -> Any:
    if word in ("last", "float0"):
        return values[-1]
    if word == "stack":
        return jnp.stack(values)
    if word == "concat":
        return jnp.concatenate(values)
    total = functools.reduce(jnp.maximum if word == "max" else jnp.add, values)
    return total / len(values) if word == "mean" else total


@dataclass
class Words:
    """A word of `REDUCTIONS` for each leaf; ``weighted`` for one to be averaged, ``float0`` for the gradient of an integer.

    Attributes:
      per_leaf: the words.
      counts: of each leaf that is weighted the number of the leaf that it is weighted by.
    """

    per_leaf: list[str]
    counts: list[int | None]


def words_of(name: str, reduce: Any, out: PyTree) -> Words:
    """The reduction of each leaf of the result of a function that is called by ``name`` in errors."""
    leaves = jax.tree.leaves(out)
    try:
        expanded = jax.tree.map(lambda w, part: [w] * len(jax.tree.leaves(part)), reduce, out)
    except ValueError as error:
        text = str(error).replace("tree_map tree", "reduce")  # what JAX calls the first of the trees
        raise MicrobatchError(
            f"microbatch({name}): reduce={reduce!r} is not a prefix of the result, whose structure is {jax.tree.structure(out)}: {text}"
        ) from None
    given = jax.tree.leaves(expanded)
    means = {id(w): w for w in given if isinstance(w, WeightedMean)}
    found = {key: _find_count(name, w.count, out) for key, w in means.items()}
    counts = [found.get(id(w)) for w in given]
    words = [_word_of(i, w, _dtype_of(x), counts[i]) for i, (w, x) in enumerate(zip(given, leaves, strict=True))]
    _check_words(name, out, words)
    for key, w in means.items():
        _check_count(name, out, words, w, found[key])
    return Words(words, [k if w == "weighted" else None for k, w in zip(counts, words, strict=True)])


def _word_of(i: int, given: Any, dtype: Any, count: int | None) -> str:
    """The word of leaf ``i``; of a `WeightedMean` the counts, and what is no floating-point number, are added up."""
    if dtype == jax.dtypes.float0:
        return "float0"
    if not isinstance(given, WeightedMean):
        return str(given)
    return "weighted" if i != count and jnp.issubdtype(dtype, jnp.inexact) else "sum"


def _check_words(name: str, out: PyTree, words: list[str]) -> None:
    """Refuses a result that its word does not apply to."""
    _check_states(name, out, words)
    for (path, leaf), word in zip(jax.tree_util.tree_leaves_with_path(out), words, strict=True):
        dtype, result = _dtype_of(leaf), f"microbatch({name}): result{jax.tree_util.keystr(path)}"
        if jnp.issubdtype(dtype, jax.dtypes.prng_key) and word in ("sum", "mean", "max"):
            neither = "have no greatest one" if word == "max" else "cannot be added up"
            raise MicrobatchError(
                f"{result} is {dtype.name}, and random keys {neither}; do not return it, or reduce it by another word, such as "
                "'stack' or 'last'"
            )
        if word == "max" and jnp.issubdtype(dtype, jnp.complexfloating):
            raise MicrobatchError(
                f"{result} is {dtype.name}, and complex numbers have no greatest one; "
                "reduce their absolute values, or use another word, such as 'stack'"
            )
        if word == "concat" and not np.shape(leaf):
            raise MicrobatchError(
                f"{result} is a scalar in each microbatch and cannot be concatenated; reduce it by 'stack'"
            )


def _check_count(name: str, out: PyTree, words: list[str], mean: WeightedMean, i: int) -> None:
    """Refuses a count, the i-th leaf, that is reduced by another word than ``sum``."""
    if words[i] == "sum":
        return
    path = jax.tree_util.keystr(jax.tree_util.tree_leaves_with_path(out)[i][0])
    how = "averaged by another WeightedMean" if words[i] == "weighted" else f"reduced by {words[i]!r}"
    raise MicrobatchError(
        f"microbatch({name}): result{path}, the count of WeightedMean({mean.count!r}), is {how}; counts are added up: reduce "
        "it by 'sum'"
    )


def _check_states(name: str, out: PyTree, words: Sequence[str]) -> None:
    """Refuses to concatenate states of Equinox: what is meant is that they go from one microbatch to the next."""
    equinox: Any = sys.modules.get("equinox")
    if equinox is None:
        return
    remaining = iter(words)
    for path, x in jax.tree_util.tree_leaves_with_path(out, is_leaf=lambda x: isinstance(x, equinox.nn.State)):
        own = [next(remaining) for _ in jax.tree.leaves(x)]
        if isinstance(x, equinox.nn.State) and "concat" in own:
            raise MicrobatchError(
                f"microbatch({name}): result{jax.tree_util.keystr(path)} is an equinox.nn.State, which cannot be concatenated; if it "
                "goes from one microbatch to the next, name the argument that it comes in by state_argnum=, and return (result, state)"
            )


def _dtype_of(x: Any) -> Any:
    """The dtype of a result; outside of `mm.jit` that may be a number of Python."""
    return x.dtype if hasattr(x, "dtype") else jnp.result_type(x)


def _find_count(name: str, count: Any, out: PyTree) -> int:
    with_path = jax.tree_util.tree_leaves_with_path(out)
    if callable(count):
        found = [_picked(name, count, out)]
    else:
        found = [i for i, (path, _) in enumerate(with_path) if path and _key_name(path[-1]) == str(count)]
    if len(found) != 1:
        names = sorted({_key_name(path[-1]) for path, _ in with_path if path})
        raise MicrobatchError(
            f"microbatch({name}): WeightedMean({count!r}): {len(found)} leaves of the result are called that; it has leaves called {names}. "
            "Return the count beside the loss (has_aux=True), or pick it with a function"
        )
    if shape := np.shape(with_path[found[0]][1]):
        raise MicrobatchError(
            f"microbatch({name}): WeightedMean({count!r}): the count has shape {shape}; it has to be a scalar"
        )
    return found[0]


class _Leaf(int):
    """Stands for a leaf of the result, by its number: a number of its own as soon as something is computed of it."""


def _picked(name: str, count: Callable[[Any], Any], out: PyTree) -> int:
    """Which leaf of the result a function picks."""
    structure: Any = jax.tree.structure(out)
    index = count(jax.tree.unflatten(structure, list(map(_Leaf, range(structure.num_leaves)))))
    if not isinstance(index, _Leaf):
        raise MicrobatchError(
            f"microbatch({name}): WeightedMean: the function has to pick one leaf of the result, as lambda result: result['tokens'] "
            f"does, and compute nothing of it; of leaves numbered from 0 it gave {index!r}"
        )
    return int(index)


def _key_name(key: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)
