"""The pass: what stacked layers are made of stays on the submeshes that use it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from jax.sharding import Mesh, NamedSharding

from ... import _compat
from ..._compat import Var
from ..._findings import Finding, listed
from ..._program._flat import FlatProgram, Pins
from ..._program._stacked import Stacked, positions, spec_of_blocks
from .._dead import remove_dead
from .._spread import open_control_flow
from ._find import Found, Scattered, Split, Uneven, find_split
from ._rewrite import Rewriter, Whole

SMALL = 1024  # bytes: what goes to and fro, or is put together, of less is not worth a word


def spread_stacks(flat: FlatProgram) -> FlatProgram:
    """Cuts stacked values into blocks, each on the submesh whose tasks use it, and opens conditionals between them."""
    found = _find(flat)
    while found.split and found.conditionals:
        flat = remove_dead(open_control_flow(flat, found.conditionals))
        found = _find(flat)
    names = {v: "".join(steps) for v, steps in flat.pins.names.items()}
    findings = [*_about_uneven(found.uneven, names), *_about_scattered(found.scattered)]
    if not found.split:
        return replace(flat, findings=(*flat.findings, *findings)) if findings else flat
    results = _results(flat, found.split)
    rewriter = Rewriter(flat, found.split, results)
    new = rewriter.run()
    inputs = flat.invars[len(flat.consts) :]
    ins = _stacked([found.split.get(v) for v in inputs])
    outs = _stacked(results)
    return replace(
        new,
        pins=_pins(flat, new, ins, outs),
        findings=(
            *flat.findings,
            *findings,
            *_about_wholes(rewriter.whole.values(), names),
            *_about_drawn(rewriter.drawn.values()),
        ),
        stacked_inputs=ins,
        stacked_outputs=outs,
    )


def _results(flat: FlatProgram, split: Mapping[Var, Split]) -> list[Split | None]:
    """How each result is cut: as it is made, else as the state whose next value it is."""
    found = [split.get(v) if _compat.is_var(v) else None for v in flat.outvars]
    for v, o in flat.pins.states:
        if found[o] is None and o not in flat.pins.outputs and _compat.is_var(flat.outvars[o]):
            found[o] = split.get(v)
    return found


def _pins(flat: FlatProgram, new: FlatProgram, ins: tuple[Stacked, ...], outs: tuple[Stacked, ...]) -> Pins:
    """What is known of places, by the positions that arguments and results have now."""
    before, inputs = flat.invars[len(flat.consts) :], new.invars[len(new.consts) :]
    own = dict(zip(before, positions(len(before), ins), strict=True))
    at = positions(len(flat.outvars), outs)
    whole_in = {v: mesh for v, mesh in flat.pins.inputs.items() if len(own[v]) == 1}
    whole_out = {at[o].start: mesh for o, mesh in flat.pins.outputs.items() if len(at[o]) == 1}
    return Pins(
        {**whole_in, **{inputs[i]: mesh for s in ins for i, mesh in zip(s.positions, s.submeshes, strict=True)}},
        {**whole_out, **{o: mesh for s in outs for o, mesh in zip(s.positions, s.submeshes, strict=True)}},
        # A block's result is where it has to be without being told.
        tuple((v, at[o].start) for v, o in flat.pins.states if len(own[v]) == len(at[o]) == 1),
        names={inputs[own[v].start]: name for v, name in flat.pins.names.items() if len(own[v]) == 1},
        result_names={at[o].start: name for o, name in flat.pins.result_names.items() if len(at[o]) == 1},
        given={inputs[own[v].start]: sharding for v, sharding in flat.pins.given.items() if len(own[v]) == 1},
    )


def _find(flat: FlatProgram) -> Found:
    pins = flat.pins
    pinned: dict[Var, list[NamedSharding | None]] = {v: [pins.input_shardings.get(v)] for v in pins.inputs}
    for o in pins.outputs:
        v = flat.outvars[o]
        if _compat.is_var(v):
            pinned.setdefault(v, []).append(pins.output_shardings.get(o))

    def free(v: Var, split: Split) -> bool:
        if v in flat.consts:
            return False
        return all(_fits(sharding, v, split) for sharding in pinned.get(v, ()))

    return find_split(flat, free)


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


def _about_uneven(uneven: Sequence[Uneven], called: Mapping[Var, str]) -> list[Finding]:
    """A finding for each number of layers that cannot be cut, if much of them goes to and fro."""
    alike: dict[tuple[str, int, tuple[Mesh, ...]], list[Uneven]] = {}
    for u in uneven:
        kind = "layers" if len(_compat.shape(u.var)) > 1 else "elements"
        alike.setdefault((kind, u.layers, u.submeshes), []).append(u)
    texts = [
        f"the {layers} {kind} of {listed([called.get(u.var, 'an argument') for u in those])} are not used in equal "
        f"blocks by {len(submeshes)} submeshes of one shape, so they lie together on one submesh between steps: "
        f"{sum(u.away for u in those)} bytes go out to the others in every step, and where they are trained or "
        f"changed as many come back; {_even(kind, layers, len(submeshes), min(u.rounds for u in those))}"
        for (kind, layers, submeshes), those in alike.items()
        if sum(u.away for u in those) > SMALL
    ]
    return list(map(Finding, texts))


def _about_scattered(scattered: Sequence[Scattered]) -> list[Finding]:
    """A finding for each stack that is put together on one submesh, of layers that are on others."""
    return [
        Finding(
            f"a stack {s.type} is put together{f' at {s.line}' if s.line else ''} of layers of {s.count} submeshes, not as many "
            f"of each side by side, so it is computed with on one submesh: {s.away} bytes come from the others in every step, "
            "and what is made of them goes back; stack the layers of each submesh next to each other, as many of each, or "
            "compute with each layer by itself"
        )
        for s in scattered
        if s.away > SMALL
    ]


def _even(kind: str, layers: int, count: int, rounds: int) -> str:
    """What would make the blocks equal."""
    if rounds > 1:
        return (
            f"they are dealt out in {rounds} rounds: keep them in the shape ({rounds}, {layers // rounds}, ...) and take the "
            "layers of one row after the other, for then each submesh has columns of its own (see docs: tutorials/stacked)"
        )
    if kind == "layers" and layers % count:
        more = -(-layers // count) * count
        fewer = f"{layers // count * count} or " if layers > count else ""
        return (
            f"use a number of layers that {count} divides, such as {fewer}{more}, or a stack of {more} of which the scan takes "
            f"the first {layers} (see docs: tutorials/stacked)"
        )
    return (
        f"let each submesh use as many {kind} as the others, which stand side by side in the argument (those of a V in the order "
        f"of the submeshes, not of the model), or give each an argument of its own"
    )


def _about_wholes(wholes: Iterable[Whole], called: Mapping[Var, str]) -> list[Finding]:
    """A finding for each kind of operation that reads whole stacks."""
    read: dict[str, list[Whole]] = {}
    for w in wholes:
        if w.nbytes > SMALL:
            read.setdefault(w.reader, []).append(w)
    return [
        Finding(
            f"{listed([called.get(w.var) or _kind(w.var) for w in those])}: in blocks on several submeshes, one for each part "
            f"of the layers, but {reader!r} reads the whole: {sum(w.nbytes for w in those)} bytes come together on one submesh "
            "in every step"
        )
        for reader, those in read.items()
    ]


def _about_drawn(drawn: Iterable[Whole]) -> list[Finding]:
    """A finding for each draw of the numbers of all layers, or for all elements of a vector of what lies on several submeshes."""
    return [
        Finding(
            f"random numbers for all {'parts of a vector' if vector else 'layers of a stack'} ({w.var.aval.str_short()}"
            f"{f', {w.reader}' if w.reader else ''}) are drawn on one submesh, and {w.nbytes} bytes of them sent to the others "
            f"in every step; draw with {'a key for each array' if vector else 'a Threefry key for each layer'}, and each "
            f"submesh draws its own: {_EACH_ARRAY if vector else _EACH_LAYER}"
        )
        for w in drawn
        if w.nbytes > SMALL
        for vector in [len(_compat.shape(w.var)) == 1]
    ]


_EACH_LAYER = "jax.vmap(lambda k: jax.random.normal(k, shape))(jax.random.split(key, layers))"
_EACH_ARRAY = "optax.tree.random_like(key, grads, jax.random.normal), say, before they are one vector"


def _kind(v: Var) -> str:
    return f"a stacked value {v.aval.str_short()}"
