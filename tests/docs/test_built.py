"""The built documentation: every link inside leads somewhere, pictures are there, every public name has its entry.

``make docs`` builds it and runs this file with its folder in ``BUILT_DOCS``.
"""

from __future__ import annotations

import importlib
import inspect
import os
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import manymesh as mm

MODULES = [name for name in dir(mm) if inspect.ismodule(getattr(mm, name))]
FACES = ["manymesh", *(f"manymesh.{name}" for name in MODULES)]
built = pytest.mark.skipif("BUILT_DOCS" not in os.environ, reason="`make docs` builds the pages and runs these tests")


class Page(HTMLParser):
    """The anchors of a page, and what it points to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.targets: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.anchors.add(value)
            elif name in ("href", "src") and value is not None:
                self.targets.append(value)


def broken_links(folder: Path) -> list[str]:
    """``page -> target`` for everything inside the folder that a page points to and that is not there."""
    files = [path for path in sorted(folder.rglob("*.html")) if "_static" not in path.parts]  # templates of the theme
    pages = {path: Page(path.read_text("utf-8")) for path in files}
    assert pages, f"no pages in {folder}"
    broken = []
    for path, page in pages.items():
        for target in page.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue  # elsewhere
            file = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            anchor = unquote(parts.fragment)
            known = pages.get(file)
            if not file.is_file() or (anchor and known is not None and anchor not in known.anchors):
                broken.append(f"{path.relative_to(folder)} -> {target}")
    return broken


def test_the_link_checker_finds_what_is_broken(tmp_path: Path) -> None:
    """A file that is missing, a picture, an anchor; not what is there, nor what is elsewhere."""
    (tmp_path / "a.html").write_text(
        '<p id="here"></p><a href="b.html#there"></a><a href="#here"></a><a href="https://example.org/x"></a>'
        '<a href="c.html"></a><img src="d.svg"/><a href="b.html#nowhere"></a><a href="#gone"></a>'
    )
    (tmp_path / "b.html").write_text('<p id="there"></p>')
    expected = ["c.html", "d.svg", "b.html#nowhere", "#gone"]
    assert broken_links(tmp_path) == [f"a.html -> {target}" for target in expected]


@pytest.fixture
def folder() -> Path:
    return Path(os.environ["BUILT_DOCS"]).resolve()


@built
def test_no_link_inside_is_broken(folder: Path) -> None:
    assert broken_links(folder) == []


@built
def test_the_first_page_has_its_picture(folder: Path) -> None:
    pictures = [t for t in Page((folder / "index.html").read_text("utf-8")).targets if t.endswith("timeline.svg")]
    assert pictures
    assert (folder / pictures[0]).read_text("utf-8").startswith("<svg")


@built
@pytest.mark.parametrize("face", FACES)
def test_every_public_name_is_in_the_reference(folder: Path, face: str) -> None:
    page = Page((folder / "reference" / f"{face.rpartition('.')[2]}.html").read_text("utf-8"))
    names = set(importlib.import_module(face).__all__) - ({*MODULES} if face == "manymesh" else set())
    assert {name for name in names if f"{face}.{name}" not in page.anchors} == set()


@built
def test_errors_lead_to_their_sections(folder: Path) -> None:
    anchors = Page((folder / "errors.html").read_text("utf-8")).anchors
    assert {name.lower() for name in mm.errors.__all__} <= anchors


@built
@pytest.mark.skipif(shutil.which("chromium") is None, reason="it takes a browser to run the search")
def test_the_search_works_from_the_file_system(folder: Path) -> None:
    browser = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", "--dump-dom"]
    page = f"file://{folder}/search.html?q=microbatch"
    done = subprocess.run([*browser, page], capture_output=True, text=True, check=True, timeout=120)
    assert 'href="reference/manymesh.html#manymesh.microbatch"' in done.stdout
