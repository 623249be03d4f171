"""What users call the values of a program."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from .. import _compat
from .._compat import Var
from .._program._fragments import Program
from .._program._stacked import Stacked, positions

SHOWN = 3  # arguments that differ


def names_of_values(program: Program, in_tree: Any, out_tree: Any) -> dict[Var, str]:
    """Arguments by their path, results by theirs, everything else by what makes it.

    Args:
      program: the program.
      in_tree: structure of ``(args, kwargs)``.
      out_tree: structure of the result.
    """
    names: dict[Var, str] = {}
    for loop in program.loops:
        carried = (v for inner, _, init, final in loop.carries for v in (inner, init, final))
        names.update(dict.fromkeys((v for v in carried if _compat.is_var(v)), "accumulator"))
        pieces = (v for inner, outer in loop.xs for v in (inner, *outer))
        names.update(dict.fromkeys((v for v in pieces if _compat.is_var(v)), "piece of the batch"))
    for f in program.fragments:
        for v in f.outvars:
            names.setdefault(v, f"from {f.name}")
    for (v, _), name in zip(
        program.outputs, _of_blocks(names_of_results(out_tree), program.stacked_outputs), strict=True
    ):
        if _compat.is_var(v):
            names[v] = name
    count = len(program.consts)
    names.update(dict.fromkeys(program.invars[:count], "constant"))
    names.update(zip(program.invars[count:], names_of_inputs(program, in_tree), strict=True))
    return names


def names_of_inputs(program: Program, in_tree: Any) -> list[str]:
    """``args[0]['w']`` of every input of a program that is an argument, with one for each block of what is stacked."""
    return _of_blocks(names_of_arguments(in_tree), program.stacked_inputs)


def paths_of_arguments(in_tree: Any) -> list[tuple[str, ...]]:
    """``("args", "[0]", "['w']")`` of every leaf of the arguments."""
    return [("args" if which.idx == 0 else "kwargs", *_steps(rest)) for which, *rest in _compat.key_paths(in_tree)]


def paths_of_results(out_tree: Any) -> list[tuple[str, ...]]:
    """``("result", "['w']")`` of every leaf of the result."""
    return [("result", *_steps(path)) for path in _compat.key_paths(out_tree)]


def names_of_arguments(in_tree: Any) -> list[str]:
    """``args[0]['w']`` of every leaf of the arguments."""
    return ["".join(path) for path in paths_of_arguments(in_tree)]


def names_of_results(out_tree: Any) -> list[str]:
    """``result['w']`` of every leaf of the result."""
    return ["".join(path) for path in paths_of_results(out_tree)]


def differences(types: Mapping[str, str], known: Iterable[Mapping[str, str]]) -> str:
    """How the types of arguments differ from those that are the most alike of some others; empty where they do not.

    Args:
      types: what an argument is called -> its type.
      known: the others, likewise.

    Returns:
      Text such as ``args[0]['x'] is float32[4] and was float32[8]``.
    """

    def different(before: Mapping[str, str]) -> list[str]:
        return [name for name in {**types, **before} if types.get(name) != before.get(name)]

    before = min(known, key=lambda before: len(different(before)), default=types)
    names = different(before)
    shown = [
        f"{name} is {types.get(name, 'not there')} and was {before.get(name, 'not there')}" for name in names[:SHOWN]
    ]
    return ", ".join([*shown, *([f"and {len(names) - SHOWN} more differ"] if len(names) > SHOWN else [])])


def users_keys(path: Sequence[Any]) -> tuple[Any, ...]:
    """The keys of a path that are the user's: those of what an adapter packs them in are no text."""
    return tuple(key for key in path if str(key))


def _steps(path: Sequence[Any]) -> list[str]:
    return [jax.tree_util.keystr((key,)) for key in users_keys(path)]


def _of_blocks(names: Sequence[str], stacked: Sequence[Stacked]) -> list[str]:
    """The names, with one for each block of what is stacked."""
    found = []
    for name, at in zip(names, positions(len(names), stacked), strict=True):
        found += [name] if len(at) == 1 else [f"{name} block {k}" for k in range(len(at))]
    return found
