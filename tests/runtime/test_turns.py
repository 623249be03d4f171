"""Steps that take turns on one state equal plain JAX, whatever they read, replace and hand on, and wherever it lies."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import manymesh as mm
from turns import run


@pytest.mark.parametrize("number", range(24))
def test_steps_that_take_turns_compute_what_they_do_alone(number: int) -> None:
    ours = run(number)
    with mm.ignore_transforms():
        expected = run(number)
    assert jax.tree.structure(ours) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), ours, expected)
