"""A script whose processes go different ways, in the way that its first argument says, where nobody dies."""

import signal
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np

import manymesh as mm
from manymesh._distributed._world import several


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


def pipeline(first=jnp.sin):
    """A step that goes from process 1 to process 0."""
    front, back = mm.task(first, "front", devices=[1]), mm.task(lambda x: jnp.sum(x * 2), "back", devices=[0])
    return mm.jit(lambda x: back(front(x)))


def puts_arguments_elsewhere(me):
    """Each process in another of two ways that both have taken before."""
    step, host, placed = pipeline(), np.ones(4, np.float32), made(4, 0)
    for x in (host, placed, host, placed, host if me == 0 else placed):
        float(step(x))


def fails_again_and_again(me):
    """In process 1, which goes on with the next batch each time, before process 0 has ended."""
    jax.config.update("jax_debug_nans", True)
    step = pipeline(jnp.log)
    for number in range(8):
        try:
            float(step(np.full(4, 1 if number < 3 else -1, np.float32)))
        except FloatingPointError:
            print("a batch is left out")
    assert me == 1, "process 0 waits for what those would have sent"


def is_interrupted(me):
    """Process 1 alone, in the midst of a call, which the script catches."""
    step, x = pipeline(), np.ones(4, np.float32)
    float(step(x))
    if me == 1:
        several().counts_sent = lambda target: signal.raise_signal(signal.SIGINT)
    try:
        float(step(x))
    except KeyboardInterrupt:
        return
    assert me == 1, "process 0 waits for what was to come"


def is_interrupted_in_a_fetch(me):
    """Process 1 alone, before it has sent what process 0 asks for."""
    x = made(4, 1)
    if me == 1:
        several().counts_sent = lambda target: signal.raise_signal(signal.SIGINT)
    try:
        mm.fetch(x)
    except KeyboardInterrupt:
        return
    assert me == 1, "process 0 waits for what was to come"


def is_interrupted_as_it_compiles(me):
    """Process 1 alone, which stays where it is."""
    step, x = pipeline(), made(4, 1)
    if me == 1:
        jax.stages.Lowered.compile = lambda *_, **__: signal.raise_signal(signal.SIGINT)
    try:
        float(step(x))
    except KeyboardInterrupt:
        time.sleep(1000)


def compiles_for_long(me, x=np.ones(4, np.float32)):  # noqa: B008  # which nobody changes
    """Process 1, which has more to compile; process 0 waits in the agreement about what comes next."""
    if me == 1:
        compiled = jax.stages.Lowered.compile

        def slowly(*args, **kwargs):
            time.sleep(8)
            return compiled(*args, **kwargs)

        jax.stages.Lowered.compile = slowly
    float(pipeline()(x))


def compiles_for_long_what_needs_no_agreement(me):
    """The same, with an argument that is there already: process 0 waits for what process 1 sends."""
    ((described,), _) = pipeline().lower(jax.ShapeDtypeStruct((4,), "float32")).arguments
    there = described.sharding
    compiles_for_long(me, jax.make_array_from_callback((4,), there, lambda _: np.ones(4, np.float32), dtype="float32"))


def catches_what_a_callback_raised(me):
    """In both processes: it comes to the other one with the value, which both ask for, after the call."""
    called, result = threading.Event(), jax.ShapeDtypeStruct((4,), "float32")

    def sleeps(x):
        time.sleep(1)  # until process 1 has launched what reads it, which then waits for it beside the call
        return x

    def raises(x):
        called.wait(10)
        raise ValueError("on purpose")

    front = mm.task(lambda x: jax.pure_callback(sleeps, result, x), "front", devices=[0])
    back = mm.task(lambda x: jax.pure_callback(raises, result, x), "back", devices=[1])
    y = mm.jit(lambda x: back(front(x)))(np.ones(4, np.float32))
    called.set()
    try:
        mm.fetch(y)
    except jax.errors.JaxRuntimeError:
        return
    raise AssertionError(f"process {me} has not heard of it")


if __name__ == "__main__":
    mm.distributed.initialize(death_timeout=0.5, stall_timeout=5)
    globals()[sys.argv[1]](jax.process_index())
    print("ended well", jax.process_index())
