"""What stacked layers are made of is cut into blocks, each on the submesh that uses it."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import manymesh as mm
from flat import lines, placed, program, run, text
from manymesh._program._flat import Pins
from manymesh._program._stacked import Stacked
from stages import assert_agrees

MESHES = [Mesh(np.array(jax.devices()[i : i + 1]), ("m",)) for i in (0, 1)]
TASKS = {name: mm.Task(name, mesh=mesh) for name, mesh in zip(("one", "two"), MESHES, strict=True)}
LAYERS = """
    inputs: w f32[2,4], m f32[2,4], x f32[4]
    a = one: x + w0
    b = two: a + w1
    n = {n}
    v = w - n
    results: v, n, b
"""


def layers(source, **given):
    """A program of two layers: `w0` and `w1` are the slices of `w`."""
    return program(source.replace("a = one", "w0 = w[0]\n    w1 = w[1]\n    a = one"), tasks=TASKS, **given)


def test_arithmetic_is_done_on_each_submesh():
    """Inputs that it ties to the layers are in blocks as well, and so are the results."""
    after = run("spread_stacks", layers(LAYERS.format(n="m * 0.9")))
    assert lines(after) == text("""
        inputs: a f32[1,4], b f32[1,4], c f32[1,4], d f32[1,4], e f32[4]
        f f32[1,4] = slice(a) start_indices=(0, 0) limit_indices=(1, 4) [on {'m': 1}]
        g f32[4] = squeeze(f) dimensions=(0,)
        h f32[1,4] = slice(b) start_indices=(0, 0) limit_indices=(1, 4) [on {'m': 1}]
        i f32[4] = squeeze(h) dimensions=(0,)
        j f32[4] = task one(e, g)
        k f32[4] = task two(j, i)
        l f32[1,4] = mul(c, 0.8999999761581421) [on {'m': 1}]
        m f32[1,4] = mul(d, 0.8999999761581421) [on {'m': 1}]
        n f32[1,4] = sub(a, l) [on {'m': 1}]
        o f32[1,4] = sub(b, m) [on {'m': 1}]
        results: n, o, l, m, k
    """)
    assert after.stacked_inputs == after.stacked_outputs == (Stacked(0, tuple(MESHES), 0), Stacked(2, tuple(MESHES), 0))
    assert [at for name, at in placed(run("place", after)) if name in ("mul", "sub")] == [0, 1, 0, 1]
    assert not after.findings


TOGETHER = """
    inputs: x f32[512], y f32[512]
    a = one: lax.sin(x)
    b = two: lax.sin(y)
    s = jnp.stack([{order}])
    t = lax.mul(s, s)
    u = t[0:1]
    v = t[1:2]
    results: u, v{more}
"""


def test_what_is_put_together_and_taken_apart_again_stays_apart():
    """An optimizer that works on all matrices of a shape at once."""
    after = run("spread_stacks", program(TOGETHER.format(order="a, b", more=""), tasks=TASKS))
    assert "f32[2,512]" not in lines(after) and lines(after).count("f32[1,512] = mul") == 2
    assert [at for name, at in placed(run("place", after)) if name == "mul"] == [0, 1]
    assert not after.findings


def test_a_stack_that_is_read_whole_or_stays_one_is_left():
    """A result of the step; a sum over the layers without anything that takes them apart."""
    for more in ("results: t", "w = jnp.sum(t * jnp.float32(2))\n    results: w"):
        source = TOGETHER.format(order="a, b", more="").split("u = t")[0] + more
        flat = program(source, tasks=TASKS)
        assert run("spread_stacks", flat) is flat


def test_a_stack_of_scattered_layers_is_told():
    """Not as many of each submesh side by side: with its line, and what to do."""
    (finding,) = run("spread_stacks", program(TOGETHER.format(order="a, b, a", more=""), tasks=TASKS)).findings
    assert "a stack float32[3,512] is put together" in finding.text and "of layers of 2 submeshes" in finding.text
    assert "2048 bytes come from the others" in finding.text and "next to each other" in finding.text


VIEWS = """
    inputs: x f32[512], y f32[512]
    a = one: lax.sin(x)
    b = one: lax.sin(y)
    s = jnp.stack([a, b])
    u = s[1:2]
    v = two: lax.sin(u)
    results: v, s
