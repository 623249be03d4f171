"""Public classes carry the name of the module that users import them from."""

from __future__ import annotations

import sys


def publish(face: str) -> None:
    """Makes the classes that a face exports print as ``face.Name``, in errors, reprs and pickles.

    Args:
      face: name of the module, which is complete and has an ``__all__``.
    """
    module = sys.modules[face]
    for name in module.__all__:
        exported = vars(module).get(name)
        if isinstance(exported, type) and exported.__module__.startswith("manymesh."):
            exported.__module__ = face
