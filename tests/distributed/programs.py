"""What the processes of the pool run. Each function is called in all of them, and returns plain data."""

from __future__ import annotations

import contextlib
import gc
import re
import threading
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import manymesh as mm
from manymesh._distributed._world import world
from manymesh._runtime._carriers import carrier
from manymesh._runtime._exchange import Exchange, everywhere, processes_of, put

WIDTH = 8


def under(transport, function, *args):
    """What another of these functions returns, with a transport that was prepared when the pool started."""
    world().asked = transport
    try:
        return globals()[function](*args)
    finally:
        world().asked = "pull"


def mesh(*positions, names=("x",), shape=None):
    devices = np.array([jax.devices()[k] for k in positions])
    return Mesh(devices.reshape(shape or (len(positions),)), names)


def training(groups, microbatches=4, schedule="1f1b", steps=3):
    """Losses and parameters of a pipeline trained with AdamW and clipping; each group of devices is a stage."""
    meshes = [mesh(*g) for g in groups]

    def stage(p, x):
        x = mm.with_sharding_constraint(x, P("x"))
        return x + jnp.tanh(x @ p["a"]) @ p["b"]

    tasks = [mm.task(stage, f"stage{i}", mesh=m) for i, m in enumerate(meshes)]
    tail = mm.task(lambda y, t: jnp.mean((y - t) ** 2), "loss", mesh=meshes[-1])

    def loss_fn(params, batch):
        x, t = batch
        for p, task in zip(params, tasks, strict=True):
            x = task(p, x)
        return tail(x, t)

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))

    def step(params, state, batch):
        grad = mm.microbatch(
            jax.value_and_grad(loss_fn), argnum=1, num_microbatches=microbatches, schedule=schedule, reduce="mean"
        )
        loss, grads = grad(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype("f4")  # noqa: E731
    params = [{"a": 0.1 * draw(WIDTH, 2 * WIDTH), "b": 0.1 * draw(2 * WIDTH, WIDTH)} for _ in groups]
    state = optimizer.init(params)
    run, losses = mm.jit(step, donate_argnums=(0, 1)), []
    for _ in range(steps):
        batch = draw(8 * microbatches, WIDTH), draw(8 * microbatches, WIDTH)
        params, state, loss = run(params, state, batch)
        losses.append(float(loss))
    counts = [int(x) for x in jax.tree.leaves(state) if x.shape == ()]
    return losses, counts, jax.tree.leaves(mm.fetch(params))


def values_of(dtype, shape):
    """Numbers of a dtype that tell places apart."""
    if dtype == "key":
        return jax.random.split(jax.random.key(3), shape)
    count = np.arange(3 * 7 * 1024)  # repeated, as counting to millions takes longer than sending them
    numbers = count % 3 == 0 if dtype == "bool" else (count % 7).astype(getattr(ml_dtypes, dtype, None) or dtype)
    return np.resize(numbers, shape)


def crossing(dtypes, shapes, sources, targets):
    """Every dtype and shape, by one transport, between all these places; gives what did not arrive as it was."""
    wrong, number = [], 0
    for dtype in dtypes:
        for shape in shapes:
            x = values_of(dtype, shape)
            for source, target in zip(sources, targets, strict=True):
                places = [NamedSharding(mesh(*devices), P(*axes[: len(shape)])) for devices, axes in (source, target)]
                sent, arriving = (jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s) for s in places)
                world().begin("a test")
                carrier().begin(world().doing.calls)
                lent = number % 2 == 0
                exchange = Exchange(number % 7, [sent], [arriving], carrier(), [lent])
                given = [put(values_of(dtype, shape), places[0])] if exchange.gives else []
                (result,) = exchange(*given) or (None,)
                if given and lent:
                    given[0].delete()
                number += 1
                if result is not None and not _as_expected(result, x, places[1]):
                    wrong.append((dtype, shape, source, target))
    return wrong


def _as_expected(result, x, sharding):
    expected = put(x, sharding)
    if (result.shape, result.dtype, result.sharding) != (expected.shape, expected.dtype, expected.sharding):
        return False
    if jnp.issubdtype(result.dtype, jax.dtypes.prng_key):
        result, expected = jax.random.key_data(result), jax.random.key_data(expected)
    pairs = zip(result.addressable_shards, expected.addressable_shards, strict=True)
    return all(np.array_equal(np.asarray(a.data), np.asarray(b.data)) for a, b in pairs)


