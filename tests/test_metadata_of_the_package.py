"""What the package says of itself."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

pytestmark = pytest.mark.once

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def test_links_of_the_readme_lead_to_files() -> None:
    """From the checkout. They become whole addresses once the project has one."""
    links = re.findall(r"\]\(([^)]+)\)", (ROOT / "README.md").read_text("utf-8"))
    assert links
    assert not [link for link in links if not (ROOT / link).exists()]


def test_there_is_an_author_and_an_extra_for_each_framework() -> None:
    assert PROJECT["authors"]
    assert {"flax", "equinox"} <= set(PROJECT["optional-dependencies"])
