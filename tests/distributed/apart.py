"""A script whose processes go different ways, in the way that its first argument says, where nobody dies."""

import sys

import jax
import jax.numpy as jnp
import numpy as np

import manymesh as mm


def made(size, device):
    """An array that a step has made on a device."""
    return mm.jit(lambda x: mm.task(jnp.sin, "made", devices=[device])(x))(np.ones(size, np.float32))


def fetches_for_itself(me):
    """Each process asks for an array alone."""
    mm.fetch(made(4, 1), process=me)


def fetches_in_another_order(me):
    """Of trees that all have agreed on before."""
    trees = made(4, 0), made(5, 1)
    for tree in (*trees, *(reversed(trees) if me == 0 else trees)):
        mm.fetch(tree)


if __name__ == "__main__":
    mm.distributed.initialize(death_timeout=0.5, stall_timeout=5)
    globals()[sys.argv[1]](jax.process_index())
    print("ended well", jax.process_index())