def sent_ahead(count):
    """How many values process 0 has sent before process 1 asks for the first one, and what arrived."""
    me, here, there = jax.process_index(), *(NamedSharding(mesh(d), P()) for d in (0, 4))
    sent, arriving = (jax.ShapeDtypeStruct((256,), np.float32, sharding=s) for s in (here, there))
    carrier().begin(number := world().begin("a test"))
    # A carrier of its own for each value, as in a step.
    exchanges = [Exchange(k, [sent], [arriving], carrier()) for k in range(count)]
    values, ahead = [], []
    if me == 0:
        values = [jax.device_put(np.full(256, k, np.float32), here) for k in range(count)]

        def look():
            time.sleep(0.5)
            ahead.append(done[0])
            world().write(f"sent_ahead/{number}", "go on")

        done, looking = [0], threading.Thread(target=look)
        looking.start()
        for k, exchange in enumerate(exchanges):
            exchange(values[k])
            done[0] = k + 1
        looking.join()
        return ahead[0], []
    world().read(f"sent_ahead/{number}")
    return None, [int(exchange()[0][0]) for exchange in exchanges]


def three(transports):
    """What was asked for, and the losses of a pipeline over three processes by each transport; run in each of them."""
    here, losses = world(), {}
    asked = here.asked
    for name in transports:
        here.asked = name
        losses[name], *_ = training([(0,), (1,), (2,)], 2, "1f1b", 2)
    return asked, losses


def fetching():
    """What `fetch` gives of arrays of one process, of the other, of both, of all, of nobody in particular."""
    one = put(np.arange(8.0, dtype="f4"), NamedSharding(mesh(0, 1), P("x")))
    two = put(np.arange(6, dtype="i4").reshape(2, 3), NamedSharding(mesh(6), P()))
    both = put(np.arange(16.0, dtype="f4").reshape(4, 4), NamedSharding(mesh(3, 4), P(None, "x")))
    key = put(jax.random.key(5), NamedSharding(mesh(5), P()))
    scalar = put(np.float32(2.5), everywhere())
    tree = {"one": one, "two": two, "both": both, "key": key, "scalar": scalar, "host": 7, "bare": jnp.ones(2)}
    return mm.fetch(tree), mm.fetch(tree), mm.fetch({"two": two, "one": one}, process=1)


def ghosts():
    """What can be seen of an array of the other process, and the words of what cannot."""
    front, back = (mm.task(lambda x: x * 2, name, devices=[d]) for name, d in (("front", 0), ("back", 4)))
    x, seen = jnp.arange(4.0), {}
    y = mm.jit(lambda x: back(front(x)))(x)
    seen["sharding"] = [d.id for d in y.sharding.device_set] == [jax.devices()[4].id]
    seen["shape"], seen["dtype"] = y.shape, str(y.dtype)
    seen["here"] = len(y.addressable_shards)
    seen["value"] = mm.fetch(y).tolist()
    again = mm.jit(lambda y: front(y))(y)  # comes back by the plan
    seen["again"] = mm.fetch(again).tolist()
    step = mm.jit(lambda y: back(y), donate_argnums=0)
    step(y)
    try:
        step(y)
    except RuntimeError as error:
        seen["donated"] = str(error)
    return seen


def arguments():
    """The same step on host values, on uncommitted arrays, on arrays that lie elsewhere, in both processes."""
    front = mm.task(lambda w, x: jnp.tanh(mm.with_sharding_constraint(x, ("x", None)) @ w), "front", mesh=mesh(0, 1))
    back = mm.task(lambda w, h: mm.with_sharding_constraint(h @ w, (None, "x")), "back", mesh=mesh(4, 5))
    step = mm.jit(lambda w, x: back(w, front(w, x)))  # both read w
    rng = np.random.default_rng(0)
    w, x = rng.normal(size=(4, 4)).astype("f4"), rng.normal(size=(8, 4)).astype("f4")
    elsewhere = NamedSharding(mesh(2, 6), P("x")), NamedSharding(mesh(7, 3, 5, 1), P(None, "x"))
    ways = {
        "host": (w, x),
        "uncommitted": (jnp.asarray(w), jnp.asarray(x)),
        "elsewhere": (put(w, elsewhere[0]), put(x, elsewhere[1])),
        "mixed": (put(w, elsewhere[1]), x),
    }
    results = {way: mm.fetch(step(*given)) for way, given in ways.items()}
    results["again"] = mm.fetch(step(*ways["elsewhere"]))
    return results, np.tanh(x @ w) @ w


