"""The shardings that XLA's partitioner would find, by its propagation pass alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax._src import config
from jax._src.lib.mlir import ir, passmanager  # type: ignore[attr-defined]  # JAX re-exports these without saying so
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from ._tracing import without_mesh

try:
    from jaxlib.mlir.dialects import sdy
except ImportError:  # a jaxlib built without Shardy
    sdy = None  # type: ignore[assignment]  # a module, or nothing


class Propagated(NamedTuple):
    """Device axes for each dimension of what a computation takes and gives."""

    inputs: list[PartitionSpec]
    outputs: list[PartitionSpec]


def propagate(
    trace: Callable[..., jax.stages.Traced], mesh: AbstractMesh, ins: Sequence[Any], outs: Sequence[Any]
) -> Propagated | None:
    """The shardings that XLA's partitioner would find for a computation, by its propagation pass alone.

    No device is needed, and no code is generated.

    Args:
      trace: traces the computation, a function of flat arrays, with the arguments of `jax.jit` that it gets.
      mesh: what it runs on.
      ins, outs: the spec of each input and result; None to find it.

    Returns:
      A spec for each input and result, in the axes of ``mesh``. None where this jaxlib has no such pass, or where the
      computation cannot be lowered without devices.
    """
    if sdy is None:
        return None

    def shardings(specs: Sequence[Any]) -> list[Any]:
        return [None if s is None else NamedSharding(mesh, s) for s in specs]

    platform = jax.default_backend()
    with without_mesh(), config.use_shardy_partitioner(True):
        traced = trace(in_shardings=tuple(shardings(ins)), out_shardings=shardings(outs), keep_unused=True)
        try:
            lowered = traced.lower(lowering_platforms=(platform,))
        except ValueError as error:
            if "require devices" not in str(error):
                raise
            return None  # a callback: JAX lowers it for devices only
    module = lowered.compiler_ir("stablehlo")
    with module.context:
        operation = module.operation.clone().operation  # JAX may keep the module for another compilation
        passes = passmanager.PassManager.parse("builtin.module(sdy-propagation-pipeline)")
        passes.enable_verifier(False)  # between its passes, which takes longer than they do
        passes.run(operation)
        (main,) = (o for o in operation.regions[0].blocks[0] if o.attributes.get("sym_name") == _main())
        found = [_specs_of(main, name) for name in ("arg_attrs", "res_attrs")]
    # What JAX adds, tokens of ordered effects, comes first; a typed key has a dimension more than we know of.
    return Propagated(
        *(each[len(each) - n :] if n else [] for each, n in zip(found, (len(ins), len(outs)), strict=True))
    )


def _main() -> Any:
    return ir.StringAttr.get("main")


def _specs_of(main: Any, name: str) -> list[PartitionSpec]:
    """The specs of the inputs or of the results of an MLIR function."""
    kind = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value)
    count = len(kind.inputs if name == "arg_attrs" else kind.results)
    if name not in main.attributes:
        return [PartitionSpec()] * count
    return [_spec_of(ir.DictAttr(attributes)) for attributes in ir.ArrayAttr(main.attributes[name])]


def _spec_of(attributes: Any) -> PartitionSpec:
    if "sdy.sharding" not in attributes:
        return PartitionSpec()
    entries: list[Any] = []
    for dim in map(sdy.DimensionShardingAttr, sdy.TensorShardingAttr(attributes["sdy.sharding"]).dimension_shardings):
        axes = [sdy.AxisRefAttr(axis) for axis in dim.axes]
        whole = [a for a in axes if a.sub_axis_info is None]  # a part of an axis has no name in JAX
        names = tuple(str(a.name) for a in axes) if len(whole) == len(axes) else ()
        entries.append(names if len(names) > 1 else names[0] if names else None)
    return PartitionSpec(*entries)
