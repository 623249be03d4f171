"""What users get wrong: each mistake is told where, what was expected, what was found and what to write.

Every traceback ends at the user's line: no more than three frames of the package are in it.
"""

import re
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import manymesh as mm
import manymesh.equinox
import manymesh.flax
import manymesh.nnx
from flax import nnx
from manymesh import errors, meta, schedules
from stages import WIDTH, back, front, loss, microbatched, parameters, rows

pytestmark = pytest.mark.once

MESH = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("stage", "data"))
WHOLE = jax.make_mesh((2, 2), ("stage", "data"), (AxisType.Auto,) * 2, devices=jax.devices()[:4])
FIRST, LAST = mm.submeshes(WHOLE, "stage")
ALONE = jax.sharding.SingleDeviceSharding(jax.devices()[3])
EXPLICIT = jax.device_put(np.ones(4), NamedSharding(jax.make_mesh((4,), ("data",), (AxisType.Explicit,)), P()))
PACKAGE = str(Path(mm.__file__).parent)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(x).sum()


def in_a_task(fun, **task):
    return lambda: mm.jit(mm.task(fun, "inner", **(task or {"devices": [0]})))(rows())


def placed_as(where, spec, fun=lambda x: x * 2):
    """A step whose argument, or result ``y``, of three rows is to lie so on a submesh of 2 x 2."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    task = mm.task(fun, "task", mesh=mesh)
    sharding = NamedSharding(mesh, spec) if where else None
    said = {"in": {"in_shardings": sharding}, "out": {"out_shardings": {"y": sharding}}, None: {}}[where]
    return lambda: mm.jit(lambda x: {"y": task(x)}, **said)(jnp.ones((3, 4)))


def cut_as(spec):
    """A loop over two pieces of three rows, each of which is to lie so on four devices."""
    task = mm.task(lambda x: x * 2, "task", mesh=Mesh(np.array(jax.devices()[:4]), ("data",)))
    loop = mm.microbatch(task, num_microbatches=2, reduce="concat", arg_shardings=spec)
    return lambda: mm.jit(loop)(jnp.ones((6, 4)))


def whole_mesh(which):
    w = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("data",)), P("data"))
    options = {"in_shardings": ({"front": w, "back": None}, None)} if which == "in" else {"out_shardings": {"y": w}}
    return lambda: mm.jit(lambda p, x: {"y": back(p["back"], front(p["front"], x))}, **options)(parameters(), rows())


def sharded_by_hand():
    def step(x):
        return jax.shard_map(lambda x: front(jnp.eye(WIDTH), x), mesh=MESH, in_specs=P("data"), out_specs=P("data"))(x)

    return mm.jit(step)(rows())


def cut_by_hand(mesh):
    return lambda x: jax.shard_map(lambda x: 2 * x, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(x)


def raw_equinox():
    model = eqx.nn.MLP(4, 4, 4, 1, key=jax.random.key(0))
    return mm.jit(lambda m, x: front(jnp.eye(WIDTH), jax.vmap(m)(x)))({"model": model}, rows())


def mistaken(**options):
    return lambda: mm.jit(microbatched(**options))(parameters(), rows())


def mistaken_result(result):
    return mm.jit(mm.microbatch(lambda x: result, num_microbatches=2))(rows())


def in_a_step_that_registers():
    def step(x):
        with mm.register_task("enc", devices=[1]), jax.named_scope("enc"):
            return x + 1

    return mm.jit(step, strict=True)(rows())


def of_nnx(**options):
    """A step of NNX over two microbatches."""
    return mm.nnx.jit(mm.nnx.microbatch(lambda m, x, y=None: jnp.sum(m(x)), num_microbatches=2, **options))


CHOICE = schedules.search(schedules.Costs(), 2, [2])
TABLE = [[(0, "front"), (0, "back")]]


@dataclass(frozen=True)
class Mistake:
    """What is called, the error, and words of its text in order."""

    call: Any
    error: type[Exception]
    words: tuple[str, ...]


CASES = {
    "a mesh for the name of a task": (lambda: mm.Task(MESH), TypeError, "Task:", "name of the task", "Mesh", "write mesh="),
    "a mesh after the name": (lambda: mm.Task("a", MESH), TypeError, "by keyword", "found Mesh", "write mesh="),
    "a mesh for the name, task": (lambda: mm.task(loss, MESH), TypeError, "task:", "found Mesh", "write mesh="),
    "a Task for the name": (lambda: mm.task(loss, mm.Task("a")), TypeError, "found Task", "write task="),
    "a mesh for the name, Flax": (lambda: manymesh.flax.task(Net(), MESH), TypeError, "found Mesh", "write mesh="),
    "an axis named twice": (
        lambda: mm.Task("a", devices=[[0, 1]], device_axes=("x", "x")), ValueError, "task 'a'", "'x' more than once",
    ),
    "a class for a function": (lambda: mm.task(nn.Dense, devices=[0]), ValueError, "Dense is a class", "manymesh.flax.task"),
    "a module for a function": (
        lambda: mm.task(nn.Dense(3), devices=[0]), ValueError, "the Linen module Dense(...)", "manymesh.flax.task(Dense",
    ),
    "a name for a function": (
        lambda: mm.task("front", devices=[0]), TypeError, "found str 'front'", "write task(fun, 'front'",
    ),
    "a column of strings": (
        lambda: mm.jit(lambda x: x)({"id": np.array(["a", "b"])}), TypeError, "args[0]['id']", "dtype <U1", "leave it out",
    ),
    "a string for a result of a microbatch": (
        lambda: mistaken_result((1.0, {"kind": "train"})), ValueError, "result[1]['kind'] is str 'train'", "arrays and numbers",
    ),
    "swapped arguments of submeshes": (lambda: mm.submeshes("stage", MESH), TypeError, "found str", "the other way round"),
    "submeshes of an abstract mesh": (
        lambda: mm.submeshes(AbstractMesh((2,), ("stage",)), "stage"), TypeError, "abstract mesh, which has no devices",
    ),
    "parameters in place of a function": (
        lambda: mm.parallelize(loss, init_params=parameters(), initial_batch=rows()),
        TypeError, "init_params has to be a function, found dict", "lambda: params",
    ),
    "a batch in place of a function": (
        lambda: mm.parallelize(loss, init_params=parameters, get_input_batch=rows()),
        TypeError, "get_input_batch has to be a function", "initial_batch=",
    ),
    "an optimizer that was not called": (
        lambda: manymesh.flax.parallelize_step(Net(), optax.sgd, MESH, rows()),
        TypeError, "parallelize_step", "GradientTransformation", "function sgd", "sgd(",
    ),
    "a model that was not called": (
        lambda: manymesh.flax.parallelize_step(Net, optax.sgd(0.1), MESH, rows()),
        TypeError, "parallelize_step", "found the class Net", "Net(...)",
    ),
    "a fraction of a stage": (
        lambda: schedules.simulate("1f1b", stages=3.0, num_microbatches=4), ValueError, "stages", "positive int", "float 3.0",
    ),
    "a fraction of a microbatch": (
        lambda: schedules.simulate("1f1b", stages=3, num_microbatches=4.5), ValueError, "num_microbatches", "float 4.5",
    ),
    "a schedule class": (
        lambda: mm.microbatch(loss, num_microbatches=2, schedule=schedules.GPipe), ValueError, "the class GPipe", "GPipe(...)",
    ),
    "a Choice for a schedule": (
        lambda: mm.microbatch(loss, num_microbatches=2, schedule=CHOICE), ValueError, "found Choice", "choice.schedule",
    ),
    "a typo among schedules to try": (
        lambda: schedules.search(schedules.Costs(), 2, [2], schedules=["1f1"]), ValueError, "'1f1'", "did you mean '1f1b'",
    ),
    "a number for costs": (lambda: schedules.search(3, 2, [2]), ValueError, "costs has to be Costs", "int 3"),
    "a dictionary for costs": (lambda: schedules.search({"f": 1}, 2, [2]), ValueError, "costs has to be Costs", "dict"),
    "a number for numbers to try": (
        lambda: schedules.search(schedules.Costs(), 2, 4), ValueError, "a list of the numbers to try", "int 4", "[4]",
    ),
    "an argument number that is not there": (
        lambda: mm.jit(loss, donate_argnums=7), TypeError, "donate_argnums=7", "2 positional arguments (params, x)",
    ),
    "an argument name that is not there": (
        lambda: mm.jit(loss, static_argnames="kind"), TypeError, "static_argnames='kind'", "['params', 'x']",
    ),
    "rows without their schedule": (
        lambda: microbatched(custom_schedule=TABLE), ValueError, "custom_schedule goes with schedule='custom', found None",
    ),
    "leaves of two lengths": (
        lambda: microbatched(lambda p, b: b["x"].sum(), num_microbatches=2)(parameters(), {"x": rows(8), "y": rows(6)}),
        ValueError, "different lengths along dimension 0", "['x']: 8", "['y']: 6",
    ),
    "rows for one microbatch": (
        mistaken(num_microbatches=1, schedule="custom", custom_schedule=[["frnt"], ["back"]]),
        ValueError, "names 'frnt'", "did you mean 'front'",
    ),
    "a schedule that does not fit one microbatch": (
        mistaken(num_microbatches=1, schedule=schedules.Interleaved1F1B(2)), ValueError, "needs 2 stages on each submesh",
    ),
    "a number of stages for one microbatch": (
        mistaken(num_microbatches=1, num_stages=5), ValueError, "num_stages=5", "2 stages",
    ),
    "a sharding on the whole mesh": (
        whole_mesh("in"), ValueError, "in_shardings of args[0]['front']", "devices [0, 1]", "'back', 'front'", "submesh",
    ),
    "a result on the whole mesh": (whole_mesh("out"), ValueError, "out_shardings of result['y']", "devices [0, 1]"),
    "a sharding of too many dimensions": (
        placed_as("in", P("data", None, "model")), ValueError, "in_shardings of args[0]: P('data', None, 'model') is of 3 dimensions",
        "shape (3, 4) has 2",
    ),
    "a sharding that does not divide": (
        placed_as("in", P("data")), ValueError, "in_shardings of args[0]: dimension 0 of shape (3, 4) does not divide over axis 'data'",
    ),
    "a result of too many dimensions": (placed_as("out", P(None, None, "data")), ValueError, "out_shardings of result['y']", "3 dim"),
    "a result that does not divide": (placed_as("out", P("data")), ValueError, "out_shardings of result['y']: dimension 0", "2 or 4"),
    "an exception for explicit shardings in a task": (
        placed_as(None, None, lambda x: jax.reshard(x, P(None, "data"))), ValueError, "all axes are Auto", "with_sharding_constraint(x, spec)",
    ),
    "an exception for a closure over an array of Explicit axes": (
        in_a_task(lambda x: x + EXPLICIT, mesh=MESH), ValueError, "in task 'inner', which closes over", "pass it as an argument",
    ),
    "an argument that is static and donated": (
        lambda: mm.jit(lambda n, x: x * n, static_argnums=0, donate_argnames="n"), TypeError, "static and donated", "no buffer",
    ),
    "keys that are none": (mistaken(num_microbatches=2, rng_argnum=0), ValueError, "microbatch(", "float32", "rng_argnum"),
    "a number for a name": (lambda: mm.task(lambda x: x, name=3, devices=[0]), TypeError, "name of the task", "found int 3"),
    "a custom schedule by name alone": (
        mistaken(num_microbatches=2, schedule="custom"), ValueError, "needs rows", "custom_schedule= beside it",
    ),
    "an exception for Explicit axes outside of mm.jit": (
        lambda: mm.task(jax.sharding.explicit_axes(lambda x: x, in_sharding=P()), "typed", mesh=MESH)(rows()), ValueError,
        "in task 'typed'", "jax.set_mesh(mesh) around the call",
    ),
    "a task after a pattern": (
        lambda: mm.register_task("layer", mm.Task(devices=[0])), TypeError, "register_task('layer')", "found Task", "write task=",
    ),
    "a mesh after a pattern": (lambda: mm.register_task("layer", MESH), TypeError, "one pattern", "write mesh="),
    "a spec of too many axes for pieces": (
        mistaken(num_microbatches=2, arg_shardings=P("data", "model", "x")), ValueError, "microbatch: arg_shardings: 3 axis names",
    ),
    "pieces that do not divide": (
        cut_as(P("data")), ValueError, "microbatch: arg_shardings", "dimension 0 ('data') of shape (3, 4)", "4 devices",
    ),
    "an argument that is cut twice": (mistaken(argnum=(1, 1), num_microbatches=2), ValueError, "argnum names args[1] twice"),
    "a batch that is the state, too": (
        mistaken(argnum=1, num_microbatches=2, state_argnum=-1), ValueError, "argnum and state_argnum both name args[1]",
    ),
    "a dimension by name": (mistaken(num_microbatches=2, dim="rows"), ValueError, "number of a dimension, found 'rows'"),
    "a dimension that is none": (mistaken(num_microbatches=2, dim=True), ValueError, "number of a dimension, found True"),
    "one spec for two batches": (
        lambda: mm.microbatch(lambda x, y: x + y, argnum=(0, 1), num_microbatches=2, arg_shardings=[P("data")]), ValueError,
        "argnum names 2 arguments", "a tuple with one for each; found 1 of them",
    ),
    "a result that is not there": (
        lambda: mm.jit(lambda x: (x, {"a": x}), out_shardings=(None, {"z": None}))(rows()), TypeError, "out_shardings[1]", "'z'",
    ),
    "parameters for a batch": (mistaken(argnum=0, num_microbatches=3), ValueError, "does not divide", "write argnum=1, or whichever is"),
    "a batch and parameters of other lengths": (
        lambda: mm.microbatch(lambda p, x: p["w"].sum(), num_microbatches=2)({"w": rows(8), "b": rows(6)}, rows()),
        ValueError, "different lengths", "if args[0] is not the batch, write argnum=1",
    ),
    "a task inside shard_map": (sharded_by_hand, ValueError, "task 'front'", "inside jax.shard_map", "outside"),
    "a constraint on another mesh": (
        in_a_task(lambda x: jax.lax.with_sharding_constraint(2 * x, NamedSharding(MESH, P("data")))),
        ValueError, "task 'inner' on devices [0]", "test_mistakes.py", "on devices [0, 1, 2, 3]", "without a mesh",
    ),
    "the whole mesh for shard_map in a task": (
        in_a_task(cut_by_hand(WHOLE), mesh=LAST), ValueError, "task 'inner' on devices [2, 3]", "another mesh", "without mesh=",
    ),
    "pmap in a task": (
        in_a_task(jax.pmap(lambda row: 2 * row), mesh=FIRST), ValueError, "task 'inner' on devices [0, 1]", "jax.pmap makes",
        "another mesh", "without mesh=",
    ),
    "another submesh for shard_map in a task": (
        in_a_task(cut_by_hand(LAST), mesh=FIRST), ValueError,
        "task 'inner' on devices [0, 1]", "jax.shard_map at ", "test_mistakes.py", "on devices [2, 3]", "without mesh=",
    ),
    "a move inside a task": (
        in_a_task(lambda x: jax.device_put(x, jax.devices()[3]) + 1), ValueError, "on devices [3]", "outside the task",
    ),
    "a move to the sharding of one device": (
        in_a_task(lambda x: jax.device_put(x, ALONE) + 1), ValueError, "jax.device_put at ", "on devices [3]", "outside the task",
    ),
    "a constraint to one device": (
        in_a_task(lambda x: jax.lax.with_sharding_constraint(x + 1, ALONE), mesh=FIRST), ValueError,
        "task 'inner' on devices [0, 1]", "test_mistakes.py", "on devices [3]", "outside the task",
    ),
    "shardings of a jit in a task": (
        in_a_task(jax.jit(lambda x: x + 1, in_shardings=NamedSharding(LAST, P("data"))), mesh=FIRST), ValueError,
        "task 'inner' on devices [0, 1]", "sharding of jax.jit at ", "test_mistakes.py", "on devices [2, 3]", "without a mesh",
    ),
    "one device for the results of a jit in a task": (
        in_a_task(lambda x: jax.checkpoint(jax.jit(lambda x: x + 1, out_shardings=ALONE))(x), mesh=FIRST), ValueError,
        "sharding of jax.jit at ", "on devices [3]",
    ),
    "a spec that is one word": (
        in_a_task(lambda x: mm.with_sharding_constraint(x, "batch")), TypeError, "the string 'batch'", "('batch', None)",
    ),
    "rules in place of a spec": (
        in_a_task(lambda x: mm.with_sharding_constraint(x, [("batch", "data")])), TypeError, "one entry for each dimension",
        "list [('batch', 'data')]",
    ),
    "a spec that is a number": (
        in_a_task(lambda x: mm.with_sharding_constraint(x, 3)), TypeError, "expected a spec", "found int 3",
    ),
    "a raw Equinox module": (
        raw_equinox, TypeError, "args[0]['model']", "which is no array", "Equinox module MLP", "eqx.partition",
    ),
    "a string among the results": (
        lambda: mm.jit(lambda p, x: (loss(p, x), {"name": "run"}))(parameters(), rows()),
        TypeError, "result[1]['name'] is str 'run', no array", "outside of the step",
    ),
    "a loop that was not called": (
        lambda: mm.jit(lambda p, x: microbatched(loss))(parameters(), rows()), TypeError, "result is function", "call it",
    ),
    "a number in a batch": (
        lambda: microbatched(lambda p, b: p * b["lr"])(rows(), {"lr": 0.1}), ValueError, "['lr'] of shape ()", "argnum does not name",
    ),
    "an empty batch": (
        lambda: microbatched(loss)(parameters(), rows(0)), ValueError, "has length 0 along dimension 0", "skip an empty batch",
    ),
    "a quotient for a number": (lambda: microbatched(num_microbatches=8 / 2), ValueError, "positive int, found 4.0; //"),
    "a box without a name for its axis": (
        lambda: meta.add_axis({"w": meta.Partitioned(jnp.ones(2), ("a",))}, 0, {}), ValueError, "metadata_params",
    ),
    "a value in place of a function, microbatch": (
        lambda: mm.microbatch(3.0, num_microbatches=2), ValueError, "microbatch: expected a function, found float 3.0",
    ),
    "keys by name": (mistaken(rng_argnum="key"), ValueError, "rng_argnum has to be the position of one argument, found 'key'"),
    "several states": (mistaken(state_argnum=(0, 1)), ValueError, "state_argnum has to be the position of one", "(0, 1)"),
    "a boolean for a position": (mistaken(argnum=True), ValueError, "position of the batch", "True"),
    "a number of stages as text": (mistaken(num_stages="2"), ValueError, "num_stages has to be a positive int, found '2'"),
    "no stage for each submesh": (mistaken(interleave=0), ValueError, "interleave has to be a positive int, found 0"),
    "a row that is none": (
        mistaken(schedule="custom", custom_schedule=[["front"], None]), ValueError, "row 1 of custom_schedule", "NoneType None",
    ),
    "one row for all submeshes": (
        mistaken(schedule="custom", custom_schedule=["front", "back"]), ValueError, "row 0", "list of task names, found str 'front'",
    ),
    "an entry the wrong way round": (
        mistaken(schedule="custom", custom_schedule=[[("front", 0)], [("back", 0)]]), ValueError,
        "row 0 of custom_schedule holds ('front', 0)", "(0, 'front')",
    ),
    "a count that is computed": (
        lambda: mm.jit(mm.microbatch(lambda x: {"loss": x.sum(), "n": x.max()}, num_microbatches=2, reduce=mm.WeightedMean(
            lambda result: result["loss"] + 1  # the number of another one
        )))(rows()), ValueError, "WeightedMean: the function has to pick one leaf", "compute nothing",
    ),
    "a name for a ready task": (
        lambda: mm.task(loss, task="front"), TypeError, "task: task has to be a manymesh.Task, found str 'front'",
    ),
    "a name for a ready task, Flax": (
        lambda: manymesh.flax.task(Net, task="front"), TypeError, "flax.task: task has to be a manymesh.Task, found str 'front'",
    ),
    "a module of Equinox for Flax": (
        lambda: manymesh.flax.task(eqx.nn.Linear(2, 2, key=jax.random.key(0)), devices=[0]), ValueError,
        "flax.task: found an Equinox module, a Linear; write manymesh.equinox.task",
    ),
    "a module of Linen for NNX": (
        lambda: mm.nnx.task(Net(), devices=[0]), ValueError, "nnx.task: found a Linen module, a Net; write manymesh.flax.task",
    ),
    "a module of NNX for Equinox": (
        lambda: mm.equinox.task(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), devices=[0]), ValueError,
        "equinox.task: found an NNX module, a Linear; write manymesh.nnx.task",
    ),
    "a batch in place of the mesh": (
        lambda: manymesh.flax.parallelize_step(Net(), optax.sgd(0.1), rows()), TypeError, "the mesh, its third argument", "found Array",
    ),
    "the name of one stream": (
        lambda: manymesh.flax.parallelize_step(Net(), optax.sgd(0.1), WHOLE, rows(), rngs="dropout"), TypeError,
        "rngs takes several names", "write ('dropout',)",
    ),
    "a loss in place of its function": (
        lambda: manymesh.flax.parallelize_step(Net(), optax.sgd(0.1), WHOLE, rows(), loss_fn=0.0), TypeError,
        "loss_fn has to be a function, found float",
    ),
    "inputs that are no tuple": (
        lambda: manymesh.flax.parallelize_step(Net(), optax.sgd(0.1), WHOLE, rows(), inputs=lambda x: x), TypeError,
        "inputs has to return the arguments of the model in a tuple", "write (x,)",
    ),
    "an initializer among names": (
        lambda: manymesh.flax.shard_axes(nn.initializers.zeros, "embed"), ValueError, "shard_axes: found a function", "write init=",
    ),
    "an array for an initializer": (
        lambda: manymesh.flax.shard_axes("embed", init=jnp.ones(3)), ValueError, "init has to be an initializer", "found Array",
    ),
    "options of the compiler as text": (
        lambda: mm.jit(loss, compiler_options="xla_dump_to"), TypeError, "compiler_options has to be a dictionary", "'xla_dump_to'",
    ),
    "options of the compiler as text, later": (
        lambda: mm.jit(loss).lower(parameters(), rows()).compile("xla_dump_to"), TypeError, "compiler_options has to be a dictionary",
    ),
    "half a position": (lambda: mm.jit(loss, donate_argnums=0.5), TypeError, "donate_argnums takes numbers", "float 0.5"),
    "a constraint the wrong way round": (
        in_a_task(lambda x: mm.with_sharding_constraint(("batch", None), x)), TypeError, "expected arrays, and then what to say of each",
        "found str 'batch'",
    ),
    "a constraint on a number": (
        in_a_task(lambda x: x * mm.with_sharding_constraint(2.0, ("batch",))), ValueError, "the number 2.0, which has no dimensions",
    ),
    "a process by name": (lambda: mm.fetch(rows(), process="0"), RuntimeError, "fetch: process='0'", "processes 0 to 0"),
    "a word for progress": (lambda: mm.inspect.progress("yes"), TypeError, "progress: expected True, False or a function", "'yes'"),
    "an efficiency as text": (
        lambda: mm.inspect.Hardware.h100().scaled("half"), TypeError, "efficiency has to be a number", "'half'",
    ),
    "a schedule in place of its class": (
        lambda: schedules.register(schedules.GPipe(), "mine"), ValueError, "register: GPipe() cannot be called; give its class GPipe",
    ),
    "submeshes as text": (
        lambda: schedules.OneFOneB().order("01", 4), ValueError, "stage 0 is placed on str '0'", "by its number",
    ),
    "one placement for several": (
        lambda: schedules.search(schedules.Costs(), 2, [4], placements=(0, 1)), ValueError, "placements has to be a list of placements",
    ),
    "one schedule for several": (
        lambda: schedules.search(schedules.Costs(), 2, [4], schedules="1f1b"), ValueError, "write ['1f1b']",
    ),
    "activations of one stage": (
        lambda: schedules.peak_memory(schedules.GPipe().order((0, 1), 2), [1.0]), ValueError, "activation has to be 2 numbers", "found [1.0]",
    ),
    "a picture of a name": (lambda: schedules.picture("1f1b"), ValueError, "picture: expected a Simulation or an Order, found str"),
    # Mistakes of the user's own, and those that are told deep in the compiler.
    "an exception in a task": (in_a_task(lambda x: x @ jnp.ones((3, 3))), TypeError, "dot_general"),
    "a boolean of a tracer": (in_a_task(lambda x: x if x.sum() else -x), Exception, "racer"),
    "a dimension that does not divide": (
        in_a_task(lambda x: mm.with_sharding_constraint(x, (None, "d")), devices=[0, 1, 2], device_axes=("d",)),
        ValueError, "does not divide over axis 'd'",
    ),
    "a schedule that the program contradicts": (mistaken(num_stages=7), ValueError, "num_stages=7"),
    "argnum as a name": (mistaken(argnum="batch"), ValueError, "position of the batch, or several, found 'batch'"),
    "half an argnum": (mistaken(argnum=1.5), ValueError, "position of the batch, or several, found 1.5"),
    "a list of numbers in a batch": (
        lambda: mm.jit(mm.microbatch(lambda b: front(jnp.eye(WIDTH), b["x"]), num_microbatches=2))({"x": rows(), "y": [1, 2]}),
        ValueError, "args[0]['y'][0] is a number in a list", "np.asarray(args[0]['y'])",
    ),
    "a key for each microbatch": (
        lambda: mm.jit(mm.microbatch(lambda x, key: front(jnp.eye(WIDTH), x), num_microbatches=4, rng_argnum=1))(
            rows(), jax.random.split(jax.random.PRNGKey(0), 4)
        ),
        ValueError, "args[1]", "of shape (4, 2)", "one key for all microbatches",
    ),
    "rows by name": (
        mistaken(schedule="custom", custom_schedule={"0": ["front"], "1": ["back"]}), ValueError, "row of task names for each",
    ),
    "a batch that does not divide": (mistaken(num_microbatches=3), ValueError, "does not divide into 3"),
    "a reduction that is no prefix": (mistaken(reduce={"a": "sum"}), ValueError, "is not a prefix of the result"),
    "a tracer among the arguments": (lambda: jax.jit(mm.jit(front))(jnp.eye(4), rows()), TypeError, "is a tracer"),
    "a step given to jax.export": (
        lambda: jax.export.export(mm.jit(front))(jnp.eye(WIDTH), rows()),
        TypeError, "found _private_parameters, lowering_platforms", "export jax.jit of the same function",
    ),
    "an unknown name under strict": (
        lambda: mm.jit(
            mm.task(lambda x: mm.with_sharding_constraint(x, ("btch",)), "t", mesh=MESH, logical_axes=[("batch", "data")]),
            strict=True,
        )(rows()),
        ValueError, "'btch'", "did you mean 'batch'",
    ),
    "a typo of a device axis": (
        lambda: meta.get_sharding({"w": meta.Partitioned(jnp.ones(2), ("dat",))}, MESH), ValueError, "'dat'",
    ),
}  # fmt: skip
CASES |= {
    "a batch by keyword, NNX": (
        lambda: of_nnx(argnum=(1, 2))(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), rows(), y=rows()), ValueError,
        "argnum 2 names the batch", "2 positional arguments",
    ),
    "keys that are not there, NNX": (
        lambda: of_nnx(argnum=1, rng_argnum=5)(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), rows(), jax.random.key(0)), ValueError,
        "rng_argnum 5 names the random keys", "3 positional arguments",
    ),
    "a module for random keys, NNX": (
        lambda: of_nnx(argnum=1, rng_argnum=2)(nnx.Linear(4, 4, rngs=nnx.Rngs(0)), rows(), nnx.Rngs(0)), ValueError,
        "rng_argnum 2 is a random key, but there is a module in it", "without rng_argnum",
    ),
    "text for a compiled step": (
        lambda: mm.jit(front).lower(jnp.eye(WIDTH), rows()).compile()(jnp.eye(WIDTH), "rows"), TypeError,
        "argument args[1] was compiled as float32[8,4], called with str 'rows', which is no array",
    ),
    "other rows for a compiled step": (
        lambda: mm.jit(front).lower(jnp.eye(WIDTH), rows()).compile()(jnp.eye(WIDTH), rows(4)), TypeError,
        "was compiled as float32[8,4], called with float32[4,4]", "call the function that mm.jit returned",
    ),
    "a description for a compiled step": (
        lambda: mm.jit(front).lower(jnp.eye(WIDTH), rows()).compile()(jnp.eye(WIDTH), jax.ShapeDtypeStruct((8, WIDTH), np.float32)),
        TypeError, "is a jax.ShapeDtypeStruct",
    ),
    "a name for hardware": (
        lambda: mm.jit(front).lower(jnp.eye(WIDTH), rows()).report("h100"), TypeError, "hardware has to be", "found str 'h100'",
    ),
    "a mesh for rules": (lambda: mm.Task("a", mesh=MESH, logical_axes=MESH), ValueError, "logical_axes has to be a list", "found Mesh"),
    "a number for names of axes": (
        lambda: mm.Task("a", devices=[0], device_axes=1), TypeError, "device_axes has to be one name for each dimension", "int 1",
    ),
    "a mesh for tasks": (
        lambda: meta.get_sharding({"w": rows()}, tasks=MESH), TypeError, "tasks has to be a manymesh.Task, or a mapping", "Mesh(",
    ),
    "no mesh for shardings": (
        lambda: meta.logical_to_mesh_sharding(P("a"), None, [("a", "data")]), TypeError, "mesh has to be", "found NoneType",
    ),
    "a number for a placement": (
        lambda: schedules.simulate("1f1b", 2, 4, placement=2), ValueError, "placement has to be the submesh of each stage", "int 2",
    ),
    "submeshes by name": (
        lambda: schedules.search(schedules.Costs(), 2, [4], submeshes="all"), ValueError, "submeshes has to be a positive int",
    ),
    "a number for schedules": (lambda: schedules.search(schedules.Costs(), 2, [4], schedules=3), ValueError, "schedules has to be a list"),
    "a name for an order": (lambda: schedules.live_activations("1f1b"), ValueError, "live_activations: expected an Order", "str '1f1b'"),
    "a loop by name": (
        lambda: mm.jit(microbatched()).lower(parameters(), rows()).compile().measure(parameters(), rows(), loop="first"),
        TypeError, "measure(loop=first), but the step has 1 microbatch loops",
    ),
    "arrays for positions": (lambda: mm.jit(loss, donate_argnums=jnp.ones(2)), TypeError, "donate_argnums takes numbers of arguments"),
    "a size that is none": (lambda: mm.inspect.Hardware.measure(size=-4), TypeError, "size has to be a positive int, found -4"),
    "an axis for a mesh": (lambda: meta.explain({"w": rows()}, "data"), TypeError, "explain: mesh has to be", "found str 'data'"),
    "an axis for a mesh, constraint": (
        lambda: meta.with_logical_constraint(rows(), ("a", "b"), [("a", "data")], "data"), TypeError, "mesh has to be", "str 'data'",
    ),
    "a description to be measured": (
        lambda: mm.jit(microbatched()).lower(parameters(), rows()).compile().measure(
            parameters(), jax.ShapeDtypeStruct((8, WIDTH), np.float32)
        ), TypeError, "argument args[1] is a jax.ShapeDtypeStruct",
    ),
    "a registration in a step": (in_a_step_that_registers, ValueError, "register_task('enc') is called in the step itself", "around the call"),
    "a value in place of a function, NNX": (lambda: mm.nnx.jit(3), TypeError, "nnx.jit takes a function, found int"),
    "a value in place of a function, Equinox": (lambda: mm.equinox.jit(3), TypeError, "equinox.jit takes a function, found int"),
}  # fmt: skip
MISTAKES = {name: Mistake(call, error, words) for name, (call, error, *words) in CASES.items()}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake(name):
    """The type, the text, and how much of the package the traceback shows."""
    mistake = MISTAKES[name]
    with pytest.raises(mistake.error, match="(?s)" + ".*".join(re.escape(w) for w in mistake.words)) as caught:
        mistake.call()
    if not name.startswith(("an exception", "a boolean")):
        assert isinstance(caught.value, errors.ManyMeshError)
    error: Any = caught.value
    while error is not None:
        ours = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(PACKAGE)]
        assert len(ours) <= 3, "".join(traceback.format_list(ours))
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def test_what_is_no_mistake():
    """Numbers of NumPy are positions, a function that has no hash is one, and a number has no axis to constrain."""
    step = mm.jit(lambda x: front(jnp.eye(WIDTH), x), donate_argnums=np.int64(0))
    assert step(rows()).shape == (8, WIDTH)
    assert mm.microbatch(lambda p, x: x, argnum=np.int64(1), num_microbatches=2, reduce="concat")(0, rows()).shape == (
        8,
        WIDTH,
    )
    unhashable = mm.jit(eqx.filter_value_and_grad(lambda w, x: jnp.sum(front(w, x))))
    with mm.ignore_transforms():
        value, _ = unhashable(jnp.eye(WIDTH), rows())
    np.testing.assert_allclose(value, unhashable(jnp.eye(WIDTH), rows())[0], rtol=1e-5)
    doubled = mm.task(lambda x: x * mm.with_sharding_constraint(2.0, ()), "doubled", mesh=FIRST)
    assert mm.jit(doubled)(jnp.ones(2, jnp.bfloat16)).dtype == jnp.bfloat16


def test_a_number_that_is_too_large():
    """It is named, as by jax.jit."""
    with pytest.raises(OverflowError, match=r"argument args\[0\]\['seed'\]: Python int 1099511627776 too large"):
        mm.jit(lambda b: b["seed"] + 1)({"seed": 2**40})


NOWHERE = "/dev/null/none"
BESIDES = {
    "save": lambda: mm.checkpoint.save(NOWHERE, {"w": jnp.ones(2), "name": "text"}),
    "restore": lambda: mm.checkpoint.restore(NOWHERE),
    "metadata": lambda: mm.checkpoint.metadata(NOWHERE),
    "a manager": lambda: mm.checkpoint.Manager(NOWHERE),
    "a save of a manager": lambda: mm.checkpoint.Manager(PACKAGE).save(-1, {}),
    "argument_of": lambda: mm.checkpoint.argument_of(3),
    "initialize": lambda: mm.distributed.initialize("localhost:1", 0, 0),
    "launch": lambda: mm.distributed.launch(print, 0),
    "launch without a number": lambda: mm.distributed.launch(print, None),
    "argument_of several": lambda: mm.checkpoint.argument_of(mm.jit(front).lower(jnp.eye(4), rows()), [0, 1]),
    "launch with one argument": lambda: mm.distributed.launch(print, 1, args="text"),
    "launch with half a restart": lambda: mm.distributed.launch(print, 1, max_restarts=0.5),
    "initialize with a port": lambda: mm.distributed.initialize(1234, 2, 0),
    "initialize with text for a time": lambda: mm.distributed.initialize("localhost:1234", 2, 0, stall_timeout="9"),
    "initialize with no time to start": lambda: mm.distributed.initialize("localhost:1234", 2, 0, start_timeout=-1),
    "fetch": lambda: mm.fetch(jnp.ones(2), process=7),
}


@pytest.mark.parametrize("name", BESIDES)
def test_a_mistake_beside_steps(name):
    """In checkpoints, and in what belongs to processes: nothing of the package is in the traceback."""
    with pytest.raises(errors.ManyMeshError) as caught:
        BESIDES[name]()
    ours = [f for f in traceback.extract_tb(caught.value.__traceback__) if f.filename.startswith(PACKAGE)]
    assert not ours, "".join(traceback.format_list(ours))
