"""Layouts are decided before anything compiles, by rules in order, and are what the arrays then have."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import manymesh as mm
from manymesh import _compat
from manymesh._layout import _solve
from stages import assert_same, reference

RULES = (("batch", "data"), ("hidden", "model"), ("embed", None))
WIDTH = 16


def halves(shape=(2, 2)):
    """Two submeshes of one shape."""
    devices = np.array(jax.devices()[: 2 * int(np.prod(shape))]).reshape(2, *shape)
    return tuple(Mesh(d, ("data", "model")) for d in devices)


def mlp(first, second, annotate=("embed", "hidden")):
    """Two layers, the first weight annotated, the second not."""

    def front(w, x):
        x = mm.with_sharding_constraint(x, ("batch", None))
        return jnp.tanh(x @ mm.with_sharding_constraint(w, annotate))

    a = mm.task(front, "front", mesh=first, logical_axes=RULES)
    b = mm.task(lambda w, h, y: jnp.mean((h @ w - y) ** 2), "back", mesh=second, logical_axes=RULES)
    return lambda p, batch: b(p["w2"], a(p["w1"], batch["x"]), batch["y"])


def training(loss, optimizer, **loop):
    """A step of training, in microbatches where ``loop`` says how."""

    def step(p, s, batch):
        grad = jax.value_and_grad(loss)
        if loop:
            grad = mm.microbatch(grad, argnum=1, reduce="mean", **loop)
        value, g = grad(p, batch)
        updates, s = optimizer.update(g, s, p)
        return optax.apply_updates(p, updates), s, value

    return step


def arguments(optimizer):
    keys = jax.random.split(jax.random.key(0), 4)
    p = {f"w{i + 1}": jax.random.normal(keys[i], (WIDTH, WIDTH)) / 4 for i in range(2)}
    batch = {"x": jax.random.normal(keys[2], (8, WIDTH)), "y": jax.random.normal(keys[3], (8, WIDTH))}
    return p, optimizer.init(p), batch


def leaves(layout, which):
    """Name -> decision of each named argument or result."""
    return {layout.names[v]: d for (v, _), d in layout.decisions.items() if layout.names[v].startswith(which)}


def assert_as_printed(compiled, layout, results):
    """What the arrays have is what the layout said, argument by argument and result by result."""
    program = compiled.program
    for (v, s), x in zip(program.outputs, jax.tree.leaves(results), strict=True):
        if _compat.is_var(v):
            assert x.sharding == layout.sharding(v, s)
    for f, executable in zip(program.fragments, compiled._lowered.executables, strict=True):
        for given, variables in ((executable.input_shardings[0], f.invars), (executable.output_shardings, f.outvars)):
            for sharding, v in zip(given, variables, strict=True):
                assert sharding.is_equivalent_to(layout.sharding(v, f.submesh), len(v.aval.shape))


OPTIMIZERS = {
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adamw, clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)),
    "ema of parameters": optax.chain(optax.sgd(0.1), optax.ema(0.9)),
    "lion": optax.lion(1e-3),
    "muon": optax.contrib.muon(1e-2),  # whose momentum meets the parameter in products of matrices only
}


@pytest.mark.parametrize("loop", [{}, {"num_microbatches": 2, "schedule": "1f1b"}], ids=["whole", "1f1b"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_state_is_laid_out_like_its_parameter(name, loop):
    """Also where only one weight is annotated, nothing is donated by the user, and XLA would choose otherwise."""
    optimizer = OPTIMIZERS[name]
    step = mm.jit(training(mlp(*halves()), optimizer, **loop), donate_argnums=(0, 1))
    p, s, batch = arguments(optimizer)
    with mm.ignore_transforms():
        expected = step(p, s, batch)
    lowered = step.lower(p, s, batch)
    layout = lowered.layout
    specs = {name: d.spec for name, d in leaves(layout, "args[0]").items()}
    assert specs["args[0]['w1']"] == P(None, "model")
    for name, decision in leaves(layout, "args[1]").items():
        w = f"args[0]{name[-6:]}"
        if w in specs:
            assert (decision.spec, decision.rule) == (specs[w], f"as {w}")
    compiled = lowered.compile()
    results = compiled(p, s, batch)
    assert_as_printed(compiled, layout, results)
    assert_same(results, expected)
    after = [x.sharding for x in jax.tree.leaves(results[:2])]
    assert after == jax.tree.leaves(compiled.input_shardings[0][:2])
    with jax.transfer_guard("disallow"):
        again = compiled(*results[:2], jax.tree.map(jax.device_put, batch, compiled.input_shardings[0][2]))
    assert [x.sharding for x in jax.tree.leaves(again[:2])] == after


NUMBERS = {"zero": lambda s, x: jnp.zeros_like(s), "a mean": lambda s, x: jnp.full_like(s, x.mean())}


@pytest.mark.parametrize("number", NUMBERS)
def test_a_state_that_becomes_a_number_is_laid_out_like_its_parameter(number):
    """The gradient that Adan remembers, say, where it is zero. XLA replicates a number that is a result."""
    first, _ = halves()

    def front(w, x):
        return x @ mm.with_sharding_constraint(w, ("embed", "hidden"))

    front = mm.task(front, "front", mesh=first, logical_axes=RULES)

    def step(state, x):
        p, before = state
        g = NUMBERS[number](p, x)
        w = 2 * p  # read twice, so that it is made where the next values are
        return (p - 0.1 * (g - before), g), front(w, front(w, x))

    state, x = (jnp.ones((WIDTH, WIDTH)), jnp.full((WIDTH, WIDTH), 2.0)), jnp.ones((8, WIDTH))
    lowered = mm.jit(step).lower(state, x)
    found = {name: d.spec for name, d in leaves(lowered.layout, "args[0]").items()}
    assert found == dict.fromkeys(("args[0][0]", "args[0][1]"), P(None, "model"))
    compiled = lowered.compile()
    results = compiled(state, x)
    assert_as_printed(compiled, lowered.layout, results)
    with mm.ignore_transforms():
        assert_same(results, step(state, x))


def test_momenta_that_are_stacked_are_laid_out_like_their_parameters():
    """All matrices of a shape at once, in products with themselves: each layer of the stack is that of one parameter."""
    first, _ = halves()

    def front(p, x):
        h = jnp.tanh(x @ mm.with_sharding_constraint(p["w1"], (None, "model")))
        return jnp.mean(jnp.tanh(h @ mm.with_sharding_constraint(p["w2"], ("model", None))) ** 2)

    task = mm.task(front, "front", mesh=first)

    def step(p, s, x):
        grads = jax.grad(task)(p, x)
        s = jax.tree.map(lambda m, g: 0.9 * m + g, s, grads)
        stack = jnp.stack(jax.tree.leaves(s))
        turned = stack - 0.1 * jnp.einsum("nij,nkj,nkl->nil", stack, stack, stack)
        return {k: p[k] - 0.1 * u for k, u in zip(sorted(p), turned, strict=True)}, s

    p = {k: jnp.eye(WIDTH) for k in ("w1", "w2")}
    args = p, jax.tree.map(jnp.zeros_like, p), jnp.ones((8, WIDTH))
    lowered = mm.jit(step).lower(*args)
    found = {name: d.spec for name, d in leaves(lowered.layout, "args[1]").items()}
    assert found == {"args[1]['w1']": P(None, "model"), "args[1]['w2']": P("model")}
    results = lowered.compile()(*args)
    with mm.ignore_transforms():
        assert_same(results, step(*args))


def test_two_parameters_of_one_shape_are_not_one_anothers_states():
    """Under plain SGD nothing is tied to either, and outside tasks one has a part in the gradient of the other."""
    first, _ = halves()
    last = mm.task(lambda h, y: jnp.mean((h - y) ** 2), "last", mesh=first)
    optimizer = optax.sgd(0.1)
    step = training(lambda p, batch: last(jnp.tanh(batch["x"] @ p["w1"]) @ p["w2"], batch["y"]), optimizer)
    p, s, batch = arguments(optimizer)
    said = {"w1": None, "w2": NamedSharding(first, P(None, "model"))}
    found = leaves(mm.jit(step, in_shardings=(said, None, None)).lower(p, s, batch).layout, "args[0]['w1']")
    assert found["args[0]['w1']"].rule == "propagated through 'last'"


def test_the_users_word_comes_first():
    """`in_shardings` before where an argument lies, that before constraints; `out_shardings` of a result."""
    first, second = halves()
    optimizer = optax.sgd(0.1)
    p, s, batch = arguments(optimizer)
    step = training(mlp(first, second), optimizer)
    said = NamedSharding(first, P("model", None))
    layout = mm.jit(step, in_shardings=({"w1": said, "w2": None}, None, None)).lower(p, s, batch).layout
    assert leaves(layout, "args[0]['w1']")["args[0]['w1']"].rule == "in_shardings"
    assert leaves(layout, "args[0]['w1']")["args[0]['w1']"].spec == P("model")
    assert leaves(layout, "result[0]['w1']")["result[0]['w1']"].spec == P("model"), "the next value is where it was"
    placed = p | {"w1": jax.device_put(p["w1"], NamedSharding(first, P("data")))}
    decision = leaves(mm.jit(step).lower(placed, s, batch).layout, "args[0]['w1']")["args[0]['w1']"]
    assert (decision.rule, decision.spec) == ("as it arrives", P("data"))
    decision = leaves(mm.jit(step).lower(p, s, batch).layout, "args[0]['w1']")["args[0]['w1']"]
    assert (decision.rule, decision.spec) == ("constraint in 'front'", P(None, "model"))
    out = NamedSharding(second, P(None, "data"))
    layout = mm.jit(step, out_shardings=({"w1": None, "w2": out}, None, None)).lower(p, s, batch).layout
    decision = leaves(layout, "result[0]['w2']")["result[0]['w2']"]
    assert (decision.rule, decision.spec) == ("out_shardings", P(None, "data"))


def test_new_parameters_that_are_constrained_are_kept_so():
    """Where a step constrains them in the end: its own word, for the state and its moments, not what readers would like."""
    first, second = halves()
    optimizer = optax.adam(1e-2)
    p, s, batch = arguments(optimizer)
    plain = training(mlp(first, second, annotate=(None, None)), optimizer, num_microbatches=2, schedule="1f1b")

    def step(p, s, batch):
        p, s, value = plain(p, s, batch)
        return jax.tree.map(lambda w: mm.with_sharding_constraint(w, ("hidden", "batch")), p), s, value

    compiled = mm.jit(step)
    layout = compiled.lower(p, s, batch).layout
    decision = leaves(layout, "args[0]['w2']")["args[0]['w2']"]
    assert (decision.rule, decision.spec) == ("constraint in 'after_1'", P("model", "data"))
    for moment in ("mu", "nu"):
        assert leaves(layout, f"args[1][0].{moment}['w2']")[f"args[1][0].{moment}['w2']"].spec == P("model", "data")
    assert leaves(layout, "args[0]['w1']")["args[0]['w1']"].spec == P(), "its task says otherwise"
    assert_same(compiled(p, s, batch), reference(compiled, p, s, batch))


@pytest.mark.parametrize("wanted", [False, True], ids=["", "gradients are wanted whole"])
def test_what_is_scaled_and_then_constrained_lies_so(wanted):
    """A parameter, though a step computes with it before any task does, and its gradient is asked for otherwise."""
    first, _ = halves()
    task = mm.task(lambda w, x: x @ w, "task", mesh=first, logical_axes=RULES)

    def rows(w, x):
        return task(mm.with_sharding_constraint(w / 2, ("batch", "hidden")), x)

    def step(w, x):
        loop = mm.microbatch(rows, argnum=1, num_microbatches=2, reduce="concat")
        g = jax.grad(lambda w: jnp.mean(loop(w, x) ** 2))(w)
        return w - 0.1 * g, g

    whole = NamedSharding(first, P())
    step = mm.jit(step, out_shardings=(None, whole) if wanted else None)
    w, x = arguments(optax.sgd(0.1))[0]["w1"], jnp.ones((8, WIDTH))
    assert step.lower(w, x).compile().input_shardings[0][0].spec == P("data", "model")
    assert_same(step(w, x), reference(step, w, x))


def test_what_is_scaled_for_a_task_that_constrains_it_lies_so():
    """A parameter, scaled once for all microbatches; though its gradient comes out of a vector of all gradients."""
    first, (last, *_) = halves()[0], jax.devices()[4:]
    front = mm.task(lambda p, x: jnp.exp(x @ p["w"]) + p["b"], "front", devices=[last])

    def layer(p, x):
        for _ in range(2):
            x = x + jnp.tanh(x @ mm.with_sharding_constraint(p["w"], ("batch", "hidden")) + p["b"])
        return mm.with_sharding_constraint(x, ("batch", "hidden"))

    task = mm.task(layer, "task", mesh=first, logical_axes=RULES)

    def loss(p, x):
        p = jax.tree.map(lambda w: w / 2 * -2.0, p)
        return jnp.mean(task(p["back"], front(p["front"], x)) ** 2)

    def step(p, x):
        g = mm.microbatch(jax.grad(loss), argnum=1, num_microbatches=2, reduce="mean")(p, x)
        vector, back = ravel_pytree(g)
        g = back(vector / jnp.maximum(1.0, jnp.linalg.norm(vector)))
        return jax.tree.map(lambda w, g: w - 0.1 * g, p, g), g

    step = mm.jit(step)
    each = {"w": arguments(optax.sgd(0.1))[0]["w1"], "b": jnp.ones(WIDTH)}
    p, x = {"front": each, "back": each}, jnp.ones((8, WIDTH)) / WIDTH
    assert step.lower(p, x).compile().input_shardings[0][0]["back"]["w"].spec == P("data", "model")
    assert_same(step(p, x), reference(step, p, x))


def test_a_penalty_on_all_parameters_lays_none_of_them_out():
    """What is added up of them before the loop, over two submeshes, leaves them to the task that constrains them, cast outside."""
    first, second = halves()
    front = mm.task(lambda w, x: jnp.tanh(x @ w), "front", mesh=first)
    constrained = mm.task(lambda w, h: h @ mm.with_sharding_constraint(w, P("data", "model")), "back", mesh=second)

    def loss(p, x):
        low = jax.tree.map(lambda w: w.astype(jnp.bfloat16), p)
        y = constrained(low["w2"], front(low["w1"], x.astype(jnp.bfloat16)))
        return jnp.mean(y.astype(jnp.float32) ** 2) + 0.01 * sum(jnp.sum(w * w) for w in jax.tree.leaves(p))

    grad = mm.microbatch(jax.value_and_grad(loss), argnum=1, num_microbatches=2, reduce="mean", schedule="1f1b")
    p, _, batch = arguments(optax.sgd(0.1))
    p = jax.tree.map(lambda w: jnp.tile(w, (8, 8)), p)  # a number crosses, not a weight
    compiled = mm.jit(grad).lower(p, jnp.tile(batch["x"], (1, 8))).compile()
    assert compiled.input_shardings[0][0]["w2"].spec == P("data", "model")


BATCHES = {  # what the task says of its argument, the number of microbatches, how the pieces then lie
    "nothing is said": (lambda x: x, 4, P("data")),
    "the task wants it whole": (lambda x: mm.with_sharding_constraint(x, (None, None)), 4, P()),
    "the task wants it otherwise": (lambda x: mm.with_sharding_constraint(x, (None, "model")), 4, P(None, "model")),
    "one row": (lambda x: x, 8, P()),
}


@pytest.mark.parametrize("given", ["put", "in_shardings", "shapes"])
@pytest.mark.parametrize("case", BATCHES)
def test_pieces_of_a_batch_lie_as_it_does(case, given):
    """Where the tasks that read them say nothing else; their gradients are summed over the axis once a step."""
    said, count, spec = BATCHES[case]
    first, second = halves()
    front = mm.task(lambda w, x: jnp.tanh(said(x) @ w), "front", mesh=first)
    back = mm.task(lambda w, h, y: jnp.mean((h @ w - said(y)) ** 2), "back", mesh=second)
    step = training(
        lambda p, batch: back(p["w2"], front(p["w1"], batch["x"]), batch["y"]),
        optax.sgd(0.1), num_microbatches=count, schedule="1f1b",
    )  # fmt: skip
    p, s, batch = arguments(optax.sgd(0.1))
    sharded = {"x": NamedSharding(first, P("data")), "y": NamedSharding(second, P("data"))}
    placed = batch if given == "in_shardings" else jax.device_put(batch, sharded)
    step = mm.jit(step, **({"in_shardings": (None, None, sharded)} if given == "in_shardings" else {}))
    if given == "shapes":
        placed = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), batch, sharded)
    lowered = step.lower(p, s, placed)
    (loop,) = lowered.program.loops
    assert [lowered.layout.decisions[v, k].spec for k, (v, _) in enumerate(loop.xs)] == [spec, spec]
    summed = [str(r) for r in lowered.report().reductions]
    assert (case != "nothing is said") == (not summed) and all("over data once a call" in r for r in summed)
    if given == "put":
        assert_same(step(p, s, placed), reference(step, p, s, batch))


def test_what_crosses_arrives_as_its_reader_wants_it_or_as_it_left():
    first, second = halves()
    names = lambda *axes: lambda x: mm.with_sharding_constraint(x * 2, axes)  # noqa: E731
    a = mm.task(names("data", "model"), "a", mesh=first)
    free = mm.task(lambda x: x + 1, "free", mesh=second)
    wants = mm.task(lambda x: mm.with_sharding_constraint(x, ("model", None)) + 1, "wants", mesh=second)
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    for reader, spec, rule in (
        (free, P("data", "model"), "as on submesh 0"),
        (wants, P("model"), "constraint in 'wants'"),
    ):
        lowered = mm.jit(lambda x, reader=reader: reader(a(x))).lower(x)
        (crossing,) = lowered.program.edges
        decision = lowered.layout.decisions[crossing.var, 1]
        assert (decision.spec, decision.rule) == (spec, rule)


@pytest.mark.parametrize("said, there", [(P(None, "model"), P(None, "model")), (None, P("model"))])
def test_an_argument_that_two_submeshes_read_lies_as_at_its_home(said, there):
    """Where it is sharded there, as a tied embedding; a whole one is left to those who read it elsewhere."""
    first, second = halves()
    front = mm.task(
        lambda e, ids: (e if said is None else mm.with_sharding_constraint(e, said))[ids], "front", mesh=first
    )
    back = mm.task(lambda e, h: mm.with_sharding_constraint(h @ e.T, (None, "model")), "back", mesh=second)
    step = mm.jit(lambda e, ids: back(e, front(e, ids)))
    e, ids = jax.random.normal(jax.random.key(0), (8, 8)), jnp.arange(4)
    lowered = step.lower(e, ids)
    (v, _) = lowered.program.invars
    assert lowered.program.home[v] == 0
    assert [lowered.layout.decisions[v, s].spec for s in range(2)] == [said or P(), there]
    assert_same(step(e, ids), reference(step, e, ids))


def test_the_layout_is_known_without_devices():
    """Nothing is compiled for it, and no device has to be there."""
    devices = mm.planned_devices(8, "cpu")
    first, second = (Mesh(np.array(devices).reshape(2, 2, 2)[i], ("data", "model")) for i in range(2))
    optimizer = optax.adamw(1e-2)
    shapes = jax.eval_shape(lambda: arguments(optimizer))
    planned = mm.jit(training(mlp(first, second), optimizer)).lower(*shapes).layout
    real = mm.jit(training(mlp(*halves()), optimizer)).lower(*shapes).layout
    assert str(planned) == str(real)
    assert "args[1][0].mu['w1']" in str(planned)


def test_without_the_pass_xla_is_asked(monkeypatch):
    """Where jaxlib has no propagation pass, a fragment is compiled to see what XLA chooses; the same result."""
    optimizer = optax.adamw(1e-2)
    p, s, batch = arguments(optimizer)
    step = training(mlp(*halves()), optimizer, num_microbatches=2, schedule="gpipe")
    expected = mm.jit(step).lower(p, s, batch).layout
    monkeypatch.setattr(_compat, "propagate", lambda *args: None)
    lowered = mm.jit(step).lower(p, s, batch)
    assert str(lowered.layout) == str(expected)
    with mm.ignore_transforms():
        reference = step(p, s, batch)
    assert_same(lowered.compile()(p, s, batch), reference)


def test_nothing_in_it_and_sizes_that_do_not_divide():
    """An empty array is replicated; a dimension that the devices do not divide is never sharded."""
    first, _ = halves()

    def odd(x, w):
        x = mm.with_sharding_constraint(x, ("data", "model"))
        return jnp.concatenate([x @ w, x[:, :1]], axis=1), jnp.zeros((0, 4)) + x[0, 0]

    f = mm.jit(mm.task(odd, mesh=first))
    x, w = jnp.ones((4, 4)), jnp.ones((4, 4))
    lowered = f.lower(x, w)
    compiled = lowered.compile()
    results = compiled(x, w)
    assert_as_printed(compiled, lowered.layout, results)
    with mm.ignore_transforms():
        assert_same(results, f(x, w))


def test_a_callback_is_lowered_for_devices_only():
    """JAX cannot lower it without; XLA is asked on real devices, and planned ones get replication."""

    def doubled(x):
        x = mm.with_sharding_constraint(x, ("data", None))
        return jax.pure_callback(lambda v: 2 * np.asarray(v), jax.ShapeDtypeStruct(x.shape, x.dtype), x) + x

    first, _ = halves()
    x = jnp.ones((4, 4))
    assert_same(mm.jit(mm.task(doubled, mesh=first))(x), 3 * x)
    planned = Mesh(np.array(mm.planned_devices(4)).reshape(2, 2), ("data", "model"))
    assert "result" in str(mm.jit(mm.task(doubled, mesh=planned)).lower(x).layout)


def test_without_a_word_about_layouts_nothing_is_propagated(monkeypatch):
    """All is whole; no fragment is lowered to find that out."""
    first, second = halves()
    tasks = [mm.task(lambda w, h: jnp.tanh(h @ w), f"stage{i}", mesh=m) for i, m in enumerate((first, second))]

    def loss(p, batch):
        return jnp.mean((tasks[1](p["w2"], tasks[0](p["w1"], batch["x"])) - batch["y"]) ** 2)

    step = mm.jit(training(loss, optax.adam(0.1), num_microbatches=2, schedule="1f1b"))
    p = {"w1": np.ones((WIDTH, WIDTH), np.float32), "w2": np.ones((WIDTH, 2), np.float32)}
    batch = {"x": np.ones((4, WIDTH), np.float32), "y": np.ones((4, 2), np.float32)}
    before = dict(step.lower(p, optax.adam(0.1).init(p), batch).layout.decisions)
    monkeypatch.setattr(_solve, "says_more", lambda jaxpr: True)
    asked = dict(step.lower(p, optax.adam(0.1).init(p), batch).layout.decisions)
    monkeypatch.undo()
    assert [d.spec for d in before.values()] == [d.spec for d in asked.values()]
    monkeypatch.setattr(_compat, "propagate", lambda *args: pytest.fail("propagated"))
    step.lower(p, optax.adam(0.1).init(p), batch).layout  # noqa: B018


def sharded(axis="data", mesh=None):
    """What shards a 4 x 4 array by itself, by name."""
    mesh = halves()[0] if mesh is None else mesh
    rows = NamedSharding(mesh, P(axis))
    return {
        "constraint": lambda x: jax.lax.with_sharding_constraint(x, rows),
        "jit": jax.jit(lambda x: x + 1, out_shardings=rows),
        "argument of jit": jax.jit(lambda x: x + 1, in_shardings=rows),
        "device_put": lambda x: jax.device_put(x, rows),
        "shard_map": jax.shard_map(lambda x: x + 1, mesh=mesh, in_specs=P(axis), out_specs=P(axis)),
        "in a loop": lambda x: jax.lax.scan(lambda c, _: (jax.lax.with_sharding_constraint(c, rows), None), x, None, 2)[0],
        "in a branch": lambda x: jax.lax.cond(x[0, 0] > 0, lambda x: jax.device_put(x, rows), lambda x: x, x),
    }  # fmt: skip


@pytest.mark.parametrize("name", sharded())
def test_a_computation_that_shards_by_itself_says_more(name):
    """Wherever in it the sharding stands; one that says that a value is whole says nothing."""
    x = jnp.ones((4, 4))
    assert _solve.says_more(jax.make_jaxpr(sharded()[name])(x).jaxpr)
    if name != "shard_map":
        assert not _solve.says_more(jax.make_jaxpr(sharded(None)[name])(x).jaxpr)


@pytest.mark.parametrize("which", ["in_shardings", "out_shardings"])
def test_another_mesh_of_the_devices_of_a_task_is_told(which):
    """Its axes have other names, so that it is another submesh; the mesh of the task itself is not."""
    task = mm.task(lambda x: jnp.tanh(x), "wide", devices=[0, 1])
    own = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("model",)), P())
    with pytest.warns(UserWarning, match=rf"{which} of .* of task 'wide', but on another mesh, {{'model': 2}}"):
        lowered = mm.jit(task, **{which: own}).lower(jnp.ones((4, 4)))
    assert len(lowered.program.submeshes) == 2
    (mesh,) = mm.jit(task).lower(jnp.ones((4, 4))).program.submeshes
    assert not mm.jit(task, **{which: NamedSharding(mesh, P())}).lower(jnp.ones((4, 4))).findings


def test_an_argument_that_is_handed_back_is_listed():
    """It is its own next value; the next value of another one lies as that does, and is not listed again."""
    task = mm.task(lambda w, x: x @ w, "task", devices=[0])

    def step(frozen, w, x):
        return frozen, jax.tree.map(lambda w: w - task(frozen["w"], x).sum(), w)

    w = {"w": jnp.ones((4, 4))}
    layout = mm.jit(step, donate_argnums=(0, 1)).lower(w, w, jnp.ones((2, 4))).layout
    lines = [line.split()[0] for line in str(layout).splitlines() if "float32[4,4]" in line]
    assert sorted(lines) == ["args[0]['w']", "args[1]['w']"]
