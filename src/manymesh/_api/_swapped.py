"""Results unpacked in the wrong order: the loss comes back as the state."""

from __future__ import annotations

from typing import Any

from jax.tree_util import treedef_is_leaf

from ._arguments import Arguments


def swapped_results(name: str, before: Any, given: Arguments) -> list[str]:
    """Sentences about arguments that are one number, and were a tree in the call before.

    Args:
      name: name of the step.
      before: structure of the arguments of the last call that went well, or None.
      given: those of this one.
    """
    if before is None:
        return []
    (args_before, _), (args_now, _) = before.children(), given.treedef.children()
    texts, at = [], 0
    for k, (was, now) in enumerate(zip(args_before.children(), args_now.children(), strict=False)):
        leaf = given.leaves[at] if now.num_leaves else None
        at += now.num_leaves
        if leaf is None or not treedef_is_leaf(now) or treedef_is_leaf(was):
            continue
        if getattr(leaf, "shape", None) == ():
            texts.append(
                f"mm.jit({name}): args[{k}] is one number, {leaf.dtype}[], and was a tree of {was.num_leaves} arrays in the "
                "call before; if it is the loss, unpack the results in the order in which the step returns them: "
                "loss, state = step(state, batch)"
            )
    return texts
