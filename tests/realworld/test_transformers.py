"""Hugging Face's Flax models, unmodified: placed by the names of their scopes, trained as under plain JAX.

Run by `make realworld`, which installs the extra of that name; where it is not installed, all of this is skipped.
"""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import manymesh as mm
from generated.laws import cheap_options

pytest.importorskip("transformers", reason="needs the extra `realworld`: make realworld")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it imports what is deprecated in NumPy and Flax
    from realworld.transformers_models import CASES, LENGTH

# The models call what Flax and JAX call deprecated; that is their business.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, eps=1e-3))


@pytest.fixture(autouse=True)
def no_tasks_left():
    yield
    mm.clear_tasks()


def training_step(case, model, dropout):
    """``(variables, moments, batch, key) -> (variables, moments, loss)``: cross entropy against fixed labels."""

    def loss(variables, batch, key):
        # What the library hides between a model's caller and its Flax module: the order of image dimensions.
        options = {"train": True} if dropout else {}
        if case.mutable:
            out, new = model(**batch, params=variables, **options), None
            if dropout:
                out, new = out
            logits = out.logits
        else:
            new = None
            keys = {"dropout_rng": key} if dropout else {}
            logits = model(**batch, params=variables["params"], **keys, **options).logits
        labels = jnp.arange(logits.size // logits.shape[-1]).reshape(logits.shape[:-1]) % logits.shape[-1]
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), new

    def step(variables, moments, batch, key):
        def of_params(params):
            return loss({**variables, "params": params}, batch, key)

        (value, new), grads = jax.value_and_grad(of_params, has_aux=True)(variables["params"])
        updates, moments = OPTIMIZER.update(grads, moments, variables["params"])
        params = optax.apply_updates(variables["params"], updates)
        statistics = {} if new is None else {k: v for k, v in new.items() if k != "params"}
        return {**variables, **statistics, "params": params}, moments, value

    return step


@pytest.mark.parametrize("dropout", [False, True], ids=["deterministic", "dropout"])
@pytest.mark.parametrize("name", CASES)
def test_two_steps_are_those_of_plain_jax(name, dropout):
    """Loss and parameters after two steps of AdamW with clipping; blocks run on the devices that the names say."""
    case = CASES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = case.model()
    variables = model.params if case.mutable else {"params": model.params}
    batch, key = case.batch(), jax.random.key(1)
    moments = OPTIMIZER.init(variables["params"])
    step = training_step(case, model, dropout)

    plain = jax.jit(step, compiler_options=cheap_options())
    expected = variables, moments
    losses = []
    for _ in range(2):
        *expected, value = plain(*expected, batch, key)
        losses.append(float(value))

    for pattern, device in case.scopes:
        mm.register_task(pattern, devices=[device])
    placed = mm.jit(step, compiler_options=cheap_options())
    lowered = placed.lower(variables, moments, batch, key)
    tasks = {task for f in lowered.program.fragments for task in f.tasks}
    assert len(tasks) >= 2, "the scopes' names placed nothing"
    actual = variables, moments
    for wanted in losses:
        *actual, value = placed(*actual, batch, key)
        np.testing.assert_allclose(float(value), wanted, rtol=1e-5)
    for (path, a), e in zip(
        jax.tree_util.tree_leaves_with_path(tuple(actual)), jax.tree.leaves(tuple(expected)), strict=True
    ):
        scale = max(1.0, float(jnp.max(jnp.abs(e), initial=0)))
        np.testing.assert_allclose(
            np.asarray(a), np.asarray(e), rtol=2e-4, atol=2e-4 * scale, err_msg=jax.tree_util.keystr(path)
        )
    used = {d for x in jax.tree.leaves(actual[0]) for d in x.sharding.device_set}
    assert used >= {jax.devices()[d] for _, d in case.scopes}, "parameters lie on every stage"


WAYS = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "top_k": 5, "temperature": 0.8},
    "beams": {"do_sample": False, "num_beams": 3},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_generated_tokens_are_those_of_plain_jax(name, way):
    """The library's own `generate`, a while_loop with caches, over two submeshes: the host runs the loop."""
    case = CASES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = case.model()
    prompt = case.batch()["input_ids"][:, :4]

    def generate(params, prompt, key):
        options = {"max_length": LENGTH, "eos_token_id": 5, "pad_token_id": 0, **WAYS[way]}
        return model.generate(prompt, params=params, prng_key=key, **options).sequences

    for pattern, device in case.scopes:
        mm.register_task(pattern, devices=[device])
    key = jax.random.PRNGKey(2)
    step = mm.jit(generate)
    assert "while1" in step.lower(model.params, prompt, key).parts
    found = step(model.params, prompt, key)
    with mm.ignore_transforms():
        expected = jax.jit(generate)(model.params, prompt, key)
    np.testing.assert_array_equal(found, expected)
