"""Two processes save one checkpoint and restore it: each writes and reads what it owns."""

from __future__ import annotations

import socket
import subprocess
import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import manymesh as mm

WORKER = """
import os, sys
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
os.environ["JAX_PLATFORMS"] = "cpu"
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

jax.config.update("jax_cpu_collectives_implementation", "gloo")
me, port, directory = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.distributed.initialize(f"127.0.0.1:{port}", 2, me, initialization_timeout=300, heartbeat_timeout_seconds=60)
import manymesh as mm, tensorstore as ts
from manymesh._runtime._exchange import assembled
from manymesh.errors import CheckpointError

devices = jax.devices()
first, second = (Mesh(np.array(devices[i : i + 2]), ("x",)) for i in (0, 2))
across = Mesh(np.array(devices[1:3]), ("x",))
everywhere = Mesh(np.array(devices), ("x",))

def array(start, mesh, *spec):
    # Each process holds the shards of its own devices: none of a submesh of the other one.
    whole = np.arange(start, start + 2**16, dtype=np.float32).reshape(256, 256)
    sharding = NamedSharding(mesh, P(*spec))
    return jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index], dtype=whole.dtype)

def keys(mesh):
    # Typed random keys of one process; of the other, an array without a value.
    sharding = NamedSharding(mesh, P())
    mine = [d for d in mesh.devices.flat if d.process_index == me]
    words = jax.device_put([np.arange(6, dtype=np.uint32).reshape(3, 2)] * len(mine), mine)
    return assembled(jax.ShapeDtypeStruct((3,), jax.random.key(0).dtype, sharding=sharding), words)

def state(first, second, *spec):
    return {"first": array(0, first, *spec), "second": array(1, second, *spec), "across": array(2, across, *spec),
            "everywhere": array(3, everywhere, *spec), "replicated": array(4, across), "host": np.arange(3), "step": 7,
            "whole": {"first": array(5, first), "second": array(6, second)}, "keys": keys(second), "uncommitted": jnp.arange(2.0)}

def numbers(x):
    return jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x

def same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
        if isinstance(e, jax.Array):
            assert a.sharding == e.sharding
            for x, y in zip(a.addressable_shards, e.addressable_shards, strict=True):
                assert x.index == y.index and np.array_equal(numbers(x.data), numbers(y.data))
        else:
            assert np.array_equal(a, e)

def read():
    metrics = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return sum(value["value"] for metric in metrics for value in metric["values"])

def blank(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
                        if isinstance(x, jax.Array) and x.sharding.num_devices > 1 else x, tree)

saved = state(first, second, "x")
with mm.checkpoint.Manager(directory, max_to_keep=2) as manager:
    for step in range(3):
        manager.save(step, saved, metadata={"step": step, "own": [mm.checkpoint.ByProcess({"rows": me})]})
assert manager.all_steps() == [1, 2] and manager.metadata() == {"step": 2, "own": [[{"rows": 0}, {"rows": 1}]]}
same(manager.restore(like=blank(saved)), saved)
other = state(second, first, None, "x")
same(manager.restore(like=blank(other)), other)
before = read()
manager.restore(like=blank({k: saved[k] for k in ("first", "second")}))
assert 1 <= (read() - before) / 2**18 < 1.1, read() - before
for wrong, words in (({"w": jnp.ones(2 + me)}, "9: nothing was saved; process 1 saves another tree than process 0"),
                     ({"w": jnp.ones(2 + me)}, "of w, process 0 has float32[2], process 1 has float32[3]"),
                     ({"a": 1, "b": 2} if me else {"a": 1}, "of b, process 0 lacks it, process 1 has int64[]"), ({"first": saved[["first", "second"][me]]}, "numbers were")):
    try:
        mm.checkpoint.save(directory + "/9", wrong)
        assert False, "processes that save different trees"
    except CheckpointError as error:
        assert words in str(error), error
def generator():
    return np.random.default_rng(me).bit_generator.state

rows = {"rows": array(0, first), "position": np.arange(3) + me, "keys": jax.random.key(me), "many": np.arange(2**17) + me}
for wrong, metadata, words in (({"seen": 10 + me}, None, ["1 saves other values", "\\n  seen: process 0 has int64[] 10, process 1 has int64[] 11"]),
                               ({"seen": 10}, {"batch": me, "rng": generator()}, ["has 0, process 1 has 1\\n  metadata['rng']['state']['inc']:", "ByProcess"]),
                               (rows, None, ["position: process 0 has int64[3] [0, 1, 2]", "\\n  keys: ", "\\n  many: "]),
                               ({}, {"a": 1, "b": 2} if me else {"a": 1}, ["metadata['b']: process 0 lacks it, process 1 has 2"]),
                               ({}, mm.checkpoint.ByProcess(1) if me else 1, ["metadata: process 0 has 1, process 1 has ByProcess"])):
    try:
        mm.checkpoint.save(directory + "/8", wrong, metadata=metadata)
        assert False, "processes that save different values"
    except CheckpointError as error:
        assert all(word in str(error) for word in words) and "rows:" not in str(error) and "'a'" not in str(error), error
assert not os.path.exists(directory + "/8.orbax-checkpoint-tmp")
mm.checkpoint.save(directory + "-alike", {"w": np.array([np.nan])}, metadata=dict(sorted({"a": 1, "b": 2}.items(), reverse=bool(me))))
assert mm.checkpoint.metadata(directory + "-alike") == {"a": 1, "b": 2}
try:
    mm.checkpoint.save(f"{directory}-of-{me}/9", saved)
    assert False, "a disk for each process"
except CheckpointError as error:
    assert "process 0 does not see what process 1 wrote" in str(error) and "on a disk that all processes share" in str(error)
assert sorted(os.listdir(directory)) == ["1", "2", "9.orbax-checkpoint-tmp"]
print("done", me)
"""


def test_two_processes(tmp_path) -> None:
    """What two processes saved is restored in both, on other submeshes too, and in one process of many devices."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(k), str(port), str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for k in range(2)
    ]
    try:
        said = [worker.communicate(timeout=300)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    for k, text in enumerate(said):
        assert f"done {k}" in text, text
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P(None, "x"))
    like = {k: jax.ShapeDtypeStruct((256, 256), np.float32, sharding=sharding) for k in ("second", "everywhere")}
    found = mm.checkpoint.Manager(tmp_path).restore(like=like)
    for start, name in ((1, "second"), (3, "everywhere")):
        assert np.array_equal(found[name], np.arange(start, start + 2**16, dtype=np.float32).reshape(256, 256))
