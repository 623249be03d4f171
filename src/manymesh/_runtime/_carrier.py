"""What a transport between processes is asked for: to carry pieces of values from devices to devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
from jax.sharding import Sharding

from .._distributed._world import World
from ._launches import Launches


@dataclass(frozen=True)
class Piece:
    """A piece of a value that goes from one process to another, or a whole value where its layout stays.

    Attributes:
      value: which value of those that cross together.
      giver: the device it leaves from; None for a whole value.
      taker: the device it arrives on; None for a whole value.
      source: process that has it.
      target: process that wants it.
      shape, dtype: its own.
      leaving: its sharding where it is.
      arriving: its sharding where it goes.
    """

    value: int
    giver: Any
    taker: Any
    source: int
    target: int
    shape: tuple[int, ...]
    dtype: Any
    leaving: Sharding
    arriving: Sharding

    @property
    def wanted(self) -> jax.ShapeDtypeStruct:
        """What is to arrive."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=self.arriving)


Give = Callable[[Piece], jax.Array]
Carry = Callable[[Give], Sequence[jax.Array]]


class Carrier(Protocol):
    """Carries pieces between the processes of a run.

    What crosses together is bound once, with all its pieces, those between other processes too, and is then carried in
    every call. Nothing waits for a value to be computed, but a process that gets too far ahead of another does
    (`World.counts_sent`). Whoever gives a piece does not donate or delete it before it was taken.

    Attributes:
      world: the processes.
      in_order: whether each process has to carry everything that crosses between any two, in one order in all of them.
      whole: whether it takes values in one piece that lie on several devices.
    """

    world: World
    in_order: bool
    whole: bool

    def begin(self, call: int) -> None:
        """The next call begins; its number is the same in every process."""

    def beside(self, launches: Launches) -> Carrier:
        """The same, for a step whose launches may hold collectives."""

    def bind(self, number: int, pieces: Sequence[Piece]) -> Carry:
        """What carries pieces that cross together.

        Args:
          number: what tells them from all others of a call.
          pieces: the same in every process, in the same order.

        Returns:
          A function. It is given what gives each piece that leaves here, and returns those that arrive here, in the order
          of `pieces`, though they may not be computed yet.
        """


def ends(pieces: Sequence[Piece], process: int) -> tuple[list[int], list[int]]:
    """The processes that pieces go to from a process, and those from which pieces come to it."""
    return (
        sorted({p.target for p in pieces if p.source == process}),
        sorted({p.source for p in pieces if p.target == process}),
    )
