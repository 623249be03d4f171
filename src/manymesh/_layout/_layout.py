"""`Layout`: the sharding of every value on every submesh, with the rule that decided it. Pure data."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .. import _compat
from .._compat import Var
from .._shown import Shown, shortened
from .._topology import PlannedDevice

HOST = "pinned_host"  # the kind of the host's memory from which devices read


@dataclass(frozen=True)
class Decision:
    """The spec of a value on one submesh, and why it has it.

    Attributes:
      spec: device axes of each dimension.
      rule: what decided, in words: ``in_shardings``, ``constraint in 'front'``, ``as args[0]['w']``, ...
    """

    spec: PartitionSpec
    rule: str


@dataclass(frozen=True, eq=False)
class Layout(Shown):
    """Where the pieces of every value are.

    Attributes:
      submeshes: the submeshes of the program, with axes of the types that the caller's arrays have.
      decisions: (value, submesh) -> its spec and the rule that decided it.
      donation: fragment -> pairs (position of an input, position of the result that takes over its buffer).
      names: what users call a value: the path of an argument or result, or the task that makes it.
      replaces: result -> the argument whose next value it is; both have one layout, and the text shows the argument.

    Example:
      >>> import jax, jax.numpy as jnp, manymesh as mm
      >>> task = mm.task(lambda x: mm.with_sharding_constraint(x + 1, ("d",)), "add", devices=[0, 1], device_axes=("d",))
      >>> print(mm.jit(task).lower(jax.ShapeDtypeStruct((4,), jnp.float32)).layout)
      Layout: 2 values on 1 submesh
        submesh 0, {'d': 2}
          args[0]  float32[4]  P('d')  propagated through 'add'
          result   float32[4]  P('d')  propagated through 'add'
    """

    submeshes: tuple[Mesh, ...]
    decisions: Mapping[tuple[Var, int], Decision]
    donation: Mapping[int, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    names: Mapping[Var, str] = field(default_factory=dict)
    replaces: Mapping[Var, Var] = field(default_factory=dict)

    def sharding(self, v: Var, submesh: int) -> NamedSharding:
        """The sharding of a value on a submesh: on its devices, or in their part of the host's memory if it was put there.

        Planned devices have no kinds of memory: there only the type of the value says it.
        """
        mesh = self.submeshes[submesh]
        on_host = _compat.is_in_host_memory(v.aval) and not isinstance(mesh.devices.flat[0], PlannedDevice)
        return _sharding(mesh, self.decisions[v, submesh].spec, HOST if on_host else None)

    def spec(self, v: Var, submesh: int) -> PartitionSpec:
        """The device axes of each dimension of a value on a submesh."""
        return self.decisions[v, submesh].spec

    def __str__(self) -> str:
        count = len(self.submeshes)
        lines = [f"Layout: {len(self.decisions)} values on {count} submesh{'es' * (count != 1)}"]
        for s, mesh in enumerate(self.submeshes):
            rows = list(self._rows(s))
            lines.append(f"  submesh {s}, {dict(mesh.shape)}")
            widths = [max((len(row[k]) for row in rows), default=0) for k in range(3)]
            lines += [
                "    " + "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]])
                for row in rows
            ]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return shortened(str(self), whole="str()")

    def _rows(self, s: int) -> Iterator[tuple[str, str, str, str]]:
        """Name, type, spec and rule of each value on a submesh; values that are alike share a line."""
        alike: dict[tuple[str, str, str, str], int] = {}
        for (v, at), decision in self.decisions.items():
            if at == s and self.replaces.get(v, v) is v:  # the next value of another one lies as that does
                row = (self.names.get(v, ""), v.aval.str_short(), _spec_text(decision.spec), decision.rule)
                alike[row] = alike.get(row, 0) + 1
        for (name, aval, spec, rule), times in alike.items():
            yield name, aval if times == 1 else f"{times} x {aval}", spec, rule


@functools.lru_cache(maxsize=4096)
def _sharding(mesh: Mesh, spec: PartitionSpec, kind: str | None) -> NamedSharding:
    """One object for all equal shardings, which are then told to be equal at once."""
    return NamedSharding(mesh, spec, memory_kind=kind)


def _spec_text(spec: PartitionSpec) -> str:
    return f"P({', '.join(map(repr, spec))})"
