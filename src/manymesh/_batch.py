"""The batch among the arguments of one call of a microbatched function: what is cut, into how many pieces."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from ._errors import MicrobatchError
from ._types import PyTree


def is_whole(number: object) -> TypeGuard[int | np.integer[Any]]:
    """Whether something is a whole number, of Python or of NumPy."""
    return isinstance(number, (int, np.integer)) and not isinstance(number, bool)


def positions(name: str, argnum: Any) -> tuple[int, ...]:
    """Where the batch stands among the arguments."""
    argnums = tuple(argnum) if isinstance(argnum, Iterable) else (argnum,)
    if not argnums or not all(is_whole(k) for k in argnums):
        raise MicrobatchError(
            f"microbatch({name}): argnum has to be the position of the batch, or several, found {argnum!r}; the batch is passed "
            "by position"
        )
    return tuple(map(int, argnums))


def check_positions(name: str, argnums: Iterable[int], count: int) -> None:
    """Refuses positions of the batch that a call with so many positional arguments does not have."""
    for k in argnums:
        if not -count <= k < count:
            raise MicrobatchError(
                f"microbatch({name}): argnum {k} names the batch, but the call has {count} positional arguments, numbered "
                "from 0; pass the batch by position"
            )


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


def rng_argnums(name: str, args: tuple[Any, ...]) -> list[int]:
    """The arguments that `rng_argnum` could name."""
    found = []
    for k, x in enumerate(args):
        with contextlib.suppress(MicrobatchError):
            _check_keys(name, args, k)
            found += [k] * bool(jax.tree.leaves(x))
    return found


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


@dataclass(frozen=True)
class Cut:
    """How a batch is cut.

    Attributes:
      name: name of the function.
      argnums: the arguments that are the batch.
      dim: the dimension that is cut.
      size, number: the length of a piece, and how many there are to be, as far as the caller says.
      taken: arguments that are something else, such as parameters, and are not recommended as the batch.
    """

    name: str
    argnums: tuple[int, ...]
    dim: int
    size: int | None
    number: int | None
    taken: tuple[int, ...]

    def count(self, args: tuple[Any, ...]) -> int:
        """How many pieces the batch is cut into.

        Raises:
          MicrobatchError: an argument is not there, its leaves differ in length, or they do not divide.
        """
        shapes = {f"args[{k}]{jax.tree_util.keystr(path)}": shape for k, path, shape in self._leaves(args)}
        if not shapes:
            raise MicrobatchError(
                f"microbatch({self.name}): the batch (argnum {self.argnums}) has no array to cut{self.instead(args)}"
            )
        examples: dict[int, str] = {}
        for where, shape in shapes.items():
            examples.setdefault(shape[self.dim], where)
        if len(examples) > 1:
            listing = ", ".join(f"{where}: {length}" for length, where in examples.items())
            raise MicrobatchError(
                f"microbatch({self.name}): leaves of the batch have different lengths along dimension {self.dim} ({listing}), so that "
                "their pieces would not belong together; cut leaves of one length, or pass the other ones apart"
                f"{self._about_keys(args)}{self.instead(args)}"
            )
        return self._count(*next(iter(shapes.items())), args)

    def _leaves(self, args: tuple[Any, ...]) -> Iterator[tuple[int, tuple[Any, ...], tuple[int, ...]]]:
        """The argument, path and shape of each leaf of the batch, all of which have the dimension that is cut."""
        name, dim = self.name, self.dim
        for k in self.argnums:
            check_positions(name, (k,), len(args))
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
                        f"argument that argnum does not name{self.instead(args)}"
                    )
                yield k, path, shape

    def _count(self, where: str, shape: tuple[int, ...], args: tuple[Any, ...]) -> int:
        """How many pieces a batch is cut into of which a leaf has this shape, and all have this length."""
        number, size, length = self.number, self.size, shape[self.dim]
        what = f"microbatch({self.name}): {where} of shape {shape}"
        if length == 0:
            raise MicrobatchError(
                f"{what} has length 0 along dimension {self.dim}: there is nothing to cut; skip an empty batch"
            )
        pieces = self._pieces(length)
        if pieces == 0:
            fits = [d for d in range(1, length + 1) if length % d == 0]
            wanted = f"{number} microbatches" if number is not None else f"pieces of size {size}"
            kind = "num_microbatches" if number is not None else "size"
            raise MicrobatchError(
                f"{what} has length {length} along dimension {self.dim}, which does not divide into {wanted}; "
                f"{kind} that would work: {_short(fits)}{self.instead(args)}"
            )
        if number is not None and size is not None and length != number * size:
            raise MicrobatchError(
                f"{what}: num_microbatches={number} times size={size} is {number * size}, "
                f"but dimension {self.dim} has length {length}; give one of the two"
            )
        return pieces

    def _about_keys(self, args: tuple[Any, ...]) -> str:
        """What to do with random keys that are cut and are as many as the microbatches."""
        if not any(_are_keys(x) for k in self.argnums for x in jax.tree.leaves(args[k])):
            return ""
        return (
            "; random keys are no rows: pass one for all microbatches in an argument of its own, and name that in rng_argnum, "
            "so that each gets its own by jax.random.fold_in"
        )

    def instead(self, args: tuple[Any, ...]) -> str:
        """What to write if argnum names something else than the batch, or more: which argument could be the batch."""
        lengths = {k: _length(args[k % len(args)], self.dim) for k in self.argnums}
        fitting = [k for k, length in lengths.items() if length and self._pieces(length)]
        if 0 < len(fitting) < len(self.argnums) and len({lengths[k] for k in fitting}) == 1:
            rest = [f"args[{k % len(args)}]" for k in self.argnums if k not in fitting]
            batch = fitting[0] if len(fitting) == 1 else tuple(fitting)
            return (
                f"; if {in_words(rest)} {'is' if len(rest) == 1 else 'are'} no part of the batch, write argnum={batch}"
            )
        others = self.others(args)
        if not others and self.argnums == (0,) and len(args) > 1:  # it was not given
            others = [1]
        if not others:
            return ""
        cut = in_words([f"args[{k % len(args)}]" for k in self.argnums])
        argnum = in_words([f"argnum={k}" for k in others], "or")
        return f"; if {cut} {'is' if len(self.argnums) == 1 else 'are'} not the batch, write {argnum}, or whichever is"

    def beside(self, args: tuple[Any, ...], length: int) -> str:
        """What to know of arguments as long as the batch that argnum does not name."""
        alike = [f"args[{k}]" for k in self.others(args) if _length(args[k], self.dim) == length]
        if not alike:
            return ""
        one = len(alike) == 1
        return (
            f"; {in_words(alike)} {'has' if one else 'have'} that length, too, and {'goes' if one else 'go'} whole to each, as argnum "
            f"does not name {'it' if one else 'them'}"
        )

    def others(self, args: tuple[Any, ...]) -> list[int]:
        """The arguments that argnum does not name and that could be cut."""
        named = {k % len(args) for k in (*self.argnums, *self.taken)}
        lengths = [(k, _length(x, self.dim)) for k, x in enumerate(args) if k not in named]
        return [k for k, length in lengths if length and self._pieces(length)]

    def _pieces(self, length: int) -> int:
        """How many pieces a length makes; 0 where it does not divide."""
        if self.number is not None:
            return self.number if length % self.number == 0 else 0
        return length // self.size if self.size and length % self.size == 0 else 0


def whole_by_keyword(kwargs: Mapping[str, PyTree], dim: int, length: int) -> list[str]:
    """The keyword arguments whose arrays all are as long as the batch: what is given by keyword is not cut."""
    return [name for name, tree in kwargs.items() if _length(tree, dim) == length]


def _length(tree: PyTree, dim: int) -> int | None:
    """The one length along a dimension that all arrays of a tree have, as those of a batch do; None where there is none.

    A random key as plain words is no batch.
    """
    found: set[int] = set()
    for x in jax.tree.leaves(tree):
        shape = tuple(np.shape(x))
        if not -len(shape) <= dim < len(shape) or (len(shape) == 1 and getattr(x, "dtype", None) == np.uint32):
            return None
        found.add(shape[dim])
    return found.pop() if len(found) == 1 else None


def _are_keys(x: Any) -> bool:
    """Whether an array is of random keys, typed or, as it looks, as plain words."""
    dtype = getattr(x, "dtype", None)
    if dtype is None:
        return False
    return jnp.issubdtype(dtype, jax.dtypes.prng_key) or (dtype == np.uint32 and x.ndim == 2 and x.shape[1] in (2, 4))


def in_words(words: Sequence[str], last: str = "and") -> str:
    """``a, b and c``."""
    *first, final = words or [""]
    return f"{', '.join(first)} {last} {final}" if first else final


def _short(numbers: list[int]) -> str:
    if len(numbers) <= 12:
        return ", ".join(map(str, numbers))
    return ", ".join(map(str, numbers[:6])) + ", ..., " + ", ".join(map(str, numbers[-3:]))
