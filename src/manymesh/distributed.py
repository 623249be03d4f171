"""One script in several processes: the public face of `manymesh.distributed`."""

from __future__ import annotations

from ._distributed._initialize import initialize as initialize
from ._distributed._worker import launch as launch

__all__ = ["initialize", "launch"]
