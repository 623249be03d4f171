"""The public face of the error tree: ``manymesh.errors.ManyMeshError`` and its children."""

from __future__ import annotations

from ._errors import ArgumentError as ArgumentError
from ._errors import AxisError as AxisError
from ._errors import CheckpointError as CheckpointError
from ._errors import CheckpointNotFoundError as CheckpointNotFoundError
from ._errors import ManyMeshError as ManyMeshError
from ._errors import MeshError as MeshError
from ._errors import MetadataError as MetadataError
from ._errors import MicrobatchError as MicrobatchError
from ._errors import PlacementError as PlacementError
from ._errors import ProcessError as ProcessError
from ._errors import ScheduleError as ScheduleError
from ._errors import TaskError as TaskError

__all__ = [
    "ArgumentError",
    "AxisError",
    "CheckpointError",
    "CheckpointNotFoundError",
    "ManyMeshError",
    "MeshError",
    "MetadataError",
    "MicrobatchError",
    "PlacementError",
    "ProcessError",
    "ScheduleError",
    "TaskError",
]
