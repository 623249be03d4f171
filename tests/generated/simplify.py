"""Makes a program that breaks a law smaller, one change at a time, while it keeps breaking it in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace

from .program import Layer, Program

_DEFAULTS = Program(((0, 1, 1), (1, 1, 1)), ())
_PLAIN = Layer(0, 0, (0,), ())


def simplest(program: Program, breaks: Callable[[Program], bool], limit: int = 60) -> Program:
    """The smallest program that can be reached by changes that keep ``breaks`` true, in ``limit`` tries."""
    tried = 0
    progress = True
    while progress and tried < limit:
        progress = False
        for candidate in smaller(program):
            tried += 1
            if breaks(candidate):
                program, progress = candidate, True
                break
            if tried >= limit:
                break
    return program


def smaller(program: Program) -> Iterator[Program]:
    """Programs that have one thing less, those that save most first."""
    for i in range(len(program.layers)):
        if len(program.layers) > 1:
            yield _without(program, i)
    if len(program.schedules) > 1:
        for schedule in program.schedules:
            yield replace(program, schedules=(schedule,))
    if program.microbatches > 1:
        yield replace(program, microbatches=1, schedules=(None,))
    for field in fields(Program):
        plain = getattr(_DEFAULTS, field.name)
        if (
            field.name not in ("submeshes", "layers", "microbatches", "schedules")
            and getattr(program, field.name) != plain
        ):
            yield replace(program, **{field.name: plain})
    for i, layer in enumerate(program.layers):
        for less in _smaller_layers(layer, i):
            yield replace(program, layers=(*program.layers[:i], less, *program.layers[i + 1 :]))
    for s, (start, a, b) in enumerate(program.submeshes):
        for shape in ((1, 1), (1, b), (a, 1)):
            if shape != (a, b):
                yield replace(program, submeshes=_replaced(program.submeshes, s, (start, *shape)))


def _replaced(items, i, new):
    return (*items[:i], new, *items[i + 1 :])


def _smaller_layers(layer: Layer, i: int) -> Iterator[Layer]:
    if layer.wrap != "plain":
        yield replace(layer, wrap="plain")
    if layer.inner != "plain":
        yield replace(layer, inner="plain")
    for name in ("between", "placed", "put", "depth"):
        if getattr(layer, name) != getattr(_PLAIN, name):
            yield replace(layer, **{name: getattr(_PLAIN, name)})
    for name in ("operations", "modules"):
        names = getattr(layer, name)
        for k in range(len(names)):
            yield replace(layer, **{name: names[:k] + names[k + 1 :]})
    if layer.annotated != "never":
        yield replace(layer, annotated="never", kernel_axes=None)
    if layer.activation is not None:
        yield replace(layer, activation=None)
    if layer.style != "mm":
        yield replace(layer, style="mm")
    if layer.reads != (i,):
        yield replace(layer, reads=(i,))


def _without(program: Program, i: int) -> Program:
    """The program without its i-th layer, whose readers read what it read first."""
    first = program.layers[i].reads[0]
    moved = [r if r <= i else r - 1 for r in range(len(program.layers) + 1)]
    layers = []
    for k, layer in enumerate(program.layers):
        if k != i:
            reads = {first if r == i + 1 else moved[r] for r in layer.reads}
            layers.append(replace(layer, reads=tuple(sorted(reads))))
    used = sorted({layer.parameter for layer in layers})
    layers = [replace(layer, parameter=used.index(layer.parameter)) for layer in layers]
    submeshes = sorted({layer.submesh for layer in layers})
    if program.schedules == (None,):  # a schedule may need every submesh
        layers = [replace(layer, submesh=submeshes.index(layer.submesh)) for layer in layers]
        return replace(program, layers=tuple(layers), submeshes=tuple(program.submeshes[s] for s in submeshes))
    return replace(program, layers=tuple(layers))
