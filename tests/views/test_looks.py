"""What views look like: text against golden files, the page in a real browser, pictures, notebooks.

    python tests/views/test_looks.py

writes what the text views print now into the golden files.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import shutil
import subprocess
import sys
import termios
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console

import manymesh as mm
from manymesh import inspect
from manymesh.errors import ArgumentError

sys.path.insert(0, str(Path(__file__).parents[1]))  # when run as a script
from views.steps import made_up, predicted, two_stages

pytestmark = pytest.mark.once

GOLDEN = Path(__file__).parent / "golden"


def placements() -> str:
    """Arrays in one, two and four dimensions, alike, replicated, on several submeshes, and on many planned devices."""
    mesh = jax.make_mesh((2, 2, 2), ("stage", "data", "model"))
    first, second = mm.submeshes(mesh, "stage")

    def at(shape, where, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(where, PartitionSpec(*spec)))

    many = jax.make_mesh((32, 32), ("x", "y"), devices=mm.planned_devices(1024))
    tree = {
        "bias": at((8,), second, "model"),
        "four": at((4, 2, 6, 8), mesh, "stage", None, "data", "model"),
        "large": at((64, 64), many, "x", "y"),
        "columns": at((64, 64), many, None, "y"),
        "one": at((3, 3), second),
        "up": at((4, 8), first, "data", "model"),
        "upper": at((4, 8), first, "data", "model"),
    }
    return str(inspect.visualize(tree))


def large() -> tuple[object, object]:
    """A program of a hundred fragments, and its layout."""
    mesh = jax.make_mesh((4, 2), ("stage", "data"), devices=mm.planned_devices(8))
    meshes = mm.submeshes(mesh, "stage")
    layers = [mm.task(lambda w, x: x + jnp.sin(x @ w), f"layer_{i}", mesh=meshes[i // 6]) for i in range(24)]

    def loss(weights, x):
        for layer, w in zip(layers, weights, strict=True):
            x = layer(w, x)
        return jnp.mean(x**2)

    def step(weights, x):
        grads = mm.microbatch(jax.grad(loss), argnum=1, num_microbatches=4, schedule="1f1b", reduce="mean")(weights, x)
        scale = jnp.sqrt(sum(jnp.sum(g**2) for g in grads))
        return [w - 0.1 * g / scale for w, g in zip(weights, grads, strict=True)]

    w, x = jax.ShapeDtypeStruct((4, 4), jnp.float32), jax.ShapeDtypeStruct((8, 4), jnp.float32)
    lowered = mm.jit(step).lower([w] * 24, x)
    return lowered.program, lowered.layout


VIEWS = {
    "timeline": lambda: str(made_up().timeline()),
    "timeline-predicted": lambda: str(made_up().timeline(predicted())),
    "comparison": lambda: str(made_up().compare(predicted())),
    "placements": placements,
    "large-program": lambda: repr(large()[0]),
}


def text_of(name: str) -> str:
    """A view as a pipe gets it, whatever terminal there is."""
    with contextlib.redirect_stdout(io.StringIO()):
        return VIEWS[name]() + "\n"


@pytest.mark.parametrize("name", VIEWS)
def test_text_is_as_it_was(name):
    """Against the golden file."""
    assert text_of(name) == (GOLDEN / f"{name}.txt").read_text("utf-8")


def test_a_wide_and_a_narrow_terminal():
    """The rows take the width there is, and no line is longer."""
    for width in (40, 160):
        out = io.StringIO()
        Console(file=out, width=width).print(made_up().timeline())
        lines = out.getvalue().splitlines()
        assert max(map(len, lines)) <= width
        assert len(next(line for line in lines if line.startswith("0 | "))) == width


def test_what_is_printed_fits_a_narrow_terminal(monkeypatch, tmp_path):
    """Tables fold what is too long for `COLUMNS` or else the terminal; in a pipe and in a file they are as ever."""
    step, params, x = two_stages()
    report = step.lower(params, x).report(inspect.Hardware.h100())
    wide = {f"a_parameter_with_a_long_name_{i}": jnp.ones((4, 8)) for i in range(2)}
    printed = [report, made_up().timeline(), made_up().compare(predicted()), inspect.tabulate(wide)]
    usual = list(map(str, printed))
    assert max(len(line) for text in usual for line in text.splitlines() if line.startswith("┃")) > 80
    parent, child = pty.openpty()
    termios.tcsetwinsize(child, (24, 70))
    with open(child, "w", closefd=True) as terminal:
        for columns in ("80", None):
            if columns is None:
                monkeypatch.delenv("COLUMNS")
                monkeypatch.setattr(sys, "stdout", terminal)
            else:
                monkeypatch.setenv("COLUMNS", columns)
            for it in printed:
                lines = [line for line in str(it).splitlines() if line.startswith(("┃", "│", "0 |", "  '"))]
                assert lines and max(map(len, lines)) <= int(columns or 70), it
        assert made_up().timeline().save(tmp_path / "t.txt").read_text("utf-8") == usual[1]
        monkeypatch.undo()
    os.close(parent)
    assert list(map(str, printed)) == usual


def test_a_table_is_not_folded_into_single_letters(monkeypatch):
    """On a very narrow terminal lines wrap: below a certain width a table does not get better."""
    step, params, x = two_stages()
    report = step.lower(params, x).report()
    monkeypatch.setenv("COLUMNS", "64")
    narrow = str(report)
    monkeypatch.setenv("COLUMNS", "40")
    assert str(report) == narrow


# --- short reprs ---------------------------------------------------------------------------------------------------


def test_reprs_are_short_and_shown_in_notebooks():
    """Of every object that a user holds on the way: less than 40 lines, no address, and a form in HTML."""
    step, params, x = two_stages()
    traced = step.trace(params, x)
    lowered = traced.lower()
    compiled = lowered.compile()
    program, layout = large()
    order = mm.schedules.get("1f1b").order(range(8), 64)
    objects = [
        step, traced, lowered, lowered.program, lowered.plan, lowered.layout, compiled, compiled.report(), program, layout,
        mm.Task("many", devices=mm.planned_devices(512)), made_up(), made_up().timeline(), made_up().compare(predicted()),
        inspect.tabulate(params), inspect.visualize(params), mm.schedules.simulate(order),
        mm.meta.explain(params, jax.make_mesh((2,), ("a",))),
    ]  # fmt: skip
    for it in [*objects, order, mm.schedules.Custom(order.rows), mm.schedules.search(mm.schedules.Costs(), 2, [4])]:
        text = repr(it)
        assert text.count("\n") < 40 and len(text) < 8000, (type(it), text)
        assert " object at 0x" not in text and type(it).__name__ != "function", text
    for it in objects:
        assert it._repr_html_().startswith("<"), type(it)


@pytest.mark.parametrize("word", ["encoder[a]", "[/b]"])
def test_names_are_no_markup(word):
    """Brackets in the names of tasks and parameters are printed as they are, by print, by Rich and in notebooks."""
    step = mm.jit(mm.task(lambda p: jnp.sin(p[word]) @ p[word], word, devices=[0]))
    params = {word: jnp.ones((8, 8))}
    report = step.lower(params).report(mm.inspect.Hardware.h100())
    spans = [(0, "first", "other", None, None, 0.0, 1.0), (0, word, "other", None, None, 3.0, 4.0)]
    recording = made_up()
    recording.spans = tuple(mm.inspect.Span(*s)._replace(waited_for=f"what {word} makes") for s in spans)
    views = {
        "report": report,
        "comparison": recording.compare([(0, word, "other", None, None, 0.0, 1.0)]),
        "timeline": recording.timeline(),
        "table": inspect.tabulate(params, title=f"of {word}"),
    }
    for name, view in views.items():
        out = io.StringIO()
        Console(file=out, width=160).print(view)
        assert word in str(view), name
        assert word in out.getvalue(), name
        assert word in view._repr_html_(), name


def test_a_large_program_names_every_kind():
    """Many layers are one line, with their range, count, submeshes and phase; all of it is in as_text()."""
    program, layout = large()
    text = repr(program)
    assert "layer_0 .. layer_23 (24): submeshes 0-3, loop 0 forward" in text
    assert "layer_0_bwd .. layer_23_bwd (24)" in text.replace(
        "layer_23_bwd .. layer_0_bwd", "layer_0_bwd .. layer_23_bwd"
    )
    assert program.as_text().count("\n") > 40 and all(f.name in program.as_text() for f in program.fragments)
    assert str(layout).count("\n") > 40 > repr(layout).count("\n")


# --- pictures and pages --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("suffix", "start"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_pictures(tmp_path, suffix, start):
    """In three formats, with a bar for each span and the number of its microbatch."""
    path = made_up().timeline(predicted()).save(tmp_path / f"timeline{suffix}")
    assert path.read_bytes().startswith(start)


def test_names_in_a_picture_are_no_formulas(tmp_path):
    """Dollars in the name of a task are no mathematics."""
    recording = made_up()
    recording.spans = (mm.inspect.Span(0, "a$x$b$\\frac$", "other", None, None, 0.0, 9.0),)
    assert recording.timeline().save(tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_has_a_bar_for_each_span():
    """And a row for each submesh, and one for each prediction."""
    figure = made_up().timeline(predicted()).figure()
    (axes,) = figure.axes
    bars = sum(len(c.get_paths()) for c in axes.collections)
    assert bars == 2 * len(made_up().spans)
    labels = [t.get_text() for t in axes.get_yticklabels()]
    assert labels == ["submesh 0\ndata 2, devices 0,1", "submesh 1\ndevice 2", "predicted", "predicted"]
    assert {"0", "1"} <= {t.get_text() for t in axes.texts}


def test_another_name_is_refused(tmp_path):
    """With those that would do."""
    with pytest.raises(ArgumentError, match=r"'run.gif'; end the name in one of .html, .json, .pdf, .png, .svg, .txt"):
        made_up().timeline().save(tmp_path / "run.gif")


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# Points at the third bar, as a mouse would, then zooms, and leaves what is seen in the page's title.
PROBE = """<script>
addEventListener("error", event => document.body.dataset.error = event.message);
addEventListener("load", () => {
  const bars = document.querySelectorAll("rect.span");
  const bar = [...bars].find(b => items[b.dataset.i].label === "front -> submesh 1");
  bar.dispatchEvent(new MouseEvent("mousemove", { bubbles: true, clientX: 300, clientY: 100 }));
  document.body.dataset.tip = document.getElementById("tip").textContent;
  document.body.dataset.shown = document.getElementById("tip").style.display;
  document.body.dataset.hot = document.querySelectorAll("rect.hot").length;
  document.body.dataset.bars = bars.length;
  document.body.dataset.rows = document.querySelectorAll("svg .name").length;
  zoom(.25);
  document.body.dataset.zoomed = document.querySelectorAll("rect.span").length;
  [...document.querySelectorAll("#bar button")].find(b => b.textContent === "forward").click();
  document.body.dataset.forward = document.querySelectorAll("rect.forward").length;
});
</script></head>"""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: apt-get install chromium")
def test_the_page_works_in_a_browser(tmp_path):
    """A row for each submesh, a bar for each span, a tooltip that says what it is, zoom and filters; no error."""
    page = tmp_path / "run.html"
    page.write_text(made_up().timeline(predicted()).html().replace("</head>", PROBE, 1), "utf-8")
    done = subprocess.run(
        [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1200,700", "--dump-dom",
         "--virtual-time-budget=2000", f"--user-data-dir={tmp_path / 'profile'}", page.as_uri()],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    (body,) = re.findall(r"<body[^>]*>", done.stdout)
    found = dict(re.findall(r'data-(\w+)="([^"]*)"', body))
    count = len(made_up().spans)
    assert "error" not in found, found
    assert (found["bars"], found["rows"], found["shown"]) == (str(2 * count), "2", "block"), found
    assert found["tip"].startswith("front -&gt; submesh 1") and "carriesfloat32[8,128] from front" in found["tip"]
    assert "4.0 KiB" in found["tip"] and "predicted200 us" in found["tip"]
    assert int(found["hot"]) == 12 and 0 < int(found["zoomed"]) < 2 * count and found["forward"] == "0"


def test_the_page_loads_nothing():
    """No address in it; and what users call things cannot break out of the data."""
    evil = made_up().spans[0]._replace(label="</script><script>alert(1)</script><!--")
    page = inspect.Timeline((evil,), (), ("<b>",), ("<i>step",)).html()
    assert not re.findall(r"(?:src|href)=|https?://|@import|url\((?!#)", page)
    assert page.count("<script") == 2 and "<title>&lt;i&gt;step" in page
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert json.loads(data)["spans"][0][1] == evil.label


def test_a_notebook_shows_them(tmp_path):
    """Executed by a kernel of its own: tables, programs and timelines come as HTML, progress comes and goes."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    cells = [
        f"import sys; sys.path[:0] = {[str(Path(__file__).parents[1]), str(Path(mm.__file__).parents[1])]}\n"
        "import os; os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=8'\n"
        "import manymesh as mm\nfrom views.steps import two_stages\nstep, params, x = two_stages()",
        "lowered = step.lower(params, x)\nlowered.program",
        "with mm.inspect.record() as run:\n    params, loss = step(params, x)\nrun",
        "import jax\nmesh = jax.make_mesh((2,), ('d',), devices=jax.devices()[:2])\n"
        "mm.inspect.visualize(jax.device_put(x, jax.NamedSharding(mesh, jax.P('d'))))",
        "mm.inspect.tabulate(params)",
        "mm.schedules.simulate('1f1b', 2, 4)",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    nbclient.NotebookClient(notebook, timeout=180, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [
        "".join(str(o.get("data", {}).get("text/html", "")) for o in cell["outputs"]) for cell in notebook["cells"]
    ]
    assert "<pre" in shown[1] and "front_bwd" in shown[1]
    assert "<iframe srcdoc=" in shown[2] and "&lt;svg" in shown[2]
    assert "<table" in shown[3] and "background:#" in shown[3]
    assert "front" in shown[4] and "float32" in shown[4]
    assert "background:#3f7fd6" in shown[5]
    bars = [o for o in notebook["cells"][2]["outputs"] if o["output_type"] == "display_data"]
    assert bars and bars[0]["data"]["text/html"] == ""  # the progress of compiling, gone at the end
    assert not any(o["output_type"] == "stream" for cell in notebook["cells"] for o in cell["outputs"])


def test_looking_loads_nothing_early():
    """`import manymesh` loads neither Rich nor Matplotlib nor the command line; `mm.inspect` no Matplotlib."""
    code = (
        "import sys, manymesh as mm\n"
        "print([n for n in ('rich', 'matplotlib', 'manymesh._cli', 'manymesh._views', 'argparse') if n in sys.modules])\n"
        "mm.inspect.record\nprint('matplotlib' in sys.modules, 'manymesh._cli' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    early = done.stdout.splitlines()
    assert early[0] in ("[]", "['argparse']") and early[1] == "False False", done.stdout


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name in VIEWS:
        (GOLDEN / f"{name}.txt").write_text(text_of(name), "utf-8")


def test_submeshes_of_other_processes(tmp_path) -> None:
    """They are said to be recorded there, in every form, and not to have waited."""
    run = made_up()
    here = inspect.Recording(tuple(s for s in run.spans if s.submesh == 0), run.submeshes, run.steps, elsewhere=(1,))
    lines = str(here.timeline()).splitlines()
    assert "1 | recorded in another process" in lines
    (row,) = [line for line in lines if line.split()[:2] == ["1", "device"]]
    assert row.split()[:5] == ["1", "device", "2", "recorded", "in"] and "%" not in row
    assert "in another process, device 2" in here.timeline().html()
    assert "submesh 1 (in another process, device 2)" in here.timeline().save(tmp_path / "t.json").read_text("utf-8")
    path = here.save(tmp_path / "run.json")
    assert inspect.Recording.load(path) == here
    data = json.loads(path.read_text("utf-8"))
    del data["manymesh"]["elsewhere"]  # as in files of before
    path.write_text(json.dumps(data), "utf-8")
    assert inspect.Recording.load(path).elsewhere == ()
    beside = str(here.timeline(run.spans))
    assert "1 | recorded in another process" in beside and beside.count("\n  ' ") == 2
    assert "recorded in another" not in str(inspect.Timeline((), run.spans, run.submeshes, elsewhere=(1,)))
    nothing = str(inspect.Timeline((), (), run.submeshes, elsewhere=(0, 1)))
    assert nothing.count("| recorded in another process") == 2 and "%" not in nothing
