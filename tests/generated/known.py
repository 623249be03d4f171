"""What does not work yet: each entry is kept from being drawn, or from being checked, until somebody mends it."""

from __future__ import annotations

import os

# One sentence each. Delete an entry with the change that mends it: from then on the construct is drawn.
KNOWN_BROKEN: dict[str, str] = {}


def works(name: str) -> bool:
    """Whether a construct is to be drawn."""
    return name not in KNOWN_BROKEN or name in _SWITCHED_ON


# `make fuzz ARGS="--with overlapping_submeshes"` draws one of them all the same.
_SWITCHED_ON = frozenset(os.environ.get("MANYMESH_GENERATED_WITH", "").split(","))
