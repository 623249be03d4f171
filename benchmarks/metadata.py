"""How long it takes to handle the metadata of a large tree, beside Flax, in one run.

    python benchmarks/metadata.py [number of boxes]

Prints a table: milliseconds for Flax and for ManyMesh (the best of several rounds, taken in turns so that noise
meets both), their ratio, and the least ratio that the project promises. Exits with 1 if one is missed.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import flax.linen as nn
import jax
import numpy as np
from flax.core import meta as flax_meta
from jax.sharding import Mesh

from manymesh import meta

ROUNDS = 25
RULES = (("batch", "data"), ("embed", None), ("hidden", "model"), ("heads", "model"))
NAMES = (("embed", "hidden"), ("hidden", "embed"), ("embed", "heads"), ("hidden",), ("embed",))


def tree_of(box: Callable[[Any, tuple[str, ...]], Any], count: int) -> dict[str, Any]:
    """Layers of ten parameters each, boxed."""
    values = {n: jax.device_put(np.ones((8,) * len(n), np.float32)) for n in NAMES}
    return {
        f"layer_{i}": {f"p{j}": box(values[NAMES[j % 5]], NAMES[j % 5]) for j in range(10)} for i in range(count // 10)
    }


def compare(theirs: Callable[[], Any], ours: Callable[[], Any]) -> tuple[float, float]:
    """Milliseconds of each, the best of the rounds."""
    best = [float("inf"), float("inf")]
    for _ in range(ROUNDS):
        for i, run in enumerate((theirs, ours)):
            start = time.perf_counter()
            run()
            best[i] = min(best[i], time.perf_counter() - start)
    return best[0] * 1e3, best[1] * 1e3


def main(count: int) -> int:
    mesh = Mesh(np.array(jax.devices()).reshape(-1, 2), ("data", "model"))
    a, b = tree_of(nn.LogicallyPartitioned, count), tree_of(meta.LogicallyPartitioned, count)
    plain = tree_of(lambda value, names: value, count)
    params = {meta.PARTITION_NAME: "layers"}
    a1, b1 = flax_meta.add_axis(a, 0, params), meta.add_axis(b, 0, params)
    sa, sb = nn.get_partition_spec(a), meta.get_partition_spec(b)
    cases: list[tuple[str, float, Callable[[], Any], Callable[[], Any]]] = [
        ("unbox", 8, lambda: flax_meta.unbox(a), lambda: meta.unbox(b)),
        ("add_axis", 8, lambda: flax_meta.add_axis(a, 0, params), lambda: meta.add_axis(b, 0, params)),
        ("remove_axis", 8, lambda: flax_meta.remove_axis(a1, 0, params), lambda: meta.remove_axis(b1, 0, params)),
        ("replace_boxed", 8, lambda: flax_meta.replace_boxed(a, plain), lambda: meta.replace_boxed(b, plain)),
        (
            "logical_to_mesh_sharding",
            8,
            lambda: nn.logical_to_mesh_sharding(sa, mesh, RULES),
            lambda: meta.logical_to_mesh_sharding(sb, mesh, RULES),
        ),
        ("get_partition_spec", 3, lambda: nn.get_partition_spec(a), lambda: meta.get_partition_spec(b)),
    ]
    print(f"{count} boxes, JAX {jax.__version__}, Python {sys.version.split()[0]}")
    print(f"{'':26}{'Flax ms':>9}{'ours ms':>9}{'ratio':>8}{'promised':>10}")
    missed = 0
    for name, promised, theirs, ours in cases:
        flax_ms, our_ms = compare(theirs, ours)
        ratio = flax_ms / our_ms
        missed += ratio < promised
        verdict = "  MISSED" if ratio < promised else ""
        print(f"{name:26}{flax_ms:9.2f}{our_ms:9.2f}{ratio:8.1f}{promised:10.0f}{verdict}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000))
