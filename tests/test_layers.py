"""Stacked layers: the iterations of a scan split over submeshes."""

import contextlib
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import manymesh as mm
from stages import assert_agrees, assert_same, dense, microbatched, reference

pytestmark = pytest.mark.once

WIDTH, ROWS = 32, 8  # a weight is 4096 bytes: too large to be computed or sent twice without being seen
WEIGHT, ACTIVATION = 4 * WIDTH * WIDTH, 4 * ROWS * WIDTH


def meshes(count, size=1):
    devices = np.array(jax.devices()[: count * size]).reshape(count, size)
    return [Mesh(row, ("m",)) for row in devices]


def model(where, length, **options):
    """The mean square of ``length`` dense layers, one scan; their weights are stacked."""
    layer = mm.task(dense, "layer", mesh=where)

    def f(ws, x):
        h, _ = jax.lax.scan(lambda h, w: (layer(w, h), None), x, ws, length=length, **options)
        return jnp.mean(h**2)

    return f


def stacked(length, seed=0):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=(length, WIDTH, WIDTH)) / np.sqrt(WIDTH), jnp.float32)


def batch(rows=ROWS):
    return jnp.asarray(np.random.default_rng(9).normal(size=(rows, WIDTH)), jnp.float32)


def warned(divides):
    """Layers that the submeshes do not divide cost bytes in every step, which one warning says."""
    return contextlib.nullcontext() if divides else pytest.warns(UserWarning, match="not used in equal blocks")


@pytest.mark.parametrize(("length", "count"), [(6, 3), (7, 3), (5, 3), (2, 3), (3, 1)])
def test_layers_split_over_submeshes(length, count):
    """In order, as evenly as it goes, also when the number of submeshes does not divide that of layers."""
    f = jax.value_and_grad(model(meshes(count), length))
    with warned(length % count == 0 or length < count):
        program = mm.jit(f).lower(stacked(length), batch()).program
    for kind, backwards in (("F", False), ("B", True)):
        held = [f.submesh for f in program.fragments if f.kind == kind and f.tasks]
        sizes = [len(part) for part in np.array_split(range(length), count) if len(part)]
        expected = [s for s, size in enumerate(sizes) for _ in range(size)]
        assert held == (expected[::-1] if backwards else expected)
    for step in (f, microbatched(f, num_microbatches=2)):
        with warned(length % count == 0 or length < count):
            assert_agrees(step, stacked(length), batch())


def test_a_reversed_scan_and_two_scans_in_one():
    """The layer's index decides, not the order of computation; nested scans count through."""
    with warned(False):
        assert_agrees(jax.value_and_grad(model(meshes(3), 7, reverse=True)), stacked(7), batch())
    layer = mm.task(dense, "layer", mesh=meshes(3))

    def f(ws, x):
        def group(h, ws_of_group):
            return jax.lax.scan(lambda h, w: (layer(w, h), None), h, ws_of_group)

        return jnp.mean(jax.lax.scan(group, x, ws)[0] ** 2)

    ws = stacked(6).reshape(3, 2, WIDTH, WIDTH)
    assert_agrees(jax.value_and_grad(f), ws, batch())
    program = mm.jit(f).lower(ws, batch()).program
    assert [f.submesh for f in program.fragments if f.tasks] == [0, 0, 1, 1, 2, 2]


def test_what_crosses_for_stacked_layers():
    """Activations, and nothing else, where the submeshes divide the layers; else weights go out and gradients come
    back once a call, whatever the number of microbatches."""
    for length, weights in ((6, 0), (5, 1)):
        f = model(meshes(3), length)
        for count in (2, 4):
            step = microbatched(jax.value_and_grad(lambda p, x: f(p["layers"], x)), num_microbatches=count)  # noqa: B023
            params = {"layers": stacked(length)}
            with warned(not weights):
                compiled = mm.jit(step).lower(params, batch()).compile()
            crossing = {(e.source, e.target): e.nbytes for e in compiled.report().edges}
            # Five layers lie on the first submesh: two on the second go out and come back, one on the third.
            expected = {(0, 1): ACTIVATION, (1, 0): ACTIVATION, (1, 2): ACTIVATION, (2, 1): ACTIVATION}
            if not weights:
                assert crossing == expected
            else:
                assert sum(crossing.values()) > sum(expected.values()) + 2 * WEIGHT
            assert_same(compiled(params, batch()), reference(step, params, batch()))


