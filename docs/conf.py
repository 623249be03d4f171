"""Sphinx builds the documentation with this: ``make docs``."""

from __future__ import annotations

import os
import re
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

# Docstrings are read from the modules, which make submeshes of simulated devices when they are imported by no one.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

DOCS = Path(__file__).parent

project = "ManyMesh"
author = "The ManyMesh authors"
copyright = author
release = version = version_of("manymesh")

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]

# Pages keep what their examples print; the tests run them and compare (tests/test_docs.py).
nb_execution_mode = "off"
myst_heading_anchors = 3

default_role = "py:obj"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_member_order = "groupwise"
python_maximum_signature_line_length = 100
napoleon_use_ivar = True


def _without_empty_patterns(_: Any, name: str, text: list[str]) -> None:
    """The table of contents names some pages by patterns, which Sphinx does not let be empty."""
    if name == "index":
        lines = text[0].splitlines()
        text[0] = "\n".join(x for x in lines if not re.fullmatch(r"\w+\*", x) or [*DOCS.glob(f"{x}.md")])


def setup(app: Any) -> None:
    app.connect("source-read", _without_empty_patterns)


html_theme = "sphinx_book_theme"
html_title = "ManyMesh"
html_static_path = ["_static"]
html_theme_options = {"show_toc_level": 2, "use_download_button": False, "use_fullscreen_button": False}
html_show_sourcelink = False
