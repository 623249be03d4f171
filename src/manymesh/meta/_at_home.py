"""Making our boxes at home in Flax, whatever is imported first, without importing Flax.

Flax looks for boxes with ``isinstance`` on its own classes and serializes by exact type, so its modules have to be told
about ours once. Where Flax is there already, that happens now. Else a finder waits for these modules at the head of
``sys.meta_path``: it finds nothing itself, but has their loader call us when the module is complete, and leaves when it
has seen all. Nothing less is reliable: a tree of boxes may be made before Flax is imported, and the first that Flax does
with it is a dictionary lookup of its type.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from .._errors import MetadataError
from .._types import PyTree
from ._box import AxisMetadata, content_of
from ._partitioned import Partitioned, on_subclass


class _Finder(importlib.abc.MetaPathFinder):
    """Calls functions when modules have been imported."""

    def __init__(self) -> None:
        self.waiting: dict[str, Callable[[ModuleType], None]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec that the other finders have for a module that is waited for; its loader tells us."""
        if fullname not in self.waiting:
            return None
        found = (f.find_spec(fullname, path, target) for f in sys.meta_path if f is not self)
        spec = next((s for s in found if s is not None), None)
        if spec is None or spec.loader is None:
            return spec
        loader, execute = spec.loader, spec.loader.exec_module

        def execute_and_tell(module: ModuleType) -> None:
            del loader.exec_module
            execute(module)
            self.tell(fullname, module)

        loader.exec_module = execute_and_tell  # type: ignore[method-assign]  # a loader is one module's
        return spec

    def tell(self, name: str, module: ModuleType) -> None:
        callback = self.waiting.pop(name, None)
        if callback is not None:
            callback(module)
        if not self.waiting and self in sys.meta_path:
            sys.meta_path.remove(self)


def when_imported(callbacks: dict[str, Callable[[ModuleType], None]]) -> None:
    """Calls functions with modules: at once with those that are imported, with the others when they are.

    Args:
      callbacks: name of a module -> what to call with it.
    """
    finder = _Finder()
    for name, callback in callbacks.items():
        if name in sys.modules:
            callback(importlib.import_module(name))  # waits, if another thread is importing it
        else:
            finder.waiting[name] = callback
    if finder.waiting:
        sys.meta_path.insert(0, finder)


def register_serialization(serialization: ModuleType, cls: type) -> None:
    """Teaches ``flax.serialization`` a class of boxes: the state is the value alone, as for Flax's own boxes.

    Metadata are code, not state: they come from the target. Bytes written from Flax's boxes can be read into ours and
    the other way round.

    Args:
      serialization: the module ``flax.serialization``.
      cls: the exact class.
    """

    def to_state(box: PyTree) -> dict[str, Any]:
        return {"value": serialization.to_state_dict(content_of(box))}

    def from_state(box: PyTree, state: dict[str, Any]) -> PyTree:
        if not isinstance(state, dict) or set(state) != {"value"}:
            found = sorted(state) if isinstance(state, dict) else type(state).__name__
            raise MetadataError(
                f"{box!r} expects a state with the single key 'value', found {found}; load a state without boxes "
                "into meta.unbox(target), then use meta.replace_boxed"
            )
        return box.replace_boxed(serialization.from_state_dict(content_of(box), state["value"], name="value"))

    serialization.register_serialization_state(cls, to_state, from_state, override=True)


def _tell_core(module: ModuleType) -> None:
    module.AxisMetadata.register(AxisMetadata)
    module.Partitioned.register(Partitioned)  # for nn.tabulate, which prints names of these only


def _tell_serialization(module: ModuleType) -> None:
    on_subclass(functools.partial(register_serialization, module))


def settle() -> None:
    """Makes our boxes at home in Flax, now or as soon as it is imported."""
    when_imported({"flax.core.meta": _tell_core, "flax.serialization": _tell_serialization})
