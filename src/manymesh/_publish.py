"""Public classes carry the name of the module that users import them from."""

from __future__ import annotations

import sys


def publish(face: str, *, module: str | None = None) -> None:
    """Makes the classes that a face exports print as ``face.Name``, in errors, reprs and pickles.

    Args:
      face: name of the module that users import from.
      module: name of the module whose ``__all__`` lists them, complete; defaults to the face itself.
    """
    names = vars(sys.modules[module or face])
    for name in names["__all__"]:
        exported = names.get(name)
        if isinstance(exported, type) and exported.__module__.startswith("manymesh."):
            exported.__module__ = face
