"""What the results of a conditional are made of, told apart by looking into its branches."""

import jax
import jax.numpy as jnp
import optax
import pytest

import manymesh as mm
from manymesh import _compat
from manymesh._passes import _place
from manymesh._passes._branches import Branches

STATES, X, Y = [jnp.ones(4)] * 3, jnp.ones(4), jnp.float32(1.0)


def made_of(update, other):
    """For each result of a conditional over states, of values of their shape and of a number, the operands of its shape."""
    fun = jax.make_jaxpr(lambda on, states, x, y: jax.lax.cond(on, update, other, states, x, y))
    (*_, eqn) = _compat.open_jaxpr(fun(True, STATES, X, Y)).eqns
    assert eqn.primitive.name == "cond"
    branches = Branches()
    return [[eqn.invars.index(v) - 1 for v in branches.operands(eqn, out)] for out in eqn.outvars]


@pytest.mark.parametrize(
    ("update", "other", "found"),
    [
        (lambda s, x, y: [w * 2.0 for w in s], lambda s, x, y: s, [[0], [1], [2]]),
        (lambda s, x, y: [s[1], s[0] + x, -s[2]], lambda s, x, y: s, [[0, 1], [0, 1, 3], [2]]),  # of either branch
        (lambda s, x, y: jax.jit(lambda s: [w + x for w in s])(s), lambda s, x, y: s, [[0, 3], [1, 3], [2, 3]]),
        (lambda s, x, y: [w * jnp.sum(x) for w in s], lambda s, x, y: s, [[0], [1], [2]]),  # a number is no way
        (lambda s, x, y: [jnp.zeros(4)] * 3, lambda s, x, y: [jnp.zeros(4)] * 3, [[], [], []]),
        (lambda s, x, y: y, lambda s, x, y: y * 2, [[4]]),
    ],
)  # fmt: skip
def test_operands(update, other, found):
    assert made_of(update, other) == found


def looked_at(monkeypatch, leaves):
    """How many equations are looked at for the states of an optimizer that updates all of them in one conditional."""
    tasks = [mm.task(lambda ws, x: sum(x * w for w in ws), f"t{i}", devices=[i]) for i in range(2)]
    optimizer = optax.apply_if_finite(optax.adam(1e-3), 3)

    def step(params, moments, x):
        grads = jax.grad(lambda params: jnp.sum(tasks[1](params[1], tasks[0](params[0], x))))(params)
        updates, moments = optimizer.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments

    seen = []
    whole = _place._Placer._update_of

    def watched(self, *state):
        for n in whole(self, *state):
            seen.append(n)
            yield n

    monkeypatch.setattr(_place._Placer, "_update_of", watched)
    params = [[jnp.ones(4)] * leaves] * 2
    mm.jit(step).lower(params, optimizer.init(params), jnp.ones(4))
    return len(seen)


def test_the_work_grows_with_the_number_of_states(monkeypatch):
    """And not with its square: what one state is made of are not all operands of the conditional."""
    few, many = (looked_at(monkeypatch, leaves) for leaves in (8, 32))
    assert few and many < 5 * few
