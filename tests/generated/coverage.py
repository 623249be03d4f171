"""What generated programs are made of, counted."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import jax.extend as jex

from .program import Layer, Program
from .wraps import STACKED


def primitives(closed: Any) -> dict[str, int]:
    """How often each primitive is in a jaxpr, and in the jaxprs inside it."""
    found: Counter[str] = Counter()

    def walk(jaxpr: Any) -> None:
        for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
            found[eqn.primitive.name] += 1
            for inner in jex.core.jaxprs_in_params(eqn.params):
                walk(inner)

    walk(closed)
    return dict(found)


def constructs(program: Program) -> set[str]:
    """What a program has in it, as words ``group: entry``."""
    found = {
        f"{name}: {getattr(program, name)}" for name in ("mode", "reduce", "state", "donate", "aux", "ema", "weak")
    }
    found |= {f"schedule: {s}" for s in program.schedules}
    found |= {f"microbatches: {program.microbatches}", f"submeshes: {len(program.submeshes)}"}
    if program.mode != "forward":
        found.add(
            f"optimizer: {program.optimizer}"
            + {False: "", True: ", clipped", "vector": ", clipped as one vector"}[program.clipped]
        )
    if program.key is not None:
        found.add(f"key: {program.key}{', raw' if program.raw_key else ''}, {program.key_from}")
    if program.in_shardings:
        found.add("layout: in_shardings")
    if program.together is not None:
        found.add(f"layout: parameters in one {program.together}, read by {program.index}")
    if program.viewed is not None:
        found.add(f"layout: parameters {program.viewed} before layers read them")
    if program.collected is not None:
        found.add("layout: results on a submesh by out_shardings")
    if program.again:
        found.add("mode: again and again, in lax.while_loop")
    found |= {f"carried from one microbatch to the next: {how}" for how, *_ in program.carried}
    if program.kept:
        found.add("carried from one microbatch to the next: kept from one step to the next")
    found |= {f"returned: {name}" for name in program.metrics}
    found |= {f"returned, of gradients: {name}" for name in program.watched}
    if program.penalty is not None:
        found.add(f"penalty: {program.penalty}")
    if program.refused is not None:
        found.add(f"refused updates: {program.refused}")
    if program.arrives:
        found.add("layout: a batch that arrives sharded")
    found.add(f"framework: {program.framework or 'none'}")
    spans = [set(range(s, s + a * b)) for s, a, b in program.submeshes]
    if any(x & y for i, x in enumerate(spans) for y in spans[:i]):
        found.add("layout: overlapping submeshes")
    if len({(a, b) for _, a, b in program.submeshes}) > 1:
        found.add("layout: unequal submeshes")
    if len({layer.parameter for layer in program.layers}) < len(program.layers):
        found.add("layout: tied parameters")
    for layer in program.layers:
        found |= {f"around a task: {layer.wrap}", f"inside a task: {layer.inner}"}
        found |= {f"operation: {name}" for name in (*layer.operations, layer.between) if name}
        found.add(f"kernel: {layer.annotated}" + (f" {layer.kernel_axes}" if layer.kernel_axes else ""))
        found.add(f"activation: {layer.style + ' ' + str(layer.activation) if layer.activation else 'never'}")
        if layer.between:
            found.add("around a task: operation between tasks")
        found.add(f"placed by: {layer.placed if layer.placed == 'task' else 'register_task, ' + layer.placed}")
        found |= {f"module: {program.framework}, {part}" for part in layer.modules}
        if layer.wrap in STACKED:
            found.add(f"stacked layers: {layer.depth} on {min(layer.depth, _alike(program, layer))} submeshes")
        if layer.put is not None:
            found.add(f"device_put: {layer.put}")
    return found


def _alike(program: Program, layer: Layer) -> int:
    """How many submeshes have the shape of a layer's."""
    shapes = [shape for _, *shape in program.submeshes]
    return shapes.count(shapes[layer.submesh])


def table(counts: Counter[str], drawn: Counter[str], examples: int) -> str:
    """The page: primitives, then each group of constructs, as Markdown."""
    groups: dict[str, list[tuple[str, int]]] = {}
    for word, n in drawn.items():
        group, entry = word.split(": ", 1)
        groups.setdefault(group, []).append((entry, n))
    lines = [f"{examples:,} programs. {len(counts)} distinct primitives, with the number of programs they were in:", ""]
    lines += [_listed(sorted(counts.items(), key=lambda kv: (-kv[1], kv[0])))]
    for group in sorted(groups, key=lambda g: (g == "operation", g)):
        entries = sorted(groups[group], key=lambda kv: (-kv[1], kv[0]))
        lines += ["", f"**{group.capitalize()}** ({len(entries)}):", "", _listed(entries)]
    return "\n".join(lines)


def _listed(entries: list[tuple[str, int]]) -> str:
    return ", ".join(f"`{name}` {n}" for name, n in entries)


BEGIN, END = "<!-- coverage: written by tests/fuzz.py -->", "<!-- end of coverage -->"


def write_page(page: Path, text: str, run: str) -> None:
    """Puts the table between the two marks of a page."""
    before, _, rest = page.read_text("utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n{run}\n\n{text}\n{END}{after}", "utf-8")
