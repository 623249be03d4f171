"""One accelerator: a step of GPT-2 small in tasks beside one plain `jax.jit`, its memory, and every schedule.

    python benchmarks/gpu.py [step] [memory] [schedules] [--layers 12] [--width 768] [--length 1024] [--sequences 32]
                             [--microbatches 4] [--tasks 4] [--attention cudnn] [--rounds 20] [--json FILE]

Parameters and moments are float32, the computation is bfloat16, the optimizer AdamW with clipping, the embedding is tied.
``step``: the tasks lie on one submesh, with and without microbatches, or each on a submesh of its own, which is the same
device under another name, so that a schedule orders them; beside it stands one jitted function of the same model, with
`jax.lax.scan` over microbatches. Losses have to agree; times are compared by the ratio of neighbouring
runs of four steps.
``memory``: the peak that `compiled.report()` says, and the one that the device had, each step in a process of its own; two
of them put moments or activations into the memory of the host.
``schedules``: each schedule in float32 on submeshes of one device, beside a plain loop.

It runs on the first device of JAX's default platform, whichever that is. Nothing else needs an accelerator. The laws of
the tests on generated programs there, all of whose submeshes are then the lone device:

    JAX_PLATFORMS=cuda,cpu JAX_DEFAULT_MATMUL_PRECISION=highest XLA_PYTHON_CLIENT_PREALLOCATE=false \\
        python tests/fuzz.py --examples 600 --jobs 12
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

# Each process takes what it needs, so that the peak of one is not in the way of another.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _timing import alternate, ratio, row, write_rows
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, SingleDeviceSharding

import manymesh as mm

TARGET = 1 / 0.97
CLIP, RATE = 1.0, 1e-3
BETWEEN = "between layers"  # the name of what goes from one to the next
IN_FLIGHT = 4  # steps that are issued before somebody waits for them
STAGES = {  # submeshes of the stages, all on one device, and the schedules that admit them
    (0, 1, 2, 3): ("gpipe", "1f1b", "eager-1f1b", "wavefront", "zero-bubble-h1", "zero-bubble-h2"),
    (0, 1, 0, 1): ("interleaved",),
    (0, 1, 1, 0): ("zbv", "dualpipev"),
}


@dataclass(frozen=True)
class Size:
    """The size of the problem; ``length`` counts tokens."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    length: int = 1024
    vocabulary: int = 50304
    sequences: int = 32
    microbatches: int = 4
    tasks: int = 4
    attention: str | None = None

    def parameters(self) -> dict[str, Any]:
        """Initial parameters, on the host: float32."""
        rng = np.random.default_rng(0)

        def normal(*shape: int) -> np.ndarray:
            return rng.normal(0, 0.02, shape).astype(np.float32)

        def norm() -> dict[str, np.ndarray]:
            return {"scale": np.ones(self.width, np.float32), "bias": np.zeros(self.width, np.float32)}

        def dense(fan_in: int, fan_out: int) -> dict[str, np.ndarray]:
            return {"kernel": normal(fan_in, fan_out), "bias": np.zeros(fan_out, np.float32)}

        d = self.width
        layers = [
            {"norm_1": norm(), "qkv": dense(d, 3 * d), "out": dense(d, d),
             "norm_2": norm(), "up": dense(d, 4 * d), "down": dense(4 * d, d)}
            for _ in range(self.layers)
        ]  # fmt: skip
        each = self.layers // self.tasks
        return {
            "embedding": normal(self.vocabulary, d),
            "positions": normal(self.length, d),
            "stages": [layers[s * each : (s + 1) * each] for s in range(self.tasks)],
            "norm": norm(),
        }

    def batch(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and the ones after them: int32[sequences, length] each."""
        tokens = np.random.default_rng(1).integers(0, self.vocabulary, (self.sequences, self.length + 1), np.int32)
        return tokens[:, :-1], tokens[:, 1:]

    def flops(self) -> float:
        """Of a step, counted as usual: six for each parameter that multiplies and each token, and the attention."""
        multiplied = 12 * self.layers * self.width**2 + self.vocabulary * self.width
        return self.sequences * self.length * (6 * multiplied + 12 * self.layers * self.width * self.length)


def norm(p: Any, x: Any) -> Any:
    """Layer normalization, in float32."""
    y = x.astype(jnp.float32)
    y = y - jnp.mean(y, -1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 1e-5)
    return (y * p["scale"] + p["bias"]).astype(x.dtype)


def dense(p: Any, x: Any) -> Any:
    """A product in the type of x."""
    return x @ p["kernel"].astype(x.dtype) + p["bias"].astype(x.dtype)


def blocks(size: Size, layers: Sequence[Any], x: Any) -> Any:
    """Attention that looks back, and a perceptron, some times."""
    for p in layers:
        x = checkpoint_name(x, BETWEEN)
        heads = dense(p["qkv"], norm(p["norm_1"], x)).reshape(*x.shape[:2], 3, size.heads, -1)
        q, k, v = heads[:, :, 0], heads[:, :, 1], heads[:, :, 2]
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=size.attention)
        x = x + dense(p["out"], mixed.reshape(x.shape))
        x = x + dense(p["down"], jax.nn.gelu(dense(p["up"], norm(p["norm_2"], x))))
    return x


def embed(p: Any, tokens: Any) -> Any:
    """Tokens and their places, in bfloat16."""
    return (p["embedding"][tokens] + p["positions"]).astype(jnp.bfloat16)


def head(p: Any, x: Any, targets: Any) -> Any:
    """The mean loss of the next token, in float32."""
    logits = norm(p["norm"], x) @ p["embedding"].T.astype(x.dtype)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), targets))


def plain_loss(size: Size, p: Any, batch: Any) -> Any:
    """The model, with nothing of this library."""
    x = embed(p, batch[0])
    for layers in p["stages"]:
        x = blocks(size, layers, x)
    return head(p, x, batch[1])


def loss_in_tasks(size: Size, meshes: Sequence[Mesh], offload: bool = False) -> Callable[[Any, Any], Any]:
    """The same model: the embedding with the first layers, the loss with the last ones.

    With ``offload`` the host keeps what goes from layer to layer, and the backward pass computes the rest again.
    """

    def first(p: Any, layers: Any, tokens: Any) -> Any:
        return blocks(size, layers, embed(p, tokens))

    def last(p: Any, layers: Any, x: Any, targets: Any) -> Any:
        return head(p, blocks(size, layers, x), targets)

    middle = functools.partial(blocks, size)
    functions = [first, *[middle] * (size.tasks - 2), last]
    if offload:
        policy = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[], names_which_can_be_offloaded=[BETWEEN],
            offload_src="device", offload_dst="pinned_host",
        )  # fmt: skip
        functions = [jax.checkpoint(f, policy=policy) for f in functions]
    tasks = [mm.task(f, f"stage_{s}", mesh=m) for s, (f, m) in enumerate(zip(functions, meshes, strict=True))]

    def loss(p: Any, batch: Any) -> Any:
        x = tasks[0]({k: p[k] for k in ("embedding", "positions")}, p["stages"][0], batch[0])
        for task, layers in zip(tasks[1:-1], p["stages"][1:-1], strict=True):
            x = task(layers, x)
        return tasks[-1]({k: p[k] for k in ("embedding", "norm")}, p["stages"][-1], x, batch[1])

    return loss


def meshes_of_one_device(placement: Sequence[int]) -> list[Mesh]:
    """A submesh for each number, all of them the first device: under different names they are different submeshes."""
    return [Mesh(np.array(jax.devices()[:1]), (f"stage_{k}",)) for k in placement]


class Step:
    """A step and its state, which it donates.

    Args:
      size: of the problem.
      how: ``plain``, ``tasks`` on one submesh, ``hosted``, the same with its moments in the memory of the host,
        ``offloaded``, with activations there, or ``submeshes``, one for each task.
      microbatches: into how many the batch is cut; None cuts nothing.
    """

    def __init__(self, size: Size, how: str, microbatches: int | None) -> None:
        self.optimizer = optax.chain(optax.clip_by_global_norm(CLIP), optax.adamw(RATE))
        if how == "plain":
            grad = self._accumulated(jax.value_and_grad(functools.partial(plain_loss, size)), microbatches)
        else:
            placement = range(size.tasks) if how == "submeshes" else [0] * size.tasks
            loss = loss_in_tasks(size, meshes_of_one_device(placement), offload=how == "offloaded")
            grad = jax.value_and_grad(loss)
            if microbatches is not None:
                grad = mm.microbatch(grad, argnum=1, num_microbatches=microbatches, schedule="1f1b", reduce="mean")

        def train(state: Any, batch: Any) -> Any:
            value, grads = grad(state[0], batch)
            updates, moments = self.optimizer.update(grads, state[1], state[0])
            return value, (optax.apply_updates(state[0], updates), moments)

        device = jax.devices()[0]
        parameters = size.parameters()
        moments = jax.tree.map(np.asarray, self.optimizer.init(parameters))
        there = SingleDeviceSharding(device, memory_kind="pinned_host") if how == "hosted" else device
        self.state: Any = (jax.device_put(parameters, device), jax.device_put(moments, there))
        self.batch = jax.device_put(size.batch(), device)
        jitted = (jax.jit if how == "plain" else mm.jit)(train, donate_argnums=0)
        begin = time.perf_counter()
        lowered = jitted.lower(self.state, self.batch)
        self.compiled = lowered.compile()
        self.seconds = time.perf_counter() - begin
        # None where nothing is known of the device.
        reports = [] if how == "plain" else [lowered.report(), self.compiled.report()]
        self.predicted = [report.prediction and report.prediction.seconds for report in reports]

    @staticmethod
    def _accumulated(grad: Any, microbatches: int | None) -> Any:
        if microbatches is None:
            return grad

        def scanned(p: Any, batch: Any) -> Any:
            def add(total: Any, piece: Any) -> Any:
                return jax.tree.map(jnp.add, total, grad(p, piece)), None

            pieces = jax.tree.map(lambda x: x.reshape(microbatches, -1, *x.shape[1:]), batch)
            zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(grad, p, batch))
            return jax.tree.map(lambda x: x / microbatches, jax.lax.scan(add, zeros, pieces)[0])

        return scanned

    def __call__(self) -> float:
        """Some steps, as in training: nobody waits for one before the next. Returns the loss before the last of them."""
        for _ in range(IN_FLIGHT):
            loss, self.state = self.compiled(self.state, self.batch)
        jax.block_until_ready(self.state)
        return float(loss)


def compare(size: Size, how: str, microbatches: int | None, rounds: int, seconds: float) -> dict[str, Any]:
    """Steps both in turns, checks that the losses agree, and returns a row of the table."""
    steps = {"mm": Step(size, how, microbatches), "plain": Step(size, "plain", microbatches)}
    losses: dict[str, list[float]] = {who: [] for who in steps}
    runs = {who: lambda who=who: losses[who].append(steps[who]()) for who in steps}
    samples = alternate(runs, rounds, warm_up=3, seconds=seconds)
    # Two programs round differently in bfloat16, and training on one batch drives them apart.
    np.testing.assert_allclose(losses["mm"][:3], losses["plain"][:3], rtol=1e-2, err_msg="losses differ")
    found = ratio(samples["mm"], samples["plain"])
    ours, theirs = (1e3 * min(s.wall for s in samples[who]) / IN_FLIGHT for who in ("mm", "plain"))
    pieces = "one batch" if microbatches is None else f"{microbatches} microbatches"
    places = "on one submesh" if how == "tasks" else "on submeshes of their own"
    name = f"GPT-2 in {size.tasks} tasks {places}, {pieces}, {size.attention or 'default'} attention"
    before, after = map(_milliseconds, steps["mm"].predicted)
    print(
        f"{name}: ratio {found}; best steps: {ours:.2f} ms, one jit {theirs:.2f} ms, "
        f"{size.flops() / theirs / 1e9:.0f} TFLOP/s; predicted {before} before compiling, {after} after; "
        f"compiled in {steps['mm'].seconds:.1f} s, one jit {steps['plain'].seconds:.1f} s; "
        f"losses {_few(losses['mm'])}, one jit {_few(losses['plain'])}",
        flush=True,
    )
    return row(
        name, f"{ours:.2f} ms", f"{theirs:.2f} ms in one jit", f"{found.median:.3f} ({found.low:.3f} to {found.high:.3f})",
        f"<= {TARGET:.3f}", found.median <= TARGET,
    )  # fmt: skip


def _few(losses: Sequence[float]) -> str:
    return " ".join(f"{loss:.4f}" for loss in losses[:3])


def _milliseconds(seconds: float | None) -> str:
    return "nothing" if seconds is None else f"{1e3 * seconds:.1f} ms"


def peak(size: Size, how: str, microbatches: int | None) -> dict[str, float]:
    """Bytes of the state, of the predicted peak and of the measured one, after some steps in this process; their time."""
    step = Step(size, how, microbatches)
    step()
    begin = time.perf_counter()
    step()
    seconds = (time.perf_counter() - begin) / IN_FLIGHT
    device = jax.devices()[0]
    stats = device.memory_stats() or {}
    if how == "plain":
        told = step.compiled.memory_analysis()
        predicted = told.argument_size_in_bytes + told.temp_size_in_bytes + told.output_size_in_bytes
        predicted -= told.alias_size_in_bytes
    else:
        predicted = step.compiled.report().memory[device].peak_bytes
    state = sum(x.nbytes for x in jax.tree.leaves(step.state))
    return {
        "state": state,
        "predicted": predicted,
        "measured": stats.get("peak_bytes_in_use", float("nan")),
        "after": stats.get("bytes_in_use", float("nan")),
        "seconds": seconds,
    }


def memory(size: Size, options: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each step, which runs in a process of its own."""
    rows = []
    tried = [("plain", 0), ("tasks", 0), ("offloaded", 0)]
    for how, cut in [*tried, ("plain", 1), ("tasks", 1), ("hosted", 1), ("submeshes", 1)]:
        command = [sys.executable, __file__, *options, "--peak", how, str(cut)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-4000:]}")
        found = json.loads(done.stdout.splitlines()[-1])
        seconds = found.pop("seconds")
        name = f"memory, {how}, {f'{size.microbatches} microbatches' if cut else 'one batch'}"
        off = found["predicted"] / found["measured"] - 1
        print(
            f"{name}: " + ", ".join(f"{k} {v / 1e9:.3f} GB" for k, v in found.items()) + f"; off by {off:+.1%}; "
            f"a step takes {1e3 * seconds:.1f} ms",
            flush=True,
        )
        rows.append(
            row(name, f"{found['predicted'] / 1e9:.2f} GB predicted", f"{found['measured'] / 1e9:.2f} GB measured",
                f"{off:+.1%}", "" if how == "plain" else "within 5 %", None if how == "plain" else abs(off) <= 0.05)
        )  # fmt: skip
    return rows


