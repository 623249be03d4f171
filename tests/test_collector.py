"""The pause of Python's garbage collector while a program is traced and planned."""

import gc

import pytest

from manymesh._collector import collector_paused

pytestmark = pytest.mark.once


def test_what_was_made_during_the_pause_counts_as_old():
    """The next object that anybody makes does not have the collector look through all of it."""
    with collector_paused():
        assert not gc.isenabled()
        made = [[] for _ in range(10_000)]
    assert gc.isenabled()
    old = {id(x) for x in gc.get_objects(generation=2)}
    assert all(id(x) in old for x in made)


def test_what_somebody_has_frozen_stays_so():
    """As a server does before it forks. What is frozen is in no generation."""
    kept: list[object] = []
    gc.freeze()
    try:
        with collector_paused():
            pass
        assert not any(kept is x for x in gc.get_objects())
    finally:
        gc.unfreeze()
    assert any(kept is x for x in gc.get_objects())


def test_a_collector_that_is_off_stays_off():
    """Whoever switched it off switches it on again."""
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
