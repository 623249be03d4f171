"""What fails while a step runs says where: the task, the microbatch and the submesh."""

import contextlib

import jax
import jax.numpy as jnp
import pytest

import manymesh as mm

LARGER_THAN_MEMORY = 1 << 44


@pytest.fixture
def submeshes():
    return mm.submeshes(jax.make_mesh((2,), ("stage",), devices=jax.devices()[:2]), "stage")


def too_large(x):
    """A result that no machine has room for: one number for each row, many times over."""
    return jnp.broadcast_to(jnp.sin(x)[:, None], (len(x), LARGER_THAN_MEMORY))


@pytest.mark.parametrize("looking_on", [contextlib.nullcontext, mm.inspect.record])
def test_too_little_memory(submeshes, looking_on):
    small = mm.task(jnp.cos, "small", mesh=submeshes[0])
    large = mm.task(too_large, "large", mesh=submeshes[1])
    step = mm.jit(mm.microbatch(lambda x: large(small(x)), argnum=0, num_microbatches=2, reduce="last"))
    with looking_on(), pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED") as caught:
        jax.block_until_ready(step(jnp.ones(8)))
    where, remedy, *_ = caught.value.__notes__
    assert where == "while 'large', microbatch 0, runs on submesh 1"
    assert "report()" in remedy


def test_outside_of_loops_there_is_no_microbatch(submeshes):
    large = mm.task(too_large, "large", mesh=submeshes[0])
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.block_until_ready(mm.jit(lambda x: large(x + 1))(jnp.ones(8)))
    assert caught.value.__notes__[0] == "while 'large' runs on submesh 0"


def test_a_transfer(submeshes):
    """The copies of a call are bound to it; one that fails stands for a device that has no room."""
    first, second = (mm.task(f, f.__name__, mesh=m) for f, m in zip((jnp.sin, jnp.cos), submeshes, strict=True))
    executor = mm.jit(lambda x: second(first(x))).lower(jnp.ones(4)).compile()._executor

    def fails(*arrays):
        raise RuntimeError("RESOURCE_EXHAUSTED: nothing is left")

    (at,) = [k for k, issue in enumerate(executor._issues) if len(issue.told) == 2]
    executor._code[at] = (fails, *executor._code[at][1:])
    with pytest.raises(RuntimeError) as caught:
        executor([jnp.ones(4)])
    assert caught.value.__notes__[0] == "while what 'sin' made goes from submesh 0 to submesh 1"