def every_schedule() -> list[dict[str, Any]]:
    """Values and gradients of each schedule on one device, beside a plain loop; raises if they differ."""
    tried = {name for named in STAGES.values() for name in named}
    rng = np.random.default_rng(0)
    w = [tuple(rng.normal(0, 0.3, (64, 64)).astype(np.float32) for _ in range(2)) for _ in range(4)]
    x = rng.normal(size=(64, 64)).astype(np.float32)

    def block(w: Any, x: Any) -> Any:
        return x + jnp.tanh(x @ w[0]) @ w[1]

    def plain(w: Any, x: Any) -> Any:
        for p in w:
            x = block(p, x)
        return jnp.mean(x**2)

    with jax.default_matmul_precision("highest"):
        one = jax.jit(jax.value_and_grad(plain))
        expected = jax.tree.map(lambda *v: sum(v) / 8, *[one(w, x[8 * m : 8 * m + 8]) for m in range(8)])
        for placement, named in STAGES.items():
            tasks = [mm.task(block, f"block_{s}", mesh=m) for s, m in enumerate(meshes_of_one_device(placement))]

            def loss(w: Any, x: Any, tasks: Any = tasks) -> Any:
                for task, p in zip(tasks, w, strict=True):
                    x = task(p, x)
                return jnp.mean(x**2)

            for schedule in named:
                grad = mm.microbatch(
                    jax.value_and_grad(loss), argnum=1, num_microbatches=8, schedule=schedule, reduce="mean"
                )
                compiled = mm.jit(grad).lower(w, x).compile()
                assert compiled.program.loops[0].placement == placement, (schedule, compiled.program.loops[0].placement)
                for _ in range(2):
                    jax.tree.map(
                        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), compiled(w, x), expected
                    )
                print(f"{schedule} on {placement}: values of the plain loop", flush=True)
    return [row("schedules on one device", f"{len(tried)} of them", "a plain loop", "equal", "equal", True)]


