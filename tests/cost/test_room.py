"""What is in memory inside of a fragment, by our own count."""

from hypothesis import given
from hypothesis import strategies as st

from manymesh._cost._operations import NOTHING, Operation, Operations
from manymesh._cost._room import _Roots


@st.composite
def computations(draw):
    """Operations of up to three earlier values or none, each making one or two, and which of their results are in memory."""
    count = draw(st.integers(1, 4))
    found, kept = Operations(inputs=tuple(range(count))), set(range(count))
    for _ in range(draw(st.integers(0, 12))):
        reads = draw(st.lists(st.integers(0, count - 1) | st.just(NOTHING), max_size=3))
        makes = tuple(range(count, count + draw(st.integers(1, 2))))
        found.operations.append(Operation(None, tuple(reads), makes, "add"))
        kept |= {k for k in makes if draw(st.booleans())}
        count += len(makes)
    return found, kept, draw(st.permutations(range(count)))


@given(computations())
def test_roots_are_what_following_each_operation_gives(computation):
    """In whatever order they are asked for."""
    found, kept, order = computation
    wanted = {k: frozenset({k}) for k in order}
    for op in found.operations:
        for k in op.makes:
            if k not in kept:
                wanted[k] = frozenset().union(*(wanted[r] for r in op.reads if r != NOTHING))
    roots = _Roots(found, kept)
    assert {k: roots[k] for k in order} == wanted


def test_a_long_sum_is_followed_once():
    """Each sum on the way to it has as many roots as terms: to keep them all was most of the time of a report."""
    terms = 200
    found = Operations(inputs=tuple(range(terms)))
    for i in range(1, terms):
        found.operations.append(Operation(None, (0 if i == 1 else terms + i - 2, i), (terms + i - 1,), "add"))
    roots = _Roots(found, set(range(terms)))
    assert roots[2 * terms - 2] == frozenset(range(terms))
    assert not roots._known
