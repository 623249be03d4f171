"""The pause of Python's garbage collector while a program is traced and planned."""

import gc

import pytest

from manymesh._collector import MANY, collector_paused

pytestmark = pytest.mark.once


def test_what_was_made_during_the_pause_counts_as_old():
    """The next object that anybody makes does not have the collector look through all of it."""
    with collector_paused():
        assert not gc.isenabled()
        made = [[] for _ in range(MANY + 1000)]
    assert gc.isenabled()
    young = {id(x) for generation in (0, 1) for x in gc.get_objects(generation)}
    assert not any(id(x) in young for x in made)


def test_what_somebody_has_frozen_stays_so():
    """As a server does before it forks. What is frozen is in no generation."""
    kept: list[object] = []
    gc.freeze()
    try:
        with collector_paused():
            made = [[] for _ in range(MANY + 1000)]
        assert not any(kept is x for x in gc.get_objects())
        del made
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
