"""The pages show what the library does.

    python tests/test_docs.py [PAGE ...]

writes what the examples print into the pages (all of them, or those whose names are given, such as nnx).
"""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import shlex
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

import manymesh as mm

pytestmark = pytest.mark.once

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    importlib.import_module("conftest")  # eight devices, before JAX starts

DOCS = ROOT / "docs"
# A block of code, and what it prints, if it prints something. What differs from machine to machine (times) stands in
# a block "text varies", and is not compared.
BLOCKS = re.compile(
    r"^```(?P<language>python|sh)\n(?P<code>.*?)^```\n(?:^```text(?P<varies> varies)?\n(?P<text>.*?)^```\n)?",
    re.MULTILINE | re.DOTALL,
)
COMMAND = "python -m manymesh "


def examples(page: Path) -> list[re.Match[str]]:
    """The blocks of a page that are run here: code, and calls of the command line."""
    return [b for b in BLOCKS.finditer(page.read_text("utf-8")) if is_run(b)]


def is_run(block: re.Match[str]) -> bool:
    """Sessions (``>>>``) are doctests and run elsewhere (tests/schedules/test_docs.py); other commands are not ours."""
    lines = block["code"].splitlines()
    if block["language"] == "sh":
        return all(line.startswith(COMMAND) and " launch " not in line for line in lines)
    return not block["code"].startswith(">>>")


def name_of(page: Path) -> str:
    return page.relative_to(DOCS).with_suffix("").as_posix()


PAGES = {name_of(page): page for page in sorted(DOCS.rglob("*.md")) if examples(page)}
# What other libraries warn of at import or in use.
WARNS = {"howto/save": "Orbax"}
WRITING = ("inspect",)  # pages whose examples write files; their folder goes


def run(block: re.Match[str], page: Path, variables: dict[str, Any]) -> str:
    """What a block prints, without blanks at the ends of lines."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), warnings.catch_warnings():
        if name_of(page) in WARNS:
            warnings.simplefilter("ignore")
        if block["language"] == "sh":
            from manymesh._cli import main  # after conftest has set up JAX, also when this is a script

            for line in block["code"].splitlines():
                assert main(shlex.split(line.removeprefix(COMMAND))) == 0, line
        else:
            exec(compile(block["code"], page.name, "exec"), variables)
        jax.effects_barrier()  # what jax.debug.print prints
    return stripped(out.getvalue())


def stripped(text: str) -> str:
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """What a page sets does not outlive it."""
    nans = jax.config.jax_debug_nans
    yield
    jax.config.update("jax_debug_nans", nans)
    mm.clear_tasks()


def falls(losses: list[float]) -> bool:
    return len(losses) > 4 and losses[-1] < losses[0]


# What is true at the end of other pages, where their output differs from one release of JAX to the next.
ENDINGS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "howto/memory": lambda v: v["less"] < v["donated"] < v["plain"] < v["gpipe"],
}
# The stories of a first hour, each told by one page alone, and what is true at its end.
STORIES: dict[str, Callable[[dict[str, Any]], bool]] = {
    "tutorials/linen": lambda v: falls(v["losses"]) and len(v["step"].compiled.program.submeshes) == 2,
    "tutorials/stacked": lambda v: falls(v["losses"]) and v["kernel"].sharding.spec[0] == "stage",
    "tutorials/no_edit": lambda v: falls(v["losses"]) and "register_task" not in inspect_source(v["Layer"]),
    "nnx": lambda v: falls(v["losses"]),
    "equinox": lambda v: falls(v["losses"]),
    "howto/schedule": lambda v: v["choice"].num_microbatches in v["candidates"] and min(v["costs"].forward) > 0,
    "howto/plan": lambda v: len(v["devices"]) > len(jax.devices()) and v["crossing"] > 0,
    "howto/save": lambda v: v["same"] and len(v["restored_devices"]) == 4,
    "howto/debug": lambda v: "in a result of task 'back'" in str(v["found"]),
    "howto/evaluate": lambda v: len(v["tokens"]) == v["LENGTH"],
}


def inspect_source(cls: type) -> str:
    """The names that the methods of a class use."""
    return " ".join(word for f in vars(cls).values() if hasattr(f, "__code__") for word in f.__code__.co_names)


@pytest.mark.parametrize("name", PAGES)
def test_every_example_on_the_page_prints_what_stands_below_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In order, with the variables of the blocks before."""
    page = PAGES[name]
    monkeypatch.chdir(tmp_path if name in WRITING else ROOT)
    variables: dict[str, Any] = {"__name__": "__main__"}
    for block in examples(page):
        printed = run(block, page, variables)
        if not block["varies"]:
            assert printed == stripped(block["text"] or ""), block["code"]
    ending = {**STORIES, **ENDINGS}.get(name)
    assert ending is None or ending(variables)


def test_each_story_has_its_page() -> None:
    assert set(STORIES) <= set(PAGES)


@pytest.mark.parametrize("name", mm.errors.__all__)
def test_each_error_has_a_section_that_it_names(name: str) -> None:
    """With its cause, an example that raises it (run above), and what to do."""
    page = PAGES["errors"].read_text("utf-8")
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    assert f"see docs: errors#{name}" in getattr(mm.errors, name)("words").__notes__
    section = sections[name]
    (example,) = BLOCKS.finditer(section)
    assert f"except mm.errors.{name} as error:" in example["code"] and example["text"]
    assert section.index("**Cause.**") < example.start() < section.index("**Remedy.**")


def write(page: Path) -> None:
    """Fills in what each block prints."""
    variables: dict[str, Any] = {"__name__": "__main__"}

    def filled(block: re.Match[str]) -> str:
        if not is_run(block):
            return block[0]
        printed = run(block, page, variables)
        fence = f"```text{block['varies'] or ''}"
        return f"```{block['language']}\n{block['code']}```\n" + (f"{fence}\n{printed}```\n" if printed else "")

    page.write_text(BLOCKS.sub(filled, page.read_text("utf-8")), "utf-8")
    mm.clear_tasks()
    jax.config.update("jax_debug_nans", False)


if __name__ == "__main__":
    for each in sys.argv[1:] or PAGES:
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder if each in WRITING else ROOT):
            write(PAGES[each])
