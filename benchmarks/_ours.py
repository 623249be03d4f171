"""The workload with ManyMesh: tasks, a microbatch loop, a jitted step."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from _model import Size, adam, blocks, fresh_state, mean_squared_error
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import manymesh as mm


class WithManyMesh:
    """A training step of `size`, one stage on each device.

    Args:
      size: the size of the problem.
      schedule: a name or an object of `manymesh.schedules`.
      weights: those of each stage to begin with; by default as `size` makes them.
    """

    def __init__(self, size: Size, schedule: Any, weights: list[Any] | None = None) -> None:
        meshes = mm.submeshes(Mesh(np.array(jax.devices()[: size.stages]), ("stage",)), "stage")
        tasks = [mm.task(blocks, f"stage_{s}", mesh=mesh) for s, mesh in enumerate(meshes)]

        def loss(weights: Any, batch: Any) -> jax.Array:
            x, y = batch
            for task, w in zip(tasks, weights, strict=True):
                x = task(w, x)
            return mean_squared_error(x, y)

        grad = mm.microbatch(
            jax.value_and_grad(loss), argnum=1, num_microbatches=size.microbatches, schedule=schedule, reduce="mean"
        )

        def train(state: Any, batch: Any) -> Any:
            value, grads = grad(state[0], batch)
            return adam(state, grads), value

        x, y = size.data()
        self.batch = self._placed(x, meshes[0]), self._placed(y, meshes[-1])
        self.state = fresh_state(size.stage_weights() if weights is None else weights)
        self.step = mm.jit(train, donate_argnums=0)
        self.gradients = mm.jit(grad)

    @staticmethod
    def _placed(x: np.ndarray, mesh: Mesh) -> jax.Array:
        """An array on a submesh, also where another process has its devices."""
        whole = NamedSharding(mesh, PartitionSpec())
        return jax.make_array_from_callback(x.shape, whole, lambda index: x[index], dtype=x.dtype)

    def __call__(self) -> float:
        """One step; the loss before it."""
        self.state, loss = self.step(self.state, self.batch)
        jax.block_until_ready(self.state)
        return float(loss)

    def without_optimizer(self) -> float:
        """Loss and gradients alone."""
        loss, _ = jax.block_until_ready(self.gradients(self.state[0], self.batch))
        return float(loss)

    def compiled(self) -> Any:
        """The compiled step, after the first call."""
        return self.step.lower(self.state, self.batch).compile()
