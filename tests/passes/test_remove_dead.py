"""What nobody reads goes, also out of tasks and loops."""

import jax
import jax.numpy as jnp

import manymesh as mm
from flat import lines, program, run, text
from stages import WIDTH, assert_same, parameters, reference, rows


def test_dead_equations_results_of_tasks_and_carries_go():
    """One after the other: the carry frees the task's result, and that an operand of the task."""
    flat = program("""
        tasks: front 0
        inputs: w f32[4,4], x f32[4,4], y f32[4,4]
        loop 0: 2 microbatches, gpipe
        xs b f32[2,4] = p, q
        xs d f32[2,4] = r, s
        carry a f32[2,4] = b0, then t, at last total
        carry c f32[2,4] = b0, then u, at last other
        b0 = x[0:2] * 0.0
        p = x[0:2]
        q = x[2:4]
        r = y[0:2]
        s = y[2:4]
        dead = lax.sin(x)
        0: h, g = front: (lax.tanh(b @ w), lax.exp(d))
        0: t = a + h
        0: u = c + g
        results: total
    """)
    after = run("remove_dead", flat)
    assert str(after) == text("""
        inputs: a f32[4,4], b f32[4,4], c f32[4,4]
        loop 0 step: 2 microbatches
          xs d f32[2,4] = e, f
          carry g f32[2,4] = h, then i, at last j
        k f32[2,4] = slice(b) start_indices=(0, 0) limit_indices=(2, 4)
        h f32[2,4] = mul(k, 0.0)
        e f32[2,4] = slice(b) start_indices=(0, 0) limit_indices=(2, 4)
        f f32[2,4] = slice(b) start_indices=(2, 0) limit_indices=(4, 4)
        0: l f32[2,4] = task front(d, a)
            inputs: a f32[2,4], b f32[4,4]
            c f32[2,4] = dot_general(a, b)
            d f32[2,4] = tanh(c)
            results: d
        0: i f32[2,4] = add(g, l)
        results: j
    """)
    assert run("remove_dead", after) is after


def test_collected_pieces_that_nobody_reads_go():
    """The loop then collects nothing, and the body is empty."""
    flat = program("""
        inputs: x f32[4]
        loop 0: 2 microbatches, gpipe
        xs b f32[2] = p, q
        ys c f32[2], d f32[2] = y
        p = x[0:2]
        q = x[2:4]
        0: y = b * 2.0
        e = lax.neg(x)
        results: e
    """)
    assert lines(run("remove_dead", flat)) == text("""
        inputs: a f32[4]
        loop 0 step: 2 microbatches
        b f32[4] = neg(a)
        results: b
    """)


def test_a_carry_that_only_another_carry_takes_over_stays():
    """A shift register: the second one leaves what the first one held."""
    flat = program("""
        inputs: x f32[]
        loop 0: 2 microbatches, gpipe
        carry a f32[] = x, then t, at last last
        carry b f32[] = x, then a, at last before
        0: t = a + 1.0
        results: before
    """)
    assert run("remove_dead", flat) is flat


def test_what_a_node_says_besides_stays():
    """Trimming a task keeps its phase and its loop."""
    flat = program("""
        tasks: front 0
        inputs: x f32[4]
        loop 0: 2 microbatches, gpipe
        carry a f32[4] = x, then t, at last total
        0: h, g = front_wgt: (lax.tanh(a), lax.exp(a))
        0: t = a + h
        results: total
    """)
    assert "0: e f32[4] = task front_wgt(b)" in lines(run("remove_dead", flat))


def test_what_a_task_returns_twice_has_one_name():
    """As its result, and as what the policy of a checkpoint saves: it crosses once."""
    flat = program("""
        tasks: front 0, back 1
        inputs: x f32[2,4]
        g, h = front: (lambda y: (y, y))(lax.tanh(x))
        i = back: g * 2.0
        j = back_bwd: i + h
        results: j
    """)
    after = run("remove_dead", flat)
    front, back, backward = (n for n in after.nodes if n.task)
    assert front.outputs == back.inputs and set(backward.inputs) == {*front.outputs, *back.outputs}


def test_a_task_is_not_given_what_it_does_not_read():
    """Each of two tasks is handed all parameters, as with methods of a model: only the activation crosses."""
    enc = mm.task(lambda p, x: jnp.tanh(x @ p["front"]), "enc", devices=[0])
    dec = mm.task(lambda p, h: jax.jit(lambda p, h: h @ p["back"])(p, h), "dec", devices=[1])
    predict = mm.jit(lambda p, x: dec(p, enc(p, x)))
    p, x = parameters(), rows()
    compiled = predict.lower(p, x).compile()
    assert [(e.source, e.target, e.var.aval.shape) for e in compiled.program.edges] == [(0, 1, (8, WIDTH))]
    homes = compiled.input_shardings[0][0]
    assert [[d.id for d in homes[k].device_set] for k in ("front", "back")] == [[0], [1]]
    assert_same(predict(p, x), reference(predict, p, x))
