"""Where everything runs: a fact about a flat program, computed by a pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jax.sharding import Mesh

from .._compat import Var
from ._nodes import Node


@dataclass(frozen=True, eq=False)
class Placement:
    """Where every node of a flat program runs.

    Attributes:
      submeshes: the submeshes, in order of first use.
      node: node -> the submeshes it runs on; more than one where it is cloned.
      home: variable -> the submesh of its one copy of record (its producer's, or an input's home).
      reason: node -> one word on why an unmarked equation is where it is.
    """

    submeshes: tuple[Mesh, ...]
    node: Mapping[Node, tuple[int, ...]]
    home: Mapping[Var, int]
    reason: Mapping[Node, str]
