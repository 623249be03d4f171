"""The program between tracing and planning, as plain frozen data.

A traced step becomes a `FlatProgram`: equations in order, each with the task it belongs to, and the microbatch loops
beside them. The passes rewrite it. What they leave is cut into a `Program`: one SPMD fragment for each task and phase,
and the values that cross between submeshes.
"""

from ._flat import FlatProgram as FlatProgram
from ._fragments import Edge as Edge
from ._fragments import Fragment as Fragment
from ._fragments import Kind as Kind
from ._fragments import LoopPlan as LoopPlan
from ._fragments import Program as Program
from ._fragments import Reduction as Reduction
from ._nodes import Carry as Carry
from ._nodes import Loop as Loop
from ._nodes import Node as Node
from ._nodes import Pieces as Pieces
from ._nodes import nbytes as nbytes
