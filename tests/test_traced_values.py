"""JAX's errors about traced values name the user's function, its line and its arguments, wherever it runs."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import manymesh as mm
from flax import nnx

PARAMS, X = {"w": np.ones((3, 2), np.float32), "b": np.ones(2, np.float32)}, np.ones((4, 3), np.float32)


def decides(params, x, *, more=0.0):
    if x.sum() + params["w"].sum() + more > 0:
        x = 2 * x
    return (x @ params["w"]).sum()


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x if x.sum() > 0 else self.param("w", nn.initializers.ones, (3, 2))


class Nnx(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones((3, 2)))

    def __call__(self, x):
        return x @ self.w if x.sum() > 0 else x


def in_loop(params, x):
    return mm.microbatch(jax.value_and_grad(decides), argnum=1, num_microbatches=2)(params, x)


TASK = mm.task(decides, "decides", devices=[1])
CASES = {
    "step": (mm.jit(decides), (PARAMS, X), decides, ("params_w", "x")),
    "task": (mm.jit(lambda p, x: TASK(p, x, more=x[0, 0])), (PARAMS, X), decides, ("params_w", "x", "more")),
    "loop": (mm.jit(in_loop), (PARAMS, X), decides, ()),
    "linen": (
        mm.jit(lambda x: mm.flax.task(Linen, "a", devices=[1])().apply({}, x)), (X,), Linen.__call__.__wrapped__, (),
    ),
    "nnx": (mm.nnx.jit(lambda m, x: m(x)), (mm.nnx.task(Nnx(), "b", devices=[1]), X), Nnx.__call__, ()),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_decision_about_a_traced_value_is_told_at_its_place(case):
    step, args, fun, names = CASES[case]
    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        step(*args)
    text = str(caught.value)
    code = fun.__code__
    assert f"the function {fun.__name__} at {code.co_filename}:{code.co_firstlineno} for jit" in text
    assert "manymesh" not in text.replace(__file__, "")
    for name in names:
        assert name in text.split("argument")[1]


def test_arguments_have_names_whatever_they_are_called():
    """Keywords of Python, equal names, more than there are parameters, and builtins."""

    def bad(a, *rest, **more):
        return 1 if sum(rest, a["if"] + a["x y"] + a["x-y"]) + more["b"] > 0 else 0

    task = mm.task(bad, "bad", devices=[0])
    one = np.float32(1)
    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        mm.jit(lambda x: task({"if": x, "x y": x, "x-y": x}, x, x, b=x))(one)
    assert all(name in str(caught.value) for name in ("a_if", "a_x_y", "a_x_y_", "args_1", "args_2", "b"))
    assert mm.jit(mm.task(max, "max", devices=[0]))([one]) == 1
