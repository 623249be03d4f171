"""Binding a plan: transports, ownership, what is compiled ahead, and looking on."""

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import manymesh as mm
from generated.laws import counted_compilations
from manymesh._plan._instructions import Receive, Run, Send
from manymesh._runtime._bind import bind
from manymesh._runtime._observe import Observer
from manymesh._runtime._ownership import Ownership, ownership
from manymesh._runtime._transport import LocalTransport
from stages import assert_same, loss, microbatched, parameters, reference, rows

DEVICES = np.array(jax.devices())
FOUR = Mesh(DEVICES[:4].reshape(2, 2), ("data", "model"))
OTHER = Mesh(DEVICES[4:].reshape(2, 2), ("data", "model"))
TWO = Mesh(DEVICES[4:6].reshape(1, 2), ("data", "model"))


@functools.cache
def trained():
    """A training step on two devices, compiled."""

    def step(p, x):
        value, grads = microbatched()(p, x)
        return jax.tree.map(lambda w, g: w - g, p, grads), value

    return mm.jit(step).lower(parameters(), rows()).compile()


def bound(compiled, transport, *submeshes):
    """A step bound anew, for those submeshes."""
    lowered, owner = compiled._lowered, Ownership(frozenset(submeshes))
    return bind(lowered.program, lowered.plan, lowered, lowered.executables, owner, transport, starts=lowered.starts)


class Recording(LocalTransport):
    """A transport that writes down what it moves."""

    def __init__(self):
        super().__init__()
        self.moved = []

    def move(self, batch):
        call = super().move(batch)

        def move(*values):
            assert [x.sharding for x in values] == [x.sharding for x in batch.sent]
            self.moved.append((batch.tag, tuple(x.shape for x in values)))
            return call(*values)

        return move


def leaves():
    return jax.tree.leaves((parameters(), rows()))


def test_all_that_crosses_goes_through_the_transport():
    """Each batch of the plan once, in its order, and nothing else."""
    transport, plan = Recording(), trained()._lowered.plan
    results = bound(trained(), transport, 0, 1)(leaves())
    sent = [i for i in plan.instructions if isinstance(i, Send)]
    assert transport.moved == [(i.tag, tuple(plan.variables[v].shape for v in i.variables)) for i in sent]
    assert_same(results, jax.tree.leaves(trained()(parameters(), rows())), tolerance=0)


def test_a_transport_can_be_swapped():
    """One that loses every value and gives zeros: the loss is that of a batch of zeros, on the same devices."""

    class Zeros(LocalTransport):
        def move(self, batch):
            return lambda *values: [jax.device_put(np.zeros(x.shape, x.dtype), x.sharding) for x in batch.arriving]

    compiled = mm.jit(loss).lower(parameters(), rows()).compile()
    assert float(compiled(parameters(), rows())) > 0
    (found,) = bound(compiled, Zeros(), 0, 1)(leaves())
    assert float(found) == 0


def test_each_owner_runs_its_submeshes_and_they_meet_in_the_transport():
    """Two executors of one plan, each in a thread, give together the bits of the one that runs it all."""
    transport, results = LocalTransport(), {}
    executors = {s: bound(trained(), transport, s) for s in (0, 1)}
    whole = jax.tree.leaves(trained()(parameters(), rows()))
    for _ in range(3):  # tags are unique in a call, not over calls
        threads = [
            threading.Thread(target=lambda s=s: results.update({s: executors[s](leaves())}), daemon=True)
            for s in executors
        ]
        for t in threads:
            t.start()
        for t in threads:
            t.join(60)
        assert sorted(results) == [0, 1], "one of them waits for ever"
        for o, (value, (_, s)) in enumerate(zip(whole, trained().program.outputs, strict=True)):
            np.testing.assert_array_equal(np.asarray(results[s][o]), np.asarray(value))
            assert results[1 - s][o] is None
        results.clear()


def test_an_owner_needs_only_its_own_executables():
    """Those of other submeshes are never asked for."""
    lowered = trained()._lowered
    executables = [
        e if f.submesh == 0 else None for f, e in zip(lowered.program.fragments, lowered.executables, strict=True)
    ]
    arguments = lowered.program, lowered.plan, lowered, executables
    bind(*arguments, Ownership(frozenset({0})), LocalTransport())
    with pytest.raises(AssertionError, match="was not compiled for its owner"):
        bind(*arguments, Ownership(frozenset({0, 1})), LocalTransport())


def test_one_process_owns_everything():
    """Every submesh that has one of its devices."""
    assert ownership([FOUR, OTHER], 0) == Ownership(frozenset({0, 1}))
    assert ownership([FOUR, OTHER], 1) == Ownership(frozenset())


def unequal():
    """Two tasks between which the layout changes on both sides of the copy, and its arguments and result elsewhere."""
    one = mm.task(lambda x: mm.with_sharding_constraint(x * 2, ("data", None)), "one", mesh=FOUR)
    two = mm.task(lambda x: mm.with_sharding_constraint(x, (None, "model")) + 1, "two", mesh=TWO)
    three = mm.task(lambda x: mm.with_sharding_constraint(x, (None, "model")) + 1, "three", mesh=OTHER)
    x = jax.device_put(jnp.arange(64.0).reshape(8, 8), NamedSharding(OTHER, P(None, "model")))
    out = NamedSharding(FOUR, P("model", "data")), NamedSharding(OTHER, P("data"))
    f = lambda x: (two(one(x)), three(one(x)))  # noqa: E731
    return f, mm.jit(f, out_shardings=out, in_shardings=NamedSharding(FOUR, P("model"))), x


