"""The batch among the arguments of one call of a microbatched function: what is cut, into how many pieces."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._errors import MicrobatchError
from ._types import PyTree


def _check_position(name: str, label: str, argnum: int | None, what: str, count: int) -> None:
    if argnum is not None and not -count <= argnum < count:
        raise MicrobatchError(
            f"microbatch({name}): {label} {argnum} names the {what}, but the call has {count} positional arguments; "
            f"pass the {what} by position"
        )


def check_arguments(
    name: str, args: tuple[Any, ...], argnums: Sequence[int], rng_argnum: int | None, state_argnum: int | None
) -> None:
    """Refuses arguments that are not there, keys that are none, and an argument that is named twice: it cannot be both."""
    _check_keys(name, args, rng_argnum)
    _check_position(name, "state_argnum", state_argnum, "state", len(args))
    others = {"rng_argnum": rng_argnum, "state_argnum": state_argnum}
    named = [(k, "argnum") for k in argnums] + [(k, label) for label, k in others.items() if k is not None]
    labels: dict[int, str] = {}
    for k, label in ((k % len(args), label) for k, label in named):
        if k in labels:
            both = (
                f"{label} names args[{k}] twice"
                if labels[k] == label
                else f"{labels[k]} and {label} both name args[{k}]"
            )
            raise MicrobatchError(
                f"microbatch({name}): {both}; an argument is cut into pieces, or is random keys, or goes from one microbatch to "
                "the next"
            )
        labels[k] = label


def _check_keys(name: str, args: tuple[Any, ...], argnum: int | None) -> None:
    """Refuses what `rng_argnum` names and is not one random key, typed or raw."""
    _check_position(name, "rng_argnum", argnum, "random keys", len(args))
    for path, key in [] if argnum is None else jax.tree_util.tree_leaves_with_path(args[argnum]):
        dtype = getattr(key, "dtype", None)
        if dtype is None or not (dtype == np.uint32 or jnp.issubdtype(dtype, jax.dtypes.prng_key)):
            what = type(key).__name__ if dtype is None else f"{dtype}[{','.join(map(str, key.shape))}]"
            raise MicrobatchError(
                f"microbatch({name}): args[{argnum}]{jax.tree_util.keystr(path)} is {what}, but rng_argnum names an argument of "
                "random keys, such as jax.random.key(0): one for all microbatches, from which each gets its own"
            )
        if len(key.shape) != int(dtype == np.uint32):
            raise MicrobatchError(
                f"microbatch({name}): args[{argnum}]{jax.tree_util.keystr(path)} is an array of keys, of shape {key.shape}, but "
                "rng_argnum takes one key for all microbatches, from which each gets its own by jax.random.fold_in: pass the "
                "key itself, not what jax.random.split makes of it"
            )


def count_pieces(
    name: str,
    args: tuple[Any, ...],
    argnums: tuple[int, ...],
    dim: int,
    size: int | None,
    number: int | None,
    taken: Sequence[int],
) -> int:
    """How many pieces the batch is cut into.

    Args:
      name: name of the function.
      args: the positional arguments.
      argnums: which of them are the batch.
      dim: the dimension that is cut.
      size, number: the length of a piece, and how many there are to be, as far as the caller says.
      taken: arguments that are something else, such as parameters, and are not recommended as the batch.

    Raises:
      MicrobatchError: an argument is not there, or does not divide.
    """
    counts: dict[str, int] = {}
    lengths: dict[str, int] = {}
    hint = functools.partial(other_batch, args, argnums, dim, taken)
    for k in argnums:
        if not -len(args) <= k < len(args):
            raise MicrobatchError(
                f"microbatch({name}): argnum {k} names the batch, but the call has {len(args)} positional arguments, numbered "
                "from 0; pass the batch by position"
            )
        for path, leaf in jax.tree_util.tree_leaves_with_path(args[k]):
            where = f"microbatch({name}): args[{k}]{jax.tree_util.keystr(path)}"
            shape = tuple(np.shape(leaf))
            if not -len(shape) <= dim < len(shape):
                if path and isinstance(path[-1], jax.tree_util.SequenceKey) and not shape:
                    raise MicrobatchError(
                        f"{where} is a number in a list or tuple, each of which is cut for itself; make an array of them, as by "
                        f"np.asarray(args[{k}]{jax.tree_util.keystr(path[:-1])})"
                    )
                raise MicrobatchError(
                    f"{where} of shape {shape} has no dimension {dim} to cut along; what is the same in every microbatch goes in an "
                    f"argument that argnum does not name{hint()}"
                )
            length = shape[dim]
            if length == 0:
                raise MicrobatchError(
                    f"{where} of shape {shape} has length 0 along dimension {dim}: there is nothing to cut; skip an empty batch"
                )
            pieces = number if number is not None else length // size if size and length % size == 0 else 0
            if pieces == 0 or length % pieces:
                fits = [d for d in range(1, length + 1) if length % d == 0]
                what = f"{number} microbatches" if number is not None else f"pieces of size {size}"
                kind = "num_microbatches" if number is not None else "size"
                raise MicrobatchError(
                    f"{where} of shape {shape} has length {length} along dimension {dim}, which does not divide into {what}; "
                    f"{kind} that would work: {_short(fits)}{hint()}"
                )
            if number is not None and size is not None and length != number * size:
                raise MicrobatchError(
                    f"{where} of shape {shape}: num_microbatches={number} times size={size} is {number * size}, "
                    f"but dimension {dim} has length {length}; give one of the two"
                )
            counts[where], lengths[where] = pieces, length
    if not counts:
        raise MicrobatchError(f"microbatch({name}): the batch (argnum {argnums}) has no array to cut{hint()}")
    if len(set(counts.values())) > 1:
        listing = ", ".join(f"{w.split(': ')[1]}: {c}" for w, c in counts.items())
        raise MicrobatchError(f"microbatch({name}): leaves give different numbers of microbatches ({listing}){hint()}")
    if len(set(lengths.values())) > 1:
        listing = ", ".join(f"{w.split(': ')[1]}: {n}" for w, n in lengths.items())
        raise MicrobatchError(
            f"microbatch({name}): leaves of the batch have different lengths along dimension {dim} ({listing}), so that "
            f"their pieces would not belong together; cut leaves of one length, or pass the other ones apart{hint()}"
        )
    return next(iter(counts.values()))


def other_batch(args: tuple[Any, ...], argnums: tuple[int, ...], dim: int, taken: Sequence[int]) -> str:
    """What to write if argnum names something else than the batch: which other argument could be the batch."""
    others = [k for k, _ in uncut(args, argnums, dim, taken)]
    if not others and argnums == (0,) and len(args) > 1:  # it was not given
        others = [1]
    if not others:
        return ""
    cut = in_words([f"args[{k % len(args)}]" for k in argnums])
    return f"; if {cut} {'is' if len(argnums) == 1 else 'are'} not the batch, write {in_words([f'argnum={k}' for k in others], 'or')}, or whichever is"


def beside_batch(args: tuple[Any, ...], argnums: tuple[int, ...], dim: int, taken: Sequence[int], length: int) -> str:
    """What to know of arguments as long as the batch that argnum does not name."""
    alike = [f"args[{k}]" for k, found in uncut(args, argnums, dim, taken) if found == length]
    if not alike:
        return ""
    one = len(alike) == 1
    return (
        f"; {in_words(alike)} {'has' if one else 'have'} that length, too, and {'goes' if one else 'go'} whole to each, as argnum "
        f"does not name {'it' if one else 'them'}"
    )


def whole_by_keyword(kwargs: Mapping[str, PyTree], dim: int, length: int) -> list[str]:
    """The keyword arguments whose arrays all are as long as the batch: what is given by keyword is not cut."""
    return [name for name, tree in kwargs.items() if _length(tree, dim) == length]


def uncut(args: tuple[Any, ...], argnums: tuple[int, ...], dim: int, taken: Sequence[int]) -> list[tuple[int, int]]:
    """The arguments that could be a batch and that argnum does not name, each with its length."""
    named = {k % len(args) for k in (*argnums, *taken)}
    lengths = [(k, _length(x, dim)) for k, x in enumerate(args) if k not in named]
    return [(k, length) for k, length in lengths if length is not None]


def _length(tree: PyTree, dim: int) -> int | None:
    """The one length along a dimension that all arrays of a tree have, as those of a batch do; None where there is none.

    A random key as plain words is no batch.
    """
    found: set[int] = set()
    for x in jax.tree.leaves(tree):
        shape = tuple(np.shape(x))
        if not -len(shape) <= dim < len(shape) or (len(shape) == 1 and x.dtype == np.uint32):
            return None
        found.add(shape[dim])
    return found.pop() if len(found) == 1 else None


def in_words(words: Sequence[str], last: str = "and") -> str:
    """``a, b and c``."""
    *first, final = words or [""]
    return f"{', '.join(first)} {last} {final}" if first else final


def _short(numbers: list[int]) -> str:
    if len(numbers) <= 12:
        return ", ".join(map(str, numbers))
    return ", ".join(map(str, numbers[:6])) + ", ..., " + ", ".join(map(str, numbers[-3:]))
