"""The laws on generated programs, and on those that once broke one."""

from pathlib import Path

import jax.numpy as jnp
import pytest

import manymesh as mm
from generated.draw import drawn
from generated.laws import check
from generated.program import Program
from stages import assert_same, rows

PARTS = 10


# In parts, so that workers share them.
@pytest.mark.quick
@pytest.mark.parametrize("part", range(PARTS))
def test_laws_hold_on_generated_programs(part, shared, request):
    """Values, effects and layouts are those of plain JAX, and a second step compiles nothing. Ten programs a part."""
    brief = request.config.getoption("--hypothesis-profile") == "brief"
    for number in range(part, 75 if brief else 100, PARTS):
        program = drawn(number, small=True)
        try:
            check(program, shared)
        except Exception as error:
            error.add_note(f"program {number}:\n{program.to_json()}")
            raise


# CI has them on the second pair with XLA compiling as for users, and need not have them there twice.
@pytest.mark.once
@pytest.mark.parametrize("path", sorted((Path(__file__).parent / "regressions").glob("*.json")), ids=lambda p: p.stem)
def test_what_once_broke_a_law(path):
    """Programs that `make fuzz` found and kept."""
    check(Program.from_json(path.read_text("utf-8")))


@pytest.mark.parametrize("reduce", ["max", "concat", "stack", "last"])
def test_other_reductions_equal_the_plain_loop(reduce):
    """Reductions that keep, pick or collect."""
    front = mm.task(lambda w, x: jnp.tanh(x @ w), "front", devices=[0])
    back = mm.task(lambda w, h: h @ w, "back", devices=[1])
    run = mm.microbatch(lambda ws, x: back(ws[1], front(ws[0], x)), argnum=1, num_microbatches=4, reduce=reduce)
    ws, x = (jnp.eye(4), 2 * jnp.eye(4)), rows()
    with mm.ignore_transforms():
        expected = run(ws, x)
    assert_same(mm.jit(run)(ws, x), expected)