def main() -> None:
    """Reads the command line and measures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", default=["step", "memory", "schedules"], help="step, memory, schedules")
    for name in ("layers", "width", "heads", "length", "vocabulary", "sequences", "microbatches", "tasks"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Size, name))
    parser.add_argument("--attention", choices=["xla", "cudnn"], help="implementation; JAX chooses otherwise")
    parser.add_argument("--rounds", type=int, default=20, help="most rounds")
    parser.add_argument("--seconds", type=float, default=30, help="about the time for them")
    parser.add_argument("--json", help="write the rows of the table to this file")
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)
    a = parser.parse_args()
    size = Size(*(getattr(a, name) for name in Size.__dataclass_fields__))
    if a.peak:
        print(json.dumps(peak(size, a.peak[0], size.microbatches if int(a.peak[1]) else None)))
        return
    rows: list[dict[str, Any]] = []
    if "memory" in a.parts:  # before this process takes any
        options = [f"--{name}={value}" for name, value in vars(size).items() if value is not None]
        rows += memory(size, options)
    print(f"{size}, {jax.devices()[0].device_kind}, JAX {jax.__version__}, Python {sys.version.split()[0]}", flush=True)
    if "schedules" in a.parts:
        rows += every_schedule()
    if "step" in a.parts:
        for how, count in (("tasks", None), ("tasks", size.microbatches), ("submeshes", size.microbatches)):
            rows.append(compare(size, how, count, a.rounds, a.seconds))
    write_rows(a.json, rows)


if __name__ == "__main__":
    main()
