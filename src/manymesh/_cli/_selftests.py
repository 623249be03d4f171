"""What ``doctor`` tries: each a function without arguments that gives an `Outcome`."""

from __future__ import annotations

import functools
import io
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from .. import _compat
from .._api._jit import jit
from .._distributed._launch import run_processes
from .._distributed._transports import VARIABLE, asked_for, of_backend
from .._mark import ignore_transforms, task
from .._microbatch import microbatch
from .._plan._instructions import Tag
from .._runtime._transport import Batch, LocalTransport
from .._shown import format_bytes
from ._between import COUNTS, MARK

_WORDS = 1 << 20  # float32 values that are sent to see how fast: 4 MiB
_SECONDS = 90.0  # that two processes have to start, send and end


@dataclass(frozen=True)
class Outcome:
    """What a test found.

    Attributes:
      name: what was tried.
      ok: whether it works; None where it could not be tried.
      words: what was seen, or why not.
    """

    name: str
    ok: bool | None
    words: str


def _outcome(name: str) -> Callable[[Callable[[], tuple[bool | None, str]]], Callable[[], Outcome]]:
    """Makes a test of a function that gives whether it went well, and words; an exception is a failure."""

    def decorate(check: Callable[[], tuple[bool | None, str]]) -> Callable[[], Outcome]:
        def run() -> Outcome:
            try:
                return Outcome(name, *check())
            except Exception as error:  # whatever breaks here is what doctor is asked about
                return Outcome(name, False, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")

        return run

    return decorate


@_outcome("layouts without compiling")
def layouts() -> tuple[bool | None, str]:
    """Shardy's propagation pass, which `lower` needs to lay values out for devices that are not there."""
    mesh = AbstractMesh((2,), ("d",))
    value = jax.ShapeDtypeStruct((4,), jnp.float32)
    found = _compat.propagate(
        lambda **how: jax.jit(lambda x: [x + 1], **how).trace(value), mesh, [PartitionSpec("d")], [None]
    )
    if found is None:
        return None, "this jaxlib has no propagation pass: lower() compiles to see layouts, and needs real devices"
    return found.outputs == [PartitionSpec("d")], f"the pass keeps a sharding through an addition: {found.outputs[0]}"


@_outcome("transport inside this process")
def local_transport() -> tuple[bool | None, str]:
    """Values between two submeshes of one process: right, and how fast."""
    devices = jax.local_devices()
    if len(devices) < 2:
        return None, "needs two devices"
    here, there = (NamedSharding(Mesh(np.array([d]), ("d",)), PartitionSpec()) for d in devices[:2])
    times = []
    for count in (1, _WORDS):
        aval = jax.ShapeDtypeStruct((count,), jnp.float32)
        batch = Batch(
            Tag(0, 1, None), 0, 1,
            (jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=here),),
            (jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=there),), 0, (False,),
        )  # fmt: skip
        move = LocalTransport().move(batch)
        value = jax.block_until_ready(jax.device_put(np.arange(count, dtype=np.float32), here))
        (arrived,) = move(value)
        if arrived.sharding.device_set != {devices[1]} or not np.array_equal(arrived, np.arange(count)):
            return False, f"{count} values did not arrive as they left"
        times.append(min(_seconds(functools.partial(move, value)) for _ in range(5)))
    return True, (
        f"{devices[0]} to {devices[1]}: {times[0] * 1e6:.0f} us for a number, "
        f"{format_bytes(round(4 * _WORDS / times[1]))}/s for {format_bytes(4 * _WORDS)}"
    )


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - begin


@_outcome("transport between processes")
def transport_between_processes() -> tuple[bool | None, str]:
    """Values from one local process to another, by the transport that would be chosen: right, and how fast."""
    asked = asked_for(None)
    name = asked or of_backend()
    why = f"as {VARIABLE} says" if asked else f"which suits the backend ({jax.default_backend()})"
    output = io.StringIO()
    variables = {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "JAX_PLATFORMS": "cpu", VARIABLE: name}
    command = [sys.executable, "-m", "manymesh._cli._between"]
    code = run_processes(command, 2, 1, output=output, more=variables, timeout=_SECONDS)
    lines = output.getvalue().splitlines()
    said = next((line.partition(MARK)[2] for line in lines if MARK in line), None)
    if said is None:
        last = next((line for line in reversed(lines) if line.startswith("[")), "they said nothing")
        return False, f"{name}, {why}: two processes ended with exit code {code}: {last[:300]}"
    found = json.loads(said)
    wrong = [words for words in found if isinstance(words, str)]
    if wrong or code:
        return False, f"{name}, {why}: {'; '.join(wrong) or f'the processes ended with exit code {code}'}"
    return True, (
        f"{name}, {why}; between two processes on CPU {found[0] * 1e6:.0f} us for a number, "
        f"{format_bytes(round(4 * COUNTS[1] / found[1]))}/s for {format_bytes(4 * COUNTS[1])}"
    )


@_outcome("a pipeline, against plain JAX")
def pipeline() -> tuple[bool | None, str]:
    """Two tasks, differentiated and looped over microbatches, give what one device gives."""
    devices = jax.local_devices()
    ends = devices[0], devices[-1]
    front, back = (
        task(lambda w, x: jnp.tanh(x @ w), name, devices=[d]) for name, d in zip(("front", "back"), ends, strict=True)
    )

    def loss(weights: tuple[jax.Array, jax.Array], x: jax.Array) -> jax.Array:
        return jnp.mean(back(weights[1], front(weights[0], x)) ** 2)

    step = jit(microbatch(jax.grad(loss), argnum=1, num_microbatches=2, schedule="1f1b", reduce="mean"))
    arguments = (jnp.eye(8), jnp.ones((8, 8)) / 8), jnp.arange(32.0).reshape(4, 8) / 32
    ours = step(*arguments)
    with ignore_transforms():
        reference = step(*arguments)
    worst = max(float(jnp.max(jnp.abs(np.asarray(a) - np.asarray(b)))) for a, b in zip(ours, reference, strict=True))
    where = f"on {ends[0]} and {ends[1]}" if len(devices) > 1 else "on one device, the only one"
    return worst < 1e-5, f"gradients of two stages {where} differ by {worst:.1e} at most"


CHECKS: tuple[Callable[[], Outcome], ...] = (layouts, local_transport, transport_between_processes, pipeline)
"""In the order in which they are run."""