def a_key_of_all():
    """A step on a key of which every process has a copy: what it draws, and the key handed through."""
    key = jax.jit(lambda: jax.random.key(3), out_shardings=everywhere())()
    draw = mm.task(lambda k: jax.random.normal(k, (3,)), "draw", mesh=mesh(5, 6))
    return mm.fetch(mm.jit(lambda k: (draw(k), k))(key))


def moved_results():
    """A result that is wanted on a submesh of the other process, and one that is an argument handed through."""
    front = mm.task(lambda x: x + 1, "front", devices=[0])
    there = NamedSharding(mesh(5, 6), P("x"))
    step = mm.jit(lambda x: (front(x), x), out_shardings=(there, None))
    y, x = step(jnp.arange(4.0))
    return y.sharding == there, mm.fetch((y, x))


def called_otherwise(donate):
    """Arguments that lie where a step reads them, but on meshes of other names, and are results too: where these lie, and they."""
    front = mm.task(lambda w, k, x: x @ w + jax.random.normal(k), "front", mesh=mesh(0, 1))
    back = mm.task(lambda w, x: x @ w, "back", mesh=mesh(5, 6))
    here, there = (NamedSharding(Mesh([jax.devices()[i] for i in of], ("other",)), P()) for of in ((0, 1), (5, 6)))
    w, v, x = np.eye(4, dtype="f4"), 2 * np.eye(4, dtype="f4"), np.ones((2, 4), "f4")
    key = mm.jit(lambda: jax.random.key(3), out_shardings=here)()
    step = mm.jit(lambda w, k, v, x: (back(v, front(w, k, x)), w, k, v), donate_argnums=(0, 1, 2) if donate else ())
    y, *given = step(put(w, here), key, put(v, there), x)
    said = [str(g.sharding) for g in given]
    again, *given = step(*given, x)
    first = mm.task(lambda w, x: x @ w, "first", mesh=mesh(0, 1))

    def until(w, v, x):
        return jax.lax.while_loop(lambda x: x.sum() < 99, lambda x: back(v, first(w, x)), x)

    loop = mm.jit(until)  # the host runs it
    tokens = loop(given[0], given[2], loop(given[0], given[2], x))
    return [*said, str(tokens.sharding)], mm.fetch((y, again, *given[::2], tokens))


def host_loops():
    """Decoding until a token comes, over submeshes of two processes: what comes out, and what it should be."""
    front = mm.task(lambda w, t, cache, i: (jnp.tanh(w[t] + cache[i]), cache.at[i].set(w[t])), "front", mesh=mesh(0, 1))
    back = mm.task(lambda w, h: jnp.argmax(h @ w, -1).astype(jnp.int32), "back", mesh=mesh(5, 6))

    table, seed = np.linspace(0, 0.1, WIDTH, dtype=np.float32), jax.random.key(5)

    def decode(params, start, last):
        def body(c):
            i, tokens, cache, key = c
            h, cache = front(params["front"], tokens[i], cache, i)
            key, now = jax.random.split(key)
            h = h + 0.1 * jax.random.normal(now, h.shape) + table * jax.random.uniform(jax.random.fold_in(seed, i))
            return i + 1, tokens.at[i + 1].set(back(params["back"], h)), cache, key

        tokens = jnp.zeros(9, jnp.int32).at[0].set(start)
        first = (0, tokens, jnp.zeros((9, WIDTH)), jax.random.key(0))
        i, tokens, cache, _ = jax.lax.while_loop(lambda c: (c[0] < 8) & (c[1][c[0]] != last), body, first)
        return params, {"tokens": tokens, "count": i, "cache": cache, "norm": jnp.sum(params["front"] ** 2)}

    rng = np.random.default_rng(0)
    params = {"front": rng.normal(size=(5, WIDTH)), "back": rng.normal(size=(WIDTH, 5))}
    params = {k: v.astype(np.float32) for k, v in params.items()}
    step = mm.jit(decode)
    results, placed = [], params
    for last in range(5):  # the host's parameters, then those that came back
        placed, found = step(placed, 1, last)
        numbers = {k: np.asarray(found[k]) for k in ("count", "norm")}  # which every process can read
        results.append({**mm.fetch(found), **numbers})
    with mm.ignore_transforms():
        expected = [jax.tree.map(np.asarray, step(params, 1, last)[1]) for last in range(5)]
    return results, expected, repr(step)


