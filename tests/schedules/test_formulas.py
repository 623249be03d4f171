"""The simulator against the formulas that the schedules were published with.

Unit costs: a forward takes 1 and a backward 2, of which the weight gradient is 1. For schedules with two stages
on a submesh each stage takes half. All formulas are for `p` submeshes and `m` microbatches.
"""

from __future__ import annotations

import pytest

from manymesh.schedules import Interleaved1F1B, Simulation, get, simulate

pytestmark = pytest.mark.once

SIZES = [(p, m) for p in (2, 4, 8) for m in (4, 5, 8, 12, 16, 31, 32, 64)]
WORK = 3  # of one microbatch on one submesh


def split_evenly(name: str, p: int, m: int) -> Simulation:
    """Two stages on each submesh, each half as long."""
    return simulate(name, 2 * p, m, forward=0.5, backward=1.0)


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager-1f1b"])
def test_bubble_without_a_split(name: str, p: int, m: int) -> None:
    """(p - 1)(F + B), so a fraction of (p - 1) / (m + p - 1)."""
    result = simulate(name, p, m)
    assert result.makespan == WORK * m + WORK * (p - 1)
    assert result.bubble_fraction == pytest.approx((p - 1) / (m + p - 1))


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_activations_without_a_split(p: int, m: int) -> None:
    stages = range(p)
    assert simulate("gpipe", p, m).live_activations == (m,) * p
    assert simulate("1f1b", p, m).live_activations == tuple(min(p - s, m) for s in stages)
    assert simulate("eager-1f1b", p, m).live_activations == tuple(min(2 * (p - s) - 1, m) for s in stages)


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("forward", [1.0, 1.7])
@pytest.mark.parametrize("backward", [1.0, 2.0, 3.1])
def test_1f1b_and_gpipe_with_any_times(p: int, m: int, forward: float, backward: float) -> None:
    for name in ("gpipe", "1f1b"):
        result = simulate(name, p, m, forward=forward, backward=backward)
        assert result.makespan == pytest.approx((m + p - 1) * (forward + backward))


@pytest.mark.parametrize("virtual", [1, 2, 3, 4])
@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in SIZES if m % p == 0])
def test_megatron_interleaved(p: int, m: int, virtual: int) -> None:
    """Bubble (p - 1)(F + B) / v; warm-up of 2 (p - d - 1) + (v - 1) p forwards on submesh d."""
    result = simulate(Interleaved1F1B(virtual), p * virtual, m, forward=1 / virtual, backward=2 / virtual)
    assert result.makespan == pytest.approx(WORK * m + WORK * (p - 1) / virtual)
    warmup = [2 * (p - d - 1) + (virtual - 1) * p for d in range(p)]
    assert result.live_activations == tuple(min(w + 1, m * virtual) for w in warmup)


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in SIZES if m % p])
def test_interleaved_beyond_the_paper(p: int, m: int) -> None:
    """A last group that is not full costs no more than a full one, and beats no interleaving; its bubble is longer."""
    full = -(-m // p) * p
    result = split_evenly("interleaved", p, m)
    assert result.makespan <= split_evenly("interleaved", p, full).makespan
    assert m < p or result.makespan < simulate("1f1b", p, full).makespan
    assert WORK * (p - 1) / 2 < result.makespan - WORK * m < WORK * (p - 1)


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in SIZES if m >= p])
def test_zero_bubble_h1(p: int, m: int) -> None:
    """(p - 1)(F + B - W) with B the input gradient alone, and the memory of 1F1B's first stage."""
    result = simulate("zero-bubble-h1", p, m)
    assert result.makespan == WORK * m + (p - 1)
    # Stage s has p - s microbatches on their way and keeps s weight gradients back.
    assert result.live_activations == (p,) * p


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", ["zero-bubble-h1", "zero-bubble-h2"])
def test_zero_bubble_with_fewer_microbatches_than_stages(name: str, p: int) -> None:
    """The formula is out of reach there, and no schedule is faster.

    The last stage starts after p - 1 forwards, runs m forwards and m input gradients, and from its last one the
    way back to the first stage's weight gradient is p - 1 input gradients and that weight gradient.
    """
    for m in range(1, p + 1):
        way = (p - 1) + m * 2 + (p - 1) + 1
        assert way >= WORK * m + (p - 1)
        assert simulate(name, p, m).makespan == way


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in SIZES if m >= 2 * p - 1])
def test_zero_bubble_h2(p: int, m: int) -> None:
    """(p - 1)(F + B - 2W) = 0 without a barrier at the end of the step; 2p - 1 activations."""
    result = simulate("zero-bubble-h2", p, m)
    assert result.longest_span == WORK * m
    assert result.live_activations == (2 * p - 1,) * p


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in SIZES if m >= 2 * p - 1])
def test_zbv(p: int, m: int) -> None:
    """No bubble without a barrier, and the memory of 1F1B: p activations of a whole submesh."""
    result = split_evenly("zbv", p, m)
    assert result.longest_span == WORK * m
    assert max(result.live_activations) == 2 * p


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in SIZES if m >= 2 * p])
def test_dualpipev(p: int, m: int) -> None:
    """At most (p - 1)(FB + B + W - 3W) in times of one stage, FB a forward beside a whole backward, here one
    after the other; in fact half of that. p + 1/2 activations of a whole submesh."""
    result = split_evenly("dualpipev", p, m)
    assert result.makespan <= WORK * m + (p - 1) * (1.5 + 1.0 - 1.5)
    assert result.makespan == WORK * m + (p - 1) / 2
    assert max(result.live_activations) == 2 * p + 1


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_fewer_microbatches_than_published(p: int, m: int) -> None:
    """Splitting the backward never makes a step of equal stages longer than 1F1B."""
    for name in ("zero-bubble-h1", "zero-bubble-h2"):
        assert simulate(name, p, m).makespan <= simulate("1f1b", p, m).makespan
    for name in ("zbv", "dualpipev"):
        assert split_evenly(name, p, m).makespan <= simulate("1f1b", p, m).makespan


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_zero_bubble_h2_with_few_microbatches(p: int) -> None:
    """It ends no later than ZB-H1, also where the published order would."""
    for m in range(1, 2 * p):
        assert simulate("zero-bubble-h2", p, m).makespan <= simulate("zero-bubble-h1", p, m).makespan


