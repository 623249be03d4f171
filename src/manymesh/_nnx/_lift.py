"""Functions of modules as functions of arrays, with what they change in the modules handed back.

This is how Flax lifts its own transformations (`nnx.jit`, `nnx.remat`): modules and variables among the arguments
become their definition, which is static, and their state, which are arrays. The function is called on modules made
of these, and what it left in them is written back into the caller's modules, also variables that it added.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import flax.nnx as nnx
import jax

from .._errors import AxisError
from .._shown import name_of
from .._types import PyTree
from ..meta._axes import Axes
from ..meta._named import axes_of_variable
from ..meta._rules import Rules, rules_around

R = TypeVar("R")

_TAG = "manymesh"

# What is left in the modules among the arguments, and the result; both as pytrees of arrays.
PureResult: TypeAlias = tuple[Any, Any]


def is_node(x: object) -> bool:
    """Whether it is a module, another NNX object, or a variable."""
    return isinstance(x, (nnx.Pytree, nnx.Variable))


def is_split(x: object) -> bool:
    """Whether it is what stands for a module among pure arguments and results."""
    return isinstance(x, nnx.NodeStates)


def has_nodes(tree: PyTree) -> bool:
    """Whether there is a module or a variable in a tree."""
    return any(map(is_node, jax.tree.leaves(tree, is_leaf=is_node)))


def pure(fun: Callable[..., Any], tell: Callable[[bool], None] | None = None) -> Callable[..., PureResult]:
    """The function of arrays that a function of modules is; to be called below `call_lifted`.

    Args:
      fun: a function of modules.
      tell: called with whether the function left its modules as they were.
    """

    @functools.wraps(fun)
    def pure_fun(*args: PyTree, **kwargs: PyTree) -> PureResult:
        args, kwargs = nnx.from_tree((args, kwargs), ctxtag=_TAG, is_inner=True)
        nodes = jax.tree.map(lambda x: x if is_node(x) else None, (args, kwargs), is_leaf=is_node)
        before, structure = jax.tree.flatten(nnx.to_tree(nodes)) if tell is not None else ([], None)
        out = fun(*args, **kwargs)
        if tell is not None:
            after, new_structure = jax.tree.flatten(nnx.to_tree(nodes))
            tell(structure == new_structure and all(map(operator.is_, before, after)))
        result: PureResult = nnx.to_tree((nodes, out), ctxtag=_TAG)
        return result

    pure_fun.__name__ = name_of(fun)  # which a partial application does not have
    return pure_fun


def call_lifted(run: Callable[..., PureResult], args: PyTree, kwargs: PyTree) -> Any:
    """Calls a function of arrays with modules.

    Args:
      run: a function that `pure` made, or a transformation of one.
      args, kwargs: its arguments, with modules among them.

    Returns:
      The result. The modules are as the function left them.
    """
    with nnx.update_context(_TAG):
        pure_args, pure_kwargs = nnx.to_tree((args, kwargs), ctxtag=_TAG)
        result = run(*pure_args, **pure_kwargs)
        _, out = nnx.from_tree(result, ctxtag=_TAG, is_inner=False)
    return out


def call_split(run: Callable[..., R], args: PyTree, kwargs: PyTree) -> R:
    """Calls a function of arrays with modules, which stay as they are, and returns what it returns."""
    with nnx.update_context(_TAG):
        pure_args, pure_kwargs = nnx.to_tree((args, kwargs), ctxtag=_TAG)
        return run(*pure_args, **pure_kwargs)


def merge_result(out: PyTree) -> Any:
    """The result in a pure result, with modules of its own."""
    with nnx.update_context(_TAG):
        return nnx.from_tree(out, ctxtag=_TAG, is_inner=False)


def constrained(tree: PyTree, constrain: Callable[[Any, Axes, Rules], Any]) -> Any:
    """A pure tree with the values of variables that name their axes constrained.

    Args:
      tree: as a pure function gets it.
      constrain: from a value, the metadata of its variable and the rules for its names to the value.
    """

    def on_leaf(x: Any) -> Any:
        if not isinstance(x, nnx.Variable):
            return x
        axes = axes_of_variable(x)
        if not axes.names:
            return x
        rules = (axes.rules or ()) + rules_around()
        value = x.get_value()
        if not hasattr(value, "ndim"):  # a state of Optax has no array for what `optax.masked` leaves out
            return x
        try:
            return x.replace(constrain(value, axes, rules))
        except AxisError as error:
            if len(axes.names) < value.ndim:
                error.add_note(
                    f"the variable has {value.ndim} dimensions and names {axes.names}; if nnx.vmap stacked it, name the new "
                    "dimension there and in nnx.scan: transform_metadata={nnx.PARTITION_NAME: 'layers'}"
                )
            raise

    return jax.tree.map(on_leaf, tree, is_leaf=lambda x: isinstance(x, nnx.Variable))
