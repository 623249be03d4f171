"""A decoder of the structure of Gemma trains in two stages as it does in one `nnx.jit`."""

from __future__ import annotations

import re
from typing import Any

import jax
import numpy as np
import optax
import pytest

import manymesh as mm
from flax import nnx
from nnx_models import Config, decoder, in_stages, loss_of

pytestmark = pytest.mark.once

RULES = [("hidden", "model"), ("heads", "model"), ("embed", None), ("vocabulary", None)]
LAYERS = 2  # one whose attention is local and one whose attention is global, in a stage each
TOKENS = np.asarray(jax.random.randint(jax.random.key(1), (8, 9), 0, 32))


def train_step(model: Any, optimizer: Any, tokens: Any) -> Any:
    grad = mm.nnx.microbatch(nnx.value_and_grad(loss_of), argnum=1, num_microbatches=4, reduce="mean")
    loss, grads = grad(model, tokens)
    optimizer.update(model, grads)
    return loss


def train(jit: Any, model: Any) -> tuple[list[float], Any, Any]:
    with nnx.use_eager_sharding(False):
        optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
        step = jit(train_step, donate_argnums=(0, 1))
        losses = [float(step(model, optimizer, TOKENS)) for _ in range(3)]
    return losses, model, optimizer


def test_it_trains_in_two_stages_as_in_one_program() -> None:
    mesh = jax.make_mesh((2, 1, 2), ("stage", "data", "model"), devices=jax.devices()[:4])
    first, second = mm.submeshes(mesh, "stage")
    ours, model, optimizer = train(mm.nnx.jit, in_stages(decoder(config=Config(layers=LAYERS)), (first, second), RULES))
    theirs, plain, plain_optimizer = train(nnx.jit, decoder(config=Config(layers=LAYERS)))
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    assert ours[2] < ours[0]
    for a, b in ((model, plain), (optimizer, plain_optimizer)):
        a, b = nnx.state(a, nnx.Not(nnx.RngKey)), nnx.state(b, nnx.Not(nnx.RngKey))
        paths, others = jax.tree_util.tree_leaves_with_path(a), jax.tree_util.tree_leaves_with_path(b)
        assert [p for p, _ in paths] == [p for p, _ in others]  # tasks change no path
        for (path, u), (_, v) in zip(paths, others, strict=True):
            np.testing.assert_allclose(u, v, rtol=2e-4, atol=2e-5, err_msg=jax.tree_util.keystr(path))
    # Each variable is on the submesh of its stage, sharded by the names that its metadata say.
    places = {r.path: (r.devices, r.spec) for r in mm.nnx.tabulate(nnx.state(model, nnx.Param)).rows}
    for path, (devices, spec) in places.items():
        if path == "embedder/table":
            continue  # two stages read it; it lives where more bytes would cross otherwise
        block = re.match(r"blocks/(\d)", path)
        stage = int(block[1]) if block else int(path.startswith("norm"))
        assert devices == ((0, 1), (2, 3))[stage], path
        if path.endswith(("/gate", "/query")):
            assert tuple(spec) == (None, "model"), path
    counts = nnx.state(model, nnx.RngCount)
    assert {int(x) for x in jax.tree.leaves(counts)} == {12}  # a key for each microbatch, in each of the steps