class Compilations:
    """Counts what JAX traces and compiles while it is open."""

    def __enter__(self):
        self.seen = []
        jax.monitoring.register_event_duration_secs_listener(self.listen)
        return self

    def __exit__(self, *_):
        jax.monitoring.unregister_event_duration_listener(self.listen)

    def listen(self, name, *_, **__):
        self.seen.append(name)

    def count(self):
        return sum("compile" in name or "trace" in name for name in self.seen)


def test_the_first_call_compiles_nothing():
    """Changes of layout on the way, of an argument and of results were known when the step was compiled."""
    f, step, x = unequal()
    compiled = step.lower(x).compile()
    with Compilations() as compilations:
        results = jax.block_until_ready(compiled(x))
    assert compilations.count() == 0, compilations.seen
    assert_same(results, reference(f, x))
    assert [r.sharding for r in results] == list(compiled.output_shardings)


def test_what_nobody_knew_is_compiled_before_the_first_instruction():
    """An argument in a third layout."""
    f, step, x = unequal()
    compiled = step.lower(x).compile()
    other = jax.device_put(x, NamedSharding(FOUR, P(None, ("data", "model"))))

    class Watch(Observer):
        at_start = None

        def begin(self, position, instruction, inputs):
            if self.at_start is None:
                self.at_start = compilations.count()

    with Compilations() as compilations:
        watch = Watch()
        results = jax.block_until_ready(compiled.call_flat([other], watch))
    assert compilations.count() == watch.at_start > 0
    assert_same(results, reference(f, x))


def test_an_observer_is_told_every_instruction():
    """Begin and end of each, in the plan's order, with the arrays; a Send and its Receive one after the other."""
    plan, log = trained()._lowered.plan, []

    class Watch(Observer):
        def begin(self, position, instruction, inputs):
            reads = () if isinstance(instruction, Receive) else instruction.inputs
            assert len(inputs) == len(reads)
            log.append(("begin", position, instruction))

        def end(self, position, instruction, outputs):
            fills = () if isinstance(instruction, Send) else instruction.outputs
            values = [jax.typeof(x) for x in outputs]
            assert len(values) == len(fills)
            if isinstance(instruction, Run):
                makes = plan.ports[instruction.fragment].makes
                assert [x.shape for x in values] == [plan.variables[v].shape for v in makes]
            log.append(("end", position, instruction))

    trained().call_flat(leaves(), Watch())
    assert log == [(what, k, i) for k, i in enumerate(plan.instructions) for what in ("begin", "end")]
    log.clear()
    trained().call_flat(leaves())
    assert not log


def test_an_observer_is_told_arguments_that_have_to_be_moved():
    """Those that are where the program wants them are not."""
    moved = []

    class Watch(Observer):
        def moves_argument(self, position, value, sharding):
            moved.append((position, sharding))

    compiled = trained()
    home = jax.tree.leaves(compiled.input_shardings)
    given = [jax.device_put(x, s) for x, s in zip(leaves(), home, strict=True)]
    given[1] = jax.device_put(given[1], DEVICES[5])
    compiled.call_flat(given, Watch())
    assert moved == [(1, home[1])]


@pytest.mark.parametrize("dtype", ["int4", "uint4", "float4_e2m1fn"])
def test_elements_smaller_than_a_byte(dtype):
    """As arguments that come from elsewhere, change their layout, cross, and come back in the next step."""
    weights = (np.arange(16) % 4).reshape(4, 4).astype(dtype)
    front = mm.task(lambda q, x: (x @ q.astype(x.dtype), q), "front", mesh=FOUR)
    back = mm.task(lambda q, h: jnp.sum(h) + q.astype(h.dtype).sum(), "back", mesh=TWO)

    def step(q, x):
        h, q = front(mm.with_sharding_constraint(q, ("data", "model")), x)
        return q, back(q, h)

    q, jitted = jax.device_put(weights, DEVICES[7]), mm.jit(step)
    for _ in range(2):
        expected = jax.jit(step)(weights, jnp.ones((2, 4)))
        q, found = jitted(q, jnp.ones((2, 4)))
        np.testing.assert_array_equal(np.asarray(q), weights)
        np.testing.assert_array_equal(found, expected[1])


@pytest.mark.parametrize("device", [0, 2], ids=["there", "elsewhere"])
def test_arguments_whose_elements_lie_in_another_order(device):
    """As `jax.experimental.layout.Format` has them: `jax.jit` takes them, too. Later calls compile nothing."""
    front, back = (mm.task(lambda w, x: jnp.tanh(x @ w), name, devices=[i]) for i, name in enumerate(("front", "back")))
    step = mm.jit(lambda p, x: jax.grad(lambda p: jnp.sum(back(p[1], front(p[0], x))))(p))
    rng = np.random.default_rng(0)
    w, v, x = (rng.normal(size=s).astype(np.float32) for s in ((4, 5), (5, 3), (8, 4)))
    there = jax.sharding.SingleDeviceSharding(jax.devices()[device])
    expected = step([w, v], x)
    turned = [jax.device_put(y, Format(Layout(major_to_minor=(1, 0)), there)) for y in (w, v, x)]
    assert_same(step(turned[:2], turned[2]), expected)
    with counted_compilations() as made:
        assert_same(step(turned[:2], turned[2]), expected)
        assert_same(step([w, v], x), expected)
    assert not made
    assert all(y.format.layout.major_to_minor == (1, 0) for y in turned)
    assert_same(mm.jit(lambda p: p * 2)(turned[0]), 2 * w)
    with pytest.raises(mm.errors.ArgumentError, match="found Format.*give its sharding alone"):
        mm.jit(lambda p: p * 2, out_shardings=turned[0].format)(w)
