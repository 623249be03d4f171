"""What is told while a step compiles: a bar on terminals and in notebooks, a callback, and the logger ``manymesh``."""

from __future__ import annotations

import contextlib
import html
import logging
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ._errors import ArgumentError

logger = logging.getLogger("manymesh")


class Progress(NamedTuple):
    """How far the compilation of a step is.

    Attributes:
      step: name of the step.
      fragment: the fragment that is ready; empty at the beginning.
      done: how many fragments are.
      total: how many there are.
    """

    step: str
    fragment: str
    done: int
    total: int


Listener = Callable[[Progress], object]
_how: list[bool | Listener] = [True]


class Choice:
    """What `progress` returns: as a context manager it brings back what was before."""

    def __init__(self, before: bool | Listener) -> None:
        self._before = before

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        _how[0] = self._before


def progress(how: bool | Listener) -> Choice:
    """Says how the progress of compilations is shown, from now on, or inside a ``with`` block.

    Args:
      how: True for a bar on terminals and in notebooks, and nothing elsewhere, which is what happens unasked; False for
        nothing anywhere; or a function that is called with a `Progress` at the beginning and for each fragment that is
        ready, instead of the bar.

    Returns:
      A context manager that brings back what was before.

    Whatever is chosen, the logger ``manymesh`` hears of each compiled step (level INFO) and fragment (level DEBUG).

    Example:
      >>> import jax.numpy as jnp, manymesh as mm
      >>> f = mm.jit(mm.task(jnp.sin, "wave", devices=[0]))
      >>> with mm.inspect.progress(lambda p: print(f"{p.step}: {p.done} of {p.total} {p.fragment}")):
      ...     y = f(jnp.ones(2))
      sin: 0 of 1
      sin: 1 of 1 wave
    """
    if not isinstance(how, bool) and not callable(how):
        raise ArgumentError(
            f"progress: expected True, False or a function of a Progress, found {type(how).__name__} {how!r}"
        )
    choice = Choice(_how[0])
    _how[0] = how
    return choice


@contextlib.contextmanager
def compiling(name: str, total: int) -> Iterator[Callable[[str], None]]:
    """Tells how many fragments of a step are compiled while the block runs.

    Args:
      name: name of the step.
      total: number of fragments.

    Yields:
      A function to be called with the name of each fragment that is ready.
    """
    begin, done = time.perf_counter(), 0
    with _shown(name, total) as show:

        def ready(fragment: str) -> None:
            nonlocal done
            done += 1
            logger.debug("%s: %s is compiled, %d of %d", name, fragment, done, total)
            show(Progress(name, fragment, done, total))

        show(Progress(name, "", 0, total))
        yield ready
    logger.info("%s: %d fragments are compiled, in %.2f s", name, total, time.perf_counter() - begin)


@contextlib.contextmanager
def _shown(name: str, total: int) -> Iterator[Listener]:
    """Where progress is shown."""
    how = _how[0]
    if callable(how):
        yield how
    elif not how:
        yield lambda progress: None
    elif _in_notebook():
        yield from _notebook()
    elif sys.stderr.isatty():
        yield from _terminal(name, total)
    else:
        yield lambda progress: None


def _in_notebook() -> bool:
    """Whether this is the kernel of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return type(shell).__name__ == "ZMQInteractiveShell"


def _notebook() -> Iterator[Listener]:
    """A bar in the output of the cell, gone at the end."""
    from IPython.display import HTML, display

    bar = display(HTML(""), display_id=True)

    def show(p: Progress) -> None:
        words = html.escape(f"compiling {p.step}: {p.fragment}".removesuffix(": "))
        bar.update(HTML(f"<progress max='{p.total}' value='{p.done}'></progress> {p.done}/{p.total} {words}"))

    try:
        yield show
    finally:
        bar.update(HTML(""))


def _terminal(name: str, total: int) -> Iterator[Listener]:
    """A bar on standard error, gone at the end."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = TextColumn("compiling {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(name, total=total)
        yield lambda p: bar.update(task, completed=p.done, description=f"{name}: {p.fragment}".removesuffix(": "))
