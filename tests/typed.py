"""What type checkers see of the wrappers: `make check` runs mypy over this file, and nothing runs it.

A line with an ignored error is a mistake that has to be found: mypy also complains of an ignore without an error.
"""

from typing import assert_type

import jax

import manymesh as mm
from manymesh import schedules


def step(params: dict[str, jax.Array], batch: jax.Array, *, scale: float = 1.0) -> tuple[jax.Array, int]:
    return batch * scale, 1


def wrapped(params: dict[str, jax.Array], batch: jax.Array) -> None:
    for keeps in (mm.jit(step), mm.task(step), mm.microbatch(step, num_microbatches=2, argnum=1)):
        assert_type(keeps(params, batch, scale=2.0), tuple[jax.Array, int])
        keeps(params)  # type: ignore[call-arg]
        keeps(params, batch, scale="2")  # type: ignore[arg-type]
    assert_type(mm.task(name="step", devices=[0])(step)(params, batch), tuple[jax.Array, int])
    assert_type(mm.jit(mm.microbatch(step, num_microbatches=2))(params, batch)[1], int)


class Trainer:
    @mm.jit
    def step(self, batch: jax.Array, *, scale: float = 1.0) -> jax.Array:
        return batch * scale

    @mm.jit(donate_argnums=1)
    def update(self, batch: jax.Array) -> tuple[jax.Array, int]:
        return batch, 1


def methods(batch: jax.Array) -> None:
    trainer = Trainer()
    assert_type(trainer.step(batch, scale=2.0), jax.Array)
    assert_type(trainer.update(batch)[1], int)
    assert_type(Trainer.step(trainer, batch), jax.Array)
    trainer.step("no")  # type: ignore[arg-type]
    trainer.step()  # type: ignore[call-arg]
    trainer.step.lower(trainer, batch)


def words(name: str) -> None:
    mm.microbatch(step, schedule="zero-bubble-h1", reduce="mean")
    mm.microbatch(step, schedule=schedules.GPipe(), reduce=("concat", "sum"))
    mm.microbatch(step, reduce=mm.WeightedMean("tokens"))
    mm.microbatch(step, schedule=name)
    mm.microbatch(step, schedule="one-by-one")  # which `register` may know
    mm.microbatch(step, schedule=1)  # type: ignore[arg-type]
    mm.microbatch(step, schedule=schedules.GPipe)  # type: ignore[arg-type]
    mm.microbatch(step, reduce="avg")  # type: ignore[arg-type]
    mm.Task("decoder", mm.Task())  # type: ignore[arg-type]
