"""Sphinx builds the documentation with this: ``make docs``."""

from __future__ import annotations

import os
from importlib.metadata import version as version_of

# Docstrings are read from the modules, which make submeshes of simulated devices when they are imported by no one.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

project = "ManyMesh"
author = "The ManyMesh authors"
copyright = author
release = version = version_of("manymesh")

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]

# Pages keep what their examples print; the tests run them and compare (tests/test_docs.py).
nb_execution_mode = "off"
myst_heading_anchors = 3
# Plural pages may be absent; a table of contents names them by patterns.
suppress_warnings = ["toc.empty_glob"]

default_role = "py:obj"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_member_order = "groupwise"
python_maximum_signature_line_length = 100
napoleon_use_ivar = True

html_theme = "sphinx_book_theme"
html_title = "ManyMesh"
html_static_path = ["_static"]
html_theme_options = {"show_toc_level": 2, "use_download_button": False, "use_fullscreen_button": False}
html_show_sourcelink = False
