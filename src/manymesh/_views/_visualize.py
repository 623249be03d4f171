"""`visualize`: which device holds which piece of an array."""

from __future__ import annotations

import html
import io
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
from jax.sharding import AbstractMesh, NamedSharding, Sharding

from .._errors import ArgumentError
from .._shown import format_bytes, page_width
from .._table import format_ids
from ..meta._check import check_divides
from ..meta._named import is_named_node, value_of
from ..meta._paths import format_path

if TYPE_CHECKING:  # imported when something is printed
    from rich.console import Console, ConsoleOptions, RenderResult

_ROWS = 16  # more of them are left out of the middle
_PALETTE = ("#3f7fd6", "#e5822f", "#3d9a63", "#9a63c4", "#c9504b", "#2b9aa8", "#b58a1e", "#7a8599")
_HEAD = "text-align:right;font-weight:normal;padding:0 6px"
_CELL = "color:#fff;text-align:center;padding:3px 10px;border:1px solid #fff"
Range = tuple[int, int]


@dataclass(frozen=True)
class Piece:
    """A part of an array.

    Attributes:
      ranges: (start, stop) in each dimension.
      devices: ids of the devices that hold it, each a copy.
    """

    ranges: tuple[Range, ...]
    devices: tuple[int, ...]


@dataclass(frozen=True)
class Placement:
    """Where the pieces of an array are.

    Attributes:
      paths: names of the arrays that lie so.
      shape: the whole shape.
      dtype: name of the dtype.
      spec: the partition spec as text; empty where there is none.
      pieces: the pieces, in row-major order.
      bytes_per_device: size of one piece.
    """

    paths: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    spec: str
    pieces: tuple[Piece, ...]
    bytes_per_device: int

    @property
    def split(self) -> tuple[int, ...]:
        """The dimensions that are cut."""
        return tuple(k for k in range(len(self.shape)) if len({p.ranges[k] for p in self.pieces}) > 1)

    @property
    def heading(self) -> str:
        """Name, type, spec, and how many pieces of which size there are on how many devices."""
        name = self.paths[0] if len(self.paths) == 1 else f"{self.paths[0]} and {len(self.paths) - 1} alike"
        count = len(self.pieces)
        pieces = "one piece" if count == 1 else f"{count} pieces"
        copies = len(self.pieces[0].devices)
        where = f"on {_ids(self.pieces[0].devices)}" if count == 1 else f"each on {copies} devices" * (copies > 1)
        words = [f"{name}  {self.dtype}[{','.join(map(str, self.shape))}]".strip(), self.spec,
                 f"{pieces} of {format_bytes(self.bytes_per_device)} {where}".strip()]  # fmt: skip
        return "  ".join(w for w in words if w)

    def grids(self) -> Iterator[tuple[str, list[str], list[str], list[list[tuple[int, ...]]]]]:
        """The pieces as grids: a heading for dimensions beyond two, heads of columns and of rows, and the devices."""
        row, column = (None, None, *self.split)[-2:]
        ranges = {k: sorted({p.ranges[k] for p in self.pieces}) for k in self.split}
        held = {tuple(p.ranges[k] for k in self.split): p.devices for p in self.pieces}
        dims = self.split[:-2]
        for at in itertools.product(*(ranges[k] for k in dims)):
            heading = ", ".join(f"dimension {k}: {a}:{b}" for k, (a, b) in zip(dims, at, strict=True))
            rows = [()] if row is None else [(r,) for r in ranges[row]]
            columns = [()] if column is None else [(c,) for c in ranges[column]]
            cells = [[held[(*at, *r, *c)] for c in columns] for r in rows]
            yield heading, self._heads(column, columns), self._heads(row, rows), cells

    def _heads(self, k: int | None, ranges: Sequence[tuple[Range, ...]]) -> list[str]:
        if k is None:
            return ["" for _ in ranges]
        before, after = [":"] * k, [":"] * (len(self.shape) - k - 1)
        return [f"[{', '.join([*before, f'{a}:{b}', *after])}]" for ((a, b),) in ranges]


