"""What the stages of a step tell of its arguments and results is what those of `jax.jit` tell."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import manymesh as mm

W = {"front": jnp.ones((4, 4)), "back": jnp.ones((4, 2), jnp.bfloat16)}
X = np.ones((8, 4), np.float32)


def step(scale: float, w: Any, x: Any, *, names: str = "", key: Any = None) -> Any:
    front = mm.task(lambda w, x: jnp.tanh(x @ w), "front", devices=[0])
    back = mm.task(lambda w, h: h @ w, "back", devices=[1])
    y = back(w["back"], front(w["front"], x))
    return {"loss": jnp.mean(y) * scale, "w": w, "n": 3, "key": key}


def looping(scale: float, w: Any, x: Any, *, names: str = "", key: Any = None) -> Any:
    """A step of several parts, whose loop the host runs."""
    front = mm.task(lambda w, x: jnp.tanh(x @ w), "front", devices=[0])
    back = mm.task(lambda w, h: h @ w.T, "back", devices=[1])
    wide = jnp.ones((4, 4), jnp.float32)
    h = jax.lax.while_loop(lambda h: jnp.sum(h) > 1, lambda h: 0.1 * back(wide, front(w["front"], h)), x * scale)
    return {"loss": jnp.mean(h), "w": w, "n": 3, "key": key}


@pytest.mark.parametrize("fun", [step, looping])
def test_the_stages_tell_what_those_of_jax_tell(fun: Any) -> None:
    options: dict[str, Any] = {"donate_argnums": 1, "donate_argnames": "key", "static_argnames": "names"}
    args, kwargs = (2.0, W, X), {"names": "a", "key": jax.random.key(0)}
    with mm.ignore_transforms():
        plain: Any = jax.jit(fun, **options).trace(*args, **kwargs)
        stages = [plain, plain.lower(), plain.lower().compile()]
    ours: Any = mm.jit(fun, **options).trace(*args, **kwargs)
    for got, wanted in zip([ours, ours.lower(), ours.lower().compile()], stages, strict=True):
        assert got.donate_argnums == wanted.donate_argnums == (1, 2, 4)
        assert got.out_tree == wanted.out_tree
        for of in ("args_info", "in_avals"):
            found, known = jax.tree.leaves(getattr(got, of)), jax.tree.leaves(getattr(wanted, of))
            assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in known]
            assert [type(x) for x in found] == [type(x) for x in known]
        assert [x.donated for x in jax.tree.leaves(got.args_info)] == [False, True, True, False, True]
        found, known = jax.tree.leaves(got.out_info), jax.tree.leaves(wanted.out_info)
        assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in known]
    assert ours.fun_name == plain.fun_name
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(ours.out_avals)] == [
        (x.shape, x.dtype) for x in jax.tree.leaves(plain.out_avals)
    ]


def test_a_compiled_step_says_where_its_results_are() -> None:
    lowered = mm.jit(step).lower(2.0, W, X)
    compiled = lowered.compile()
    result = compiled(2.0, W, X)
    places = [x.sharding for x in jax.tree.leaves(compiled.out_info)]
    assert places == [x.sharding for x in jax.tree.leaves(result)]
