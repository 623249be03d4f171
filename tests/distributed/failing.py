"""A script in which process 1 fails in the way that its first argument says, in the third call of a step.

Where the coordinator is to be lost, that is process 0, which hosts the service because nobody launched it.
"""

import multiprocessing
import os
import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

import manymesh as mm


class Wordless(Exception):
    """Has no text."""

    def __str__(self):
        """Fails."""
        raise RuntimeError("nor this one")


def now(what):
    print(f"{what} at {time.time()}", flush=True)


def main(case, limit, *address):
    """Calls a step four times.

    Args:
      case: what happens.
      limit: seconds of silence, or until all have started.
      address: of the coordinator, the number of processes and of this one, where it was not launched.
    """
    address = (address[0], int(address[1]), int(address[2])) if address else ()
    failing = address[2] == 0 if address else os.environ.get("MANYMESH_PROCESS") == "1"
    if case == "never starts" and failing:
        time.sleep(100)
    now(f"pid {os.getpid()} starts")
    mm.distributed.initialize(
        *address, death_timeout=0.5, stall_timeout=limit, start_timeout=limit if case == "never starts" else 100
    )

    def last(w, x):
        y = jnp.tanh(x @ w)
        return jnp.log(y) if case.startswith("catches") else y

    front = mm.task(lambda w, x: jnp.tanh(x @ w), "front", devices=[0])
    back = mm.task(last, "back", devices=[1])

    def loss(w, x):
        return jnp.mean(back(w, front(w, x)) ** 2)

    def train(w, x):
        return mm.microbatch(loss, argnum=1, num_microbatches=3, schedule="gpipe", reduce="mean")(w, x)

    step = mm.jit(train)
    other = mm.jit(lambda w, x: back(w, front(w, x)))
    w, x = np.eye(4, dtype=np.float32), np.ones((6, 4), np.float32)  # which compile nothing
    if case == "catches with state":  # which the others do not have
        w = mm.jit(mm.task(lambda w: 1 * w, "made", devices=[1]))(w)
    if case == "leaves at once" and failing:
        sys.exit(3)
    for number in range(1, 5):
        if number == 3 and case == "lost launcher":
            now("fails")
            time.sleep(100)
        if failing and number == 3:
            now("fails")
            if case in ("kill", "lost coordinator"):
                os.kill(os.getpid(), signal.SIGKILL)
            elif case == "kill with workers":
                workers = multiprocessing.get_context("fork").Pool(2)
                workers.map_async(time.sleep, [100, 100])  # who only waits for work ends when this process does
                time.sleep(0.5)
                os.kill(os.getpid(), signal.SIGKILL)
            elif case == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif case == "raise":
                raise ValueError("on purpose.")
            elif case == "raise without words":
                raise Wordless
            elif case == "leaves early":
                sys.exit(0)
            elif case == "leaves with 3":
                sys.exit(3)
            elif case == "sleeps":
                time.sleep(100)
            elif case == "other step":
                float(other(w, x).sum())
            elif case == "other shape":
                x = np.ones((9, 4), np.float32)
        if case.startswith("catches"):
            jax.config.update("jax_debug_nans", True)
            x = -x if number == 3 else x
        try:
            float(step(w, x))
        except FloatingPointError as error:
            print("caught", error, flush=True)
            sys.exit(3)  # as a script does that handles its own errors
    print("ended well", jax.process_index())


def fails_at_first():
    """Gives how often all processes were started again."""
    if os.environ["MANYMESH_RESTARTS"] == "0":
        raise ValueError("on purpose")
    return int(os.environ["MANYMESH_RESTARTS"])


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), *sys.argv[3:])