def disagreement(case):
    """The words of the error where the processes differ."""
    me = jax.process_index()
    front = mm.task(lambda x: x * 2, "front", devices=[0])
    x, device = jnp.ones(4), jax.local_devices()[0]
    if case == "program":
        fun = (lambda x: front(x) + 1.5) if me == 0 else (lambda x: front(x) + 2.5)
    else:
        fun = lambda x: front(x)  # noqa: E731
        x = jax.device_put(x, device) if case == "committed" else jnp.ones(4 + me)
    if case == "values":
        x = {"same": np.ones(4), "key": jax.random.key(3), "batch": np.full(1 << 19, me, np.float32)}
        fun = lambda x: front(x["batch"]) + x["same"][0]  # noqa: E731
    if case == "numbers":
        x = (0.02 if me else 0.01, np.ones(4, np.float32))
        fun = lambda x: front(x[1]) * x[0]  # noqa: E731
    if case == "more":
        fun = lambda x: front(x["b"])  # noqa: E731
        x = {"b": jnp.ones(4)} | ({"a": jnp.ones(4)} if me else {})
    if case == "place" and me == 0:
        x = jax.device_put(jnp.ones(7), device)
    if case == "later":
        fun = lambda x: front(x["b"]) + x["a"][0]  # noqa: E731
        x = {"a": jnp.ones(4), "b": jax.device_put(jnp.ones(4), device)}
    settings, options = contextlib.nullcontext(), {}
    if case in ("task", "precision", "nans", "donated"):
        inner = mm.task(lambda w: jnp.tanh(w @ w) * (2.5 if me and case == "task" else 1.5), "inner", devices=[0])
        fun, x = (lambda w: w - jax.grad(lambda w: inner(w).sum())(w)), jnp.eye(4)
        options = {"donate_argnums": () if me and case == "donated" else 0}
        if me and case in ("precision", "nans"):
            settings = jax.default_matmul_precision("highest") if case == "precision" else jax.debug_nans(True)
    step = mm.fetch if case == "place" and me == 0 else mm.jit(fun, **options)
    if case == "later":  # than the call that compiles
        step({"a": np.ones(4, np.float32), "b": np.ones(4, np.float32)})
    try:
        with settings:
            step(x)
    except mm.errors.ProcessError as error:
        return str(error)
    return None


def recorded():
    """Which submeshes have spans in a recording of each process, and which it says are elsewhere."""
    front, back = (mm.task(lambda x: x + 1, name, devices=[d]) for name, d in (("front", 0), ("back", 4)))
    step = mm.jit(lambda x: back(front(x)))
    step(jnp.ones(4))
    with mm.inspect.record() as run:
        step(jnp.ones(4))
    return sorted({s.submesh for s in run.spans}), run.elsewhere, str(run.timeline())


def timed():
    """What a compiled step says to who wants to time it."""
    front, back = (mm.task(lambda x: x + 1, name, devices=[d]) for name, d in (("front", 0), ("back", 4)))
    run = mm.microbatch(lambda x: back(front(x)), num_microbatches=2, reduce="concat")
    step = mm.jit(lambda x: run(x)).lower(jnp.ones(4)).compile()
    words = []
    for call in (step.measure, step.durations):
        with pytest.raises(mm.errors.ProcessError) as refused:
            call(jnp.ones(4))
        words.append(str(refused.value))
    return words


def measured_machine():
    """Which rates of this process's machine are positive."""
    return [name for name, rate in mm.inspect.Hardware.measure(size=64).peak_flops.items() if rate > 0]