def test_equal_layers_share_executables():
    """However deep the model is; the first and the last layer of a submesh may differ from those between."""
    made = {}
    for length in (12, 24):
        f = microbatched(jax.value_and_grad(model(meshes(3), length)))
        report = mm.jit(f).lower(stacked(length), batch(16)).compile().report()
        layers = [f for f in report.fragments if f.name.startswith("layer")]
        assert len(layers) == 2 * length
        made[length] = len({f.executable for f in layers})
    assert made[12] == made[24]


# A scan around the scan over layers


def layers(ws, x):
    return model(meshes(2), 4)(ws, x)


def pieces(x):
    return x.reshape(2, -1, WIDTH)


def accumulated(ws, x):
    """Gradients added up over pieces of the batch."""
    return jax.lax.scan(lambda g, x: (g + jax.grad(layers)(ws, x), None), jnp.zeros_like(ws), pieces(x))[0]


def accumulated_by_number(ws, x):
    return jax.lax.fori_loop(0, 2, lambda i, g: g + jax.grad(layers)(ws, pieces(x)[i]), jnp.zeros_like(ws))


def trained(ws, x):
    """A step of training for each piece, each in two microbatches."""
    grads = mm.microbatch(jax.grad(layers), argnum=1, num_microbatches=2, reduce="mean")
    return jax.lax.scan(lambda ws, x: (ws - 0.1 * grads(ws, x), None), ws, pieces(x))[0]


def evaluated(ws, x):
    return jax.lax.map(lambda x: layers(ws, x), pieces(x))


def differentiated(ws, x):
    """One gradient of the scan over pieces, each checkpointed."""
    piece = jax.checkpoint(lambda ws, x: layers(ws, x))
    return jax.grad(lambda ws: jax.lax.scan(lambda s, x: (s + piece(ws, x), None), 0.0, pieces(x))[0])(ws)


def generated(ws, x):
    """Tokens one after the other, each through all layers, of which each has a cache."""
    layer = mm.task(lambda w, c, x: (dense(w, x + c[0]), c.at[1].set(x)), "layer", mesh=meshes(2))

    def token(carry, _):
        cache, x = carry
        x, cache = jax.lax.scan(lambda x, wc: layer(*wc, x), x, (ws, cache))
        return (cache, x), x

    return jax.lax.scan(token, (jnp.zeros((4, 2, *x.shape)), x), None, length=2)[1]


def masked(ws, x):
    """A mask and a time for each piece of the batch."""
    layer = mm.task(lambda w, m, t, x: dense(w, x * m) + t, "layer", mesh=meshes(2))

    def piece(_, xmt):
        x, m, t = xmt
        return None, jax.lax.scan(lambda x, w: (layer(w, m, t, x), None), x, ws)[0]

    return jax.lax.scan(piece, None, (pieces(x), pieces(1 + x), pieces(x)[:, :1]))[1]


def in_chunks(ws, x):
    """Each layer goes through the rows one part after the other."""
    layer = mm.task(dense, "layer", mesh=meshes(2))
    through = lambda x, w: (jax.lax.map(lambda part: layer(w, part), pieces(x)).reshape(x.shape), None)  # noqa: E731
    return jax.lax.scan(through, x, ws)[0]


def in_chunks_and_back(ws, x):
    return jax.grad(lambda ws: jnp.mean(in_chunks(ws, x) ** 2))(ws)


def in_rounds(ws, x):
    """Two rounds of two layers: of these each submesh has one half."""
    layer = mm.task(dense, "layer", mesh=meshes(2))
    one_round = lambda x, ws: (jax.lax.scan(lambda x, w: (layer(w, x), None), x, ws)[0], None)  # noqa: E731
    return jax.lax.scan(one_round, x, ws.reshape(2, 2, WIDTH, WIDTH))[0]


