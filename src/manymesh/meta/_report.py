"""What `explain` returns: plain frozen data, and a table for people."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from jax.sharding import PartitionSpec

from .._shown import format_bytes, rich_html
from ._rules import Rule, Rules, parts_of

if TYPE_CHECKING:  # Rich is imported when something is printed: it takes as long as a third of JAX
    from rich.console import RenderableType
    from rich.table import Table

FindingKind = Literal[
    "unknown-name",
    "unknown-axis",
    "repeated-name",
    "taken-axis",
    "does-not-divide",
    "too-many-names",
    "large-replicated",
    "fitted-names",
    "unused-rule",
]


@dataclass(frozen=True)
class Finding:
    """Something suspicious.

    Attributes:
      kind: what kind of thing it is.
      path: the leaf; None for what concerns no single leaf.
      message: the whole story in one sentence, beginning with the place.
      fatal: whether ``strict=True`` makes an error of it.
    """

    kind: FindingKind
    path: str | None
    message: str
    fatal: bool

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True)
class Dimension:
    """One dimension of a leaf.

    Attributes:
      size: its length; None where the shape is unknown.
      name: the name that the box gives it.
      axes: the device axes that shard it, none if it is replicated.
      rule: the rule that decided; None where no rule did.
      rule_index: position of that rule.
    """

    size: int | None
    name: Any
    axes: tuple[str, ...]
    rule: Rule | None
    rule_index: int | None


@dataclass(frozen=True)
class LeafReport:
    """One leaf of a tree.

    Attributes:
      path: where it is.
      shape: its shape; None where unknown.
      dtype: name of its dtype; None where unknown.
      names: one entry for each leading dimension, as the box gives them.
      dimensions: what became of each dimension.
      spec: the spec in device axes.
      shard_shape: shape of one shard; None where unknown or where a dimension does not divide.
      bytes_per_device: size of one shard.
      bytes_total: size of the whole value, once.
    """

    path: str
    shape: tuple[int, ...] | None
    dtype: str | None
    names: tuple[Any, ...]
    dimensions: tuple[Dimension, ...]
    spec: PartitionSpec
    shard_shape: tuple[int, ...] | None
    bytes_per_device: int | None
    bytes_total: int | None


@dataclass(frozen=True)
class Explanation:
    """How a tree will lie on a mesh. Printed, also by Rich, it is a table; every cell of it is an attribute.

    Attributes:
      leaves: one record for each leaf that has a shape or names.
      findings: what is suspicious, fatal findings first.
      mesh_shape: pairs of device axis and its number of devices.
      rules: the rules that were explained.
      bytes_per_device: bytes of all leaves on one device. Every device holds one shard of every leaf.
      bytes_total: bytes of all leaves, each counted once.
    """

    leaves: tuple[LeafReport, ...]
    findings: tuple[Finding, ...]
    mesh_shape: tuple[tuple[str, int], ...]
    rules: Rules
    bytes_per_device: int
    bytes_total: int

    def __getitem__(self, path: str) -> LeafReport:
        for leaf in self.leaves:
            if leaf.path == path:
                return leaf
        raise KeyError(f"no leaf at {path!r}; the leaves are {[leaf.path for leaf in self.leaves]}")

    def __iter__(self) -> Iterator[LeafReport]:
        return iter(self.leaves)

    def __repr__(self) -> str:
        return (
            f"Explanation({len(self.leaves)} leaves, {len(self.findings)} findings, {format_bytes(self.bytes_per_device)} "
            "a device; print it)"
        )

    def _repr_html_(self) -> str:
        return rich_html(self)

    def table(self) -> Table:
        """The leaves as a Rich table."""
        from rich.table import Table
        from rich.text import Text

        mesh = ", ".join(f"{name}: {size}" for name, size in self.mesh_shape)
        table = Table(title=f"mesh ({mesh})", title_justify="left", show_footer=True)
        table.add_column("path", "total", overflow="fold")
        table.add_column("value")
        table.add_column("names -> device axes (rule)", overflow="fold")
        table.add_column("shard")
        table.add_column("per device", format_bytes(self.bytes_per_device), justify="right")
        table.add_column("whole", format_bytes(self.bytes_total), justify="right")
        for leaf in self.leaves:
            table.add_row(
                Text(leaf.path),
                Text("?" if leaf.shape is None else f"{leaf.dtype}{_shape(leaf.shape)}"),
                Text(", ".join(_dimension_text(d) for d in leaf.dimensions)),
                Text("?" if leaf.shard_shape is None else _shape(leaf.shard_shape)),
                Text("?" if leaf.bytes_per_device is None else format_bytes(leaf.bytes_per_device)),
                Text("?" if leaf.bytes_total is None else format_bytes(leaf.bytes_total)),
            )
        return table

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        lines = [
            Text(("! " if f.fatal else "- ") + f.message, style="red" if f.fatal else "yellow") for f in self.findings
        ]
        return Group(self.table(), *lines)

    def __str__(self) -> str:
        from rich.console import Console

        # As wide as it needs to be, wherever it is printed: a log must not depend on the terminal. Rich folds to fit.
        out = io.StringIO()
        Console(file=out, width=10_000, color_system=None).print(self)
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _shape(shape: tuple[int, ...]) -> str:
    return f"[{','.join(map(str, shape))}]"


def _dimension_text(dimension: Dimension) -> str:
    name = "_" if dimension.name is None else str(dimension.name)
    parts = parts_of(dimension.name)
    if dimension.rule is None and dimension.axes == parts:
        return name
    axes = "+".join(dimension.axes) or "-"
    return f"{name} -> {axes}" + ("" if dimension.rule_index is None else f" ({dimension.rule_index})")
