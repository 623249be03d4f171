"""The pass: what stacked layers are made of stays on the submeshes that use it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from ... import _compat
from ..._compat import Var
from ..._mark import Recording
from .._dead import remove_dead
from .._flatten import open_conditional
from .._nodes import Flat
from ._boundary import Stacked, positions, spec_of_blocks
from ._find import Found, Split, Uneven, find_split
from ._rewrite import Rewriter, Whole

SMALL = 1024  # bytes: what is put together of less is not worth a word


@dataclass(frozen=True)
class Pins:
    """Where the step's arguments and results have to be, by their position.

    Attributes:
      inputs, outputs: the submesh.
      input_shardings, output_shardings: the whole sharding, of those that a mesh of several submeshes may fit.
    """

    inputs: Mapping[int, Mesh]
    outputs: Mapping[int, Mesh]
    input_shardings: Mapping[int, NamedSharding]
    output_shardings: Mapping[int, NamedSharding]


@dataclass(frozen=True)
class Spread:
    """What became of a program's arguments and results.

    Attributes:
      inputs, outputs: those that are in blocks now.
      positions_in, positions_out: for each argument and result, the positions of its blocks, or its one position.
      findings: what stacked layers cost where they could not stay where they are used.
    """

    inputs: tuple[Stacked, ...]
    outputs: tuple[Stacked, ...]
    positions_in: Sequence[range]
    positions_out: Sequence[range]
    findings: tuple[str, ...]


def spread_stacks(flat: Flat, record: Recording, pins: Pins, names: Sequence[str] = ()) -> Spread:
    """Cuts, in place, stacked values into blocks, each on the submesh whose tasks use it.

    Args:
      flat: the program.
      record: what its marks mean.
      pins: where arguments and results have to be.
      names: what users call the arguments, for findings.
    """
    found = _find(flat, record, pins)
    while found.split and found.conditionals:
        for node in found.conditionals:
            open_conditional(flat, node, record)
        remove_dead(flat)
        found = _find(flat, record, pins)
    inputs, results = flat.invars[len(flat.consts) :], list(flat.outvars)
    called = dict(zip(inputs, names, strict=False))
    findings = _about_uneven(found.uneven, called)
    if found.split:
        rewriter = Rewriter(flat, found.split)
        rewriter.run()
        remove_dead(flat)
        findings += _about_wholes(rewriter.whole.values(), called)
    of_results = [found.split.get(v) if _compat.is_var(v) else None for v in results]
    ins, outs = _stacked([found.split.get(v) for v in inputs]), _stacked(of_results)
    return Spread(ins, outs, positions(len(inputs), ins), positions(len(results), outs), tuple(findings))


def _find(flat: Flat, record: Recording, pins: Pins) -> Found:
    inputs = flat.invars[len(flat.consts) :]
    pinned: dict[Var, list[NamedSharding | None]] = {inputs[i]: [pins.input_shardings.get(i)] for i in pins.inputs}
    for o in pins.outputs:
        if _compat.is_var(flat.outvars[o]):
            pinned.setdefault(flat.outvars[o], []).append(pins.output_shardings.get(o))

    def free(v: Var, split: Split) -> bool:
        if v in flat.consts or jnp.issubdtype(_compat.dtype(v), jax.dtypes.extended):
            return False
        return all(_fits(sharding, v, split) for sharding in pinned.get(v, ()))

    return find_split(flat, record, free)


def _fits(sharding: NamedSharding | None, v: Var, split: Split) -> bool:
    """Whether a sharding that was asked for gives every submesh its block."""
    if sharding is None:
        return False
    return spec_of_blocks(sharding, _compat.shape(v), split.submeshes, split.dim) is not None


def _stacked(splits: Sequence[Split | None]) -> tuple[Stacked, ...]:
    """Those of the arguments, or results, that are cut."""
    found: list[Stacked] = []
    at = 0
    for split in splits:
        if split is not None:
            found.append(Stacked(at, split.submeshes, split.dim))
        at += 1 if split is None else len(split.submeshes)
    return tuple(found)


def _about_uneven(uneven: Sequence[Uneven], called: Mapping[Var, str]) -> list[str]:
    """A sentence for each number of layers that cannot be cut."""
    alike: dict[tuple[int, tuple[Mesh, ...]], list[Uneven]] = {}
    for u in uneven:
        alike.setdefault((u.layers, u.submeshes), []).append(u)
    return [
        f"the {layers} layers of {_listed([called.get(u.var, 'an argument') for u in those])} are not used in equal "
        f"blocks by {len(submeshes)} submeshes of one shape, so they lie together on one submesh between steps: "
        f"{sum(u.away for u in those)} bytes go out to the others in every step, and where they are trained as many "
        f"bytes of gradients come back; use a number of layers that {len(submeshes)} divides, "
        f"such as {max(layers // len(submeshes), 1) * len(submeshes)}"
        for (layers, submeshes), those in alike.items()
    ]


def _about_wholes(wholes: Iterable[Whole], called: Mapping[Var, str]) -> list[str]:
    return [
        f"{called.get(w.var) or _kind(w.var)} lies in blocks on several submeshes, one for each part of its layers, "
        f"but {w.reader!r} reads it whole: {w.nbytes} bytes come together on one submesh in every step"
        for w in wholes
        if w.nbytes > SMALL
    ]


def _kind(v: Var) -> str:
    return f"a stacked value {v.aval.str_short()}"


def _listed(names: Sequence[str]) -> str:
    shown = list(dict.fromkeys(names))
    return ", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "")
