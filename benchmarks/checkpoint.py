"""Saving and restoring, beside Orbax and beside TensorStore by hand, of the same bytes.

    python benchmarks/checkpoint.py [--megabytes 256] [--leaves 2000] [--rounds 7] [--json FILE]

Two states: sixteen large arrays, sharded over two submeshes of two devices, and many small ones. A save ends when all is
on disk; a restore when every array is where it belongs. Orbax compresses by default; it is asked not to, as is done here.
TensorStore by hand writes each array, taken from the devices, as files of its own, one chunk a shard, and reads it back.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts
from _timing import alternate, ratio, row, write_rows
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import manymesh as mm

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of the library
    import orbax.checkpoint as ocp

LIMIT = {"Orbax": 1.0, "TensorStore": 1.25}


def state_of(count: int, size: int) -> dict[str, jax.Array]:
    """So many arrays of so many bytes, in turns on two submeshes."""
    meshes = [Mesh(np.array(jax.devices()[i : i + 2]), ("x",)) for i in (0, 2)]
    rng = np.random.default_rng(0)
    return {
        f"w{i}": jax.device_put(
            jnp.asarray(rng.normal(size=(size // 1024, 256)), jnp.float32), NamedSharding(meshes[i % 2], P("x"))
        )
        for i in range(count)
    }


class Ours:
    """This library."""

    def save(self, path: Path, state: dict[str, jax.Array]) -> None:
        mm.checkpoint.save(path, state)

    def restore(self, path: Path, like: dict[str, Any]) -> Any:
        return mm.checkpoint.restore(path, like)


class Orbax:
    """Orbax, without compression."""

    def __init__(self) -> None:
        self.checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False))

    def save(self, path: Path, state: dict[str, jax.Array]) -> None:
        self.checkpointer.save(path, ocp.args.PyTreeSave(state))

    def restore(self, path: Path, like: dict[str, Any]) -> Any:
        wanted = ocp.checkpoint_utils.construct_restore_args(like)
        return self.checkpointer.restore(path, ocp.args.PyTreeRestore(like, restore_args=wanted))


class TensorStore:
    """TensorStore by hand: no database, nothing atomic."""

    def spec(self, path: Path, name: str) -> dict[str, Any]:
        return {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/{name}/"}}

    def save(self, path: Path, state: dict[str, jax.Array]) -> None:
        stores = {}
        for name, x in state.items():
            chunk = {"name": "regular", "configuration": {"chunk_shape": x.sharding.shard_shape(x.shape)}}
            spec = {**self.spec(path, name), "metadata": {"chunk_grid": chunk}}
            stores[name] = ts.open(spec, create=True, dtype=ts.float32, shape=x.shape)
        writes = []
        for name, x in state.items():
            store = stores[name].result()
            for shard in x.addressable_shards:
                writes.append(
                    store[shard.index].write(np.array(shard.data), can_reference_source_data_indefinitely=True)
                )
        for write in writes:
            write.result()

    def restore(self, path: Path, like: dict[str, Any]) -> Any:
        stores = {name: ts.open(self.spec(path, name), open=True) for name in like}
        reads = {
            name: {
                device: stores[name].result()[index].read()
                for device, index in x.sharding.devices_indices_map(x.shape).items()
            }
            for name, x in like.items()
        }
        return {
            name: jax.make_array_from_single_device_arrays(
                x.shape, x.sharding, [jax.device_put(read.result(), device) for device, read in reads[name].items()]
            )
            for name, x in like.items()
        }


def compare(what: str, state: dict[str, jax.Array], rounds: int) -> list[dict[str, Any]]:
    """Times all of them on one state; the values that come back have to be equal."""
    like = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for name, x in state.items()}
    kinds = {"ours": Ours(), "Orbax": Orbax(), "TensorStore": TensorStore()}
    with tempfile.TemporaryDirectory() as folder:

        def save(name: str) -> Callable[[], None]:
            def run() -> None:
                path = Path(folder, name)
                shutil.rmtree(path, ignore_errors=True)
                kinds[name].save(path, state)

            return run

        def restore(name: str) -> Callable[[], None]:
            return lambda: jax.block_until_ready(kinds[name].restore(Path(folder, name), like))

        saves = alternate({name: save(name) for name in kinds}, rounds, warm_up=1)
        for kind_name, kind in kinds.items():
            found = kind.restore(Path(folder, kind_name), like)
            assert all(np.array_equal(found[name], x) for name, x in state.items()), (
                f"{kind_name} restored other values"
            )
        restores = alternate({name: restore(name) for name in kinds}, rounds, warm_up=1)
    rows = []
    for verb, samples in (("save", saves), ("restore", restores)):
        best = {name: min(sample.wall for sample in taken) for name, taken in samples.items()}
        for other, limit in LIMIT.items():
            figure = ratio(samples["ours"], samples[other])
            print(f"{verb} {what}, beside {other}: {figure}; best {best['ours']:.3f} s beside {best[other]:.3f} s")
            beside = f"{other} {best[other]:.2f} s"
            text = f"{figure.median:.2f} ({figure.low:.2f} to {figure.high:.2f})"
            rows.append(
                row(f"{verb} {what}", f"{best['ours']:.2f} s", beside, text, f"<= {limit}", figure.median <= limit)
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--leaves", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json")
    options = parser.parse_args()
    rows = compare(
        f"{options.megabytes} MB in 16 arrays", state_of(16, options.megabytes * 2**16), options.rounds
    ) + compare(f"{options.leaves} arrays of 4 KB", state_of(options.leaves, 4096), options.rounds)
    write_rows(options.json, rows)


if __name__ == "__main__":
    sys.exit(main())
