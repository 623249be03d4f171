"""Sphinx builds the documentation with this: ``make docs``."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

from sphinx.ext.napoleon import GoogleDocstring

# Docstrings are read from the modules, which make submeshes of simulated devices when they are imported by no one.
os.environ.setdefault("JAX_PLATFORMS", "cpu")


def known(name: str) -> bool:
    """Whether there is such a module in the package."""
    return importlib.util.find_spec(f"manymesh.{name}") is not None


DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS))
import notebooks  # noqa: E402  # beside this file

project = "ManyMesh"
author = "The ManyMesh authors"
copyright = author
release = version = version_of("manymesh")

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
# Modules that are on their way have their page already.
exclude_patterns += [f"reference/{name}.md" for name in ("checkpoint", "distributed", "inspect") if not known(name)]

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


# Users do not make these; what the constructors take is of no interest to them.
MADE_BY_US = {f"manymesh.{name}" for name in ("Compiled", "Jitted", "Lowered", "Program", "Report", "Traced")}
MADE_BY_US |= {"manymesh.flax.TrainStep", "manymesh.nnx.Jitted", "manymesh.equinox.Jitted"}


def _without_constructors(_: Any, what: str, name: str, *others: Any) -> tuple[str, None] | None:
    return ("", None) if what == "class" and name in MADE_BY_US else None


def _returns_as_prose(self: GoogleDocstring, preprocess_types: bool = False) -> list[tuple[str, str, list[str]]]:
    """Types stand in signatures: a colon in the first line of ``Returns:`` is a colon, and no type is before it."""
    return [("", "", self._dedent(self._consume_to_next_section()))]


def _with_notebook(_: Any, name: str, text: list[str]) -> None:
    """A tutorial says below its heading where it is as a notebook."""
    if name in notebooks.TUTORIALS:
        file = "../" * name.count("/") + notebooks.file_of(name)
        link = f'<p><a href="{file}" download>This page as a notebook</a>, with its outputs.</p>'
        heading, newline, rest = text[0].partition("\n")
        text[0] = f"{heading}{newline}\n```{{raw}} html\n{link}\n```\n{rest}"


def _write_notebooks(app: Any, error: Exception | None) -> None:
    if error is None and app.builder.format == "html":
        notebooks.write(Path(app.outdir))


def setup(app: Any) -> None:
    app.connect("source-read", _without_empty_patterns)
    app.connect("source-read", _with_notebook)
    app.connect("build-finished", _write_notebooks)
    app.connect("autodoc-process-signature", _without_constructors)
    GoogleDocstring._consume_returns_section = _returns_as_prose  # type: ignore[method-assign]  # it has no setting


html_theme = "sphinx_book_theme"
html_title = "ManyMesh"
html_static_path = ["_static"]
html_theme_options = {
    "show_toc_level": 2,
    "use_download_button": False,
    "use_fullscreen_button": False,
    "navbar_persistent": [],
}
html_show_sourcelink = False
