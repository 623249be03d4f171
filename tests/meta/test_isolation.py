"""What importing the metadata costs: JAX and Rich, and no framework."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.once


def test_meta_loads_no_framework() -> None:
    code = (
        "import sys; from manymesh import meta; meta.explain; "
        "print(sorted({'flax', 'equinox', 'optax', 'orbax', 'torch', 'tensorflow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_face_lists_what_it_has() -> None:
    from manymesh import meta

    public = {name for name in vars(meta) if not name.startswith("_") and name != "annotations"}
    assert public == set(meta.__all__)
    assert len(set(meta.__all__)) == len(meta.__all__)
