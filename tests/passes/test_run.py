"""The list of passes, and the loop that runs them."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import manymesh as mm
from flat import program
from manymesh._passes import _build
from manymesh._passes._run import ALL, PASSES, PROVIDERS, Fact, Pass, run_passes
from manymesh._program._check import check
from stages import front, loss, parameters, rows

pytestmark = pytest.mark.once

TESTS = Path(__file__).parents[1]
SOURCE = """
    tasks: one 0, two 1
    inputs: x f32[4]
    a = one: x + 1.0
    b = two: a + 1.0
    results: b
"""


@pytest.mark.parametrize("name", [p.name for p in (*PASSES, *PROVIDERS.values())])
def test_every_pass_has_a_test_file(name):
    """`tests/switch_off.py` looks for it."""
    assert (TESTS / "passes" / f"test_{name}.py").exists()


@pytest.mark.quick
def test_every_pass_is_missed():
    """Switched off, a test of its own file fails: by value, by text or by count."""
    done = subprocess.run(
        [sys.executable, str(TESTS / "switch_off.py"), "--quick"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.count(" fail: [") == len(PASSES) + len(PROVIDERS)


def test_a_stale_fact_is_made_to_hold_before_it_is_needed():
    """Dead code first, then placement; and only where something changed."""
    ran = []
    drop = Pass("drop", lambda flat: _drop(flat), makes_stale=ALL)
    same = Pass("same", lambda flat: flat, needs=ALL, makes_stale=ALL)
    after = run_passes(program(SOURCE), [same, drop, same, same], between=lambda name, flat: ran.append(name))
    assert ran == ["remove_dead", "place", "same", "drop", "remove_dead", "place", "same", "same"]
    assert after.placement is not None


def _drop(flat):
    return replace(flat, placement=None)


def test_a_pass_that_repeats_runs_until_nothing_changes():
    """With its facts anew each time."""
    ran = []
    todo = iter([True, True, False])
    again = Pass("again", lambda flat: _drop(flat) if next(todo) else flat, frozenset({Fact.NO_DEAD_CODE}), ALL, True)
    run_passes(program(SOURCE), [again], then=frozenset(), between=lambda name, flat: ran.append(name))
    assert ran == ["remove_dead", "again", "remove_dead", "again", "remove_dead", "again"]


def test_between_all_passes_of_a_step_every_rule_holds():
    """A training step with everything that passes look for; and the program that comes out is the one of `mm.jit`."""

    def step(p, x):
        _, grads = mm.microbatch(
            jax.value_and_grad(loss), argnum=1, num_microbatches=2, reduce="mean", schedule="zero-bubble-h1"
        )(p, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, p, grads)

    traced = mm.jit(step).trace(parameters(), rows())
    seen = []

    def between(name, flat):
        check(flat)
        seen.append(name)

    built = _build.build(traced.jaxpr, traced._record, {}, {}, ((0, 0), (1, 1)), between=between)
    assert {p.name for p in (*PASSES, *PROVIDERS.values())} == set(seen)
    assert len(built.fragments) == len(traced.lower().program.fragments)


def test_lowering_twice_is_one_result():
    """No pass leaves anything behind in what was traced."""
    with mm.register_task("named", devices=[0]):

        def fun(w, x):
            with jax.named_scope("named"):
                h = jnp.tanh(x @ w)
            return front(w, h)

        traced = mm.jit(jax.grad(lambda w, x: jnp.sum(fun(w, x)))).trace(jnp.ones((4, 4)), rows())
        tasks = dict(traced._record.tasks)
        texts = []
        for _ in range(2):
            flats = []
            _build.build(traced.jaxpr, traced._record, {}, {}, between=lambda name, flat, to=flats: to.append(flat))
            texts.append(str(flats[-1]))
        assert traced._record.tasks == tasks
        assert texts[0] == texts[1]