def left_behind():
    """How many objects a call of a step leaves behind, of whose results the other process has a number and a random key."""
    front, back = (mm.task(lambda x: x + 1, name, devices=[d]) for name, d in (("front", 0), ("back", 4)))
    draws = [mm.task(lambda key: jax.random.fold_in(key, 1), f"draw{d}", devices=[d]) for d in (0, 4)]
    step = mm.jit(lambda keys, x: ([draw(key) for draw, key in zip(draws, keys, strict=True)], jnp.sum(back(front(x)))))
    keys, calls, counts = [jax.random.key(0), jax.random.key(1)], 20, []
    for _ in range(3):
        for _ in range(calls):
            keys, total = step(keys, jnp.ones(4))
        float(total)
        gc.collect()
        counts.append(len(gc.get_objects()))
    return (counts[2] - counts[1]) / calls


def moved_again():
    """How to place weights that lie on devices of all processes, as a warning says it, and what is warned of if one does."""
    front, back = (mm.task(lambda w, x: x @ w, name, devices=[d]) for name, d in (("front", 0), ("back", 4)))
    weight = jax.device_put(np.ones((512, 512), "f"), NamedSharding(mesh(*range(8)), P("x")))
    args, x, step = (
        (weight, weight + 1),
        np.ones((2, 512), "f"),
        mm.jit(lambda w, x: jnp.mean(back(w[1], front(w[0], x)))),
    )

    def told(step):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            for _ in range(3):
                step(args, x)
        return [str(w.message).partition("pass that: ")[2].partition(", with")[0] for w in found]

    (how,) = told(step)
    args = eval(how, {"jax": jax, "mm": mm, "args": [args], "compiled": step.prepare(args, x)})
    return how, told(mm.jit(step.fun))


def generated(number, shared=None):
    """A generated program under the laws, its values those of plain JAX; `shared` is a folder for these."""
    from generated.draw import drawn
    from generated.laws import check

    program = drawn(number, small=True)
    try:
        return check(program, shared).remarks
    except Exception as error:
        error.add_note(f"program {number}:\n{program.to_json()}")
        raise


def parts_of_a_batch():
    """Losses of `parallelize_step`, where each process loads its part of the batch."""
    import flax.linen as nn

    from manymesh.flax import parallelize_step, task

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x, y):
            h = nn.relu(task(nn.Dense, "front", mesh=mesh(0, 1))(16)(x))
            return jnp.mean((task(nn.Dense, "back", mesh=mesh(4, 5))(1)(h) - y) ** 2)

    rng = np.random.default_rng(0)
    whole = rng.normal(size=(8, 4)).astype("f4"), rng.normal(size=(8, 1)).astype("f4")
    count, me = jax.process_count(), jax.process_index()
    local = jax.tree.map(lambda x: np.split(x, count)[me], whole)
    step, state, _, prepare = parallelize_step(
        Model(), optax.adam(1e-2), mesh(0, 1, 4, 5), local_batch=local, num_microbatches=2
    )
    shorter = jax.tree.map(lambda x: np.split(x[:4], count)[me], whole)
    losses = []
    for part in (local, local, shorter, local):
        if count > 1:
            with pytest.raises(mm.errors.ArgumentError, match=r"step\(state, prepare_batch\(batch\)\)"):
                step(state, part)
        loss, state = step(state, prepare(part))
        losses.append(float(loss))
    return losses, int(state.step)


