"""The face of the package: what is public, how it is called, and what importing it costs."""

from __future__ import annotations

import pickle
import subprocess
import sys
from importlib.metadata import version

import pytest

import manymesh as mm
import manymesh.checkpoint
import manymesh.equinox
import manymesh.flax
import manymesh.inspect
import manymesh.nnx

pytestmark = pytest.mark.once

FACES = [mm, mm.errors, mm.meta, mm.schedules, mm.flax, mm.nnx, mm.equinox, mm.checkpoint, mm.inspect]


@pytest.mark.parametrize("face", FACES, ids=lambda face: face.__name__)
def test_public_classes_print_as_they_are_imported(face) -> None:
    classes = [getattr(face, name) for name in face.__all__ if isinstance(getattr(face, name), type)]
    for cls in classes:
        home = cls.__module__
        assert home == face.__name__ or home in [f.__name__ for f in FACES], (cls, home)
        assert getattr(sys.modules[home], cls.__qualname__) is cls
        assert pickle.loads(pickle.dumps(cls)) is cls
    assert face is mm.schedules or classes


def test_errors_print_with_the_name_that_one_catches() -> None:
    code = "import manymesh as mm; mm.Task('a', devices=[0], mesh=1)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    message, note = done.stderr.splitlines()[-2:]
    assert message.startswith("manymesh.errors.ArgumentError: task 'a': mesh has to be")
    assert note == "see docs: errors#ArgumentError"


def test_dir_and_version() -> None:
    assert set(dir(mm)) == {*mm.__all__, "checkpoint", "equinox", "flax", "inspect", "nnx"}
    assert mm.__version__ == version("manymesh")
    with pytest.raises(AttributeError, match="module 'manymesh' has no attribute 'jitt'"):
        mm.jitt  # noqa: B018  # asking for it is the test
    for name in ("Jitted", "Traced", "Lowered", "Report", "Program"):
        assert isinstance(getattr(mm, name), type)


def test_importing_it_loads_neither_a_framework_nor_what_compiles_and_runs() -> None:
    """Else it takes a third longer than importing JAX (benchmarks/importing.py)."""
    code = (
        "import sys, manymesh as mm; slow = {'rich', 'flax', 'equinox', 'optax', 'orbax', 'tensorstore'}; "
        "slow |= {f'manymesh.{room}' for room in ('_api', '_passes', '_plan', '_runtime', '_cost', '_views')}; "
        "before = set(sys.modules); import jax; "
        "print(sorted(slow & before)); mm.flax.task; print('flax' in sys.modules, 'equinox' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["[]", "True False"]
