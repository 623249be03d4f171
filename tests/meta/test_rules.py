"""Logical rules: their resolution against a slow obvious model, and their surroundings."""

from __future__ import annotations

import concurrent.futures
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from manymesh import meta
from manymesh.errors import AxisError

LOGICAL = ["batch", "embed", "hidden", "heads"]
DEVICE = ["data", "model", "stage"]


def slow_model(names: tuple[Any, ...], rules: list[tuple[str, Any]]) -> tuple[Any, ...]:
    """What the rules mean, written down as in the description and not for speed."""
    closed: dict[int, Any] = {i: n for i, n in enumerate(names) if not isinstance(n, str)}

    def axes_in_use() -> list[str]:
        used = []
        for entry in closed.values():
            used += [entry] if isinstance(entry, str) else list(entry) if isinstance(entry, tuple) else []
        return used

    for name, axes in rules:
        wanted = [axes] if isinstance(axes, str) else list(axes) if isinstance(axes, tuple) else []
        for i, n in enumerate(names):
            if n == name and i not in closed and not any(a in axes_in_use() for a in wanted):
                closed[i] = axes
    return tuple(closed.get(i) for i in range(len(names)))


AXES = st.one_of(
    st.none(),
    st.sampled_from(DEVICE),
    st.lists(st.sampled_from(DEVICE), max_size=2, unique=True).map(tuple),
    st.just(P.UNCONSTRAINED),
)
RULES = st.lists(st.tuples(st.sampled_from(LOGICAL), AXES), max_size=8)
NAMES = st.lists(st.sampled_from(LOGICAL), max_size=4, unique=True).flatmap(
    lambda names: st.tuples(*(st.one_of(st.just(n), st.none(), st.just(P.UNCONSTRAINED)) for n in names))
)


@given(NAMES, RULES)
@example(("batch", "heads"), [("heads", "data"), ("batch", "data"), ("batch", "model")])  # priority is the rule's
@example(("batch", "embed"), [("batch", ("data", "model")), ("embed", "model")])  # a tuple takes all its axes
@example(("embed", "batch"), [("embed", "model"), ("batch", ("data", "model")), ("batch", "data")])  # all or nothing
@example(("batch",), [("batch", None), ("batch", "data")])  # None stops its name
def test_resolution_is_that_of_the_slow_model(names: tuple[Any, ...], rules: list[tuple[str, Any]]) -> None:
    expected = P(*slow_model(names, rules))
    assert meta.logical_to_mesh_axes(names, rules) == expected
    assert meta.logical_to_mesh({"w": P(*names)}, rules)["w"] == expected
    with meta.logical_axis_rules(rules):
        assert meta.logical_to_mesh_axes(names) == expected


def test_no_names_give_no_spec() -> None:
    assert meta.logical_to_mesh_axes(None, [("a", "x")]) is None


def test_entries_that_are_device_axes_already_stay_and_are_taken() -> None:
    assert meta.logical_to_mesh_axes((("data", "model"), "embed"), [("embed", "data"), ("embed", "stage")]) == P(
        ("data", "model"), "stage"
    )


def test_rules_may_be_lists_or_a_mapping() -> None:
    for rules in ([["a", ["x", "y"]]], {"a": ("x", "y")}, (("a", ("x", "y")),), iter([("a", ("x", "y"))])):
        assert meta.logical_to_mesh_axes(("a",), rules) == P(("x", "y"))


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ("ab", "rules must be a sequence of pairs (logical name, device axes), found 'ab'"),
        (3, "rules must be a sequence of pairs (logical name, device axes), found 3"),
        (
            ("batch", "data"),
            "rule 'batch': expected a pair (logical name, device axes), where the device axes are a string, "
            "a tuple of strings or None",
        ),
        (
            [("a", 3)],
            "rule ('a', 3): expected a pair (logical name, device axes), where the device axes are a string, "
            "a tuple of strings or None",
        ),
        (
            [("a", "b", "c")],
            "rule ('a', 'b', 'c'): expected a pair (logical name, device axes), where the device axes are a string, "
            "a tuple of strings or None",
        ),
    ],
)
def test_wrong_rules_say_what_is_wrong(rules: Any, message: str) -> None:
    for use in (
        lambda: meta.logical_to_mesh_axes(("a",), rules),
        lambda: meta.set_logical_axis_rules(rules),
        lambda: meta.LogicallyPartitioned(0.0, (), rules=rules),
    ):
        with pytest.raises(AxisError) as error:
            use()
        assert str(error.value) == message
    assert meta.get_logical_axis_rules() == ()


