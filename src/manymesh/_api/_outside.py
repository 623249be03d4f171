"""Arguments and results of the user, and what the program has for each: one value, or the blocks of a stacked one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from .._layout._stacked import Joints, block_shardings, joints_of
from .._program._fragments import Program
from .._program._stacked import Stacked, positions
from ._shardings import arrival, committed


class Outside:
    """Translates positions among the user's arguments and results into those of a program.

    Args:
      program: the program.
      leaves: the arguments.
      results: shapes of the results.
    """

    def __init__(self, program: Program, leaves: Sequence[Any], results: Sequence[Any]) -> None:
        self.program, self.leaves = program, leaves
        self.shift = len(program.consts)
        self._in = positions(len(leaves), program.stacked_inputs)
        self._out = positions(len(results), program.stacked_outputs)
        self._stacked_in = self._of(self._in, program.stacked_inputs)
        self._stacked_out = self._of(self._out, program.stacked_outputs)
        self._shapes_in = [tuple(jax.numpy.shape(x)) for x in leaves]
        self._shapes_out = [tuple(x.shape) for x in results]

    @staticmethod
    def _of(places: Sequence[range], stacked: Sequence[Stacked]) -> dict[int, Stacked]:
        known = {s.first: s for s in stacked}
        return {k: known[at.start] for k, at in enumerate(places) if at.start in known}

    def whole_in(self, shardings: Mapping[int, NamedSharding]) -> dict[int, NamedSharding]:
        """Those of arguments that are no stacks."""
        return {i: s for i, s in shardings.items() if i not in self._stacked_in}

    def whole_out(self, shardings: Mapping[int, NamedSharding]) -> dict[int, NamedSharding]:
        """Those of results that are no stacks."""
        return {o: s for o, s in shardings.items() if o not in self._stacked_out}

    def inputs(self, i: int) -> range:
        """Positions of an argument among the program's inputs."""
        return range(self.shift + self._in[i].start, self.shift + self._in[i].stop)

    def pairs(self, i: int, o: int) -> list[tuple[int, int]]:
        """(input, result) of the program for an argument and the result that replaces it."""
        ins, outs = self.inputs(i), self._out[o]
        return list(zip(ins, outs, strict=True)) if len(ins) == len(outs) else []

    def arriving(self) -> dict[int, NamedSharding]:
        """Argument -> the sharding it has, where that says something about its layout here."""
        found = {}
        for i, x in enumerate(self.leaves):
            sharding = committed(x) if i in self._stacked_in else arrival(x, self.program)
            if sharding is not None:
                found[i] = sharding
        return found

    def shardings_in(self, shardings: Mapping[int, NamedSharding]) -> dict[int, NamedSharding]:
        """Input of the program -> its sharding, from those of arguments."""
        found: dict[int, NamedSharding] = {}
        for i, sharding in shardings.items():
            stacked = self._stacked_in.get(i)
            each = [sharding] if stacked is None else block_shardings(stacked, sharding, self._shapes_in[i])
            found.update(zip(self.inputs(i), each, strict=True))
        return found

    def shardings_out(self, shardings: Mapping[int, NamedSharding]) -> dict[int, NamedSharding]:
        """Result of the program -> its sharding, from those of the user's results."""
        found: dict[int, NamedSharding] = {}
        for o, sharding in shardings.items():
            stacked = self._stacked_out.get(o)
            each = [sharding] if stacked is None else block_shardings(stacked, sharding, self._shapes_out[o])
            found.update(zip(self._out[o], each, strict=True))
        return found

    def joints(self, arguments: Mapping[int, NamedSharding], results: Mapping[int, NamedSharding]) -> Joints:
        """The user's own meshes of several submeshes."""
        ins = [(self._stacked_in[i], s, self._shapes_in[i]) for i, s in arguments.items() if i in self._stacked_in]
        outs = [(self._stacked_out[o], s, self._shapes_out[o]) for o, s in results.items() if o in self._stacked_out]
        return joints_of([*ins, *outs])
