"""Loss and gradients of the workload with SpectraX, through what it documents; imported only where it is installed."""

from __future__ import annotations

import logging
from collections.abc import Callable

import jax
import spectrax as spx
from _model import Size, mean_squared_error, norm
from spectrax import nn
from spectrax.runtime.mpmd import sxcall
from spectrax.runtime.schedules import Std1F1B


class Block(spx.Module):
    """``x <- LayerNorm(x + gelu(x W1) W2)``."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.up = nn.Linear(size.width, size.hidden, use_bias=False, rngs=spx.Rngs(0))
        self.down = nn.Linear(size.hidden, size.width, use_bias=False, rngs=spx.Rngs(1))

    def forward(self, x: jax.Array) -> jax.Array:
        return norm(x + self.down(jax.nn.gelu(self.up(x), approximate=True)))


class Stage(spx.Module):
    """The blocks of a stage."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(size) for _ in range(size.blocks // size.stages)])

    def forward(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return x


def gradients(size: Size) -> Callable[[], float]:
    """A 1F1B pass of `size` over virtual devices, to gradients; without an optimizer."""
    logging.disable(logging.INFO)  # it reports each step
    mesh = spx.create_mesh(axis_dims=(size.stages, 1, -1, 1, 1, 1), mpmd_axis="pp")
    batch = size.data()
    schedule = Std1F1B(microbatches=size.microbatches)
    with mesh:
        stages = []
        for s in range(size.stages):
            with spx.assign_stage(total=size.stages, current=s):
                stages.append(Stage(size))
        model = nn.PipelineSequential(*stages)

    def run() -> float:
        with mesh:
            loss, grads = sxcall(model, batch, mesh=mesh, schedule=schedule, loss_fn=mean_squared_error)
        jax.block_until_ready((loss, jax.tree.leaves(grads)))
        return float(loss)

    return run
