"""Optimizers of Optax by name, as users set them up."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree
from optax import contrib

# An epsilon that is large keeps what is noise in a gradient from becoming a step of full size.
EPS = 1e-3


def _kernels(params):
    return jax.tree.map(lambda p: p.ndim >= 2, params)


def _labels(params):
    return jax.tree.map(lambda p: "matrix" if p.ndim >= 2 else "vector", params)


def _warmup():
    return optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10)


def _shapes_at_once() -> optax.GradientTransformation:
    """Matrices of one shape stacked, each scaled by its norm and orthogonalised a little, as implementations of Muon do."""

    def update(updates, state, params=None):
        del params
        named, tree = jax.tree_util.tree_flatten_with_path(updates)
        leaves = [leaf for _, leaf in named]
        alike: dict[object, list[int]] = {}
        for k, (path, leaf) in enumerate(named):
            if leaf.ndim == 2 and "bias" not in jax.tree_util.keystr(path):  # of stacked layers these are matrices, too
                alike.setdefault((leaf.shape, leaf.dtype), []).append(k)
        for those in alike.values():
            stack = jnp.stack([leaves[k] for k in those])
            unit = stack / (jnp.linalg.norm(stack, axis=(-2, -1), keepdims=True) + 1.0)
            turned = 1.5 * unit - 0.5 * jnp.einsum("nij,nkj,nkl->nil", unit, unit, unit)
            for k, leaf in zip(those, turned, strict=True):
                leaves[k] = leaf.astype(leaves[k].dtype)
        return jax.tree.unflatten(tree, leaves), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "sgd": lambda: optax.sgd(1e-2),
    "momentum": lambda: optax.sgd(1e-2, momentum=0.9),
    "nesterov": lambda: optax.sgd(1e-2, momentum=0.9, nesterov=True),
    "sgd_schedule": lambda: optax.sgd(_warmup()),
    "sgd_decay": lambda: optax.chain(optax.add_decayed_weights(1e-2), optax.sgd(optax.exponential_decay(1e-2, 5, 0.9))),
    "adam": lambda: optax.adam(1e-2, eps=EPS),
    "adam_bf16_moments": lambda: optax.adam(1e-2, eps=EPS, mu_dtype="bfloat16"),
    "adamw": lambda: optax.adamw(1e-2, eps=EPS),
    "adamw_masked": lambda: optax.adamw(1e-2, eps=EPS, mask=_kernels),
    "adamw_schedule": lambda: optax.adamw(_warmup(), eps=EPS),
    "adamw_by_value": lambda: optax.chain(optax.clip(0.5), optax.adamw(1e-2, eps=EPS)),
    "amsgrad": lambda: optax.amsgrad(1e-2, eps=EPS),
    "nadam": lambda: optax.nadam(1e-2, eps=EPS),
    "nadamw": lambda: optax.nadamw(1e-2, eps=EPS),
    "radam": lambda: optax.radam(1e-2, eps=EPS),
    "adamax": lambda: optax.adamax(1e-2, eps=EPS),
    "adamaxw": lambda: optax.adamaxw(1e-2, eps=EPS),
    "adabelief": lambda: optax.adabelief(1e-2, eps=EPS),
    "adadelta": lambda: optax.adadelta(1e-2, eps=EPS),
    "adagrad": lambda: optax.adagrad(1e-2, eps=EPS),
    "adan": lambda: optax.adan(1e-2, eps=EPS),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=2),
    "adafactor_momentum": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=2, momentum=0.9),
    "fromage": lambda: optax.fromage(1e-2),
    "lamb": lambda: optax.lamb(1e-2, eps=EPS),
    "lars": lambda: optax.lars(1e-2),
    "lion": lambda: optax.lion(1e-3),
    "noisy_sgd": lambda: optax.noisy_sgd(1e-2, key=0),
    "novograd": lambda: optax.novograd(1e-2, eps=EPS),
    "optimistic_gradient_descent": lambda: optax.optimistic_gradient_descent(1e-2),
    "rmsprop": lambda: optax.rmsprop(1e-2, eps=EPS),
    "rmsprop_momentum": lambda: optax.rmsprop(1e-2, eps=EPS, momentum=0.9, centered=True),
    "sign_sgd": lambda: optax.sign_sgd(1e-3),
    "sm3": lambda: optax.sm3(1e-2),
    "yogi": lambda: optax.yogi(1e-2, eps=EPS),
    "multi_steps": lambda: optax.MultiSteps(optax.adamw(1e-2, eps=EPS), 2),
    "masked": lambda: optax.masked(optax.sgd(1e-2, momentum=0.9), _kernels),
    "multi_transform": lambda: optax.multi_transform(
        {"matrix": optax.adamw(1e-2, eps=EPS), "vector": optax.sgd(1e-2)}, _labels
    ),
    "frozen_vectors": lambda: optax.multi_transform(
        {"matrix": optax.adam(1e-2, eps=EPS), "vector": optax.set_to_zero()}, _labels
    ),
    "injected": lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=_warmup(), eps=EPS),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(1e-2, eps=EPS), 2),
    "clipped_by_block": lambda: optax.chain(optax.clip_by_block_rms(1.0), optax.sgd(1e-2, momentum=0.9)),
    "adaptive_clip": lambda: optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(1e-2)),
    "centralized": lambda: optax.chain(optax.centralize(), optax.sgd(1e-2, momentum=0.9)),
    "ema_of_updates": lambda: optax.chain(optax.ema(0.9), optax.sgd(1e-2)),
    "shapes_at_once": lambda: optax.chain(optax.trace(0.9), _shapes_at_once(), optax.scale(-1e-2)),
    "muon": lambda: contrib.muon(1e-2),
    "schedule_free": lambda: contrib.schedule_free_adamw(1e-2, eps=EPS),
    "prodigy": lambda: contrib.prodigy(1e-1, eps=EPS),
}


def clip_as_vector() -> optax.GradientTransformation:
    """Clipping by the global norm of one vector of all gradients, as many write it by hand."""

    def update(updates, state, params=None):
        del params
        vector, back = ravel_pytree(updates)
        scale = jnp.where(jnp.all(jnp.isfinite(vector)), jnp.minimum(1.0, 1.0 / (jnp.linalg.norm(vector) + 1e-6)), 0.0)
        return back(vector * scale.astype(vector.dtype)), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


@functools.cache
def optimizer(name: str, clipped: bool | str) -> optax.GradientTransformation:
    """The optimizer of a name, behind clipping by the global norm if ``clipped``, of one vector if that is ``"vector"``."""
    made = OPTIMIZERS[name]()
    if name == "multi_steps":
        return made.gradient_transformation()
    if not clipped:
        return made
    return optax.chain(clip_as_vector() if clipped == "vector" else optax.clip_by_global_norm(1.0), made)
