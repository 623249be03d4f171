"""A generated program: data that can be kept as text, and the training step that it stands for."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import manymesh as mm
from manymesh._mark import current_recording, transforms_ignored

from . import operations_large  # noqa: F401  # registers its operations
from .known import works
from .metrics import METRICS, PENALTIES, WATCHED
from .operations import WIDTH, Surroundings, apply
from .optimizers import optimizer
from .wraps import STACKED, call_wrapped, inner_wrapped

RULES = (("batch", "data"), ("hidden", "model"), ("embed", None))
ROWS = 4  # of a microbatch
PIECES = 2  # of a microbatch, where a loop is in a loop
NESTED = ("nested", "nested_around", "loop_in_scan")
TAKES_BOXES = ("plain", "keywords", "jit", "checkpoint", "policy", "python_loop", "scoped", "nested")


@dataclass(frozen=True)
class Layer:
    """One task.

    Attributes:
      submesh, parameter: which of the program's.
      reads: earlier values that it adds up; 0 is the batch.
      operations: names in the catalogue, one after the other, before the layer's own product.
      wrap: what the task is called through.
      inner: what the operations are wrapped in, inside of the task.
      kernel_axes: names of the kernel's dimensions, or None for no constraint.
      annotated: where the kernel is constrained: ``inside`` or ``outside`` of the task, ``box`` (opened in the task), ``never``.
      activation: names of the result's dimensions, or None.
      style: whose constraint it is, ``mm`` or ``jax``.
      between: an operation on the layer's result, outside of tasks; or none.
      placed: what makes a task of it: ``task``, or `register_task` with the name of a ``scope``, a ``path`` of two, or a
        ``callback``.
      depth: how many layers a stacked parameter holds; in equal blocks on all submeshes of this shape, if that divides.
      modules: what a block of a framework has besides, in order: names in `modules.PARTS`.
      put: device axes of the dimensions of the result as `jax.device_put` lays it out on the submesh of the next layer,
        outside of tasks; or none.
    """

    submesh: int
    parameter: int
    reads: tuple[int, ...]
    operations: tuple[str, ...]
    wrap: str = "plain"
    inner: str = "plain"
    kernel_axes: tuple[str | None, ...] | None = None
    annotated: str = "never"
    activation: tuple[str | None, ...] | None = None
    style: str = "mm"
    between: str | None = None
    placed: str = "task"
    put: tuple[str | None, ...] | None = None
    modules: tuple[str, ...] = ()
    depth: int = 2


@dataclass(frozen=True)
class Program:
    """A step. What a field means is said where `step` and `loss` read it.

    Attributes:
      submeshes: (first device, rows, columns) of each; rows are the axis ``data``, columns ``model``.
      framework: whose modules the tasks are, ``linen``, ``nnx`` or ``equinox``; or none, and tasks are functions.
      mode: ``train``, or ``forward``: no gradients; ``twice``: a second loop after the update; ``scanned``: the user's own scan
        over pieces, and ``loop_in_scan``: one with a loop in it; ``nested``: a loop in a loop; ``around``: the gradient of a
        loop; ``nested_around``: a loop over gradients of a loop; ``gathered``: the gradient of a loss of all the rows that
        a loop gives.
      arrives: whether the batch comes sharded along ``data``, on the submesh of the first layer; in one process.
      carried: numbers that go from one microbatch to the next, each as (how it changes, after which layer it is made, before
        which it is read): ``count`` adds one, ``mean`` averages what the layer gives, ``was`` is what the number before it
        was, ``rows`` are the layer's rows, as they are; in the mode ``train``, without ``aux``.
      kept: whether these are kept in the state, from one step to the next.
      collected: the submesh on which the loss and the gradients are wanted, by ``out_shardings``; None says nothing.
      again: whether the step is taken as often as the data says, in a loop of unknown length.
      order: which order a custom schedule writes down, as the seed of a random one; 0 is GPipe.
      together: how the parameters are kept: each for itself; in a ``stack`` for each kind, of all the layers, as for a
        scan; in a ``grid``, a stack of two columns; or in one ``vector``. A layer takes its own by index.
      viewed: what becomes of parameters before layers read them, outside of tasks: they are ``scaled``, ``reshaped`` or
        ``normalized``.
      index: how that is written: as a number, as an array (``computed``), or by ``dynamic_slice`` or ``take``.
      metrics: names in `metrics.METRICS` of what the loss returns besides, with ``aux``.
      watched: names in `metrics.WATCHED` of what the step returns of gradients and updates.
      penalty: the name in `metrics.PENALTIES` of what is added to the loss, or none.
      refused: whether an update that is not finite is refused, by ``where`` or by a branch, ``cond``; or none is.
    """

    submeshes: tuple[tuple[int, int, int], ...]
    layers: tuple[Layer, ...]
    mode: str = "train"
    microbatches: int = 2
    reduce: str = "mean"
    schedules: tuple[str | None, ...] = ("1f1b",)
    optimizer: str = "sgd"
    clipped: bool | str = False
    ema: bool = False
    state: str = "tuple"
    donate: bool = False
    aux: bool = False
    key: str | None = None
    raw_key: bool = False
    key_from: str = "argument"
    weak: bool = False
    in_shardings: bool = False
    arrives: bool = False
    carried: tuple[tuple[str, int, int], ...] = ()
    kept: bool = False
    collected: int | None = None
    again: bool = False
    order: int = 0
    framework: str | None = None
    together: str | None = None
    index: str = "number"
    viewed: str | None = None
    metrics: tuple[str, ...] = ()
    watched: tuple[str, ...] = ()
    penalty: str | None = None
    refused: str | None = None

    def to_json(self) -> str:
        """The program as text, to be kept when it breaks something."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Program:
        """The program that `to_json` wrote."""
        fields = json.loads(text)
        layers = tuple(Layer(**{k: _frozen(v) for k, v in one.items()}) for one in fields.pop("layers"))
        return cls(layers=layers, **{k: _frozen(v) for k, v in fields.items()})

    def meshes(self) -> list[Mesh]:
        """The submeshes. On a machine with one device each is that one, as a mesh with an axis more of a name of its own."""
        devices = jax.devices()
        if len(devices) == 1:
            one = np.array(devices).reshape(1, 1, 1)
            return [Mesh(one, ("data", "model", f"submesh_{i}")) for i in range(len(self.submeshes))]
        return [Mesh(np.array(devices[s : s + a * b]).reshape(a, b), ("data", "model")) for s, a, b in self.submeshes]

    def stacked(self) -> dict[int, int]:
        """Parameters that hold several layers, and how many."""
        return {layer.parameter: layer.depth for layer in reversed(self.layers) if layer.wrap in STACKED}

    def parameters(self) -> dict[str, Any]:
        """Kernels and biases, kernels in boxes where a layer says so."""
        rng, out = np.random.default_rng(0), {}
        for i in range(1 + max(layer.parameter for layer in self.layers)):
            lead = (self.stacked()[i],) if i in self.stacked() else ()
            kernel = jnp.asarray(rng.normal(size=(*lead, WIDTH, WIDTH)) * 0.5, jnp.float32)
            bias = jnp.asarray(rng.normal(size=(*lead, WIDTH)) * 0.1, jnp.float32)
            names = [la.kernel_axes for la in self.layers if la.parameter == i and la.annotated == "box"]
            boxed = names and names[0] is not None
            out[f"w{i}"] = {
                "kernel": mm.meta.LogicallyPartitioned(kernel, (None,) * len(lead) + names[0]) if boxed else kernel,
                "bias": bias,
            }
        return out

    def kept_together(self, params: dict[str, Any]) -> Any:
        """Parameters as the state has them."""
        if self.together == "vector":
            return {"all": jnp.concatenate([x.ravel() for x in jax.tree.leaves(params)])}
        if self.together is None:
            return params
        stacks = jax.tree.map(lambda *xs: jnp.stack(xs), *params.values())
        return jax.tree.map(lambda x: x.reshape(-1, 2, *x.shape[1:]), stacks) if self.together == "grid" else stacks

    def each(self, params: Any) -> dict[str, Any]:
        """The parameters of each layer."""
        if self.viewed == "scaled":
            params = jax.tree.map(lambda x: x / 2 * -2.0, params)
        elif self.viewed == "reshaped":
            params = jax.tree.map(lambda x: x.T.reshape(x.T.shape[::-1]).reshape(x.shape), params)
        elif self.viewed == "normalized":
            params = jax.tree.map(lambda x: x / (1 + jnp.mean(x * x)), params)
        if self.together is None:
            return params
        size, found = WIDTH * (WIDTH + 1), {}
        for i in range(1 + max(layer.parameter for layer in self.layers)):
            if self.together == "vector":
                own = self._part(params["all"], i * size, size)
                found[f"w{i}"] = {"bias": own[:WIDTH], "kernel": own[WIDTH:].reshape(WIDTH, WIDTH)}
            else:
                at = (i // 2, i % 2) if self.together == "grid" else (i,)
                found[f"w{i}"] = jax.tree.map(lambda x, at=at: functools.reduce(self._layer, at, x), params)
        return found

    def _part(self, x: jax.Array, start: int, size: int) -> jax.Array:
        if self.index == "number":
            return x[start : start + size]
        if self.index == "dynamic_slice":
            return jax.lax.dynamic_slice_in_dim(x, start, size)
        places = start + jnp.arange(size)
        return x[places] if self.index == "computed" else jnp.take(x, places, axis=0)

    def _layer(self, x: jax.Array, i: int) -> jax.Array:
        if self.index == "dynamic_slice":
            return jax.lax.dynamic_index_in_dim(x, i, keepdims=False)
        return jnp.take(x, i, axis=0) if self.index == "take" else x[jnp.int32(i) if self.index == "computed" else i]

    def batch(self) -> dict[str, Any]:
        """Rows, token ids, and a leaf that is None."""
        rng, rows = np.random.default_rng(1), ROWS * self.microbatches * (PIECES if self.mode in NESTED else 1)
        return {
            "x": jnp.asarray(rng.normal(size=(rows, WIDTH)), jnp.float32),
            "ids": jnp.asarray(rng.integers(0, 8, size=rows), jnp.int32),
            "nothing": None,
        }

    def given_batch(self) -> dict[str, Any]:
        """The batch where it is to arrive."""
        mesh = self.meshes()[self.layers[0].submesh]
        if not self.arrives or jax.process_count() > 1:
            return self.batch()
        return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, PartitionSpec("data"))), self.batch())

    def random_key(self) -> Any:
        if self.key is None:
            return None
        key = jax.random.key(3, impl=self.key)
        return jax.random.key_data(key) if self.raw_key else key

    def init(self) -> Any:
        """The first state, in the container that the program keeps it in."""
        params = self.kept_together(self.parameters())
        made = optimizer(self.optimizer, self.clipped)
        if self.state == "train_state":
            state = TrainState.create(apply_fn=None, params=params, tx=made)
            # Some optimizers hold the parameters themselves, and one array cannot be donated twice.
            state = state.replace(opt_state=jax.tree.map(jnp.copy, state.opt_state))
            return state if works("python_step_count") else state.replace(step=jnp.zeros((), jnp.int32))
        fields = {
            "params": params,
            "moments": jax.tree.map(jnp.copy, made.init(params)),  # some hold the parameters themselves
            "average": jax.tree.map(jnp.copy, params) if self.ema else None,
            "count": jnp.zeros((), jnp.int32),
        }
        if self.kept:
            fields["count"] = fields["count"], self.first_carried()
        return CONTAINERS[self.state](**fields)

    # The step

    def loss(self, params: Any, batch: Any, key: Any, scale: Any, carried: Any = ()) -> Any:
        """Mean of squares of what the last layer gives, and a little of every other value."""
        values, ids = self.values(params, batch, key, carried), batch["ids"]
        value = jnp.mean(values[-1] ** 2) + sum(jnp.mean(v) for v in values[:-1]) * 0.1
        if self.penalty is not None:
            value = value + PENALTIES[self.penalty](mm.meta.unbox(params))
        if scale is not None:
            value = value * scale
        if self.carried:
            return value, self.next_carried(values, carried)
        if not self.aux:
            return value
        weak = jnp.asarray(0.5) * 3
        found = {"count": ids.sum(), "hidden": values[0][0], "weak": weak, "flag": ids[0] > 3, "nothing": None}
        return value, found | {name: METRICS[name](values[-1 - k], ids) for k, name in enumerate(self.metrics)}

    def gathered(self, params: Any, batch: Any, key: Any, scale: Any, schedule: str | None) -> Any:
        """A loss of the rows of all microbatches together, of every layer."""

        def rows(params: Any, batch: Any, key: Any, scale: Any) -> Any:
            return self.values(params, batch, key)

        values = self.looped(rows, schedule, "concat", False)(params, batch, key, scale)
        value = jnp.mean(values[-1] ** 2) + sum(jnp.mean(jnp.tanh(v @ v.T)) for v in values)
        return value if scale is None else value * scale

    def next_carried(self, values: list[Any], carried: Any) -> tuple[Any, ...]:
        """The numbers that the next microbatch gets."""
        new = []
        for k, (how, made, _) in enumerate(self.carried):
            if how == "rows":
                new.append(values[made])
            elif how == "mean":
                new.append(0.5 * carried[k] + 0.1 * jnp.mean(jnp.tanh(values[made])))
            else:
                like = k > 0 and carried[k - 1].shape == carried[k].shape
                new.append(carried[k - 1] if how == "was" and like else carried[k] + 1)
        return tuple(new)

    def values(self, params: Any, batch: Any, key: Any, carried: Any = ()) -> list[Any]:
        """What each layer gives."""
        meshes = self.meshes()
        values, ids = [batch["x"]], batch["ids"]
        params = self.each(params)
        for i, layer in enumerate(self.layers):
            p = params[f"w{layer.parameter}"]
            if layer.wrap not in STACKED and layer.parameter in self.stacked():
                p = jax.tree.map(lambda v: v[0], mm.meta.unbox(p))  # the names of a box are those of the whole stack
            if layer.annotated != "box" or layer.wrap not in TAKES_BOXES:
                p = mm.meta.unbox(p)
            if layer.annotated == "outside":
                names = (None,) * (p["kernel"].ndim - 2) + layer.kernel_axes
                p = {**p, "kernel": mm.with_sharding_constraint(p["kernel"], names)}
            x = sum((values[r] for r in layer.reads[1:]), values[layer.reads[0]])
            x = sum((0.1 * number for number, (*_, read) in zip(carried, self.carried, strict=True) if read == i), x)
            own = None if key is None else jax.random.fold_in(key, i)
            y = call_wrapped(layer.wrap, self.task(i, meshes, own), p, x, ids, own, f"t{i}")
            if layer.between is not None:
                kernel = mm.meta.unbox(p)["kernel"].reshape(-1, WIDTH, WIDTH)[
                    0
                ]  # of the first layer, where they are stacked
                y = apply(layer.between, y, Surroundings(kernel, ids, own))
            values.append(self.put(i, y, meshes))
        return values[1:]

    def task(self, i: int, meshes: list[Mesh], key: Any) -> Any:
        """The i-th layer as ``(parameters, x, ids, key) -> rows``, on its submesh."""
        layer = self.layers[i]

        def body(p, x, ids, own):
            if self.key_from == "closed_over":
                own = key
            elif self.key_from == "constant":
                own = constant_key(self.key)
            p = mm.meta.unbox(p)
            kernel = p["kernel"]
            if layer.annotated == "inside":
                kernel = self._constrain(kernel, layer.kernel_axes, layer.style)

            def operate(h, n):
                # A loop of unknown length has no reverse mode.
                around = Surroundings(jax.lax.stop_gradient(kernel) if layer.inner == "while" else kernel, n, own)
                for name in layer.operations:
                    h = apply(name, h, around)
                return h

            y = inner_wrapped(layer.inner, operate, x, ids) @ kernel + p["bias"]
            y = y if layer.activation is None else self._constrain(y, layer.activation, layer.style)
            return (y, 2) if layer.wrap == "returned_number" else y

        placement = self.placement(i, meshes)
        if layer.wrap == "nested":
            body = mm.task(body, f"inner{i}", **placement)
        return mm.task(body, f"t{i}", **placement) if layer.placed == "task" else scoped(body, self.scope(i))

    def placement(self, i: int, meshes: list[Mesh]) -> dict[str, Any]:
        """Where the i-th layer runs, as arguments of `mm.task`."""
        layer = self.layers[i]
        mesh: Any = meshes[layer.submesh]
        if layer.wrap in ("layers", *STACKED):
            alike = [m for m in meshes if m.shape == mesh.shape]
            mesh = [mesh, *(m for m in alike if m != mesh)]
            if layer.wrap in STACKED:
                mesh = mesh[: self.stacked().get(layer.parameter, layer.depth)]
        return {"mesh": mesh, "logical_axes": RULES}

    def scope(self, i: int) -> str:
        """The path of the scope that `register_task` makes a task of."""
        return f"blocks/{i}" if self.layers[i].placed == "path" else f"t{i}"

    @contextlib.contextmanager
    def registered(self) -> Iterator[None]:
        """Registers the layers that are placed by name."""
        meshes = self.meshes()
        with contextlib.ExitStack() as stack:
            for i, layer in enumerate(self.layers):
                task = mm.Task(f"t{i}", **self.placement(i, meshes))
                if layer.placed == "callback":
                    described = functools.partial(_described, task)
                    stack.enter_context(mm.register_task(f"(t{i})", callback=described))
                elif layer.placed != "task":
                    stack.enter_context(mm.register_task(re.escape(self.scope(i)), task=task))
            yield

    def put(self, i: int, x: Any, meshes: list[Mesh]) -> Any:
        """The result of the i-th layer, sent to the submesh of the next one if the layer says so."""
        axes = self.layers[i].put
        if axes is None or i + 1 == len(self.layers) or current_recording() is None:  # plain JAX has one device
            return x
        return jax.device_put(x, NamedSharding(meshes[self.layers[i + 1].submesh], PartitionSpec(*axes)))

    @staticmethod
    def _constrain(x: Any, names: Any, style: str) -> Any:
        if style == "jax":
            if jax.sharding.get_abstract_mesh().empty:  # in reference mode there is no mesh around
                return x
            rules = dict(RULES)
            return jax.lax.with_sharding_constraint(x, PartitionSpec(*(rules.get(n) for n in names)))
        return mm.with_sharding_constraint(x, names)

    def looped(
        self,
        fun: Any,
        schedule: str | None,
        reduce: Any,
        backward: bool = True,
        count: int | None = None,
        **options: Any,
    ) -> Any:
        """``fun(params, batch, key, scale)`` over ``count`` microbatches, or those of the program, if it has any."""
        if schedule is None:
            return fun
        return mm.microbatch(
            jax.jit(fun) if transforms_ignored() else fun,  # traced once, not for each microbatch
            argnum=1,
            num_microbatches=self.microbatches if count is None else count,
            reduce=reduce,
            rng_argnum=2 if self.key is not None and self.key_from == "folded" else None,
            **self.scheduled(schedule, backward),
            **options,
        )

    def scheduled(self, schedule: str, backward: bool) -> dict[str, Any]:
        """Arguments of `mm.microbatch` for a schedule.

        Args:
          schedule: its name; ``custom, split`` is a custom one with weight gradients of their own.
          backward: whether gradients are taken in the loop.
        """
        if not schedule.startswith("custom"):
            return {"schedule": schedule}
        phases = ["", "_bwd", "_wgt"][: 1 if not backward else 2 if schedule == "custom" else 3]
        return {"schedule": "custom", "custom_schedule": self.custom_rows(phases)}

    def custom_rows(self, phases: list[str]) -> list[list[tuple[int, str]]]:
        """A row for each submesh: GPipe, or any order in which everything can run.

        Microbatches stay in order within a task and phase, because results accumulate.

        Args:
          phases: endings of names, ``""``, ``_bwd``, ``_wgt``.
        """
        rng, layers = random.Random(self.order), range(len(self.layers))
        left = [(phase, i, m) for phase in phases for m in range(self.microbatches) for i in layers]
        rows: list[list[tuple[int, str]]] = [[] for _ in range(1 + max(layer.submesh for layer in self.layers))]
        done: set[tuple[str, int, int]] = set()
        while left:
            ready = [unit for unit in left if _before(unit, len(layers)) <= done]
            unit = rng.choice(ready) if self.order else ready[0]
            done.add(unit)
            left.remove(unit)
            rows[self.layers[unit[1]].submesh].append((unit[2], f"t{unit[1]}{unit[0]}"))
        return rows

    def reduction(self) -> Any:
        """One word for everything, or words for parts of the result."""
        if self.reduce == "weighted" and not self.metrics:
            return mm.WeightedMean("count")
        if self.reduce in ("sum", "mean"):
            return self.reduce
        words = {"count": self.reduce, "hidden": self.reduce, "weak": "last", "flag": "last", "nothing": None}
        if self.reduce == "weighted":
            mean = mm.WeightedMean("count")
            words |= {"count": "sum", "hidden": "stack", self.metrics[0]: "last"} | dict.fromkeys(
                self.metrics[1:], mean
            )
            return (mean, words), mean
        others = "last" if self.reduce == "max" else self.reduce  # not everything has a largest
        return ("mean", words | dict.fromkeys(self.metrics, others)), "mean"

    def step(self, state: Any, batch: Any, key: Any, scale: Any, schedule: str | None) -> Any:
        """The training step, or several."""
        state, metrics = self.once(state, batch, key, scale, schedule)
        if not self.again:
            return state, metrics
        turns = batch["ids"][0] % 3  # by the first batch 0, 1 or 2 more
        _, state, metrics = jax.lax.while_loop(
            lambda c: c[0] < turns,
            lambda c: (c[0] + 1, *self.once(c[1], batch, key, scale, schedule)),
            (0, state, metrics),
        )
        return state, metrics

    def once(self, state: Any, batch: Any, key: Any, scale: Any, schedule: str | None) -> Any:
        """Gradients of the loss over microbatches, and an update."""
        params = self._field(state, "params")
        if self.mode == "forward":
            reduce = "sum" if not self.aux else ("sum", "last")
            return state, self.looped(self.loss, schedule, reduce, False)(params, batch, key, scale)
        grad = jax.value_and_grad(self.loss, has_aux=self.aux)
        if self.mode in NESTED:
            grad = self.inner(grad, schedule)
        if self.mode in ("scanned", "loop_in_scan"):
            loss, grads = self._accumulated(grad, params, batch, key, scale)
        elif self.mode == "gathered":
            whole = functools.partial(self.gathered, schedule=schedule)
            loss, grads = jax.value_and_grad(whole)(params, batch, key, scale)
        elif self.mode == "around":
            loss, grads = jax.value_and_grad(self.looped(self.loss, schedule, self.reduction()))(
                params, batch, key, scale
            )
        elif self.carried:
            first = self._field(state, "count")[1] if self.kept else self.first_carried()
            (loss, grads), last = self._carrying(schedule)(params, batch, key, scale, first)
            loss = loss, last
        else:
            loss, grads = self.looped(grad, schedule, self.reduction())(params, batch, key, scale)
        if self.reduce == "sum":
            grads = jax.tree.map(lambda g: g / self.microbatches, grads)
        new = self.updated(state, grads, last if self.kept else None)
        after = self._field(new, "params")
        if self.mode == "twice":
            loss = loss, self.looped(self.loss, schedule, "last", False)(after, batch, key, scale)
        if self.watched:
            seen = mm.meta.unbox((grads, jax.tree.map(jnp.subtract, after, params), params))
            loss = loss, [WATCHED[name](*seen) for name in self.watched]
        return self.unless_refused(new, state, grads), (loss, grads)

    def unless_refused(self, new: Any, old: Any, grads: Any) -> Any:
        """The new state, or the old one where a gradient is not finite."""
        if self.refused is None:
            return new
        finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]))
        if self.refused == "cond":
            return jax.lax.cond(finite, lambda: new, lambda: old)
        return jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)

    def _field(self, state: Any, name: str) -> Any:
        return state[name] if self.state == "dict" else getattr(state, name)

    def first_carried(self) -> tuple[Any, ...]:
        shapes = [(ROWS, WIDTH) if how == "rows" else () for how, *_ in self.carried]
        return tuple(jnp.full(shape, 0.3 + 0.1 * k, jnp.float32) for k, shape in enumerate(shapes))

    def _carrying(self, schedule: str | None) -> Any:
        """``(params, batch, key, scale, numbers) -> ((loss, gradients), the next numbers)``, over microbatches."""

        def grad(params: Any, batch: Any, key: Any, scale: Any, carried: Any) -> Any:
            (value, new), grads = jax.value_and_grad(self.loss, has_aux=True)(params, batch, key, scale, carried)
            return (value, grads), new

        return self.looped(grad, schedule, self.reduction(), state_argnum=4)

    def inner(self, grad: Any, schedule: str | None) -> Any:
        """The gradient over pieces of what it is given."""
        if self.mode == "nested_around":
            return jax.value_and_grad(self.looped(self.loss, schedule, "mean", count=PIECES))
        return self.looped(grad, schedule, "mean", count=PIECES)

    def _accumulated(self, grad: Any, params: Any, batch: Any, key: Any, scale: Any) -> Any:
        """Gradients added up by a scan that the user wrote."""
        pieces = jax.tree.map(lambda x: x.reshape(self.microbatches, -1, *x.shape[1:]), batch)

        def body(total, piece):
            value, grads = grad(params, piece, key, scale)
            return jax.tree.map(jnp.add, total, grads), value

        grads, values = jax.lax.scan(body, jax.tree.map(jnp.zeros_like, params), pieces)
        return values, jax.tree.map(lambda g: g / self.microbatches, grads)

    def updated(self, state: Any, grads: Any, carried: Any = None) -> Any:
        """The next state, with what microbatches carried if that is kept."""
        if self.state == "train_state":
            return state.apply_gradients(grads=grads)
        fields = {f: self._field(state, f) for f in FIELDS}
        updates, moments = optimizer(self.optimizer, self.clipped).update(grads, fields["moments"], fields["params"])
        params = optax.apply_updates(fields["params"], updates)
        average = fields["average"]
        if self.ema:
            average = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, average, params)
        new = {"params": params, "moments": moments, "average": average}
        new["count"] = fields["count"] + 1 if carried is None else (fields["count"][0] + 1, carried)
        return CONTAINERS[self.state](**new)

    def shardings(self) -> Any:
        """`in_shardings` of the step that say where the kernels of single layers arrive."""
        meshes, used = self.meshes(), {}
        for layer in self.layers:
            used.setdefault(layer.parameter, []).append(layer)
        return {
            f"w{i}": NamedSharding(meshes[layers[0].submesh], PartitionSpec(None, "model"))
            for i, layers in used.items()
            if len(layers) == 1 and layers[0].wrap == "plain" and layers[0].annotated == "never"
        }


