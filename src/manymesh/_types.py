"""Names of types that JAX leaves without one."""

from __future__ import annotations

from typing import Any, TypeAlias

# Containers that JAX flattens, of leaves of any kind; a leaf alone is one too. For a type checker it is anything.
PyTree: TypeAlias = Any
