"""What a flat program is made of: nodes, which are equations with what they stand for, and microbatch loops."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from .. import _compat
from .._compat import AbstractValue, Atom, Eqn, Var
from .._microbatch import LoopSpec
from ._harmless import is_harmless


@dataclass(frozen=True, eq=False, slots=True)
class Node:
    """One equation of the flat program. Two nodes are equal only if they are the same object.

    Attributes:
      eqn: the equation, its variables those of the flat program.
      task: mark of the task it is, or None for an unmarked equation.
      backward: whether it belongs to a backward pass.
      loop: index of the loop whose body it is in (into `FlatProgram.loops`), or None.
      layout_follows_loop: whether it only prepares what a loop takes in (a piece of a batch, a zero accumulator); its
        sharding is then the one that the loop wants.
      unstacks: whether it takes a stacked value apart, layer by layer. It stays out of the layers' fragments, which
        would otherwise differ by their index.
      colocated_with: mark of the task on whose submesh it runs, though it is no part of it.
      stack: its name stack: the scopes it was traced in. Empty for equations that a pass made.
      weight: whether it is the half of a backward task that only makes weight gradients.
      mesh: the submesh of an equation that names axes of it, where no task says one; None where placement is free.
      guard: the branch it is in: pairs (index of a conditional, number of the branch), outermost first. Its results mean
        something only where every index is that number.
      inputs: the variables that it reads, those of its guard included if it runs in its branch alone; literals are left
        out.
      outputs: the variables that the equation makes and somebody may read.
    """

    eqn: Eqn
    task: str | None = None
    backward: bool = False
    loop: int | None = None
    layout_follows_loop: bool = False
    weight: bool = False
    unstacks: bool = False
    colocated_with: str | None = None
    stack: str = ""
    mesh: Mesh | None = None
    guard: tuple[tuple[Atom, int], ...] = ()
    inputs: tuple[Var, ...] = field(init=False, repr=False)
    outputs: tuple[Var, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        read = [*self.eqn.invars, *(index for index, _ in self.guard)] if self.is_guarded else self.eqn.invars
        object.__setattr__(self, "inputs", tuple(v for v in read if _compat.is_var(v)))
        object.__setattr__(self, "outputs", tuple(v for v in self.eqn.outvars if _compat.is_var(v)))

    @property
    def is_guarded(self) -> bool:
        """Whether it runs only where its branch is taken: what is neither cheap nor sure to end does, and what can be seen."""
        return bool(self.guard) and (self.task is not None or not is_harmless(self.eqn))

    @property
    def phase(self) -> int:
        """0 forward, 1 backward, 2 the weight-gradient half of a split backward."""
        return 2 if self.weight else int(self.backward)

    @property
    def primitive(self) -> str:
        """Name of the primitive."""
        return str(self.eqn.primitive.name)

    def __repr__(self) -> str:
        what = self.task or self.primitive
        return f"Node({what}, {len(self.inputs)} -> {len(self.outputs)})"


@dataclass(frozen=True, eq=False, slots=True)
class Carry:
    """A value that one microbatch hands to the next.

    Attributes:
      inner: what the body reads.
      out: what the body leaves for the next microbatch.
      init: what the first microbatch reads.
      final: what the last microbatch left, read after the loop.
    """

    inner: Var
    out: Var
    init: Atom
    final: Var


@dataclass(frozen=True, eq=False, slots=True)
class Pieces:
    """A value of the body that is another one for each microbatch.

    Attributes:
      inner: the variable of the body.
      outer: for each microbatch, in the order in which they run, the variable outside the loop.
    """

    inner: Var
    outer: tuple[Atom, ...]


@dataclass(frozen=True, eq=False, slots=True)
class Loop:
    """A microbatch loop: its body is in the flat program once, its nodes tagged with the loop's index.

    Attributes:
      spec: what `microbatch` said (name, number of microbatches, schedule).
      carries: values handed from one microbatch to the next.
      xs: values that enter the body piece by piece.
      ys: values that leave the body piece by piece; their outer variables are made by the loop.
    """

    spec: LoopSpec
    carries: tuple[Carry, ...] = ()
    xs: tuple[Pieces, ...] = ()
    ys: tuple[Pieces, ...] = ()


def nbytes(aval: AbstractValue) -> int:
    """Bytes of a value; a typed random key counts as its raw words."""
    dtype, shape = getattr(aval, "dtype"), getattr(aval, "shape")  # noqa: B009 (the base class declares neither)
    return int(math.prod(shape)) * _width(dtype)


@functools.cache
def _width(dtype: jax.typing.DTypeLike) -> int:
    """Bytes of an element."""
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype))
        return int(math.prod(words.shape) * words.dtype.itemsize)
    return 8 if jnp.issubdtype(dtype, jax.dtypes.extended) else int(np.dtype(dtype).itemsize)


def nodes_where(nodes: Iterable[Node], changed: Mapping[Node, Iterable[Node]]) -> tuple[Node, ...]:
    """The nodes in order, those in ``changed`` replaced by what it says."""
    return tuple(m for n in nodes for m in changed.get(n, (n,)))


def shape_and_dtype(atom: Atom) -> tuple[tuple[int, ...], np.dtype]:
    """The shape and dtype of a variable or literal."""
    return getattr(atom.aval, "shape", ()), getattr(atom.aval, "dtype", np.dtype(np.float32))
