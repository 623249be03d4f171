"""`explain`, `get_sharding` and `tabulate` read names as the tasks do that the parameters are in."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import manymesh as mm
import manymesh.flax
from manymesh import meta

BOXES = {
    "rules of the task": meta.Partitioned(jnp.ones((4, 8)), ("embed", "hidden")),
    "device axes": meta.Partitioned(jnp.ones((4, 8)), ("data", None)),
    "the first rule wins": meta.Partitioned(jnp.ones((4, 8)), ("wide", "hidden")),
    "rules of the box": meta.LogicallyPartitioned(jnp.ones((4, 8)), ("other", None), rules=(("other", "model"),)),
    "an axis it lacks": meta.LogicallyPartitioned(jnp.ones((4, 8)), ("far", "hidden"), rules=(("far", "stage"),)),
    "nothing": jnp.ones((4, 8)),
}


def submeshes() -> Any:
    return mm.submeshes(jax.make_mesh((2, 2, 2), ("stage", "data", "model")), "stage")


def tasks() -> dict[str, mm.Task]:
    first, second = submeshes()
    return {
        "front": mm.Task("front", mesh=first, logical_axes=[("hidden", "model"), ("wide", "model"), ("embed", None)]),
        r"back/\d": mm.Task(
            "back", mesh=second, logical_axes=[("wide", "data"), ("hidden", "model"), ("embed", "data")]
        ),
    }


def test_they_come_to_what_the_step_does() -> None:
    front, back = tasks().values()
    read = lambda boxes: sum(jnp.sum(jnp.sin(x)) for x in jax.tree.leaves(meta.unbox(boxes)))  # noqa: E731
    params = {"front": dict(BOXES), "back": [dict(BOXES)]}
    step = mm.jit(lambda p: mm.task(read, task=front)(p["front"]) + mm.task(read, task=back)(p["back"][0]))
    (wanted,), _ = step.lower(params).compile().input_shardings
    report, shardings = meta.explain(params, tasks=tasks()), meta.get_sharding(params, tasks=tasks())
    table = {row.path: row for row in mm.flax.tabulate(params, tasks=tasks()).rows}
    for (path, sharding), leaf in zip(jax.tree_util.tree_leaves_with_path(shardings), report.leaves, strict=True):
        place, key = path[0].key, path[-1].key
        compiled = meta.unbox(wanted[place] if place == "front" else wanted[place][0], False)[key]
        assert sharding.mesh == compiled.mesh == submeshes()[int(place == "back")], path
        assert sharding.is_equivalent_to(compiled, 2) and leaf.spec == sharding.spec, (path, sharding, compiled)
        row = table["/".join(str(getattr(k, "key", getattr(k, "idx", ""))) for k in path)]
        assert row.spec == sharding.spec and row.devices == tuple(d.id for d in sharding.mesh.devices.flat)
    held = [sum(leaf.bytes_per_device for leaf in report.leaves if place in leaf.path) for place in ("front", "back")]
    assert report.bytes_per_device == max(held) > min(held)
    assert {f.kind for f in report.findings if f.fatal} == {"taken-axis"}


def test_shard_axes_and_explain_agree() -> None:
    """Names of `shard_axes` are logical names of the task, which nothing outside it knows."""
    first, _ = submeshes()
    rules = [("hidden", "model"), ("embed", None)]
    dense = mm.flax.task(nn.Dense, mesh=first, logical_axes=rules)
    params = dense(8, kernel_init=mm.flax.shard_axes("embed", "hidden")).init(jax.random.key(0), jnp.ones((2, 4)))
    alone = meta.explain(params, first)
    assert {f.kind for f in alone.findings if f.fatal} == {"unknown-axis"}
    report = meta.explain(params, tasks=mm.Task(mesh=first, logical_axes=rules), strict=True)
    assert [leaf.spec for leaf in report.leaves] == [P(), P(None, "model")]


def test_what_tasks_do_not_say() -> None:
    first, _ = submeshes()
    params = {"front": BOXES["device axes"], "frontier": BOXES["device axes"]}
    with pytest.raises(mm.errors.ArgumentError, match=r"frontier is in none of the tasks \['front', 'back/"):
        meta.get_sharding(params, tasks=tasks())
    assert meta.get_sharding(params, first, tasks=tasks())["frontier"].mesh == first
    with pytest.raises(mm.errors.ArgumentError, match="explain: give the mesh, or tasks="):
        meta.explain(params)
    with pytest.raises(mm.errors.ArgumentError, match="tasks has to be a manymesh.Task, or a mapping"):
        meta.explain(params, tasks=["front"])
    with pytest.raises(mm.errors.AxisError, match="no rule knows the name 'hiden'"):
        boxed = {"front": meta.Partitioned(jnp.ones((4, 8)), ("embed", "hiden"))}
        meta.get_sharding(boxed, tasks=tasks(), strict=True)
    unnamed = mm.Task("unnamed", devices=[0, 1])
    assert meta.get_sharding(BOXES["rules of the task"], tasks=unnamed).spec == P(None, None)
