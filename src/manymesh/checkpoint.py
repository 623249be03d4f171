"""Checkpoints: any pytree of arrays on any submeshes, saved beside the training loop, restored onto any other layout."""

from __future__ import annotations

from ._checkpoint._api import metadata as metadata
from ._checkpoint._api import restore as restore
from ._checkpoint._api import save as save
from ._checkpoint._argument import argument_of as argument_of
from ._checkpoint._manager import Manager as Manager
from ._checkpoint._metadata import ByProcess as ByProcess
from ._publish import publish as _publish

__all__ = ["ByProcess", "Manager", "argument_of", "metadata", "restore", "save"]

_publish(__name__)
