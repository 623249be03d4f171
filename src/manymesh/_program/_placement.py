"""Where everything runs: a fact about a flat program, computed by a pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

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

    def extended(self, readers: Mapping[Node, Node], anew: Iterable[Node]) -> Placement:
        """Where everything is, once some nodes read something else, which others compute.

        Args:
          readers: node -> the same, reading something else.
          anew: nodes that there were not before; each says its submesh.
        """
        number = {mesh: k for k, mesh in enumerate(self.submeshes)}
        node, home, reason = dict(self.node), dict(self.home), dict(self.reason)
        for old, reader in readers.items():
            node[reader], reason[reader] = node[old], reason[old]
        for n in anew:
            assert n.mesh is not None, "it is made anew somewhere"
            node[n], reason[n] = (number[n.mesh],), "its submesh"
            home.update(dict.fromkeys(n.outputs, number[n.mesh]))
        return replace(self, node=node, home=home, reason=reason)