def parts_by_hand():
    """Losses of a step of the user's own on a batch of which each process loads a part, joined as the docs say."""
    page = Path(__file__).resolve().parents[2] / "docs" / "processes.md"
    code = re.search(r"^def joined.*?(?=\n\n\n)", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    names = {"jax": jax, "NamedSharding": NamedSharding, "PartitionSpec": P}
    exec(code[0], names)
    front = mm.task(lambda w, x: jnp.tanh(x @ w), "front", mesh=mesh(0, 1))
    back = mm.task(lambda w, h, y: jnp.mean((h @ w - y) ** 2), "back", mesh=mesh(4, 5))
    grad = jax.value_and_grad(lambda p, x, y: back(p["back"], front(p["front"], x), y))
    pieces = mm.microbatch(grad, argnum=(1, 2), num_microbatches=2, reduce="mean")

    @mm.jit
    def step(p, x, y):
        loss, grads = pieces(p, x, y)
        return loss, jax.tree.map(lambda w, g: w - 0.1 * g, p, grads)

    rng = np.random.default_rng(0)
    p = {k: rng.normal(size=(4, 4)).astype("f4") for k in ("front", "back")}
    losses = []
    for _ in range(3):
        whole = rng.normal(size=(8, 4)).astype("f4"), rng.normal(size=(8, 4)).astype("f4")
        local = jax.tree.map(lambda x: np.split(x, jax.process_count())[jax.process_index()], whole)
        loss, p = step(p, *jax.tree.map(names["joined"], local))
        losses.append(float(loss))
    return losses, repr(step)


def sent_and_donated(rounds):
    """A large result that goes to the other process and is donated to the next call at once; what arrives."""
    grow = mm.task(lambda x: x + 1, "grow", devices=[0])
    look = mm.task(lambda x: jnp.stack([x.min(), x.max()]), "look", devices=[4])

    def step(x):
        x = grow(x)
        return x, look(x)

    step, x, seen = mm.jit(step, donate_argnums=0), jnp.zeros(1 << 20), []
    for _ in range(rounds):
        x, found = step(x)
        seen.append(found)
    return [mm.fetch(s).tolist() for s in seen]


def sent_and_donated_beside(rounds):
    """The same of a result that is handed out from a submesh of some of the devices that it is sent from: one buffer."""
    grow = mm.task(lambda x: x + 1, "grow", mesh=mesh(0, 1))
    look = mm.task(lambda x: jnp.stack([x.min(), x.max()]), "look", devices=[4])

    def step(x):
        x = grow(x)
        return x, look(x)

    near = NamedSharding(mesh(0), P())
    step, x, seen = mm.jit(step, donate_argnums=0, out_shardings=(near, None)), jnp.zeros(1 << 20), []
    for _ in range(rounds):
        x, found = step(x)
        seen.append(found)
    return [mm.fetch(s).tolist() for s in seen]


def readme():
    """The README's example; its last losses, with and without its tasks."""
    from pathlib import Path

    text = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
    scope = {"__name__": "readme"}
    exec(text.split("```python\n")[1].split("```")[0], scope)
    return scope["losses"][-1], float(scope["loss"]), int(scope["state"].step)


def compared_by_one_process():
    """Losses of a step in all processes; in one of them alone, those of the reference mode from the same values."""
    tasks = [mm.task(lambda w, x: jnp.tanh(x @ w), f"stage{i}", mesh=mesh(d)) for i, d in enumerate((0, 4))]

    def step(params, x):
        def loss(params):
            y = x
            for w, task in zip(params, tasks, strict=True):
                y = task(w, y)
            return jnp.mean(y**2)

        value, grads = jax.value_and_grad(loss)(params)
        return value, jax.tree.map(lambda w, g: w - 0.1 * g, params, grads)

    def train(params):
        losses = []
        for _ in range(3):
            loss, params = run(params, np.ones((4, WIDTH), "f4"))
            losses.append(float(loss))
        return losses

    run = mm.jit(step)
    params = mm.fetch([jnp.full((WIDTH, WIDTH), 0.1), jnp.full((WIDTH, WIDTH), 0.2)])
    losses = train(params)
    if jax.process_index():
        return losses, None
    with mm.ignore_transforms():
        return losses, train(params)


def counted_programs():
    """How many programs a step without tasks has after three calls; whether the changes of layout of a call are of values here."""
    plain = mm.jit(lambda state: {"count": state["count"] + 1, "w": state["w"] * 2})
    state = {"count": 0.0, "w": np.ones((4, 4), "f4")}
    for _ in range(3):
        state = plain(state)
    task = mm.task(lambda x: mm.with_sharding_constraint(x, P(None, "x")) * 2, "second", mesh=mesh(4, 5))
    moved = mm.jit(lambda x: task(x))
    x = put(np.ones((4, 4), "f4"), NamedSharding(mesh(0, 1), P("x")))
    moved(x)
    (program,) = moved._compiled.values()
    sources = [key[2] for key in program._executor._relayouts._compiled]
    return repr(plain), float(state["count"]), [jax.process_index() in processes_of(s) for s in sources]


def closing_over_results():
    """What a step says that closes over an array of the other process, and what one gives that closes over a scalar result."""
    front, back = (mm.task(lambda w, x: jnp.tanh(x @ w), name, mesh=mesh(d)) for name, d in (("front", 0), ("back", 4)))
    train = mm.jit(lambda ws, x: ([w + 1 for w in ws], jnp.mean(back(ws[1], front(ws[0], x)))))
    x, w = np.ones((4, WIDTH), "f4"), np.eye(WIDTH, dtype="f4")
    ws, loss = train([w, w], x)

    def evaluate(x):
        return back(ws[1], front(ws[0], x))

    in_a_loop = jax.jit(lambda x: x @ (ws[0] + ws[1]))
    steps = evaluate, lambda x: jax.lax.scan(lambda x, _: (in_a_loop(x), None), back(w, x), length=2)[0]
    words = []
    for step in steps:
        with pytest.raises(mm.errors.ProcessError) as error:
            mm.jit(step)(x)
        words.append(str(error.value))
    scaled = mm.jit(lambda x: back(w, front(w, x)) * loss)
    return words, mm.fetch(scaled(x)), np.tanh(np.tanh(x)) * float(loss)


def states_on_the_host():
    """Memories of a state that comes in that of the host, on submeshes of both processes; its values, and those expected."""
    meshes = [mesh(0, 1), mesh(4, 5), mesh(2, 6)]
    tasks = [mm.task(lambda w, x: jnp.tanh(x @ w), f"stage{i}", mesh=m) for i, m in enumerate(meshes)]

    def step(ws, moments, x):
        def loss(ws, x):
            for w, task in zip(ws, tasks, strict=True):
                x = task(w, x)
            return jnp.mean(x**2)

        grad = mm.microbatch(jax.grad(loss), argnum=1, num_microbatches=2, schedule="1f1b", reduce="mean")
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, grad(ws, x))
        return jax.tree.map(lambda w, m: w - 0.1 * m, ws, moments), moments

    rng = np.random.default_rng(0)
    ws = [rng.normal(size=(WIDTH, WIDTH)).astype("f4") for _ in tasks]
    zeros, x = np.zeros((WIDTH, WIDTH), "f4"), rng.normal(size=(8, WIDTH)).astype("f4")
    host = [NamedSharding(m, P("x"), memory_kind="pinned_host") for m in meshes]
    run = mm.jit(step, donate_argnums=(0, 1))
    state = run(ws, [zeros] * 3, x)
    moments = mm.jit(lambda m: m, out_shardings=host)(state[1])
    kinds = []
    state = (state[0], moments)
    for _ in range(2):
        state = run(*state, x)
        kinds.append(sorted({m.sharding.memory_kind for m in state[1]}))
    with mm.ignore_transforms():
        expected = (ws, [zeros] * 3)
        for _ in range(3):
            expected = jax.jit(step)(*expected, x)
    # A state of one process alone: the others have to know, too, that this is another program.
    alone = mm.jit(lambda w: tasks[0](w, w))
    w = alone(alone(ws[0]))
    alone(mm.jit(lambda w: w, out_shardings=host[0])(w))
    return kinds, mm.fetch(state), jax.tree.map(np.asarray, expected)


