"""Runs every benchmark, each in its own process, and prints one table.

    python benchmarks/run.py [--seconds 75]

Times are compared inside one process, in turns, so that the figures are ratios and differences and not the speed
of this machine. Nothing fails on a missed target: the machine may be busy. It fails if a benchmark breaks or if two
ways of computing the same disagree.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent


def run(name: str, *options: str) -> tuple[int, str, list[dict[str, Any]]]:
    """Runs one script; its exit code, what it printed, and the rows that it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder, "rows.json")
        more = () if name == "metadata" else ("--json", str(rows))
        process = subprocess.Popen(
            [sys.executable, str(HERE / f"{name}.py"), *options, *more], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None, "its output is a pipe"
        lines = []
        for line in process.stdout:
            sys.stdout.write(line)
            sys.stdout.flush()
            lines.append(line)
        code = process.wait()
        return code, "".join(lines), json.loads(rows.read_text()) if rows.exists() else []


def metadata_rows(text: str) -> list[dict[str, Any]]:
    """Rows of the table that the metadata benchmark prints: name, two times, their ratio, the promised one."""
    found = re.findall(r"^(\w+) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+)", text, re.MULTILINE)
    return [
        {
            "what": f"metadata, {name}",
            "ours": f"{ours} ms",
            "theirs": f"{theirs} ms Flax",
            "figure": f"{times}x faster",
            "target": f"{promised}x",
            "met": float(times) >= float(promised),
        }
        for name, theirs, ours, times, promised in found
    ]


def main() -> int:
    """Runs all and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=75, help="time for each schedule of the pipeline")
    a = parser.parse_args()
    rows: list[dict[str, Any]] = []
    broken = []
    plans: list[tuple[str, tuple[str, ...]]] = [("pipeline", ("--seconds", str(a.seconds))), ("dispatch", ())]
    if (HERE / "metadata.py").exists() and importlib.util.find_spec("flax"):
        plans.append(("metadata", ()))
    for name, options in plans:
        print(f"-- {name}", flush=True)
        code, text, found = run(name, *options)
        found = metadata_rows(text) if name == "metadata" else found
        if not found:
            broken.append(f"{name} (exit code {code})")
        rows += found
    table = Table("what", "ManyMesh", "beside", "compared", "target", "")
    for row in rows:
        met = "[green]met[/]" if row["met"] else "[red]missed[/]"
        table.add_row(row["what"], row["ours"], row["theirs"], row["figure"], row["target"], met)
    console = Console()
    console.print(table, soft_wrap=not console.is_terminal)
    if broken:
        console.print(f"[red]broken: {', '.join(broken)}[/]")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
