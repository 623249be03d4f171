"""Boxes are at home in Flax whatever was imported first, and Flax is not imported by us."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.once

USE = """
import flax.linen as nn, flax.serialization, flax.nnx as nnx, jax, jax.numpy as jnp
x = jnp.ones((2, 3))
class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x @ self.param("w", meta.with_partitioning(nn.initializers.ones, (None, "model")), (3, 4))
variables = Model().init(jax.random.key(0), x)
assert type(variables["params"]["w"]) is meta.Partitioned
assert Model().apply(variables, x).shape == (2, 4)
assert nn.get_partition_spec(variables)["params"]["w"] == jax.sharding.PartitionSpec(None, "model")
assert list(flax.serialization.to_state_dict(early)) == ["value"], flax.serialization.to_state_dict(early)
assert "names" not in flax.serialization.to_bytes(variables).decode("latin1")
with nnx.use_eager_sharding(False):
    bridged = nnx.bridge.ToNNX(Model(), rngs=nnx.Rngs(0)).lazy_init(x)
assert bridged.w.get_metadata()["out_sharding"] == (None, "model")
assert not any(type(f).__module__.startswith("manymesh") for f in sys.meta_path)
print("at home")
"""

OURS_FIRST = """
import sys
import manymesh
from manymesh import meta
early = meta.Partitioned(1.0, ())
assert "flax" not in sys.modules
"""

FLAX_FIRST = """
import sys, flax
from manymesh import meta
early = meta.Partitioned(1.0, ())
"""


@pytest.mark.parametrize("first", [OURS_FIRST, FLAX_FIRST], ids=["ours", "flax"])
def test_boxes_work_in_linen_its_serialization_and_the_bridge(first: str) -> None:
    code = textwrap.dedent(first) + USE
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "at home", done.stderr[-2000:]


def test_looking_for_a_module_does_not_import_it() -> None:
    """`find_spec` is what packaging tools call; the loader it gets must work for them too."""
    code = (
        "import sys, importlib.util; from manymesh.meta._at_home import when_imported; seen = []\n"
        "when_imported({'colorsys': seen.append, 'json': seen.append})\n"
        "assert [m.__name__ for m in seen] == (['json'] if 'json' in sys.modules else [])\n"
        "spec = importlib.util.find_spec('colorsys'); assert 'colorsys' not in sys.modules and spec.loader.get_source\n"
        "import colorsys; assert seen[-1] is colorsys and colorsys.rgb_to_hsv\n"
        "import importlib; importlib.reload(colorsys); assert seen.count(colorsys) == 1\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert importlib.util.find_spec("flax") is not None