def handed_on():
    """What each of two steps hands on of one state: where it is before and after, and what was moved to where it is wanted."""
    parts = {"a": mesh(0, 1), "b": mesh(4, 5), "both": mesh(2, 3, 6, 7)}
    task = {name: mm.task(lambda w, x: jnp.tanh(x @ w), name, mesh=m) for name, m in parts.items()}

    def step_of(name):
        def step(state, x):
            grad = jax.grad(lambda w: jnp.mean(task[name](w, x) ** 2))(state[name])
            return {**state, name: state[name] - 0.1 * grad}

        return mm.jit(step, donate_argnums=0 if name == "a" else None)

    steps = {name: step_of(name) for name in parts}
    state = {name: put(np.eye(4, dtype="f4"), NamedSharding(m, P("x"))) for name, m in parts.items()}
    state["key"] = put(jax.random.key(3), NamedSharding(parts["b"], P()))
    for name in parts:  # each puts its own part where it reads it
        state = steps[name](state, np.ones((4, 4), "f4"))
    before = {name: x.sharding for name, x in state.items()}
    arrivals = [c._executor._arrivals for step in steps.values() for c in step._compiled.values()]
    known = [len(each.crossings) for each in arrivals]
    for _ in range(2):
        for name in parts:
            state = steps[name](state, np.ones((4, 4), "f4"))
    moved = [len(each.crossings) for each in arrivals] != known or len(arrivals) != len(parts)
    return {name: x.sharding == before[name] for name, x in state.items()}, moved, mm.fetch(state)
