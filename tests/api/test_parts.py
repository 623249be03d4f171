"""A jaxpr around loops of the host, in parts: what each reads, hands on, and is the last to need."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from manymesh._api._parts import Straight, inside, split

pytestmark = pytest.mark.once


def parted(fun, *args, across=lambda eqn, in_scan: True):
    """The parts of a function, all of whose `while` equations are the host's; a name for each variable of its arguments."""
    closed = jax.make_jaxpr(fun)(*args)
    names = dict(zip(closed.jaxpr.invars, "abcdefg", strict=False))
    found = split(closed, across)
    return (None if found is None else found.parts), names


def told(part, names):
    """What a part reads and is the last to need, by the names of arguments; other variables are counted."""

    def words(variables):
        known = sorted(names[v] for v in variables if v in names)
        return "".join(known) + f"+{len(variables) - len(known)}"

    return words(part.reads) if isinstance(part, Straight) else "loop", words(part.dying)


def test_a_step_without_such_a_loop_has_no_parts():
    assert parted(lambda a: a + 1, 1.0)[0] is None
    assert (
        parted(lambda a: lax.while_loop(lambda x: x < 3, lambda x: x + 1, a), 1.0, across=lambda eqn, in_scan: False)[0]
        is None
    )


def test_what_each_part_reads_and_what_dies_in_it():
    def fun(a, b, c):
        y = jnp.sin(a)  # handed on: the last part reads it
        x, n = lax.while_loop(lambda s: s[1] < c, lambda s: (s[0] * b, s[1] + 1), (a + 1, 0))
        return x + y, n, b

    (before, loop, after), names = parted(fun, 1.0, 2.0, 3)
    assert told(before, names) == ("ac+0", "a+0")  # c is asked again after each time
    assert [len(v.aval.shape) for v in loop.carry] == [0, 0]
    (body,) = loop.body
    # The carry dies where its next value is made; what every iteration reads does not.
    assert told(body, names) == ("bc+2", "+2")
    assert told(loop, names) == ("loop", "c+1")  # and the condition; b is a result
    assert told(after, names) == ("b+3", "b+3")
    assert len(before.results) == 4 and len(body.results) == 3 and len(after.results) == 3


def test_what_a_loop_does_not_change_is_not_made_anew():
    def fun(a, b):
        return lax.while_loop(lambda s: s[0] < 3.0, lambda s: (s[0] + s[1], s[1], s[2]), (a, b, b))

    (_, loop, _), _ = parted(fun, 1.0, 2.0)
    (body,) = loop.body
    assert [v for v, _ in body.results] == [loop.carry[0], loop.condition]
    assert body.dying == {loop.carry[0]}


def test_loops_in_calls_scans_and_loops_are_found():
    def inner(x):
        return lax.while_loop(lambda x: x < 3, lambda x: x + 1, x)

    def shapes(parts):
        return ["straight" if isinstance(p, Straight) else shapes(inside(p)) for p in parts]

    straight = "straight"
    assert shapes(parted(jax.jit(inner), 1.0)[0]) == [straight, [straight], straight]
    nested = lambda a: lax.while_loop(lambda x: x < 9, lambda x: inner(x) * 2, a)  # noqa: E731
    assert shapes(parted(nested, 1.0)[0]) == [straight, [straight, [straight], straight], straight]
    scanned = lambda a: lax.scan(lambda c, _: (inner(c), c), a, length=4)  # noqa: E731
    assert shapes(parted(scanned, 1.0)[0]) == [straight, [straight, [straight], straight], straight]
    chosen = lambda a: lax.cond(a > 0, inner, lambda x: x, a)  # noqa: E731
    assert shapes(parted(chosen, 1.0)[0]) == [straight, [straight, straight, [straight], straight], straight]


def test_what_one_branch_needs_dies_in_any():
    def fun(a, b, c):
        loop = lambda: lax.while_loop(lambda x: x < 3, lambda x: x + b, a)  # noqa: E731
        return lax.cond(c, loop, lambda: a * 2.0)

    (before, branch, after), names = parted(fun, 1.0, 2.0, True)
    assert told(before, names) == ("c+0", "c+0")
    untaken, taken = branch.bodies
    assert told(untaken[0], names) == ("a+0", "a+0")
    assert [told(part, names) for part in taken] == [("a+0", "a+0"), ("loop", "b+1"), ("+1", "+1")]
    assert told(branch, names) == ("loop", "ab+1")
    assert [v for v, _ in untaken[-1].results] == [v for v, _ in taken[-1].results] == list(after.reads)


def test_an_argument_that_nobody_reads_is_of_the_last_part():
    (before, _, after), names = parted(lambda a, b: lax.while_loop(lambda x: x < 3, lambda x: x + 1, a), 1.0, 2.0)
    assert told(before, names) == ("a+0", "a+0")
    assert told(after, names)[0] == "b+1"
