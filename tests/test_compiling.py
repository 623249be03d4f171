"""What the tests compile for each other is what each of them would have compiled, and is counted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytestmark = pytest.mark.once

COMPILED = "/jax/core/compile/backend_compile_duration"


def compiled(scale, device=0):
    """An executable of a new function, and how many compilations JAX has counted for it."""
    seen = []

    def listen(name, seconds, **_):
        seen.append(name)

    x = jax.device_put(np.ones(3, np.float32), jax.devices()[device])
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        made = jax.jit(lambda x: jnp.sin(x) * scale).lower(x).compile()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    np.testing.assert_allclose(made(x), np.sin(np.ones(3)) * scale, rtol=1e-6)
    return made.runtime_executable(), seen.count(COMPILED)


def test_the_same_text_is_compiled_once_and_counted_each_time():
    (first, count), (second, again) = compiled(4321.0), compiled(4321.0)
    assert first is second
    assert (count, again) == (1, 1)


def test_another_constant_and_another_device_are_another_executable():
    known = [compiled(4322.0)[0], compiled(4323.0)[0], compiled(4322.0, device=1)[0]]
    assert len(set(map(id, known))) == 3


def test_each_callback_has_an_executable_of_its_own():
    """The function that is called is not in the text."""
    found = []
    for factor in (2, 3):

        def scaled(x, factor=factor):
            return x * factor

        out = jax.jit(lambda x, f=scaled: jax.pure_callback(f, jax.ShapeDtypeStruct((3,), x.dtype), x))(np.ones(3))
        found.append(np.asarray(out).tolist())
    assert found == [[2.0] * 3, [3.0] * 3]
