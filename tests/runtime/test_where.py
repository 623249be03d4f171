"""What fails while a step runs says where: the task, the microbatch and the submesh.

What fails is put in the place of one launch: when a CPU without room says so, in the call or later, is not for us to say.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import manymesh as mm
from manymesh._plan._instructions import Run
from manymesh._runtime._observe import Observer


def fails(*arrays):
    """A device that has no room."""
    raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")


def failing(loss, which):
    """The executor of a step of two tasks in which one instruction fails; ``which`` says of an issue whether it is that."""
    meshes = mm.submeshes(jax.make_mesh((2,), ("stage",), devices=jax.devices()[:2]), "stage")
    first, second = (mm.task(f, f.__name__, mesh=m) for f, m in zip((jnp.sin, jnp.cos), meshes, strict=True))
    executor = mm.jit(loss(lambda x: second(first(x)))).lower(jnp.ones(4)).compile()._executor
    at = next(k for k, issue in enumerate(executor._issues) if which(issue))
    issue = replace(executor._issues[at], call=fails)
    executor._issues = (*executor._issues[:at], issue, *executor._issues[at + 1 :])
    executor._code[at] = (fails, *executor._code[at][1:])
    return executor


def runs(microbatch):
    """Whether an issue is the run of a microbatch on the second submesh."""
    return lambda issue: any(isinstance(i, Run) and (i.submesh, i.microbatch) == (1, microbatch) for _, i in issue.told)


@pytest.mark.parametrize("observer", [None, Observer()], ids=["alone", "looked at"])
def test_a_task_in_a_loop(observer):
    executor = failing(lambda f: mm.microbatch(f, argnum=0, num_microbatches=2, reduce="concat"), runs(1))
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED") as caught:
        executor([jnp.ones(4)], observer)
    where, remedy = caught.value.__notes__
    assert where == "while 'cos', microbatch 1, runs on submesh 1"
    assert "report()" in remedy


def test_outside_of_loops_there_is_no_microbatch():
    with pytest.raises(RuntimeError) as caught:
        failing(lambda f: f, runs(None))([jnp.ones(4)])
    assert caught.value.__notes__[0] == "while 'cos' runs on submesh 1"


def test_a_transfer():
    with pytest.raises(RuntimeError) as caught:
        failing(lambda f: f, lambda issue: len(issue.told) == 2)([jnp.ones(4)])
    assert caught.value.__notes__[0] == "while what 'sin' made goes from submesh 0 to submesh 1"
