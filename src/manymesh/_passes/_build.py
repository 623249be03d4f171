"""`build`: from a traced step to a `Program`."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace

from jax.sharding import Mesh, NamedSharding

from .._compat import AbstractJaxpr
from .._errors import AxisError
from .._mark import Recording
from .._program._check_fragments import check
from .._program._flat import Pins
from .._program._fragments import Program
from ._flatten import flatten
from ._fragments import cut
from ._place import NothingPlacedError
from ._run import PASSES, Between, run_passes


def build(
    closed: AbstractJaxpr,
    record: Recording,
    pinned_in: Mapping[int, Mesh],
    pinned_out: Mapping[int, Mesh],
    states: Sequence[tuple[int, int]] = (),
    *,
    shardings_in: Mapping[int, NamedSharding] | None = None,
    shardings_out: Mapping[int, NamedSharding] | None = None,
    arriving: Mapping[int, NamedSharding] | None = None,
    names: Sequence[tuple[str, ...]] = (),
    result_names: Sequence[tuple[str, ...]] = (),
    between: Between | None = None,
) -> Program | None:
    """Splits a traced step.

    Args:
      closed: closed jaxpr of the step, traced under ``record``.
      record: what its marks mean. Of it only the findings grow.
      pinned_in: position among the step's inputs -> the submesh it is on.
      pinned_out: position among the results -> the submesh it has to be on.
      states: (position of an input, position of the result that replaces it).
      shardings_in, shardings_out: the shardings that the inputs and results of ``pinned_in`` and ``pinned_out`` are asked
        to have, where these are known.
      arriving: the shardings that inputs come with.
      names: what users call the inputs, step by step: ``("args", "[0]", "['w']")``.
      result_names: what users call the results, likewise.
      between: called with the name of each pass that ran and the flat program that it left.

    Returns:
      The program, or None if nothing in the step says where anything runs.

    Raises:
      PlacementError: a task inside control flow that cannot be opened.
      MeshError: submeshes of several backends.
      ScheduleError: a loop that its schedule cannot run.
    """
    flat = flatten(closed, record)
    inputs = flat.invars[len(flat.consts) :]
    homes = {**_following(states, pinned_out, arriving or {}, [t.mesh for t in flat.tasks.values()]), **pinned_in}
    pins = Pins(
        {inputs[i]: mesh for i, mesh in homes.items()},
        dict(pinned_out),
        tuple((inputs[i], o) for i, o in states if o not in pinned_out or pinned_out[o] == homes.get(i)),
        {inputs[i]: sharding for i, sharding in (shardings_in or {}).items()},
        dict(shardings_out or {}),
        dict(zip(inputs, names, strict=False)),
        dict(enumerate(result_names)),
        {inputs[i]: sharding for i, sharding in {**(arriving or {}), **(shardings_in or {})}.items()},
    )
    try:
        flat = run_passes(replace(flat, pins=pins), PASSES, between=between)
    except NothingPlacedError:
        return None
    for finding in flat.findings:
        record.findings.setdefault(finding, AxisError)
    program = cut(flat)
    check(program)
    return program


def _following(
    states: Iterable[tuple[int, int]],
    pinned_out: Mapping[int, Mesh],
    arriving: Mapping[int, NamedSharding],
    meshes: Container[Mesh | None],
) -> dict[int, Mesh]:
    """Where states are whose next value is asked for on the submesh of a task: there, unless they come from elsewhere."""
    found = {i: pinned_out[o] for i, o in states if o in pinned_out and pinned_out[o] in meshes}
    return {i: m for i, m in found.items() if i not in arriving or arriving[i].device_set == {*m.devices.flat}}
