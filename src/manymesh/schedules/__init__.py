"""Pipeline schedules: who runs what in which order, as plain data.

A schedule turns a placement of stages on submeshes and a number of microbatches into an
`Order`, which `check` proves, `simulate` times, `picture` draws and the runtime follows.
Nothing here needs JAX or a device.
"""

from ._check import check as check
from ._costs import Costs as Costs
from ._custom import Custom as Custom
from ._dualpipev import DualPipeV as DualPipeV
from ._eager_1f1b import Eager1F1B as Eager1F1B
from ._gpipe import GPipe as GPipe
from ._interleaved_1f1b import Interleaved1F1B as Interleaved1F1B
from ._issue import issue_order as issue_order
from ._live import live_activations as live_activations
from ._live import peak_memory as peak_memory
from ._one_f_one_b import OneFOneB as OneFOneB
from ._picture import picture as picture
from ._registry import get as get
from ._registry import names as names
from ._registry import register as register
from ._search import Choice as Choice
from ._search import search as search
from ._simulate import Simulation as Simulation
from ._simulate import Slot as Slot
from ._simulate import simulate as simulate
from ._types import AbstractSchedule as AbstractSchedule
from ._types import Action as Action
from ._types import Kind as Kind
from ._types import Order as Order
from ._types import ScheduleName as ScheduleName
from ._wavefront import Wavefront as Wavefront
from ._zbv import ZBV as ZBV
from ._zero_bubble_h1 import ZeroBubbleH1 as ZeroBubbleH1
from ._zero_bubble_h2 import ZeroBubbleH2 as ZeroBubbleH2

register(GPipe)
register(OneFOneB)
register(Eager1F1B)
register(Interleaved1F1B)
register(ZeroBubbleH1)
register(ZeroBubbleH2)
register(ZBV)
register(DualPipeV)
register(Wavefront)
register(Custom)

__all__ = [
    "AbstractSchedule",
    "Action",
    "Choice",
    "Costs",
    "Custom",
    "DualPipeV",
    "Eager1F1B",
    "GPipe",
    "Interleaved1F1B",
    "Kind",
    "OneFOneB",
    "Order",
    "ScheduleName",
    "Simulation",
    "Slot",
    "Wavefront",
    "ZBV",
    "ZeroBubbleH1",
    "ZeroBubbleH2",
    "check",
    "get",
    "issue_order",
    "live_activations",
    "names",
    "peak_memory",
    "picture",
    "register",
    "search",
    "simulate",
]
