"""A script in which process 1 fails in the way that its first argument says, in the third call of a step."""

import os
import signal
import sys
import time

import jax
import jax.numpy as jnp

import manymesh as mm


def now(what):
    print(f"{what} at {time.time()}", flush=True)


def main(case, limit):
    failing = os.environ.get("MANYMESH_PROCESS") == "1"
    if case == "never starts" and failing:
        time.sleep(100)
    mm.distributed.initialize(death_timeout=0.5, stall_timeout=limit, start_timeout=limit)

    front, back = (mm.task(lambda w, x: jnp.tanh(x @ w), name, devices=[d]) for name, d in (("front", 0), ("back", 1)))

    def loss(w, x):
        return jnp.mean(back(w, front(w, x)) ** 2)

    def train(w, x):
        return mm.microbatch(loss, argnum=1, num_microbatches=3, schedule="gpipe", reduce="mean")(w, x)

    step = mm.jit(train)
    other = mm.jit(lambda w, x: back(w, front(w, x)))
    w, x = jnp.eye(4), jnp.ones((6, 4))
    for number in range(1, 5):
        if failing and number == 3:
            now("fails")
            if case == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif case == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif case == "raise":
                raise ValueError("on purpose")
            elif case == "leaves early":
                sys.exit(0)
            elif case == "sleeps":
                time.sleep(100)
            elif case == "other step":
                float(other(w, x).sum())
            elif case == "other shape":
                x = jnp.ones((9, 4))
        float(step(w, x))
    print("ended well", jax.process_index())


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
