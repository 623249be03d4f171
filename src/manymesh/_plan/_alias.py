"""Slots that may hold one buffer: copies of a value on submeshes that share devices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jax.sharding import Mesh

from .._task import mesh_devices
from ._instructions import Instruction, Send


def sharing_submeshes(submeshes: Sequence[Mesh]) -> frozenset[tuple[int, int]]:
    """Pairs of different submeshes with a device in common, in both orders."""
    devices = [frozenset(mesh_devices(m)) for m in submeshes]
    return frozenset(
        (a, b) for a, x in enumerate(devices) for b, y in enumerate(devices) if a != b and not x.isdisjoint(y)
    )


def find_aliases(
    submeshes: Sequence[Mesh], inputs: Iterable[tuple[int, int, int]], instructions: Sequence[Instruction]
) -> dict[int, int]:
    """Slots that may hold one buffer.

    A copy to devices of which some have the shard already does not copy there: both arrays then hold one buffer, and
    donating one deletes the other. So does an input that arrives on two submeshes, from wherever it comes.

    Args:
      submeshes: those of the program.
      inputs: those of the plan.
      instructions: those of the plan, each `Send` with its `Receive` right behind it.

    Returns:
      Each slot that may share its buffer -> the first slot of its group.
    """
    sharing = sharing_submeshes(submeshes)
    if not sharing:
        return {}
    first: dict[int, int] = {}

    def root(slot: int) -> int:
        while first.setdefault(slot, slot) != slot:
            slot = first[slot]
        return slot

    def join(a: int, b: int) -> None:
        a, b = sorted((root(a), root(b)))
        first[b] = a

    arrived: dict[int, list[tuple[int, int]]] = {}
    for position, s, slot in inputs:
        for other, its_slot in arrived.setdefault(position, []):
            if (s, other) in sharing:
                join(slot, its_slot)
        arrived[position].append((s, slot))
    for send, receive in zip(instructions, instructions[1:], strict=False):
        if isinstance(send, Send) and (send.submesh, send.target) in sharing:
            assert not isinstance(receive, Send) and receive.submesh == send.target, "a Receive stands behind its Send"
            for a, b in zip(send.inputs, receive.outputs, strict=True):
                join(a, b)
    return {slot: root(slot) for slot in sorted(first)}
