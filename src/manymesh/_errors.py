"""Every error that ManyMesh raises on purpose, in one tree.

::

    ManyMeshError
    ├── TaskError(ValueError)          a task is described or nested wrongly
    ├── MeshError(ValueError)          devices, meshes or their axes do not fit
    ├── AxisError(ValueError)          a logical or device axis is unknown, taken, or does not divide
    ├── MetadataError(ValueError)      partition metadata does not fit the value it describes
    ├── MicrobatchError(ValueError)    a batch cannot be cut, or a reduction does not fit
    ├── ScheduleError(ValueError)      a schedule is unknown, impossible, or contradicts the program
    ├── PlacementError(ValueError)     a program cannot be split over the submeshes
    ├── CheckpointError(ValueError)    a checkpoint cannot be written, or is not what was asked for
    │   └── CheckpointNotFoundError(FileNotFoundError)  there is none, or none that was finished
    ├── ArgumentError(TypeError)       a call has arguments of the wrong structure
    └── ProcessError(RuntimeError)     the processes of a run do not agree, or one is gone

Each class also inherits the built-in type that a caller would catch, so that
``except ValueError`` keeps working. A message says where, what was expected, what
was found, and what to do; a last line names the section of the documentation.

Errors that belong to JAX (leaked tracers, unhashable static arguments, deleted
arrays) pass through unchanged.
"""

from __future__ import annotations


class ManyMeshError(Exception):
    """The root of every error that ManyMesh raises on purpose.

    A note below the message names the section of the documentation: ``see docs: errors#TaskError``.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.add_note(f"see docs: errors#{type(self).__name__}")


class TaskError(ManyMeshError, ValueError):
    """A task is described or nested in a way that has no meaning."""


class MeshError(ManyMeshError, ValueError):
    """Devices, meshes or the names of their axes do not fit together."""


class AxisError(ManyMeshError, ValueError):
    """A logical or device axis is unknown, already taken, or does not divide a dimension."""


class MetadataError(ManyMeshError, ValueError):
    """Partition metadata does not fit the value it describes."""


class MicrobatchError(ManyMeshError, ValueError):
    """A batch cannot be cut into microbatches, or a reduction does not fit the output."""


class ScheduleError(ManyMeshError, ValueError):
    """A pipeline schedule is unknown, impossible, or contradicts the program."""


class PlacementError(ManyMeshError, ValueError):
    """A program cannot be split over the submeshes it names."""


class CheckpointError(ManyMeshError, ValueError):
    """A checkpoint cannot be written, or does not hold what was asked for."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """There is no checkpoint, or none that was finished, where one was looked for."""


class ArgumentError(ManyMeshError, TypeError):
    """A call has arguments of the wrong structure."""


class ProcessError(ManyMeshError, RuntimeError):
    """The processes of a run do not agree, one is gone, or they were started wrongly."""