@pytest.mark.parametrize(("p", "makespan"), [(2, 6.5), (4, 13.5), (8, 27.5)])
def test_zbv_with_few_microbatches(p: int, makespan: float) -> None:
    """With as many microbatches as submeshes the bubble is (p - 1) / 2; the published order would take more."""
    assert makespan == WORK * p + (p - 1) / 2
    assert split_evenly("zbv", p, p).makespan == makespan


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_wavefront_is_the_unit_time_order(p: int, m: int) -> None:
    """On a chain, the systolic order of training is Eager 1F1B."""
    chain = tuple(range(p))
    assert get("wavefront").order(chain, m).rows == get("eager-1f1b").order(chain, m).rows


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "wavefront"])
def test_forward_only(name: str, p: int, m: int) -> None:
    result = simulate(name, p, m, backward=None)
    assert result.makespan == m + p - 1
    assert result.live_activations == (0,) * p


def test_transfers_cost_a_round_trip_of_the_pipeline() -> None:
    """GPipe pays each hop twice; eager 1F1B hides what 1F1B waits for."""
    assert simulate("gpipe", 4, 8, transfer=0.5).makespan == simulate("gpipe", 4, 8).makespan + 2 * 3 * 0.5
    assert simulate("eager-1f1b", 4, 16, transfer=0.5).makespan < simulate("1f1b", 4, 16, transfer=0.5).makespan


def test_zero_bubble_orders_as_printed_in_the_paper() -> None:
    """Ends of the rows of ZB-H1 and ZB-H2 for four stages and eight microbatches."""
    h1 = get("zero-bubble-h1").order((0, 1, 2, 3), 8)
    assert " ".join(map(str, h1.rows[0][:10])) == "F0@0 F0@1 F0@2 F0@3 B0@0 W0@0 F0@4 B0@1 W0@1 F0@5"
    assert " ".join(map(str, h1.rows[3][-7:])) == "W3@3 F3@7 B3@7 W3@4 W3@5 W3@6 W3@7"
    h2 = get("zero-bubble-h2").order((0, 1, 2, 3), 8)
    assert [a.kind for a in h2.rows[0][:8]] == ["F"] * 7 + ["B"]