@dataclass(frozen=True)
class Placements:
    """Where the pieces of arrays are; prints itself, and shows itself in notebooks.

    Attributes:
      arrays: one entry for all arrays that lie alike.
    """

    arrays: tuple[Placement, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.style import Style
        from rich.table import Table
        from rich.text import Text

        colours = self._colours()
        for k, placement in enumerate(self.arrays):
            if k:
                yield Text("")
            yield Text(placement.heading, style="bold")
            if len(placement.pieces) == 1:
                continue
            for heading, columns, rows, cells in placement.grids():
                if heading:
                    yield Text(heading)
                table = Table(box=None, padding=(0, 1), show_header=any(columns))
                if any(rows):
                    table.add_column("", justify="right", style="dim", no_wrap=True)
                head = max(map(len, rows)) + 2 if any(rows) else 0
                widest = max(len(_ids(ids)) + 4 for line in cells for ids in line)
                room = (options.max_width - head) // max(widest, max(map(len, columns)) + 2)
                shown = _folded(range(len(columns)), max(room, 3))
                for c in shown:
                    table.add_column("..." if c is None else columns[c], justify="center", no_wrap=True)
                for r in _folded(range(len(rows)), _ROWS):
                    line = [
                        Text("..") if r is None or c is None
                        else Text(f" {_ids(cells[r][c])} ", Style(color="white", bgcolor=colours[cells[r][c]]))
                        for c in shown
                    ]  # fmt: skip
                    first = [Text("" if r is None else rows[r])] if any(rows) else []
                    table.add_row(*first, *line)
                yield table

    def __str__(self) -> str:
        from rich.console import Console

        out = io.StringIO()
        Console(file=out, width=page_width(120), color_system=None).print(self, end="")
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())

    def __repr__(self) -> str:
        return f"Placements({sum(len(a.paths) for a in self.arrays)} arrays in {len(self.arrays)} ways; print it)"

    def _repr_html_(self) -> str:
        colours = self._colours()
        parts = []
        for placement in self.arrays:
            words = html.escape(placement.heading).replace("  ", "&emsp;")
            parts.append(f"<div style='margin:8px 0 2px'><b>{words}</b></div>")
            for heading, columns, rows, cells in placement.grids() if len(placement.pieces) > 1 else ():
                shown = _folded(range(len(columns)), _ROWS)
                body = "".join(
                    f"<tr><th style='{_HEAD}'>{'' if r is None else rows[r]}</th>"
                    + "".join(
                        "<td>..</td>" if r is None or c is None
                        else f"<td style='background:{colours[cells[r][c]]};{_CELL}'>{_ids(cells[r][c])}</td>"
                        for c in shown
                    )
                    + "</tr>"
                    for r in _folded(range(len(rows)), _ROWS)
                )  # fmt: skip
                heads = "".join(f"<th style='{_HEAD}'>{'..' if c is None else columns[c]}</th>" for c in shown)
                parts.append(
                    f"<div>{heading}</div><table style='border-collapse:collapse'><tr><th></th>{heads}</tr>{body}</table>"
                )
        return "".join(parts)

    def _colours(self) -> dict[tuple[int, ...], str]:
        """A colour for each set of devices that hold one piece."""
        sets = dict.fromkeys(p.devices for a in self.arrays for p in a.pieces)
        return {ids: _PALETTE[k % len(_PALETTE)] for k, ids in enumerate(sorted(sets))}


def visualize(tree: object) -> Placements:
    """Shows which device holds which piece of an array, or of every array of a tree.

    Args:
      tree: an array, a `jax.ShapeDtypeStruct` with a sharding, or a pytree of these, on any submeshes, also of
        `manymesh.planned_devices`. What lies alike is shown once.

    Returns:
      A `Placements`; ``print`` it, or leave it as the last line of a notebook's cell.

    Raises:
      ArgumentError: nothing in it is an array with a sharding on devices.
      AxisError: a sharding does not divide the array that is described.

    Example:
      >>> import jax, jax.numpy as jnp, manymesh as mm
      >>> from jax.sharding import NamedSharding, PartitionSpec as P
      >>> mesh = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])
      >>> print(mm.inspect.visualize(jax.device_put(jnp.ones((4, 8)), NamedSharding(mesh, P("data", "model")))))
      float32[4,8]  P('data', 'model')  4 pieces of 32 B
                [:, 0:4]  [:, 4:8]
       [0:2, :]     0         1
       [2:4, :]     2         3
    """
    alike: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_named_node):
        value = value_of(leaf)
        sharding = getattr(value, "sharding", None)
        if isinstance(sharding, Sharding) and not isinstance(getattr(sharding, "mesh", None), AbstractMesh):
            if isinstance(sharding, NamedSharding):
                check_divides(format_path(path), tuple(value.shape), sharding.spec, sharding.mesh)
            pieces = _pieces(tuple(value.shape), sharding)
            spec = f"P({', '.join(map(repr, sharding.spec))})" if isinstance(sharding, NamedSharding) else ""
            size = math.prod(sharding.shard_shape(tuple(value.shape))) * value.dtype.itemsize
            alike[tuple(value.shape), value.dtype.name, spec, pieces, size].append(jax.tree_util.keystr(path))
    if not alike:
        raise ArgumentError(
            f"visualize: found no array with a sharding on devices in {type(tree).__name__}; give a jax.Array, a "
            "jax.ShapeDtypeStruct with sharding=, or a tree of them"
        )
    return Placements(tuple(Placement(tuple(paths), *key) for key, paths in alike.items()))  # type: ignore[arg-type]  # as they were put in


def _pieces(shape: tuple[int, ...], sharding: Sharding) -> tuple[Piece, ...]:
    held: dict[tuple[Range, ...], list[int]] = defaultdict(list)
    for device, index in sharding.devices_indices_map(shape).items():
        ranges = tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))
        held[ranges].append(int(getattr(device, "id")))  # noqa: B009  # JAX types planned devices as it does its own
    return tuple(Piece(ranges, tuple(ids)) for ranges, ids in sorted(held.items()))


def _ids(devices: tuple[int, ...]) -> str:
    """``0-3``, ``4,6``, ``0,32..992 (32)``."""
    ids = sorted(devices)
    if len(ids) > 4 and len({b - a for a, b in itertools.pairwise(ids)}) == 1 and ids[1] - ids[0] > 1:
        return f"{ids[0]},{ids[1]}..{ids[-1]} ({len(ids)})"
    return format_ids(tuple(ids))


def _folded(numbers: range, most: int) -> list[int | None]:
    """All of them, or both ends with None between."""
    if len(numbers) <= most:
        return list(numbers)
    half = (most - 1) // 2
    return [*numbers[: most - 1 - half], None, *numbers[len(numbers) - half :]]