def scoped(fun: Any, path: str) -> Any:
    """``fun`` in nested scopes."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with contextlib.ExitStack() as stack:
            for name in path.split("/"):
                stack.enter_context(jax.named_scope(name))
            return fun(*args, **kwargs)

    return run


def _described(task: mm.Task, match: re.Match[str], is_backward: bool) -> mm.Task:
    assert task.name == match[1]
    return task


def _before(unit: tuple[str, int, int], count: int) -> set[tuple[str, int, int]]:
    """What has to run before a layer of a chain in a phase and microbatch."""
    phase, i, m = unit
    before = {(phase, i, m - 1)} if m else set()
    if phase == "":
        return before | ({("", i - 1, m)} if i else set())
    if phase == "_bwd":
        return before | {("", count - 1, m), *([("_bwd", i + 1, m)] if i + 1 < count else [])}
    return before | {("_bwd", i, m)}


FIELDS = ("params", "moments", "average", "count")


class Named(NamedTuple):
    params: Any
    moments: Any
    average: Any
    count: Any


@functools.partial(jax.tree_util.register_dataclass, data_fields=FIELDS, meta_fields=())
@dataclass
class Fields:
    params: Any
    moments: Any
    average: Any
    count: Any


CONTAINERS: dict[str, Any] = {"dict": dict, "tuple": Named, "dataclass": Fields}


@functools.cache
def constant_key(impl: str) -> Any:
    """A key that a module would hold."""
    with jax.ensure_compile_time_eval():
        return jax.random.key(5, impl=impl)


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
