"""The list of a call holds, after each instruction, what somebody still reads, and nothing else."""

from hypothesis import given
from hypothesis import strategies as st

from manymesh._runtime._positions import Positions


@st.composite
def programs(draw):
    """(slots read, filled, freed) of each instruction: a slot is filled once, read while it is there, freed once."""
    arguments, count = draw(st.integers(0, 5)), draw(st.integers(0, 12))
    alive, code = list(range(arguments)), []
    following = arguments
    for _ in range(count):
        reads = draw(st.lists(st.sampled_from(alive), max_size=4)) if alive else []
        fills = list(range(following, following + draw(st.integers(0, 4))))
        following += len(fills)
        alive += fills
        frees = draw(st.lists(st.sampled_from(alive), max_size=6, unique=True)) if alive else []
        alive = [slot for slot in alive if slot not in frees]
        code.append((tuple(reads), tuple(fills), tuple(frees)))
    return arguments, code


@given(programs())
def test_what_is_kept_is_what_is_alive(program):
    """Each slot holds its own number; reading gives it, and what is freed is gone at once."""
    arguments, code = program
    at = Positions()
    issues = [at.issue(*instruction) for instruction in code]
    values = [None] * max(len(at), 1)
    alive = set(range(arguments)) & {slot for reads, _, frees in code for slot in (*reads, *frees)}
    for slot in alive:
        values[at[slot]] = slot
    for (reads, fills, frees), (read, filled, empty) in zip(code, issues, strict=True):
        assert [values[k] for k in read] == list(reads)
        assert len(set(filled)) == len(fills)
        for k, slot in zip(filled, fills, strict=True):
            values[k] = slot
        for run in empty:
            for k in run:
                values[k] = None
        alive = (alive | set(fills)) - set(frees)
        assert sorted(v for v in values if v is not None) == sorted(alive)


def test_a_chain_needs_no_more_room_than_one_link():
    """64 tasks of four arrays each: four positions, and nothing to empty."""
    at = Positions()
    for i in range(64):
        slots = range(4 * i, 4 * i + 4)
        _, filled, empty = at.issue(slots, range(4 * i + 4, 4 * i + 8), slots)
        assert (filled, empty) == ((0, 1, 2, 3), ())
    assert len(at) == 4
