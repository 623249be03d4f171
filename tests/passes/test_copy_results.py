"""A value that is several results lies as each is asked to."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import manymesh as mm
from flat import program, run
from manymesh._program._flat import Pins

HERE, THERE = (Mesh(np.array(jax.devices()[i : i + 2]), ("d",)) for i in (0, 2))


def test_each_layout_has_a_value_of_its_own():
    """Not what is asked for twice, or on another submesh, or of which nothing is said."""
    asked = [
        NamedSharding(HERE, P("d")),
        NamedSharding(HERE, P()),
        NamedSharding(THERE, P("d")),
        NamedSharding(HERE, P("d")),
    ]
    pins = Pins(outputs={o: s.mesh for o, s in enumerate(asked)}, output_shardings=dict(enumerate(asked)))
    tasks = {"front": mm.Task("front", mesh=HERE), "back": mm.Task("back", mesh=THERE)}
    flat = program(
        """
        inputs: x f32[4]
        a = front: lax.sin(x)
        b = back: lax.cos(a)
        results: a, a, a, a, a, b
        """,
        tasks=tasks, pins=pins,
    )  # fmt: skip
    after = run("copy_results", flat)
    a, b = flat.outvars[0], flat.outvars[-1]
    assert [v is a for v in after.outvars] == [True, False, True, True, True, False]
    (copy,) = after.nodes[len(flat.nodes) :]
    assert copy.inputs == (a,) and copy.outputs == (after.outvars[1],) and after.outvars[-1] is b
    assert run("copy_results", after).nodes == after.nodes


def test_the_gradient_that_a_step_returns_is_not_the_one_that_its_optimizer_keeps():
    """The state lies as the parameter, step after step; the result as `out_shardings` say."""
    task = mm.task(lambda w, x: jnp.tanh(x @ mm.with_sharding_constraint(w, ("d", None))), mesh=HERE)
    whole = NamedSharding(HERE, P())

    def step(state, x):
        w, last = state
        grad = jax.grad(lambda w: jnp.mean(task(w, x) ** 2))(w)
        return (w - 0.2 * grad + 0.1 * last, grad), grad

    w, x = jnp.eye(4), jnp.arange(32.0).reshape(8, 4) / 32
    jitted = mm.jit(step, out_shardings=(None, whole))
    lies = jitted.lower((w, w), x).compile().input_shardings[0][0]
    assert {s.spec for s in lies} == {P("d")}
    state, plain = (w, 0 * w), (w, 0 * w)
    for _ in range(2):
        state, grad = jitted(state, x)
        plain, wanted = jax.jit(step)(plain, x)
        assert tuple(s.sharding for s in state) == lies and grad.sharding == whole
        np.testing.assert_allclose(grad, wanted, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(state[0], plain[0], rtol=1e-5, atol=1e-6)
