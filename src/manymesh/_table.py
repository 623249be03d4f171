"""A table of parameters: their names, and where and how large their shards are."""

from __future__ import annotations

import io
import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

from . import meta
from ._errors import ArgumentError
from ._shown import as_written, format_bytes, page_width, rich_html
from ._types import PyTree
from .meta._named import axes_of, is_named_node, value_of
from .meta._tasks import TasksLike

if TYPE_CHECKING:  # imported when a table is printed
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table


@dataclass(frozen=True)
class ParameterRow:
    """One parameter.

    Attributes:
      path: keys joined by slashes, ``"blocks_0/mlp/kernel"``.
      shape: its whole shape.
      dtype: name of its dtype.
      names: the names of its axes; None where it is not boxed.
      spec: device axes that shard it; None where its sharding is unknown.
      devices: ids of the devices that hold it, in the order of their mesh.
      bytes_per_device: size of one shard in bytes.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    names: tuple[Any, ...] | None
    spec: PartitionSpec | None
    devices: tuple[int, ...]
    bytes_per_device: int


@dataclass(frozen=True)
class ParameterTable:
    """Parameters as rows; prints itself as a table, also through Rich.

    Attributes:
      rows: the parameters, in the order of the tree.
      title: printed above the table.
    """

    rows: tuple[ParameterRow, ...]
    title: str | None = None

    @property
    def bytes_on(self) -> dict[int, int]:
        """Bytes that each device holds, by its id."""
        total: dict[int, int] = {}
        for row in self.rows:
            for device in row.devices:
                total[device] = total.get(device, 0) + row.bytes_per_device
        return dict(sorted(total.items()))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = self._table(("path", "shape", "logical names", "spec", "submesh", "per device"))
        if console.measure(table, options=options.update(max_width=1000, markup=False)).maximum > options.max_width:
            # Too narrow for six columns: two in one, a line each, rather than words cut off.
            table = self._table(("path\nshape", "logical names\nspec", "submesh\nper device"))
        yield from as_written(console, options, [table])

    def __repr__(self) -> str:
        held = self.bytes_on
        most = f", at most {format_bytes(max(held.values()))} a device" if held else ""
        return f"ParameterTable({len(self.rows)} arrays on {len(held)} devices{most}; print it)"

    def _repr_html_(self) -> str:
        return rich_html(self)

    def _table(self, columns: tuple[str, ...]) -> Table:
        from rich.table import Table
        from rich.text import Text

        count = sum(math.prod(row.shape) for row in self.rows)
        held = self.bytes_on
        most = f"max {format_bytes(max(held.values()))}" if held else ""
        title = None if self.title is None else Text(self.title, "table.title")
        table = Table(title=title, show_footer=True)
        footers = (
            f"{len(self.rows)} arrays",
            f"{count:,} values",
            "",
            "",
            f"{len(held)} devices" if held else "",
            most,
        )
        for column, footer in zip(columns, _stack(footers, len(columns)), strict=True):
            table.add_column(
                column, footer=footer, justify="right" if column == "per device" else "left", overflow="fold"
            )
        for row, following in itertools.zip_longest(self.rows, self.rows[1:]):
            cells = (
                row.path,
                f"{row.dtype}{list(row.shape)}".replace(" ", ""),
                "" if row.names is None else ", ".join(map(_entry, row.names)),
                "?" if row.spec is None else f"P({', '.join(map(_entry, row.spec))})",
                format_ids(row.devices) or "?",
                format_bytes(row.bytes_per_device),
            )
            ends = following is not None and following.devices != row.devices
            table.add_row(*_stack(cells, len(columns)), end_section=ends)
        return table

    def __str__(self) -> str:
        from rich.console import Console

        out = io.StringIO()
        Console(file=out, width=page_width(120)).print(self)
        return out.getvalue()


def tabulate(
    tree: PyTree,
    boxed: Any = None,
    *,
    shardings: Any = None,
    tasks: TasksLike | None = None,
    title: str | None = None,
) -> ParameterTable:
    """Lists the parameters of a tree with their names, shardings and sizes.

    Args:
      tree: a pytree of arrays, or of `jax.ShapeDtypeStruct`: parameters, variables or a whole train state. Boxes in it
        give the names.
      boxed: a tree of the same parameters in boxes, for names that ``tree`` has lost, as from
        ``jax.eval_shape(model.init, ...)``.
      shardings: a tree of shardings for leaves that have none themselves, such as a part of
        ``compiled.input_shardings``.
      tasks: instead of ``shardings``, the tasks that the leaves are in, as for `manymesh.meta.explain`.
      title: printed above the table.

    Returns:
      A `ParameterTable`; ``print`` it, or give it to a Rich console. Scalars outside boxes are left out.

    Raises:
      ArgumentError: ``boxed`` or ``shardings``, whose leaves count in order, has more or fewer than ``tree``.
      AxisError: a sharding does not divide its parameter.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from manymesh import meta
      >>> from manymesh.flax import tabulate
      >>> table = tabulate({"dense": {"kernel": meta.Partitioned(jnp.ones((4, 8)), ("embed", None))}})
      >>> table.rows[0].path, table.rows[0].names, table.rows[0].bytes_per_device
      ('dense/kernel', ('embed', None), 128)
    """
    leaves = _leaves(tree)
    named = leaves if boxed is None else _same_length("boxed", _leaves(boxed), leaves)
    given = None
    if tasks is not None:
        shardings = meta.get_sharding(tree if boxed is None else boxed, tasks=tasks)
    if shardings is not None:
        is_sharding = lambda x: isinstance(value_of(x), jax.sharding.Sharding)  # noqa: E731
        flat = jax.tree_util.tree_leaves_with_path(shardings, is_leaf=is_sharding)
        given = _same_length("shardings", flat, leaves)
    rows = []
    for i, (path, leaf) in enumerate(leaves):
        names = _names(leaf)
        if names is None:
            names = _names(named[i][1])
        sharding = getattr(value_of(leaf), "sharding", None) if given is None else value_of(given[i][1])
        if value_of(leaf).shape or names is not None:
            rows.append(_row(_join(path), value_of(leaf), names, sharding))
    return ParameterTable(tuple(rows), title)


def _leaves(tree: PyTree) -> list[tuple[Any, Any]]:
    found = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_named_node)
    return [(path, leaf) for path, leaf in found if hasattr(value_of(leaf), "shape")]


def _same_length(word: str, found: list[Any], leaves: list[Any]) -> list[Any]:
    if len(found) != len(leaves):
        raise ArgumentError(
            f"tabulate: {word} has {len(found)} leaves, the tree has {len(leaves)}; give matching trees"
        )
    return found


def _names(leaf: Any) -> tuple[Any, ...] | None:
    names = axes_of(leaf).names if is_named_node(leaf) else ()
    return tuple(names) or None


def _row(path: str, value: Any, names: tuple[Any, ...] | None, sharding: Any) -> ParameterRow:
    shape = tuple(value.shape)
    spec: PartitionSpec | None = None
    devices: tuple[int, ...] = ()
    shard = shape
    if isinstance(sharding, NamedSharding):
        mesh: Any = sharding.mesh
        spec = sharding.spec
        meta.check_divides(path, shape, spec, mesh)
        devices = () if isinstance(mesh, AbstractMesh) else tuple(d.id for d in mesh.devices.flat)
        shard = tuple(sharding.shard_shape(shape))
    elif isinstance(sharding, jax.sharding.Sharding):
        devices = tuple(sorted(int(d.id) for d in list[Any](sharding.device_set)))
        shard = tuple(sharding.shard_shape(shape))
        spec = PartitionSpec() if shard == shape else None
    return ParameterRow(path, shape, value.dtype.name, names, spec, devices, math.prod(shard) * value.dtype.itemsize)


def _join(path: tuple[Any, ...]) -> str:
    words = []
    for key in path:
        match key:
            case DictKey(key=word) | FlattenedIndexKey(key=word):
                words.append(str(word))
            case GetAttrKey(name=word):
                words.append(word)
            case SequenceKey(idx=word):
                words.append(str(word))
            case _:
                words.append(str(key))
    return "/".join(words)


def _entry(entry: Any) -> str:
    return f"({', '.join(entry)})" if isinstance(entry, tuple) else str(entry)


def _stack(cells: tuple[str, ...], columns: int) -> list[str]:
    """Cells for a number of columns, each a line or several."""
    lines = len(cells) // columns
    return ["\n".join(cells[i : i + lines]) for i in range(0, len(cells), lines)]


def format_ids(ids: tuple[int, ...]) -> str:
    """``0-3`` for ids in a row, else all of them."""
    if len(ids) > 2 and list(ids) == list(range(ids[0], ids[-1] + 1)):
        return f"{ids[0]}-{ids[-1]}"
    return ",".join(map(str, ids))
