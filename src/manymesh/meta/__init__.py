"""Partition metadata: boxes with named axes, rules for logical names, and what they come to on a mesh.

A parameter says what its dimensions are by living in a box::

    w = meta.LogicallyPartitioned(value, ("embed", "hidden"))

Rules say later which device axes shard them, ``[("hidden", "model")]``, and a mesh says how many devices
that is. `get_sharding` turns a tree of boxes into shardings for `jax.jit`; `explain` says which leaf gets which
shard, by which rule, how many bytes that is on each device, and what looks like a mistake.

The names and their meaning are those of Flax (``flax.core.meta``, ``flax.linen.spmd``), so that a program for one runs
with the other; Flax itself is not needed, and its boxes are understood where they occur.
"""

from __future__ import annotations

from ._at_home import settle as _settle
from ._axes import PARTITION_NAME as PARTITION_NAME
from ._box import AxisMetadata as AxisMetadata
from ._box import add_axis as add_axis
from ._box import is_axis_metadata as is_axis_metadata
from ._box import map_axis_meta as map_axis_meta
from ._box import remove_axis as remove_axis
from ._box import replace_boxed as replace_boxed
from ._box import unbox as unbox
from ._check import check_divides as check_divides
from ._explain import explain as explain
from ._logical import LogicallyPartitioned as LogicallyPartitioned
from ._logical import logical_to_mesh as logical_to_mesh
from ._logical import logical_to_mesh_sharding as logical_to_mesh_sharding
from ._logical import with_logical_constraint as with_logical_constraint
from ._logical import with_logical_partitioning as with_logical_partitioning
from ._naming import box as box
from ._partitioned import Partitioned as Partitioned
from ._partitioned import with_partitioning as with_partitioning
from ._report import Dimension as Dimension
from ._report import Explanation as Explanation
from ._report import Finding as Finding
from ._report import LeafReport as LeafReport
from ._rules import RulesFallback as RulesFallback
from ._rules import get_logical_axis_rules as get_logical_axis_rules
from ._rules import logical_axis_rules as logical_axis_rules
from ._rules import logical_to_mesh_axes as logical_to_mesh_axes
from ._rules import set_logical_axis_rules as set_logical_axis_rules
from ._specs import get_partition_spec as get_partition_spec
from ._specs import get_sharding as get_sharding

__all__ = [
    "PARTITION_NAME",
    "AxisMetadata",
    "Dimension",
    "Explanation",
    "Finding",
    "LeafReport",
    "LogicallyPartitioned",
    "Partitioned",
    "RulesFallback",
    "add_axis",
    "box",
    "check_divides",
    "explain",
    "get_logical_axis_rules",
    "get_partition_spec",
    "get_sharding",
    "is_axis_metadata",
    "logical_axis_rules",
    "logical_to_mesh",
    "logical_to_mesh_axes",
    "logical_to_mesh_sharding",
    "map_axis_meta",
    "remove_axis",
    "replace_boxed",
    "set_logical_axis_rules",
    "unbox",
    "with_logical_constraint",
    "with_logical_partitioning",
    "with_partitioning",
]

_settle()
