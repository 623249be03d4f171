"""Sets of things that are one, found by joining pairs."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Groups(Generic[T]):
    """Disjoint sets (union-find)."""

    def __init__(self) -> None:
        self._parent: dict[T, T] = {}

    def find(self, item: T) -> T:
        """The representative of the set that an item is in."""
        root = item
        while root in self._parent:
            root = self._parent[root]
        while item is not root:
            self._parent[item], item = root, self._parent[item]
        return root

    def join(self, a: T, b: T) -> None:
        """Makes the sets of two items one; the representative of the second stays."""
        a, b = self.find(a), self.find(b)
        if a is not b:
            self._parent[a] = b
