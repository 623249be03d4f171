"""What does not work yet: each entry is kept from being drawn, or from being checked, until somebody mends it."""

from __future__ import annotations

import os

# One sentence each. Delete an entry with the change that mends it: from then on the construct is drawn.
KNOWN_BROKEN: dict[str, str] = {
    "overlapping_submeshes": "submeshes that share devices without being equal are refused",
    "unequal_sizes_under_grad": "two tasks on different numbers of devices, under grad, where the second one combines an "
    "operand with a constant: `0 + x`, `1 - x`, softmax, dropout, ...; a third of the catalogue",
    "observed_branches": "the branch of a cond around tasks that is not taken runs too",
    "guarded_while": "a while loop around tasks",
    "constant_key": "a concrete typed random key that a task closes over",
    "unsafe_rbg_folded": "`rng_argnum` with unsafe_rbg keys is not fold_in(key, i)",
    "weak_types": "weak types are lost in results of microbatches and in scans around tasks",
    "returned_number": "a Python int that a task returns comes back as an array",
    "mirrored_layouts": "moments of a parameter may have another layout than the parameter",
    "constraint_outside": "constraints in logical names outside tasks replicate in silence",
    "donated_is_deleted": "a donated argument that had to move, or is handed through, is not deleted",
    "python_step_count": "a TrainState whose step is a Python int compiles twice",
    "empty_scan_around": "a scan of length 0 around a task",
    "examples_under_vmap": "vmap of single examples through a task that constrains its batch dimension",
    "split_backward_of_split_layers": "a scan over layers that is split over submeshes, in a loop whose schedule splits the "
    "backward pass: a fragment reads what was freed",
    "reductions_by_a_function": "lax.reduce and lax.reduce_window with a function, in a microbatch loop with a constraint",
    "relayouts_compiled_ahead": "a relayout of a value that comes in compiles in the middle of the second step",
    "state_layouts": "a donated state that has no sharding of its own is paired with a result of another size",
}


def works(name: str) -> bool:
    """Whether a construct is to be drawn."""
    return name not in KNOWN_BROKEN or name in _SWITCHED_ON


# `make fuzz ARGS="--with overlapping_submeshes"` draws one of them all the same.
_SWITCHED_ON = frozenset(os.environ.get("MANYMESH_GENERATED_WITH", "").split(","))