def test_a_name_at_two_dimensions() -> None:
    with pytest.raises(AxisError) as error:
        meta.logical_to_mesh_axes(("a", None, "a", None), [("a", "x")])
    assert str(error.value) == (
        "names ('a', None, 'a', None): 'a' stands at more than one dimension; "
        "a rule could not tell them apart, give each dimension a name of its own"
    )


# --- the surroundings -----------------------------------------------------------------------------


def test_blocks_nest_and_end_with_an_exception() -> None:
    assert meta.get_logical_axis_rules() == ()
    with pytest.raises(RuntimeError), meta.logical_axis_rules([("a", "x")]):
        with meta.logical_axis_rules([("b", "y")]):
            assert meta.get_logical_axis_rules() == (("b", "y"),)
        assert meta.get_logical_axis_rules() == (("a", "x"),)
        meta.set_logical_axis_rules([("c", "z")])  # for the rest of the block
        assert meta.get_logical_axis_rules() == (("c", "z"),)
        raise RuntimeError
    assert meta.get_logical_axis_rules() == ()


def test_other_rules_are_never_a_stale_compiled_result() -> None:
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
    traces = 0

    @jax.jit
    def f(x: Any) -> Any:
        nonlocal traces
        traces += 1
        return meta.with_logical_constraint(x + 1, ("a", "b"))

    specs = []
    with jax.set_mesh(mesh):
        for rules in ([("a", "data")], [("b", "model")], [("a", "data")], [("a", "model")]):
            with meta.logical_axis_rules(rules):
                specs.append(f(jnp.ones((4, 4))).sharding.spec)
        meta.set_logical_axis_rules([("a", "data"), ("b", "model")])
        try:
            specs.append(f(jnp.ones((4, 4))).sharding.spec)
        finally:
            meta.set_logical_axis_rules(())
    specs = [tuple(spec) + (None,) * (2 - len(spec)) for spec in specs]
    assert specs == [("data", None), (None, "model"), ("data", None), ("model", None), ("data", "model")]
    assert traces == 4  # rules that come again are found again


def test_eval_shape_and_a_box_see_the_rules_of_the_moment() -> None:
    box = meta.LogicallyPartitioned(jnp.ones((4, 4)), ("a", "b"))
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))
    unboxed = jax.jit(meta.unbox)
    with jax.set_mesh(mesh):
        for axis in ("data", "model"):
            with meta.logical_axis_rules([("a", axis)]):
                assert unboxed(box).sharding.spec[0] == axis


def in_thread(function: Any) -> Any:
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def test_threads_see_the_rules_of_the_main_thread() -> None:
    assert in_thread(meta.get_logical_axis_rules) == ()
    with meta.logical_axis_rules([("a", "x")]):
        assert in_thread(meta.get_logical_axis_rules) == (("a", "x"),)
    meta.set_logical_axis_rules([("b", "y")])
    try:
        assert in_thread(meta.get_logical_axis_rules) == (("b", "y"),)
    finally:
        meta.set_logical_axis_rules(())
    assert in_thread(meta.get_logical_axis_rules) == ()


def test_a_thread_keeps_its_own_block_to_itself() -> None:
    inside, leave, seen = threading.Event(), threading.Event(), []

    def work() -> None:
        with meta.logical_axis_rules([("a", "x")]):
            inside.set()
            leave.wait(10)
            seen.append(meta.get_logical_axis_rules())
            meta.set_logical_axis_rules([("a", "z")])
            seen.append(meta.get_logical_axis_rules())
            with meta.logical_axis_rules([("n", "n")]):
                seen.append(meta.get_logical_axis_rules())
            seen.append(meta.get_logical_axis_rules())
        seen.append(meta.get_logical_axis_rules())

    thread = threading.Thread(target=work)
    thread.start()
    assert inside.wait(10)
    assert meta.get_logical_axis_rules() == ()
    with meta.logical_axis_rules([("b", "y")]):
        leave.set()
        thread.join()
        assert meta.get_logical_axis_rules() == (("b", "y"),)
    assert seen == [(("a", "x"),), (("a", "z"),), (("n", "n"),), (("a", "z"),), (("b", "y"),)]


def test_rules_set_by_a_thread_are_for_the_process() -> None:
    in_thread(lambda: meta.set_logical_axis_rules([("a", "x")]))
    try:
        assert meta.get_logical_axis_rules() == (("a", "x"),)
    finally:
        in_thread(lambda: meta.set_logical_axis_rules(()))
    assert meta.get_logical_axis_rules() == ()
