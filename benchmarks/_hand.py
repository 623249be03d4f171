"""The workload as somebody would write it who knows JAX and this schedule well, and wants nothing else.

One jitted function for each stage and phase, arrays moved with ``device_put``, everything issued by one thread in the
order of the schedule. It keeps to what a careful writer would do: weights are not returned as residuals, accumulators
are donated, batches are cut where they are used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from _model import Size, adam, blocks, fresh_state, mean_squared_error, norm

SCHEDULES = ("gpipe", "1f1b", "zero-bubble-h1")

Action = tuple[str, int, int]  # phase, stage, microbatch


def rows(schedule: str, stages: int, count: int) -> list[list[Action]]:
    """What each stage does, in which order."""
    if schedule == "gpipe":
        return [[(phase, s, m) for phase in "FB" for m in range(count)] for s in range(stages)]
    result = []
    for s in range(stages):
        split, ahead, done = schedule == "zero-bubble-h1", min(stages - s - 1, count), 0
        row: list[Action] = [("F", s, m) for m in range(ahead)]
        for m in range(count):
            row += [("F", s, m + ahead)] if m + ahead < count else []
            row.append(("B", s, m))
            if split and m >= s:  # stage s holds back s weight gradients, to fill its wait at the end
                row.append(("W", s, done))
                done += 1
        result.append(row + [("W", s, m) for m in range(done, count) if split])
    return result


def issue(queues: list[list[Action]]) -> list[Action]:
    """One order for the thread that issues everything: stages in turn, each as far as its inputs allow."""
    last, position, done = len(queues) - 1, [0] * len(queues), {}
    while len(done) < sum(map(len, queues)):
        for s, queue in enumerate(queues):
            if position[s] < len(queue):
                phase, _, m = queue[position[s]]
                source = {"F": ("F", s - 1, m), "B": ("B", s + 1, m) if s < last else ("F", s, m), "W": ("B", s, m)}
                if (phase == "F" and s == 0) or source[phase] in done:
                    done[queue[position[s]]] = None
                    position[s] += 1
    return list(done)


@dataclass
class Stage:
    """Compiled functions of one stage, and what it holds on its device."""

    device: Any
    state: Any
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    weight: Callable[..., Any] | None
    zeros: Callable[..., Any]
    cut: Callable[..., Any]
    update: Callable[..., Any]


class ByHand:
    """A training step of `size`, one stage on each device."""

    def __init__(self, size: Size, schedule: str) -> None:
        self.size, self.schedule = size, schedule
        self.count, self.last = size.microbatches, size.stages - 1
        self.mean = jax.jit(lambda losses: sum(losses) / self.count)
        self.order = issue(rows(schedule, size.stages, size.microbatches))
        self._begin()

    def _begin(self) -> None:
        self.stages = [self._stage(s, jax.devices()[s]) for s in range(self.size.stages)]
        x, y = self.size.data()
        self.x, self.y = jax.device_put(x, jax.devices()[0]), jax.device_put(y, jax.devices()[self.last])

    def _stage(self, s: int, device: Any) -> Stage:
        forward, backward, weight = (self._split if self.schedule == "zero-bubble-h1" else self._whole)(s)
        return Stage(
            device,
            jax.device_put(fresh_state(self.size.stage_weights()[s]), device),
            jax.jit(forward),
            jax.jit(backward, donate_argnums=() if weight else 3),
            jax.jit(weight, donate_argnums=0) if weight else None,
            jax.jit(lambda w: jax.tree.map(jnp.zeros_like, w)),
            jax.jit(lambda batch: jnp.split(batch, self.count)),
            jax.jit(self._update, donate_argnums=0),
        )

    def _update(self, state: Any, total: Any) -> Any:
        return adam(state, jax.tree.map(lambda g: g / self.count, total))

    def _whole(self, s: int) -> tuple[Any, Any, None]:
        """Forward and backward of a stage."""

        def apply(w: Any, x: Any, *y: Any) -> Any:
            return mean_squared_error(blocks(w, x), *y) if s == self.last else blocks(w, x)

        keep = WithoutWeights()

        def forward(w: Any, x: Any, *y: Any) -> Any:
            out, pullback = jax.vjp(lambda w, x: apply(w, x, *y), w, x)
            return out, keep.strip(w, pullback)

        def backward(w: Any, kept: Any, cotangent: Any, total: Any) -> Any:
            grads, back = keep.restore(w, kept)(jnp.float32(1) if s == self.last else cotangent)
            return jax.tree.map(jnp.add, total, grads), back if s else None

        return forward, backward, None

    def _split(self, s: int) -> tuple[Any, Any, Any]:
        """Forward, gradient of the input, gradient of the weights.

        Zeros added to the result of each product receive its cotangent, from which the third makes the gradient.
        """

        def tapped(w: Any, taps: Any, x: Any, *y: Any) -> Any:
            read = []
            for (up, down), (tap_1, tap_2) in zip(w, taps, strict=True):
                h = jax.nn.gelu(x @ up + tap_1, approximate=True)
                read.append((x, h))
                x = norm(x + h @ down + tap_2)
            return (mean_squared_error(x, *y) if s == self.last else x), read

        keep = WithoutWeights()

        def forward(w: Any, x: Any, *y: Any) -> Any:
            taps = [(jnp.zeros((len(x), up.shape[1])), jnp.zeros((len(x), down.shape[1]))) for up, down in w]
            out, pullback, read = jax.vjp(lambda t, x: tapped(w, t, x, *y), taps, x, has_aux=True)
            return out, keep.strip(w, (pullback, read))

        def backward(w: Any, kept: Any, cotangent: Any, _: Any) -> Any:
            pullback, read = keep.restore(w, kept)
            made, back = pullback(jnp.float32(1) if s == self.last else cotangent)
            return (read, made), back if s else None

        def weight(total: Any, pending: Any) -> Any:
            return [(a + x.T @ t1, b + h.T @ t2) for (a, b), (x, h), (t1, t2) in zip(total, *pending, strict=True)]

        return forward, backward, weight

    def __call__(self) -> float:
        """One step; the loss before it."""
        stages = self.stages
        totals = [s.zeros(s.state[0]) for s in stages]
        inputs: dict[tuple[int, int], Any] = {(0, m): piece for m, piece in enumerate(stages[0].cut(self.x))}
        targets = stages[-1].cut(self.y)
        kept: dict[tuple[int, int], Any] = {}
        cotangents: dict[tuple[int, int], Any] = {}
        losses = []
        for phase, i, m in self.order:
            s = stages[i]
            if phase == "F":
                more = (targets[m],) if i == self.last else ()
                out, kept[i, m] = s.forward(s.state[0], inputs.pop((i, m)), *more)
                if i == self.last:
                    losses.append(out)
                else:
                    inputs[i + 1, m] = jax.device_put(out, stages[i + 1].device)
            elif phase == "B":
                made, back = s.backward(s.state[0], kept.pop((i, m)), cotangents.pop((i, m), None), totals[i])
                if s.weight is None:
                    totals[i] = made
                else:
                    kept[i, m] = made
                if i:
                    cotangents[i - 1, m] = jax.device_put(back, stages[i - 1].device)
            else:
                assert s.weight is not None, "only a schedule that splits the backward pass has weight gradients"
                totals[i] = s.weight(totals[i], kept.pop((i, m)))
        for s, total in zip(stages, totals, strict=True):
            s.state = s.update(s.state, total)
        loss = self.mean(losses)
        jax.block_until_ready([s.state for s in stages])
        return float(loss)


class Whole:
    """Residuals as `jax.vjp` gives them, weights among them; what most people write."""

    def strip(self, weights: Any, residuals: Any) -> Any:
        """All of them."""
        return residuals

    def restore(self, weights: Any, kept: Any) -> Any:
        """The same."""
        return kept


class WithoutWeights:
    """Residuals less the weights: they are at hand in the backward pass, and returning them would copy them."""

    def strip(self, weights: Any, residuals: Any) -> list[Any]:
        """The leaves that are no weights, each once."""
        held = {id(leaf): i for i, leaf in enumerate(jax.tree.leaves(weights))}
        saved, self.structure = jax.tree.flatten(residuals)
        self.sources: list[tuple[bool, int]] = []
        kept: list[Any] = []
        place: dict[int, int] = {}
        for leaf in saved:
            if id(leaf) in held:
                self.sources.append((True, held[id(leaf)]))
                continue
            if id(leaf) not in place:
                place[id(leaf)] = len(kept)
                kept.append(leaf)
            self.sources.append((False, place[id(leaf)]))
        return kept

    def restore(self, weights: Any, kept: list[Any]) -> Any:
        """All residuals."""
        mine = jax.tree.leaves(weights)
        return jax.tree.unflatten(self.structure, [mine[i] if own else kept[i] for own, i in self.sources])
