"""What is said of arguments by the names that users know."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import manymesh as mm
from manymesh._api._names import SHOWN, differences

pytestmark = pytest.mark.once

BATCH = {"args[0]": "float32[8]", "args[1]": "float32[8]"}


@pytest.mark.parametrize(
    ("known", "words"),
    [
        ([], ""),
        ([BATCH], ""),
        ([{**BATCH, "args[1]": "int32[8]"}], "args[1] is float32[8] and was int32[8]"),
        ([{}, {**BATCH, "args[0]": "float32[4]"}], "args[0] is float32[8] and was float32[4]"),
        ([{"args[0]": "float32[8]"}], "args[1] is float32[8] and was not there"),
        ([{**BATCH, "kwargs['t']": "int32[]"}], "kwargs['t'] is not there and was int32[]"),
    ],
)
def test_how_arguments_differ_from_those_before(known, words):
    """From those that are the most alike."""
    assert differences(BATCH, known) == words


def test_many_that_differ_are_counted():
    types = {f"args[{k}]": "float32[]" for k in range(SHOWN + 4)}
    assert differences(types, [dict.fromkeys(types, "int32[]")]).endswith(
        "[2] is float32[] and was int32[], and 4 more differ"
    )


def test_what_makes_a_process_compile_again_is_named():
    """Other processes, which do not compile, tell it: not only of shapes, but of all that a program is kept by."""
    task = mm.task(lambda x, rate: x * rate, "task", devices=[0])
    step = mm.jit(lambda x, rate=0.5, n=1: task(x, rate) * n, static_argnames="n")
    x = jnp.ones((4, 4))
    assert step.lower(x, 0.5)._unlike() == ""
    assert step.lower(x[:2], 0.5)._unlike() == "args[0] is float32[2,4] and was float32[4,4]"
    assert step.lower(x, np.float32(0.5))._unlike() == "args[1] is float32[] and was float32[] (weakly typed)"
    assert step.lower(x, 0.5, n=2)._unlike() == "static argument 'n' is 2 and was not there"
    assert step.lower(x, 0.5, n=3)._unlike() == "static argument 'n' is 3 and was not there"
    with jax.default_matmul_precision("highest"):
        assert step.lower(x, 0.5)._unlike() == "jax_default_matmul_precision is highest and was None"
