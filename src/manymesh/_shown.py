"""How objects show themselves: short texts, in notebooks as HTML."""

from __future__ import annotations

import contextlib
import functools
import html
import inspect
import io
import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # imported when something is printed
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

MOST = 39
_NARROWEST = 64  # below that the columns of a table are a letter or two wide, and lines that wrap are easier to read
_NUMBER = re.compile(r"\d+")
_PRE = "line-height:1.35;overflow-x:auto;margin:0"


class Shown:
    """Shows its ``repr`` in notebooks, in full width and without quotes."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return f'<pre style="{_PRE}">{html.escape(repr(self))}</pre>'


def name_of(fun: object) -> str:
    """What a function is called: a partial application like the function in it, any other object like its class.

    What ``nnx.grad`` and ``nnx.value_and_grad`` of Flax make is called like the function that they differentiate.
    """
    while isinstance(fun, functools.partial) or getattr(fun, "__name__", None) in _GRADIENTS:
        inner = fun.func if isinstance(fun, functools.partial) else _differentiated(fun)
        if inner is None:
            break
        fun = inner
    return str(getattr(fun, "__name__", type(fun).__name__))


_GRADIENTS = ("grad_wrapper", "tree_grad_wrapper")  # as Flax names them


def _differentiated(fun: Any) -> Any:
    """What a function of Flax differentiates; None for another one of such a name."""
    within = inspect.getclosurevars(unwrapped).nonlocals if inspect.isfunction(unwrapped := inspect.unwrap(fun)) else {}
    return within.get("f", within.get("gradded_fn"))


def page_width(usual: int) -> int:
    """The width of what is printed as a page: the usual one, or that of a terminal that is narrower, but at least 64.

    ``COLUMNS`` goes before the terminal, as it does for Rich. A pipe and a notebook have the usual width.
    """
    words = os.environ.get("COLUMNS", "")
    columns = int(words) if words.isdecimal() else 0
    if not columns and sys.stdout is not None and sys.stdout.isatty():
        with contextlib.suppress(OSError, ValueError):  # it has no number or size, as one that stands in for a terminal
            columns = os.get_terminal_size(sys.stdout.fileno()).columns
    return min(usual, max(columns, _NARROWEST)) if columns else usual


def as_written(console: Console, options: ConsoleOptions, parts: Iterable[RenderableType]) -> RenderResult:
    """Parts of what Rich prints whose words are names of the user: ``enc[a]`` is no markup in them."""
    for part in parts:
        yield from console.render(part, options.update(markup=False))


def rich_html(renderable: object) -> str:
    """What Rich prints, as HTML for notebooks."""
    from rich.console import Console

    console = Console(record=True, file=io.StringIO(), width=140, force_jupyter=False)
    console.print(renderable)
    return console.export_html(inline_styles=True, code_format=f'<pre style="{_PRE}">{{code}}</pre>')


def shortened(text: str, most: int = MOST, whole: str = "") -> str:
    """A text of at most so many lines.

    Lines that differ in numbers alone become one with their count; what is then too much is left out of the middle.

    Args:
      text: the text.
      most: the lines it may have.
      whole: says how to see all of it.
    """
    lines = text.split("\n")
    if len(lines) <= most:
        return text
    alike: dict[str, list[str]] = {}
    for line in lines:
        alike.setdefault(_NUMBER.sub("#", line), []).append(line)
    found = [same[0] if len(same) == 1 else f"{same[0]}  (and {len(same) - 1} alike)" for same in alike.values()]
    hint = f"; {whole} shows all" if whole else ""
    if len(found) > most:
        half = (most - 1) // 2
        left_out = len(found) - 2 * half
        found = [*found[:half], f"  ... {left_out} more{hint}", *found[-half:]]
    elif hint:
        found[0] += f" (shortened{hint})"
    return "\n".join(found)


def format_bytes(count: float) -> str:
    """A number of bytes with a binary unit: ``640 B``, ``1.5 KiB``."""
    if count < 1023.5:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        count /= 1024
        if count < 1023.95 or unit == "TiB":  # which is printed as 1024.0
            break
    return f"{count:.1f} {unit}"


def joined(names: Sequence[str], most: int = 3) -> str:
    """``layer_0 .. layer_47 (48)`` for many names, all of a few."""
    return ", ".join(names) if len(names) <= most else f"{names[0]} .. {names[-1]} ({len(names)})"


def stem(name: str) -> str:
    """A name without its numbers: ``layer_#`` of ``layer_12``."""
    return _NUMBER.sub("#", name)


def numbers(values: Iterable[int]) -> str:
    """``0-3, 7``: sorted, those in a row together."""
    runs: list[list[int]] = []
    for k in sorted(set(values)):
        if runs and runs[-1][1] == k - 1:
            runs[-1][1] = k
        else:
            runs.append([k, k])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
