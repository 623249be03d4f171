"""What a package index shows: links that lead somewhere from there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def test_links_of_the_readme_are_whole_and_their_files_exist() -> None:
    """An index shows the README alone: a relative link would lead nowhere."""
    links = re.findall(r"\]\(([^)]+)\)", (ROOT / "README.md").read_text("utf-8"))
    base = f"{PROJECT['urls']['Source']}/blob/main/"
    assert links and all(link.startswith(base) for link in links), links
    missing = [link for link in links if not (ROOT / link.removeprefix(base)).exists()]
    assert not missing


def test_there_is_an_author_and_an_extra_for_each_framework() -> None:
    assert PROJECT["authors"]
    assert {"flax", "equinox"} <= set(PROJECT["optional-dependencies"])
    assert all(url.startswith(PROJECT["urls"]["Source"]) for url in PROJECT["urls"].values())
