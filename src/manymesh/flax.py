"""Flax Linen: modules as tasks, parameters with named axes, and a whole training step."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax

from . import meta
from ._flax_meta import register_with_flax
from ._flax_task import task as task

register_with_flax()
