"""Tables of parameters: Flax's own, and ours with shardings and sizes."""

from __future__ import annotations

import io

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

from manymesh import errors, meta
from manymesh.flax import ParameterTable, shard_axes, tabulate, task

TASK_TABLE = """
                                   Task[Dense] Summary
┏━━━━━━┳━━━━━━━━━━━━━┳━━━━━━━━━━━━━━━┳━━━━━━━━━━━━━━━━┳━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━┓
┃ path ┃ module      ┃ inputs        ┃ outputs        ┃ params                           ┃
┡━━━━━━╇━━━━━━━━━━━━━╇━━━━━━━━━━━━━━━╇━━━━━━━━━━━━━━━━╇━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━┩
│      │ Task[Dense] │ float32[16,9] │ float32[16,16] │ bias: float32[16]                │
│      │             │               │                │ kernel: float32[9,16] P(x, None) │
│      │             │               │                │                                  │
│      │             │               │                │ 160 (640 B)                      │
├──────┼─────────────┼───────────────┼────────────────┼──────────────────────────────────┤
│      │             │               │          Total │ 160 (640 B)                      │
└──────┴─────────────┴───────────────┴────────────────┴──────────────────────────────────┘

                              Total Parameters: 160 (640 B)
"""


def test_linen_tabulates_a_task_with_the_names_of_its_axes():
    """The table shows the wrapped class, and no level between it and its parameters."""
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    mesh = Mesh(devices, ("x", "y"))
    DenseTask = task(nn.Dense, mesh=mesh)
    model = DenseTask(features=16, kernel_init=shard_axes("x", None))

    x = jnp.ones((16, 9))
    table = model.tabulate(jax.random.key(0), x, console_kwargs={"width": 120, "force_terminal": False})
    found = [line.rstrip() for line in table.splitlines()]
    assert [line for line in found if line] == [line for line in TASK_TABLE.splitlines() if line]


def mesh():
    return Mesh(np.array(jax.devices()[4:8]).reshape(2, 2), ("data", "model"))


def arrays():
    """A sharded parameter in a box, one without, and a scalar."""
    sharding = NamedSharding(mesh(), P(None, "model"))
    kernel = jax.device_put(jnp.ones((4, 8)), sharding)
    return {
        "dense": {"kernel": meta.Partitioned(kernel, ("embed", "hidden")), "bias": jnp.ones(3)},
        "step": jnp.zeros(()),
    }


def test_rows_hold_what_the_shards_hold():
    """Path, shape, names, spec, devices, and bytes measured on the shards; scalars are left out."""
    tree = arrays()
    bias, kernel = tabulate(tree).rows
    assert (bias.path, bias.shape, bias.dtype, bias.names) == ("dense/bias", (3,), "float32", None)
    assert (bias.spec, bias.devices, bias.bytes_per_device) == (P(), (0,), 12)
    assert (kernel.path, kernel.names, kernel.spec) == ("dense/kernel", ("embed", "hidden"), P(None, "model"))
    shards = tree["dense"]["kernel"].value.addressable_shards
    assert kernel.devices == tuple(s.device.id for s in shards)
    assert {s.data.nbytes for s in shards} == {kernel.bytes_per_device} == {64}
    assert tabulate(tree).bytes_on == {0: 12, 4: 64, 5: 64, 6: 64, 7: 64}


def test_names_and_shardings_may_come_from_other_trees():
    """For parameters that have lost their boxes, and for descriptions that lie nowhere yet."""
    tree = arrays()
    plain = meta.unbox(tree)
    assert tabulate(plain, tree) == tabulate(tree)
    described = jax.eval_shape(lambda t: t, tree)
    (_, nowhere) = tabulate(described).rows
    assert (nowhere.spec, nowhere.devices, nowhere.bytes_per_device) == (None, (), 128)
    shardings = jax.tree.map(lambda x: x.sharding, tree)
    assert tabulate(described, shardings=shardings) == tabulate(tree)


@pytest.mark.parametrize("word", ["boxed", "shardings"])
def test_trees_that_do_not_match(word):
    """Both counts are said."""
    with pytest.raises(errors.ArgumentError, match=f"tabulate: {word} has 1 leaves, the tree has 3"):
        tabulate(
            arrays(),
            **{word: {"a": jax.devices() and NamedSharding(mesh(), P()) if word == "shardings" else jnp.ones(2)}},
        )


def printed(table, width):
    out = io.StringIO()
    Console(file=out, width=width).print(table)
    return out.getvalue()


@pytest.mark.parametrize("width", [120, 80, 60])
def test_the_printed_table_has_every_word_at_every_usual_width(width):
    """Nothing is cut off, and no line is longer than the console."""
    text = printed(tabulate(arrays(), title="Parameters"), width)
    for word in (
        "dense/kernel",
        "float32[4,8]",
        "embed, hidden",
        "P(None, model)",
        "4-7",
        "64 B",
        "dense/bias",
        "35 values",
    ):
        assert word in text, text
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width


def test_a_table_is_text():
    """``print`` needs no console."""
    table = tabulate(arrays(), title="Parameters")
    assert isinstance(table, ParameterTable) and "dense/kernel" in str(table) and "Parameters" in str(table)