TWICE, EACH = [0, 0, 1, 1] * 2, [0, 0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("step", "submeshes"),
    [
        (accumulated, TWICE), (accumulated_by_number, None), (trained, TWICE), (evaluated, TWICE), (differentiated, None),
        (generated, TWICE), (masked, TWICE), (in_chunks, EACH), (in_chunks_and_back, EACH), (in_rounds, [0, 0, 1, 1]),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)  # fmt: skip
def test_the_scan_that_cuts_off_the_parameters_is_split(step, submeshes):
    """Each layer is on one submesh for every piece, step or token, and no weight crosses."""
    program = mm.jit(step).lower(stacked(4), batch(16)).program
    if submeshes is not None:
        runs = [f.submesh for f in program.fragments if f.tasks and "bwd" not in f.name]
        assert runs == submeshes
    crossing = Counter(e.var.aval.shape for e in program.edges)
    assert not any(shape[-2:] == (WIDTH, WIDTH) for shape in crossing), crossing
    assert_agrees(step, stacked(4), batch(16))


@pytest.mark.parametrize("step", [accumulated, evaluated, in_rounds])
def test_so_is_that_around_a_scope(step, monkeypatch):
    """The layers have names, and no task is called."""

    def named(fun, name, mesh):
        return jax.named_scope(name)(fun)

    with mm.register_task("layer", mesh=meshes(2)):
        monkeypatch.setattr(mm, "task", named)
        program = mm.jit(step).lower(stacked(4), batch(16)).program
    forward = [f.submesh for f in program.fragments if f.tasks and f.kind == "F"]
    assert forward[:4] == [0, 0, 1, 1], program.as_text()
    assert not any(e.var.aval.shape[-2:] == (WIDTH, WIDTH) for e in program.edges)


def test_layers_of_sharded_submeshes_in_remat():
    """Each submesh has devices of its own to shard over; the body is rematerialised."""
    layer = jax.checkpoint(mm.task(dense, "layer", mesh=meshes(3, 2)))

    def f(ws, x):
        return jnp.mean(jax.lax.scan(lambda h, w: (layer(w, h), None), x, ws)[0] ** 2)

    with warned(False):
        assert_agrees(microbatched(jax.value_and_grad(f)), stacked(7), batch())


def test_meshes_that_are_not_alike():
    """One body is traced for all of them."""
    devices = np.array(jax.devices())
    with pytest.raises(ValueError, match=r"'layer': .*alike.*\{'m': 2\}.*\{'m': 1\}"):
        mm.Task("layer", mesh=[Mesh(devices[:2], ("m",)), Mesh(devices[2:3], ("m",))])
    with pytest.raises(TypeError, match="mesh holds int 3"):
        mm.Task("layer", mesh=[Mesh(devices[:2], ("m",)), 3])
    with pytest.raises(ValueError, match="mesh is empty"):
        mm.Task("layer", mesh=[])


def test_several_meshes_without_a_scan():
    """There is no index to split by."""
    layer = mm.task(dense, "layer", mesh=meshes(2))
    with pytest.raises(ValueError, match=r"'layer' has 2 meshes .* lax.scan; give it one mesh"):
        mm.jit(layer)(stacked(1)[0], batch())


@pytest.mark.parametrize("loop", ["scan", "stacked", "fori", "interleaved", "interleaved remat"])
def test_a_scan_that_comes_back_to_a_submesh_is_a_pipeline(loop):
    """The backward pass of each iteration is of the stage of its forward pass, as in a Python loop."""
    one, two = meshes(2)
    first, second = (mm.task(dense, name, mesh=m) for name, m in (("first", one), ("second", two)))
    layer = mm.task(dense, "layer", mesh=[one, two, one, two])
    ws = stacked(4)

    def loss(ws, x):
        if "interleaved" in loop:
            once = lambda h, w: (layer(w, h), None)  # noqa: E731
            h, _ = jax.lax.scan(jax.checkpoint(once) if "remat" in loop else once, x, ws)
        elif loop == "scan":
            h, _ = jax.lax.scan(lambda h, _: (second(ws[1], first(ws[0], h)), None), x, None, length=2)
        elif loop == "stacked":
            h, _ = jax.lax.scan(lambda h, w: (second(w[1], first(w[0], h)), None), x, ws.reshape(2, 2, WIDTH, WIDTH))
        else:
            h = jax.lax.fori_loop(0, 2, lambda _, h: second(ws[1], first(ws[0], h)), x)
        return jnp.mean(h**2)

    def unrolled(ws, x):
        for w, task in zip(ws if loop == "stacked" else [ws[0], ws[1]] * 2, (first, second) * 2, strict=True):
            x = task(w, x)
        return jnp.mean(x**2)

    step = microbatched(jax.value_and_grad(loss), schedule="interleaved" if "interleaved" in loop else "1f1b")
    with warned(divides="interleaved" not in loop):
        compiled = mm.jit(step).lower(ws, batch(32)).compile()
    (plan,) = compiled.program.loops
    by_hand = microbatched(jax.value_and_grad(unrolled), schedule="1f1b")
    (wanted,) = mm.jit(by_hand).lower(ws, batch(32)).program.loops
    assert plan.in_order and wanted.in_order and plan.placement == wanted.placement == (0, 1, 0, 1)
    # Forward, and backward: with it, in one, what is computed again.
    assert Counter(f.stage for f in compiled.program.body(0) if f.tasks) == dict.fromkeys(range(4), 2)
    assert_same(compiled(ws, batch(32)), reference(mm.jit(step), ws, batch(32)))


@pytest.mark.parametrize("apart", [list, lambda ws: jnp.split(ws, 4)], ids=["unstacked", "split"])
def test_stacked_weights_in_a_python_loop(apart):
    """Each is taken where it is used, by whatever equation JAX takes an array apart; gradients come back after the loop."""
    first, second = (
        mm.task(lambda w, x: dense(w.reshape(WIDTH, WIDTH), x), name, mesh=m)
        for name, m in zip(("first", "second"), meshes(2), strict=True)
    )

    def loss(ws, x):
        for w, task in zip(apart(ws), (first, second) * 2, strict=True):
            x = task(w, x)
        return jnp.mean(x**2)

    ws, jitted = stacked(4), mm.jit(microbatched(jax.value_and_grad(loss), schedule="1f1b"))
    with warned(divides=False):
        compiled = jitted.lower(ws, batch(32)).compile()
    (plan,) = compiled.program.loops
    assert plan.in_order and plan.placement == (0, 1, 0, 1)
    assert not [e for e in compiled.program.edges if e.loop == 0 and e.nbytes == WEIGHT]
    assert_same(compiled(ws, batch(32)), reference(jitted, ws, batch(32)))


@pytest.mark.parametrize("loop", ["fori", "counted", "switched"])
def test_layers_by_the_number_of_an_iteration(loop):
    """Which layer an iteration reads, and which branch it takes, follows from its number; the layers stay where they are."""
    where = meshes(2)
    layer = mm.task(dense, "layer", mesh=where)
    first, second = (mm.task(dense, name, mesh=m) for name, m in zip(("first", "second"), where, strict=True))

    def loss(ws, x):
        if loop == "fori":
            x = jax.lax.fori_loop(0, 4, lambda k, x: layer(ws[k], x), x)
        elif loop == "counted":
            x, _ = jax.lax.scan(
                lambda x, k: (layer(ws.reshape(2, 2, WIDTH, WIDTH)[k // 2, k % 2], x), None), x, jnp.arange(4)
            )
        else:
            x, _ = jax.lax.scan(
                lambda x, k: (jax.lax.switch(k // 2, [first, second], ws[k], x), None), x, jnp.arange(4)
            )
        return jnp.mean(x**2)

    jitted = mm.jit(microbatched(jax.value_and_grad(loss), schedule="1f1b"))
    compiled = jitted.lower(stacked(4), batch(32)).compile()
    assert compiled.program.loops[0].placement == (0, 1)
    assert not [e for e in compiled.program.edges if e.nbytes >= WEIGHT]
    assert_same(compiled(stacked(4), batch(32)), reference(jitted, stacked(4), batch(32)))
