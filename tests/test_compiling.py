"""What the tests compile for each other is what each of them would have compiled, and is counted."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytestmark = pytest.mark.once

COMPILED = "/jax/core/compile/backend_compile_duration"

# Equal layers on two submeshes: one executable, written out and loaded for the other one, also where it was read itself.
SCRIPT = """
import jax, jax.numpy as jnp
from jax._src import compiler

made, inner = [], compiler.backend_compile_and_load
def compile_and_load(backend, module, *rest):
    made.append(module)
    return inner(backend, module, *rest)
compiler.backend_compile_and_load = compile_and_load

import compiling
compiling.set_up()
import manymesh as mm

layers = [mm.task(lambda x: jnp.tanh(x + 1), devices=[i]) for i in range(2)]
out = mm.jit(lambda x: layers[1](layers[0](x)))(1.0)
assert abs(float(out) - float(jnp.tanh(jnp.tanh(2.0) + 1))) < 1e-6
print(len(made))
"""


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


def test_a_second_process_compiles_nothing(tmp_path):
    """It reads what the first one wrote; what is broken on disk is compiled again."""

    def compiled():
        path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
        env = {**os.environ, "MANYMESH_TESTS_EXECUTABLES": str(tmp_path), "PYTHONPATH": path}
        done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    first = compiled()
    assert first > 1
    assert compiled() == 0
    next(tmp_path.glob("*/*")).write_bytes(b"broken")
    assert compiled() == 1
