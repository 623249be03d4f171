"""Short texts of host values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from manymesh._distributed._values import WHOLE, fingerprint

pytestmark = pytest.mark.once
MANY = np.arange(WHOLE, dtype=np.float32)  # four times what is looked at


def changed(x, position):
    return np.where(np.arange(x.size) == position, -1, x).astype(x.dtype)


@pytest.mark.parametrize(
    "x",
    [3, 2.5, True, np.float32(1), np.arange(6).reshape(2, 3), jnp.arange(4), jax.random.key(1), np.zeros(0), MANY],
    ids=str,
)
def test_equal_values_have_one(x):
    found = fingerprint(x)
    again = x.copy() if isinstance(x, np.ndarray) else x
    assert found is not None and found == fingerprint(again)


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (0.01, "0.01"),
        (np.float32(0.01), "0.01"),
        (jnp.bfloat16(2.5), "2.5"),
        (True, "True"),
        (np.arange(4).reshape(2, 2), "[0, 1, 2, 3]"),
        (np.ones(1), "[1.0]"),
        (jax.random.key(7), "[0, 7]"),
    ],
    ids=str,
)
def test_small_ones_are_shown(x, text):
    assert fingerprint(x) == text


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn"])
def test_no_two_numbers_look_alike(dtype):
    """As short as they are shown: of all that there are, only those that are no numbers."""
    bits = jnp.dtype(dtype).itemsize * 8
    every = np.arange(1 << bits, dtype=f"uint{bits}").view(dtype)
    every = every[~np.isnan(every.astype("f4"))]
    assert len({fingerprint(x) for x in every}) == len(every)


def test_others_have_others():
    """A strided view is its values; of large ones, what is at the beginning, and steps over the rest."""
    values = [np.zeros(3), np.ones(3), np.arange(8)[::2], np.arange(8), jax.random.key(0), jax.random.key(1)]
    values += [MANY, changed(MANY, 5), changed(MANY, WHOLE // 8), MANY + 1]
    assert len({fingerprint(x) for x in values}) == len(values)
    assert fingerprint(np.arange(8)[::2]) == fingerprint(np.arange(8)[::2].copy())


@pytest.mark.parametrize(
    ("wide", "narrow"), [(np.arange(8), np.arange(8, dtype="i4")), (MANY.astype("f8"), MANY), (np.float64(1 / 3), np.float32(1 / 3))]
)  # fmt: skip
def test_of_64_bits_have_what_a_step_makes_of_them(wide, narrow):
    """Where 64 bits are switched off; a process may load a batch as the one, another as the other."""
    assert fingerprint(wide) == fingerprint(narrow)
    with jax.enable_x64(True):
        assert fingerprint(wide) != fingerprint(narrow)


@pytest.mark.parametrize(
    "x", [jax.device_put(jnp.ones(2), jax.devices()[0]), jax.ShapeDtypeStruct((2,), "float32"), "words"], ids=str
)
def test_what_has_a_place_or_no_value_has_none(x):
    assert fingerprint(x) is None
