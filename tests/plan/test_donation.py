"""Whose a buffer is when a call has returned."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manymesh._plan._donation import Handover, hand_over, held_outside
from manymesh._plan._instructions import Plan

pytestmark = pytest.mark.once


def plan_of(inputs, outputs, aliases):
    """A plan with these ends."""
    return Plan((), 10, tuple(inputs), tuple(outputs), (), (), aliases, {})


# A constant; an argument on two submeshes, which share devices; an argument. Slots 4 and 5 are one value.
INPUTS = ((0, 0, 0), (1, 0, 1), (1, 1, 2), (2, 0, 3))
ALIASES = {1: 1, 2: 1, 4: 4, 5: 4}


def test_the_first_result_of_a_buffer_has_it():
    """Others of that buffer are copies, and so are literals and what somebody outside holds."""
    plan = plan_of(INPUTS, (5, 4, 5, None, 2, 1, 3, 0, 6), ALIASES)
    assert hand_over(plan, frozenset({1})) == Handover(copied=(1, 2, 3, 5, 6, 7), taken=(4,))
    assert hand_over(plan, frozenset({2})) == Handover(copied=(1, 2, 3, 4, 5, 7), taken=(6,))
    assert hand_over(plan, frozenset({1, 2})) == Handover(copied=(1, 2, 3, 5, 7), taken=(4, 6))


def test_what_somebody_outside_may_give_away():
    """Results and arguments, under all names of their buffers; constants stay."""
    assert held_outside(plan_of(INPUTS, (5, 6), ALIASES), num_consts=1) == {1, 2, 3, 4, 5, 6}
    assert held_outside(plan_of(INPUTS, (None,), ALIASES), num_consts=2) == {3}


@given(
    where=st.lists(st.integers(0, 9), min_size=1, max_size=6, unique=True),
    outputs=st.lists(st.none() | st.integers(0, 9), max_size=8),
    roots=st.lists(st.integers(0, 9), min_size=10, max_size=10),
    donated=st.frozensets(st.integers(0, 5)),
)
def test_no_buffer_has_two_owners(where, outputs, roots, donated):
    """Of each buffer that nobody outside holds, one result is it; a buffer that an argument gave is taken over."""
    aliases = {slot: min(s for s in range(10) if roots[s] == roots[slot]) for slot in range(10)}
    plan = plan_of([(i, 0, slot) for i, slot in enumerate(where)], outputs, aliases)
    found = hand_over(plan, donated)
    handed = [plan.buffer(s) for o, s in enumerate(outputs) if s is not None and o not in found.copied]
    stays = {plan.buffer(slot) for i, slot in enumerate(where) if i not in donated}
    given_away = {plan.buffer(slot) for i, slot in enumerate(where) if i in donated}
    assert len(set(handed)) == len(handed)
    assert set(handed) == {plan.buffer(s) for s in outputs if s is not None} - stays
    assert {plan.buffer(outputs[o]) for o in found.taken} == given_away & set(handed)
