"""The workload as one SPMD program: every device runs the same code, activations go round by ``ppermute``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _model import Size, adam, blocks, fresh_state, mean_squared_error
from jax.sharding import AxisType, NamedSharding, PartitionSpec


class Spmd:
    """A training step of `size` with GPipe inside one ``shard_map``, differentiated as a whole.

    Weights of block `k` of every stage are stacked along a leading axis, which lies over the stages. In each of
    ``microbatches + stages - 1`` ticks each device runs its blocks on what it got from the device before.
    """

    def __init__(self, size: Size) -> None:
        count, stages = size.microbatches, size.stages
        mesh = jax.make_mesh((stages,), ("stage",), (AxisType.Auto,), devices=jax.devices()[:stages])
        over_stages, everywhere = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("stage",), ()))
        parts = size.stage_weights()
        stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *parts)
        *held, steps = fresh_state(stacked)
        self.state = (*jax.device_put(held, over_stages), jax.device_put(steps, everywhere))
        x, y = (a.reshape(count, -1, size.width) for a in size.data())
        self.batch = jax.device_put((x, y), everywhere)
        forward = [(s, s + 1) for s in range(stages - 1)]

        def pipeline(weights: Any, xs: Any, ys: Any) -> Any:
            stage = jax.lax.axis_index("stage")
            mine = jax.tree.map(lambda w: w[0], weights)

            def tick(carry: Any, t: Any) -> Any:
                received, total = carry
                out = blocks(mine, jnp.where(stage == 0, xs[jnp.minimum(t, count - 1)], received))
                done = t - (stages - 1)
                loss = mean_squared_error(out, ys[jnp.clip(done, 0, count - 1)])
                total += jnp.where((done >= 0) & (stage == stages - 1), loss, 0.0)
                return (jax.lax.ppermute(out, "stage", forward), total), None

            start = jax.lax.pcast((jnp.zeros_like(xs[0]), jnp.float32(0)), ("stage",), to="varying")
            (_, total), _ = jax.lax.scan(tick, start, jnp.arange(count + stages - 1))
            return jax.lax.psum(total, "stage") / count

        spec = PartitionSpec
        loss = jax.shard_map(
            pipeline, mesh=mesh, in_specs=(spec("stage"), spec(), spec()), out_specs=spec(), check_vma=True
        )

        def train(state: Any, xs: Any, ys: Any) -> Any:
            value, grads = jax.value_and_grad(loss)(state[0], xs, ys)
            return adam(state, grads), value

        self.step = jax.jit(train, donate_argnums=0)

    def __call__(self) -> float:
        """One step; the loss before it."""
        self.state, loss = self.step(self.state, *self.batch)
        jax.block_until_ready(self.state)
        return float(loss)
