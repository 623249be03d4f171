"""Programs that plain JAX runs as they are written: types, containers and objects of the user's own."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import manymesh as mm
from flax import nnx
from stages import WIDTH, assert_same, back, front, microbatched, parameters, reference, rows


def wide(w, x):
    """Float64 for a part of the program only."""
    with jax.enable_x64(True):
        return jnp.tanh(x.astype(jnp.float64) @ w.astype(jnp.float64)).astype(jnp.float32)


def total(x):
    with jax.enable_x64(True):
        return jnp.sum(x.astype(jnp.float64))


precise = mm.task(wide, "precise", devices=[2])


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype")  # JAX's, of plain gradients of such a part as well
@pytest.mark.parametrize(
    "fun",
    [
        pytest.param(lambda p, x: precise(p["back"], front(p["front"], x)), id="in a task"),
        pytest.param(
            jax.grad(lambda p, x: jnp.mean(precise(p["back"], front(p["front"], x)) ** 2)), id="a gradient in a task"
        ),
        pytest.param(
            jax.grad(lambda p, x: jnp.mean(jax.checkpoint(precise)(p["back"], front(p["front"], x)) ** 2)),
            id="computed again",
        ),
        pytest.param(
            jax.grad(lambda p, x: jnp.mean(wide(p["back"], front(p["front"], x)) ** 2)), id="a gradient in no task"
        ),
        pytest.param(lambda p, x: total(back(p["back"], front(p["front"], x))), id="a result of 64 bits"),
        pytest.param(
            microbatched(jax.value_and_grad(lambda p, x: jnp.mean(precise(p["back"], front(p["front"], x)) ** 2))),
            id="in microbatches",
        ),
    ],
)
def test_sixty_four_bits_for_a_part(fun):
    """By `jax.enable_x64` around it, while the rest has 32."""
    p, x = parameters(), rows()
    assert_same(mm.jit(fun)(p, x), reference(jax.jit(fun), p, x))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Linear:
    """A class that looks at what it is made of, as JAX advises against and runs."""

    w: jax.Array
    b: jax.Array

    def __post_init__(self):
        if self.w.shape[-1] != self.b.shape[0]:
            raise ValueError(f"{self.w.shape} and {self.b.shape} do not fit")


@pytest.mark.parametrize("micro", [False, True])
def test_a_class_that_looks_at_its_leaves(micro):
    layers = [Linear(jnp.eye(WIDTH), jnp.zeros(WIDTH)) for _ in range(2)]
    tasks = [mm.task(lambda layer, x: jnp.tanh(x @ layer.w + layer.b), n, devices=[k]) for k, n in enumerate("ab")]
    fun = jax.value_and_grad(lambda layers, x: jnp.mean(tasks[1](layers[1], tasks[0](layers[0], x)) ** 2))
    fun = microbatched(fun) if micro else fun
    step = mm.jit(fun)
    assert_same(step(layers, rows()), reference(jax.jit(fun), layers, rows()))
    compiled = step.prepare(layers, rows())
    assert "args[0][1].w" in str(step.lower(layers, rows()).layout)
    assert all(x.sharding == s for x, s in zip(jax.tree.leaves(compiled.arguments), compiled.homes, strict=True))


def test_a_class_that_looks_at_its_leaves_in_an_error():
    layer = Linear(jnp.eye(WIDTH), jnp.zeros(WIDTH))
    task = mm.task(lambda layer, x: x @ layer.w + layer.b, "a", devices=[0])
    compiled = mm.jit(task).prepare(layer, rows())
    with pytest.raises(mm.errors.ArgumentError, match=r"argument args\[0\].w was compiled as float32\[4,4\]"):
        compiled(dataclasses.replace(layer, w=jnp.ones((WIDTH, 5)), b=jnp.zeros(5)), rows())


def test_parts_of_a_module_that_are_put_together_in_a_microbatch():
    """What is no batch belongs to no other trace there: Variables of NNX can be merged without a copy."""

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.a = mm.nnx.task(nnx.Linear(WIDTH, WIDTH, rngs=rngs), "a", devices=[0])
            self.b = mm.nnx.task(nnx.Linear(WIDTH, WIDTH, rngs=rngs), "b", devices=[1])

        def __call__(self, x):
            return self.b(jnp.tanh(self.a(x)))

    graph, p = nnx.split(Model(nnx.Rngs(0)))

    def grad(p, x, y=None):
        value, grads = nnx.value_and_grad(lambda model: jnp.mean((model(x) - y) ** 2))(nnx.merge(graph, p))
        return value, jax.tree.leaves(grads)

    fun = mm.microbatch(grad, argnum=(1, 2), num_microbatches=2, reduce="mean")
    x = np.asarray(rows())
    assert_same(mm.jit(fun)(p, x, np.sin(x)), reference(jax.jit(fun), p, x, np.sin(x)))


@pytest.mark.parametrize("in_jit", [False, True])
def test_a_function_that_jax_replaces_late_beside_an_array(in_jit):
    """`searchsorted` of JAX 0.12, which XLA does not know, in a task that closes over an array."""
    edges = np.linspace(0, 1, WIDTH, dtype=np.float32)
    search = jax.jit(lambda x: jnp.searchsorted(edges, x)) if in_jit else lambda x: jnp.searchsorted(edges, x)
    task = mm.task(lambda w, x: x @ w + 0.1 * search(x), "search", devices=[1])
    p = parameters()["front"]
    for fun in (task, jax.grad(lambda w, x: jnp.sum(task(w, x) ** 2))):
        assert_same(mm.jit(fun)(p, rows()), reference(jax.jit(fun), p, rows()))


@pytest.mark.parametrize("compiled", [mm.jit, mm.nnx.jit, mm.equinox.jit])
def test_a_step_inside_a_step_has_arguments_of_its_own(compiled):
    """Containers that it changes, and arrays where its caller has those of NumPy; also under a transformation."""

    @compiled
    def inner(p, x):
        x += 1.0
        p["front"] = 2 * p["front"]
        return {"y": back(p["back"], front(p["front"], x.at[0].set(0.0))), "given": p, "count": np.float32(3)}

    def loss(front, p, x):
        p = {**p, "front": front}
        x, ones = x + 0, np.ones(x.shape, np.float32)
        first, again = inner(p, x), inner(p, ones)
        first["given"]["back"] = 0.0
        return jnp.sum(first["y"] + p["front"] + again["y"] * ones + p["back"] * first["count"].at[...].add(1))

    step = compiled(lambda p, x: jax.value_and_grad(loss)(p["front"], p, x))
    x = rows()[: parameters()["front"].shape[0]]
    assert_same(step(parameters(), x), reference(step, parameters(), x))


@pytest.mark.parametrize("compiled", [mm.jit, mm.nnx.jit])
def test_numbers_for_a_step_inside_a_step_are_arrays(compiled):
    @functools.partial(compiled, static_argnames="times")
    def inner(p, x, ready, factor, times):
        for _ in range(times):
            x = back(p["back"], front(p["front"], x))
        return jnp.where(~ready, 1.0, factor.astype(x.dtype)) * x, 3

    @compiled
    def step(p, x):
        y, count = inner(p, x, True, 2, times=1)
        return y / count.astype(y.dtype)

    assert_same(step(parameters(), rows()), reference(step, parameters(), rows()))


def test_a_module_for_a_step_inside_a_step_is_its_own():
    """As `optax` shows it: parameters are put into a module that `jax.grad` knows nothing of."""
    model = nnx.Linear(WIDTH, 3, rngs=nnx.Rngs(0))

    @mm.jit
    def predict(state, model, x):
        nnx.update(model, state)
        return model(front(parameters()["front"], x))

    step = mm.jit(lambda s, m, x: jax.value_and_grad(lambda s: jnp.mean(predict(s, m, x) ** 2))(s))
    state = nnx.state(model, nnx.Param)
    assert_same(
        nnx.to_pure_dict(step(state, model, rows())[1]), nnx.to_pure_dict(reference(step, state, model, rows())[1])
    )
