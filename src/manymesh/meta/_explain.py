"""Saying how a tree will lie on a mesh, and what is suspicious about that, before anything runs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from jax.sharding import PartitionSpec

from .. import _compat
from .._errors import AxisError, MetadataError
from .._shown import format_bytes
from .._types import PyTree
from ._axes import AnyMesh, Axes, Names
from ._check import indivisible, indivisible_text, shard_count, too_many_text
from ._fit import fit_names
from ._named import choose_rules, leaves_of, parts_in, resolve_axes
from ._paths import describe, nearest
from ._report import Dimension, Explanation, Finding, FindingKind, LeafReport
from ._rules import Resolution, Rules, RulesLike, as_rules, get_logical_axis_rules, parts_of, rules_around
from ._tasks import Tasks, TasksLike

_METADATA_KINDS = {"too-many-names", "repeated-name"}
MOST = 20  # findings in one error


@_compat.boundary
def explain(
    tree: PyTree,
    mesh: AnyMesh | None = None,
    rules: RulesLike | None = None,
    *,
    tasks: TasksLike | None = None,
    strict: bool = False,
    large_bytes: int = 1 << 20,
) -> Explanation:
    """Explains which sharding every leaf of a tree gets on a mesh, and why.

    Args:
      tree: a pytree of arrays or of descriptions of them (`jax.eval_shape`), with boxes. A bare `PartitionSpec` counts
        as logical names of a value of unknown shape.
      mesh: the mesh, concrete or abstract; may be left out where all leaves are in ``tasks``.
      rules: rules for the logical names of boxes that carry none themselves; by default those of the surroundings.
      tasks: the `manymesh.Task` that the leaves are in, or a mapping from patterns of paths (``"front"``,
        ``r"blocks/[01]"``: whole components) to tasks. Their names are then read by the rules of their task, on its
        submesh, as they are when the step runs; bytes per device are those of the fullest submesh.
      strict: whether fatal findings are raised instead of returned.
      large_bytes: from how many bytes on a value that is replicated on every device is worth a finding.

    Returns:
      An `Explanation`: for each leaf its path, shape, dtype, names, the rule that decided each dimension, spec, shard
      shape and bytes per device; totals; and findings. Fatal findings are a name that no rule knows, a device axis
      that the mesh does not have, a dimension left unsharded because its axes were taken, a dimension that does not
      divide, more names than dimensions, and a large leaf that is replicated. A rule that nothing used and
      names that were fitted to a factored optimizer state are mentioned only.

    Raises:
      AxisError: with ``strict``, with the messages of the fatal findings, at most 20 of them.
      MetadataError: the same, if the first one is about names that do not fit their value.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from manymesh import meta
      >>> mesh = jax.make_mesh((2, 4), ("data", "model"))
      >>> params = {"w": meta.LogicallyPartitioned(jnp.ones((4, 8)), ("embed", "hiden"))}
      >>> report = meta.explain({"params": params}, mesh, [("hidden", "model"), ("embed", "data")])
      >>> report["params['w']"].shard_shape, report.bytes_per_device
      ((2, 8), 64)
      >>> print(report.findings[0])
      params['w']: no rule knows the name 'hiden' of dimension 1, so it stays replicated; did you mean 'hidden'?
    """
    given, surrounding = as_rules(rules), get_logical_axis_rules()
    placing, in_tasks = Tasks(tasks, mesh, "explain"), rules_around()
    leaves, _ = leaves_of(tree)
    parts = [part for path, node in leaves for part in parts_in(path, node)]
    reports: list[LeafReport] = []
    findings: list[Finding] = []
    known: dict[Rules, set[int]] = {}
    held: dict[AnyMesh, int] = {}
    for part, names in zip(parts, fit_names([part.named for part in parts]), strict=True):
        if part.shape is None and not part.axes.names:
            continue
        chosen = choose_rules(part.axes, given, surrounding) if part.axes.logical else ()
        place = placing.place((*part.path, *part.inside), part.axes, choose_rules(part.axes, given, in_tasks))
        read_by = chosen if place.rules is None else place.rules
        report, found = _explain_leaf(
            part.place, place.axes, names, part.shape, part.value, read_by, place.mesh, large_bytes
        )
        reports.append(report)
        findings += found
        held[place.mesh] = held.get(place.mesh, 0) + (report.bytes_per_device or 0)
        if place.rules is None and place.axes.logical:
            own = (part.axes.rules or ()) if part.axes.lenient else chosen  # of NNX, whose others come behind
            indices = {d.rule_index for d in report.dimensions if d.rule_index is not None}
            known.setdefault(own, set()).update(index for index in indices if index < len(own))
            known.setdefault(chosen[len(own) :], set()).update(i - len(own) for i in indices if i >= len(own))
    explained = given if given is not None else surrounding
    known.setdefault(explained, set())
    for box_rules, used in known.items():
        findings += _unused(box_rules, used)
    findings.sort(key=lambda finding: not finding.fatal)
    fatal = [finding for finding in findings if finding.fatal]
    if strict and fatal:
        error = MetadataError if fatal[0].kind in _METADATA_KINDS else AxisError
        more = [f"and {len(fatal) - MOST} more; strict=False gives all of them"] if len(fatal) > MOST else []
        raise error("\n".join([finding.message for finding in fatal[:MOST]] + more))
    return Explanation(
        tuple(reports),
        tuple(findings),
        tuple(placing.meshes[0].shape.items()) if placing.meshes else (),
        explained,
        max(held.values(), default=0),
        sum(leaf.bytes_total or 0 for leaf in reports),
    )


def _explain_leaf(
    place: str,
    axes: Axes,
    fitted: Names | None,
    shape: tuple[int, ...] | None,
    value: PyTree,
    rules: Rules,
    mesh: AnyMesh,
    large_bytes: int,
) -> tuple[LeafReport, list[Finding]]:
    findings: list[Finding] = []

    def find(kind: FindingKind, message: str, fatal: bool = True) -> None:
        findings.append(Finding(kind, place, message, fatal))

    names = axes.names if fitted is None else fitted
    if fitted is None:
        assert shape is not None, "names are surplus only beside a shape"
        find("too-many-names", too_many_text(place, axes.names, shape) + "; it is left replicated")
        names = ()
    elif fitted != axes.names and shape is not None and math.prod(shape) > 1:
        if fitted:
            why = f"its parameter in this tree shows that its dimensions are {fitted}"
        else:
            why = "its parameter in this tree does not show which dimensions they name, so it stays replicated"
        find("fitted-names", f"{place}: {len(axes.names)} names {axes.names} for shape {shape}; {why}", fatal=False)
    resolution = _resolve(place, axes, names, rules, find)
    device_axes = _known_axes(place, resolution, rules, mesh, find)
    if shape is not None:
        for i in indivisible(shape, device_axes, mesh):
            find("does-not-divide", indivisible_text(place, shape, i, device_axes[i], mesh))
    report = _report(place, axes, names, device_axes, resolution, shape, value, rules, mesh)
    total = report.bytes_total
    if mesh.size > 1 and total is not None and total >= large_bytes and not any(map(parts_of, device_axes)):
        find(
            "large-replicated",
            f"{place}: {describe(value)} of {format_bytes(total)} is replicated on all {mesh.size} devices; give "
            "one of its dimensions a name that maps to a device axis, or raise large_bytes if this is meant",
        )
    return report, findings


def _resolve(place: str, axes: Axes, names: Names, rules: Rules, find: Any) -> Resolution:
    if not axes.logical:
        return Resolution(names, (None,) * len(names), (), ())
    try:
        resolution = resolve_axes(axes, names, rules)
    except AxisError as error:
        find("repeated-name", f"{place}: {error}")
        return Resolution((None,) * len(names), (None,) * len(names), (), ())
    for position, passed in zip(resolution.open, resolution.passed_over, strict=True):
        name = names[position]
        if passed:
            index, taken = passed[0]
            find(
                "taken-axis",
                f"{place}: name {name!r} of dimension {position} stays replicated, because its rule {rules[index]!r} "
                f"needs device axis {taken[0]!r}, which another dimension of {names} has taken; reorder the rules, or "
                f"map {name!r} to None",
            )
        else:
            find(
                "unknown-name",
                f"{place}: no rule knows the name {name!r} of dimension {position}, so it stays replicated"
                f"{nearest(name, [rule[0] for rule in rules])}",
            )
    return resolution


def _known_axes(place: str, resolution: Resolution, rules: Rules, mesh: AnyMesh, find: Any) -> Names:
    """The device axes without those that the mesh does not have and those that stand twice."""
    seen: set[str] = set()
    result: list[Any] = []
    for position, (entry, index) in enumerate(zip(resolution.axes, resolution.rules, strict=True)):
        good = []
        source = "" if index is None else f" of the rule {rules[index]!r}"
        for part in parts_of(entry):
            if part not in mesh.axis_names:
                find(
                    "unknown-axis",
                    f"{place}: device axis {part!r}{source} at dimension {position} is not in the mesh with axes "
                    f"{tuple(mesh.axis_names)}{nearest(part, mesh.axis_names)}",
                )
            elif part in seen:
                find(
                    "taken-axis",
                    f"{place}: device axis {part!r}{source} at dimension {position} shards another dimension already",
                )
            else:
                good.append(part)
                seen.add(part)
        if isinstance(entry, str):
            result.append(entry if good else None)
        else:
            result.append(tuple(good) or None if isinstance(entry, tuple) else entry)
    return tuple(result)


def _report(
    place: str,
    axes: Axes,
    names: Names,
    device_axes: Names,
    resolution: Resolution,
    shape: tuple[int, ...] | None,
    value: PyTree,
    rules: Rules,
    mesh: AnyMesh,
) -> LeafReport:
    rank = len(names) if shape is None else len(shape)
    padding = (None,) * (rank - len(names))
    dimensions = tuple(
        Dimension(
            None if shape is None else shape[i], name, parts_of(entry), None if index is None else rules[index], index
        )
        for i, (name, entry, index) in enumerate(
            zip((*names, *padding), (*device_axes, *padding), (*resolution.rules, *padding), strict=True)
        )
    )
    spec = PartitionSpec(*device_axes)
    if shape is None:
        return LeafReport(place, None, None, axes.names, dimensions, spec, None, None, None)
    dtype = getattr(value, "dtype", None)
    itemsize = getattr(dtype, "itemsize", None)
    total = None if itemsize is None else math.prod(shape) * itemsize
    shard_shape, per_device = None, None
    if not indivisible(shape, device_axes, mesh):
        entries = (*device_axes, *padding)
        shard_shape = tuple(size // shard_count(entry, mesh) for size, entry in zip(shape, entries, strict=True))
        per_device = None if itemsize is None else math.prod(shard_shape) * itemsize
    name = None if dtype is None else getattr(dtype, "name", str(dtype))
    return LeafReport(place, shape, name, axes.names, dimensions, spec, shard_shape, per_device, total)


def _unused(rules: Rules, used: Iterable[int]) -> list[Finding]:
    return [
        Finding("unused-rule", None, f"rules: rule {index} {rule!r} decided no dimension of this tree", False)
        for index, rule in enumerate(rules)
        if index not in set(used)
    ]