"""


def test_what_is_put_together_on_one_submesh_is_no_stack_of_layers():
    """Two views of a batch, say, of which a task elsewhere reads some rows."""
    assert not run("spread_stacks", program(VIEWS, tasks=TASKS)).findings


def test_sums_over_layers_are_combined():
    """A part on each submesh, and one addition."""
    after = run("spread_stacks", layers(LAYERS.format(n="m * jnp.sum(w * w)")))
    assert lines(after).count("= reduce_sum(") == 2 and lines(after).count("= add(") == 1
    assert lines(after).count("= concatenate(") == 0


def test_what_mixes_layers_reads_the_whole():
    """It is put together, which a finding says if it is worth a word; the next value stays where it is."""
    wide = LAYERS.replace("[2,4]", "[2,512]").replace("f32[4]", "f32[512]")
    after = run("spread_stacks", layers(wide.format(n="m * lax.cumsum(w, axis=0)")))
    assert lines(after).count("= concatenate(") == 1 and lines(after).count("= cumsum(") == 1
    assert len(after.stacked_outputs) == 2
    (finding,) = after.findings
    assert "'cumsum' reads the whole: 2048 bytes come together on one submesh in every step" in finding.text
    assert not run("spread_stacks", layers(LAYERS.format(n="m * lax.cumsum(w, axis=0)"))).findings


def test_layers_that_do_not_divide():
    """Two of three layers on the first submesh: nothing changes, and a finding says what that costs."""
    source = LAYERS.format(n="m * 0.9").replace("[2,4]", "[3,4]").replace("b = two: a + w1", "b = two: one_more(a)")
    source = source.replace("    b = two: one_more(a)", "    w2 = w[2]\n    c = one: a + w1\n    b = two: c + w2")
    wide = source.replace("[3,4]", "[3,512]").replace("f32[4]", "f32[512]")
    after = run("spread_stacks", layers(wide))
    assert not after.stacked_inputs and len(after.nodes) == len(layers(wide).nodes)
    (finding,) = after.findings
    assert finding.text.startswith("the 3 layers of an argument are not used in equal blocks by 2 submeshes")
    assert "2048 bytes go out to the others in every step" in finding.text
    assert not run("spread_stacks", layers(source)).findings  # 16 bytes are not worth a word


def test_what_is_wanted_on_one_submesh_stays_whole():
    """An input or a result; a sharding that is that of the blocks is none of them."""
    flat = layers(LAYERS.format(n="m * 0.9"))
    w, m, _ = flat.invars
    mesh = Mesh(np.array([d for x in MESHES for d in x.devices]), ("stage",))
    for spec, blocks in ((P("stage"), 2), (P(), 1)):
        pins = Pins({m: mesh}, input_shardings={m: NamedSharding(mesh, spec)})
        assert len(run("spread_stacks", replace(flat, pins=pins)).stacked_inputs) == blocks
    after = run("spread_stacks", replace(flat, pins=Pins(outputs={0: MESHES[1]}, states=((w, 0), (flat.invars[2], 2)))))
    assert after.stacked_outputs == (Stacked(1, tuple(MESHES), 0),)
    assert after.pins.outputs == {0: MESHES[1], 1: MESHES[0], 2: MESHES[1]}
    assert after.pins.states == ((after.invars[4], 3),)


def test_conditionals_between_blocks_are_opened():
    """Each branch is then computed in blocks."""
    source = LAYERS.format(n="lax.cond(x[0] > 0, lambda p: p * 0.9, lambda p: p, m)")
    after = run("spread_stacks", layers(source))
    assert lines(after).count("cond(") == 0 and lines(after).count("= select_n(") == 2
    assert len(after.stacked_inputs) == 2


LOOP = """
    inputs: w f32[2,4], x f32[4], y f32[4]
    loop 0: 2 microbatches, gpipe
    xs b f32[4] = x, y
    carry z f32[2,4] = zero, then t, at last total
    zero = w * 0.0
    w0 = w[0]
    w1 = w[1]
    0: p = one: b + w0
    0: q = two: p + w1
    0: s = jnp.stack([p, q])
    0: t = lax.max(z, s)
    results: total
"""


def test_carries_of_a_loop():
    """One for each block, from its start to its end."""
    after = run("spread_stacks", program(LOOP, tasks=TASKS, stacked={"s": "pq"}))
    assert [c.inner.aval.shape for c in after.loops[0].carries] == [(1, 4), (1, 4)]
    assert len(after.stacked_inputs) == len(after.stacked_outputs) == 1
    assert [at for name, at in placed(run("place", after)) if name == "max"] == [0, 1]


def test_the_gates_of_experts_are_no_layers():
    """A router outside of tasks, whose columns the experts' submeshes read: it stays whole, and the experts are a pipeline."""
    count, width = 4, 8
    tasks = [mm.task(lambda w, x, g: g[:, None] * jnp.tanh(x @ w), f"expert_{i}", devices=[i]) for i in range(count)]

    def loss(p, x):
        gates = jax.nn.softmax(x @ p["router"])
        top, which = jax.lax.top_k(gates, 2)
        weights = (jax.nn.one_hot(which, count) * top[..., None]).sum(1)
        y = x
        for i, task in enumerate(tasks):
            y = y + task(p["experts"][i], x, weights[:, i])
        return jnp.mean(y**2) + jnp.sum(gates.mean(0) * weights.mean(0))

    rng = np.random.default_rng(0)
    p = {
        "router": jnp.asarray(rng.normal(size=(width, count)), jnp.float32),
        "experts": [jnp.asarray(rng.normal(size=(width, width)), jnp.float32) for _ in tasks],
    }
    step = mm.microbatch(jax.value_and_grad(loss), argnum=1, num_microbatches=4, reduce="mean")
    args = p, jnp.asarray(rng.normal(size=(16, width)), jnp.float32)
    program = mm.jit(step).lower(*args).program
    assert not program.stacked_inputs and program.loops[0].in_order
    assert len(program.loops[0].placement) == count
    assert_agrees(step, *args)
