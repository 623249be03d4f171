"""A progress bar for compilation, on a terminal only."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def compiling(name: str, total: int) -> Iterator[Callable[[str], None]]:
    """Shows how many fragments of a step are compiled while the block runs; gone when it is left.

    Args:
      name: name of the step.
      total: number of fragments.

    Yields:
      A function to be called with the name of each fragment that is ready. It does nothing where standard error
      is no terminal.
    """
    if not sys.stderr.isatty():
        yield lambda fragment: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("compiling {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(name, total=total)
        yield lambda fragment: bar.update(task, advance=1, description=f"{name}: {fragment}")
