"""Linen models that are built plain or with tasks in them, by the same code."""

from __future__ import annotations

import functools

import flax.linen as nn
import jax.numpy as jnp

from manymesh.flax import task

WIDTH = 4


def plain(model, name=None, **kwargs):
    """Stands where `task` stands and wraps nothing."""
    return model


def on_device_0(model, name=None, **kwargs):
    return task(model, name, devices=[0], **kwargs)


class Block(nn.Module):
    """Two dense layers with automatic names, beside a skip."""

    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(WIDTH)(nn.relu(nn.Dense(WIDTH)(x)))


class Scaled(nn.Module):
    """A parameter of its own and a submodule from `setup`; knows a second method."""

    def setup(self):
        self.scale = self.param("scale", nn.initializers.ones, (WIDTH,))
        self.inner = nn.Dense(WIDTH)

    def __call__(self, x):
        return self.scale * self.inner(x)

    def undo(self, x):
        return x / self.scale


class Step(nn.Module):
    """The body of a scan: a carry in, a carry out."""

    @nn.compact
    def __call__(self, x, _):
        return nn.tanh(nn.Dense(WIDTH)(x)), None


def scanned(body):
    return nn.scan(body, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)


def compact(wrap):
    """Automatic names, counted over wrapped and plain layers alike."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = wrap(nn.Dense)(WIDTH)(x)
            x = nn.Dense(WIDTH)(x)
            x = wrap(Block)()(x)
            x = wrap(nn.Dense, "a name of the task")(WIDTH)(x)
            x = wrap(nn.Dense)(WIDTH, name="chosen")(x)
            return nn.Dense(WIDTH)(wrap(Block)()(x))

    return Net()


def in_setup(wrap):
    """Modules as attributes, in a list and in a dictionary."""

    class Net(nn.Module):
        def setup(self):
            self.first = wrap(nn.Dense)(WIDTH)
            self.blocks = [wrap(Block)() for _ in range(2)]
            self.heads = {"left": wrap(nn.Dense)(WIDTH), "right": nn.Dense(WIDTH)}

        def __call__(self, x):
            x = self.first(x)
            for block in self.blocks:
                x = block(x)
            return self.heads["left"](x) + self.heads["right"](x)

    return Net()


def as_fields(wrap):
    """Modules that are fields of another one, made before it exists."""

    class Net(nn.Module):
        one: nn.Module
        two: nn.Module

        @nn.compact
        def __call__(self, x):
            return nn.Dense(WIDTH)(self.two(self.one(x)))

    return Net(wrap(nn.Dense)(WIDTH), wrap(Block()))


def shared(wrap):
    """One module called twice, and given to two others as well."""

    class User(nn.Module):
        tied: nn.Module

        @nn.compact
        def __call__(self, x):
            return nn.Dense(WIDTH)(self.tied(x))

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            layer = wrap(nn.Dense)(WIDTH)
            return User(layer)(x) + wrap(User)(layer)(layer(layer(x)))

    return Net()


def bound(wrap):
    """Wrapped after Flax has bound it: an instance, a method of one, and a function of one."""

    class Net(nn.Module):
        def setup(self):
            self.inner = Scaled()
            self.other = nn.Dense(WIDTH)

        def __call__(self, x):
            x = wrap(self.other)(x)
            x = wrap(self.inner.__call__)(x)
            x = wrap(self.inner.undo, "undo")(x)
            return wrap(lambda module, y: module.inner(y) * 2)(self, x)

    return Net()


def with_post_init(wrap):
    """A class that fills in its own fields."""

    class Grown(nn.Module):
        features: int = 0

        def __post_init__(self):
            self.features = self.features or WIDTH
            super().__post_init__()

        @nn.compact
        def __call__(self, x):
            return nn.Dense(self.features)(x)

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return wrap(Grown)()(wrap(Grown)()(x))

    return Net()


def sharing_scope(wrap):
    """`nn.share_scope` puts the parameters of a module into those of another."""

    class Net(nn.Module):
        def setup(self):
            self.inner = wrap(nn.Dense)(WIDTH)
            nn.share_scope(self, self.inner)

        def __call__(self, x):
            return self.inner(x)

    return Net()


def rematerialised(wrap):
    """`nn.remat` inside and outside of a task."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.remat(wrap(Block))()(wrap(nn.remat(Block))()(x))

    return Net()


def over_layers(wrap):
    """A task around a scan."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return wrap(scanned(Step))()(x, None)[0]

    return Net()


def in_layers(wrap):
    """A scan around a task."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return scanned(wrap(Step))()(x, None)[0]

    return Net()


def mapped(wrap):
    """`nn.vmap` of a task: other parameters for each element."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            many = nn.vmap(wrap(nn.Dense), variable_axes={"params": 0}, split_rngs={"params": True})
            return many(WIDTH)(x)

    return Net()


def attention(wrap):
    """Layers that make flat kernels and shape them afterwards."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = wrap(nn.MultiHeadDotProductAttention)(num_heads=2)(x[None], mask=None)
            return wrap(nn.LayerNorm)()(wrap(nn.DenseGeneral)((2, 2))(x).reshape(x.shape))[0]

    return Net()


def a_layer(wrap):
    return wrap(nn.Dense)(WIDTH)


def an_instance(wrap):
    return wrap(Block())


def a_lambda(wrap):
    return wrap(lambda: nn.Dense(WIDTH))()


def a_partial(wrap):
    return wrap(functools.partial(nn.Dense, WIDTH))(use_bias=False)


def a_sequence(wrap):
    return nn.Sequential([wrap(nn.Dense)(WIDTH), lambda x: nn.relu(x), wrap(Block)(), nn.Dense(WIDTH)])


def twice(wrap):
    """A task around a task on the same devices."""
    return wrap(wrap(Block))()


MODELS = [
    a_layer,
    an_instance,
    a_lambda,
    a_partial,
    a_sequence,
    twice,
    compact,
    in_setup,
    as_fields,
    shared,
    bound,
    with_post_init,
    sharing_scope,
    rematerialised,
    over_layers,
    in_layers,
    mapped,
    attention,
]


def rows(count=3):
    return jnp.arange(count * WIDTH, dtype=jnp.float32).reshape(count, WIDTH) / 10 - 0.5
