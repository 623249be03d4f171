"""Everything that a step's plan says of its cost: what each fragment does, and what each value is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .. import _compat
from .._compat import Var
from .._hardware import Hardware
from .._key import Keys
from .._layout._layout import Layout
from .._plan._instructions import Plan, Send
from .._plan._number import arguments_elsewhere, variables_of
from .._program import Fragment, Program
from .._task import mesh_devices
from ._clock import Crossing, Durations
from ._crossings import shard_bytes
from ._kinds import Kind, kinds_of
from ._operations import Split, split_of
from ._work import Work, work


@dataclass(frozen=True, eq=False)
class Estimate:
    """A step, and what it costs by our own count.

    Attributes:
      program, plan, layout: the step.
      kinds: what its values are; those that are missing are activations.
      works: what one run of each fragment does on each of its devices.
      findings: what was found while the step was traced.
      late: inputs that come from the memory of the host when they are first read.
    """

    program: Program
    plan: Plan
    layout: Layout
    kinds: Mapping[Var, Kind]
    works: tuple[Work, ...]
    findings: tuple[str, ...] = ()
    late: frozenset[int] = frozenset()


def estimate(
    program: Program,
    plan: Plan,
    layout: Layout,
    states: Iterable[tuple[int, int]],
    findings: Sequence[str] = (),
    late: frozenset[int] = frozenset(),
    first: range = range(0),
) -> Estimate:
    """Counts what a step costs; fragments that are alike are counted once.

    Args:
      program, plan, layout: the step.
      states: (input, result) positions where the result is the next value of the input, or has its form.
      findings: what was found while it was traced.
      late: inputs that come from the memory of the host when they are first read.
      first: positions of the arrays of the first argument.
    """
    keys = Keys()
    known: dict[object, Work] = {}

    def of(f: Fragment) -> Work:
        axes = dict(program.submeshes[f.submesh].shape)
        ins, outs = (_splits(layout, f, variables, axes) for variables in (f.invars, f.outvars))
        on_cpu = next(iter(mesh_devices(program.submeshes[f.submesh]))).platform == "cpu"
        key = keys(f.jaxpr), ins, outs, tuple(axes.items()), on_cpu
        if key not in known:
            known[key] = work(f.jaxpr, axes, ins, outs, on_cpu=on_cpu)
        return known[key]

    works = tuple(of(f) for f in program.fragments)
    return Estimate(program, plan, layout, kinds_of(program, layout, states, first), works, tuple(findings), late)


def _splits(layout: Layout, f: Fragment, variables: Sequence[Var], axes: Mapping[str, int]) -> tuple[Split, ...]:
    return tuple(split_of(layout.spec(v, f.submesh), len(_compat.shape(v)), axes) for v in variables)


@dataclass(frozen=True)
class Roofline:
    """Seconds of one run of a fragment, by what they go for.

    They add up: of the kernels that a device runs one after the other, products compute, and the others wait for memory.

    Attributes:
      compute, memory, exchange, launch: seconds for arithmetic, for its memory, for sums over its devices, to start it.
    """

    compute: float
    memory: float
    exchange: float
    launch: float

    @property
    def seconds(self) -> float:
        """The whole run."""
        return self.compute + self.memory + self.exchange + self.launch

    @property
    def bound(self) -> str:
        """What most of the time goes for: ``compute``, ``memory``, ``exchange`` or ``launch``."""
        parts = {name: getattr(self, name) for name in ("compute", "memory", "exchange", "launch")}
        return max(parts, key=lambda name: float(parts[name]))


def roofline(work: Work, hardware: Hardware, flops: float, nbytes: float) -> Roofline:
    """How long a fragment takes where nothing is slower than the hardware's peak.

    Args:
      work: what it does.
      hardware: the device.
      flops, nbytes: all operations, and all bytes read and written: ours, or XLA's.
    """
    ours = work.flops or 1.0
    compute = sum(n / hardware.flops_per_second(dtype) for dtype, n in work.matmul_flops.items())
    compute += work.other_flops / hardware.flops_per_second("float32")
    exchange = work.exchanged_bytes / hardware.link_bandwidth + work.exchanges * hardware.link_latency
    return Roofline(compute * flops / ours, nbytes / hardware.memory_bandwidth, exchange, hardware.launch_overhead)


def durations(found: Estimate, hardware: Hardware | None, flops: Sequence[float], nbytes: Sequence[float]) -> Durations:
    """What everything takes on a hardware; without one, FLOPs stand for seconds and transfers take no time.

    Args:
      found: the step.
      hardware: its devices.
      flops, nbytes: of one run of each fragment.
    """
    if hardware is None:
        return Durations(list(flops))
    runs = [roofline(w, hardware, n, b).seconds for w, n, b in zip(found.works, flops, nbytes, strict=True)]
    transfers: dict[Crossing, float] = {}
    variables = variables_of(found.program)
    for ins in found.plan.instructions:
        if isinstance(ins, Send) and (key := (ins.submesh, ins.target, ins.variables)) not in transfers:
            moving = [v for v in (variables[k] for k in ins.variables) if _moves(found.layout, v, ins)]
            sent = sum(shard_bytes(v, found.layout, ins.target) for v in moving)
            transfers[key] = hardware.link_latency + sent / hardware.link_bandwidth if moving else 0.0
    arguments = {
        place: hardware.link_latency + shard_bytes(v, found.layout, s) / hardware.link_bandwidth
        for place, v, home, s in arguments_elsewhere(found.program, found.plan)
        if found.layout.sharding(v, home) != found.layout.sharding(v, s)
    }
    return Durations(runs, transfers, cores=hardware.cores, arguments=arguments)


def _moves(layout: Layout, v: Var, ins: Send) -> bool:
    return layout.sharding(v, ins.submesh) != layout.sharding(v, ins.target)
