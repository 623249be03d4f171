"""The cheapest way to put things on two sides."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from manymesh._passes._cut import FIRST, SECOND, Net, cost, least_cut


@st.composite
def problems(draw):
    count = draw(st.integers(1, 6))
    things = st.lists(st.sampled_from([FIRST, SECOND, *range(count)]), min_size=1, max_size=4, unique=True)
    nets = draw(st.lists(st.builds(Net, st.integers(0, 9), things.map(tuple)), max_size=8))
    number = st.integers(0, count - 1)
    follows = draw(st.lists(st.one_of(st.tuples(number, number), st.tuples(st.just(FIRST), number)), max_size=3))
    return count, nets, follows


@given(problems())
def test_nothing_is_cheaper(problem):
    """Than what is found, of all ways that keep together what follows."""
    count, nets, follows = problem

    def allowed(sides):
        side = {FIRST: False, **dict(enumerate(sides))}
        return all(side[a] or not side[b] for a, b in follows)

    found = least_cut(count, nets, follows)
    ways = [w for w in itertools.product([False, True], repeat=count) if allowed(w)]
    assert allowed(found)
    assert cost(nets, found) == min(cost(nets, w) for w in ways)


def test_a_net_costs_once():
    """However many of its things are on the other side, as a value is sent once to all that read it there."""
    nets = [Net(5, (FIRST, 0, 1, 2)), Net(2, (0, SECOND)), Net(2, (1, SECOND)), Net(2, (2, SECOND))]
    assert least_cut(3, nets) == [True, True, True]
    assert cost(nets, [False, False, True]) == 5 + 2 + 2
    assert least_cut(2, nets[:3]) == [False, False]
