"""Two processes of this machine, one CPU device each, that run a benchmark together."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from _timing import write_rows
from jax.experimental import transfer

from manymesh._distributed._launch import run_processes
from manymesh._distributed._world import several


class Link:
    """What one writes who has read the documentation: a server, a connection, and a number for each array."""

    def __init__(self) -> None:
        self.server = transfer.start_transfer_server(jax.local_devices()[0].client, "127.0.0.1:0", ["127.0.0.1:0"] * 2)
        self.me, world = jax.process_index(), several()
        world.write(f"by-hand/{self.me}", self.server.address())
        self.other = self.server.connect(world.read(f"by-hand/{1 - self.me}"))
        self.begin = 0  # what numbers are counted from

    def give(self, number: int, x: jax.Array) -> None:
        """Has an array ready for the other process."""
        self.server.await_pull(self.begin + number, [x])

    def take(self, number: int, like: jax.ShapeDtypeStruct) -> jax.Array:
        """An array of the other process, asynchronously."""
        (x,) = self.other.pull(self.begin + number, [like])
        return x


def say(folder: str, rows: list[dict[str, Any]]) -> None:
    """Hands the rows to the process that started the two."""
    if jax.process_index() == 0:
        Path(folder, "rows").write_text(json.dumps(rows))


def in_two(script: str, options: Sequence[object], path: str | None, more: dict[str, str] | None = None) -> int:
    """Runs a script with options and ``--worker FOLDER`` in two processes; prints and writes the rows; gives its exit code."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, script, *map(str, options), "--worker", folder]
        variables = {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), **(more or {})}
        code = run_processes(command, 2, 1, more=variables, timeout=1200)
        rows = json.loads(Path(folder, "rows").read_text()) if code == 0 else []
    for found in rows:
        print(found)
    write_rows(path, rows)
    return code
