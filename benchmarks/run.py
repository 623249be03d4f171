"""Runs every benchmark, each in its own process, and prints one table.

    python benchmarks/run.py [--quick] [--only NAME ...] [--torch PYTHON]

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
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
# name -> options of a full run and of a quick one
SCRIPTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "pipeline": (
        ("--seconds", "40"),
        ("--blocks", "4", "--width", "64", "--hidden", "256", "--batch", "128", "--rounds", "6"),
    ),
    "decoder": (
        ("--seconds", "40"),
        ("--layers", "2", "1", "--width", "32", "--length", "16", "--vocabulary", "64", "--rounds", "4"),
    ),
    "one_core": (("--rounds", "12"), ("--rounds", "3", "--milliseconds", "5")),
    "peers": (("--seconds", "40"), ("--quick", "--rounds", "5")),
    "dispatch": ((), ("--rounds", "5", "--tasks", "16")),
    "importing": ((), ("--rounds", "2")),
    "recording": ((), ("--blocks", "2", "--width", "64", "--hidden", "64", "--batch", "64", "--rounds", "4")),
    "planning": ((), ("--stages", "8", "--microbatches", "16", "--layers", "12")),
    "predict": ((), ("--steps", "readme", "--rounds", "3")),
    "compile": (("--rounds", "5"), ("--layers", "4", "--rounds", "1")),
    "processes": ((), ("--repetitions", "1")),
    "transports": ((), ("--rounds", "3", "--bytes", "1024", "1048576")),
    "two_processes": (("--rounds", "8"), ("--rounds", "1", "--batch", "64", "--schedule", "1f1b")),
    "failures": (("--repetitions", "1"), ("--repetitions", "1", "--only", "kill")),
    "restarts": (("--steps", "80"), ("--steps", "20", "--processes", "2", "--every", "10", "--save-every", "5")),
    "stalls": (("--runs", "2"), ("--runs", "1", "--schedules", "gpipe")),
    "memory": ((), ("--stages", "2")),
    "checkpoint": ((), ("--megabytes", "8", "--leaves", "20", "--rounds", "2")),
    "metadata": ((), ("500",)),
}


def run(name: str, options: tuple[str, ...]) -> tuple[int, list[dict[str, Any]]]:
    """Runs one script; its exit code and its rows."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.json")
        more = () if name == "metadata" else ("--json", str(path))
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
        if name == "metadata":
            return code, metadata_rows("".join(lines))
        return code, json.loads(path.read_text()) if path.exists() else []


def metadata_rows(text: str) -> list[dict[str, Any]]:
    """Rows of the table that the metadata benchmark prints: name, two times, their ratio, the promised one."""
    found = re.findall(r"^(\w+) +([\d.]+) +([\d.]+) +([\d.]+) +([\d.]+)", text, re.MULTILINE)
    return [
        {
            "what": f"metadata, {name}",
            "ours": f"{ours} ms",
            "theirs": f"{theirs} ms Flax",
            "figure": f"{times}x faster",
            "target": f">= {promised}x",
            "met": float(times) >= float(promised),
        }
        for name, theirs, ours, times, promised in found
    ]


def show(rows: list[dict[str, Any]]) -> None:
    """Prints the table."""
    words = {True: "[green]met[/]", False: "[red]missed[/]", None: ""}
    table = Table("what", "ManyMesh", "beside", "measured", "target", "")
    for row in rows:
        table.add_row(row["what"], row["ours"], row["theirs"], row["figure"], row["target"], words[row["met"]])
    Console(width=None if sys.stdout.isatty() else 150).print(table)  # a log has no width of its own


def main() -> int:
    """Runs all and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small problems and few rounds: does everything run?")
    parser.add_argument("--only", nargs="+", choices=list(SCRIPTS), default=list(SCRIPTS), metavar="NAME")
    parser.add_argument("--torch", metavar="PYTHON", help="a Python that has torch; this one by default")
    a = parser.parse_args()
    rows: list[dict[str, Any]] = []
    broken = []
    begin = time.perf_counter()
    for name in a.only:
        if name == "metadata" and importlib.util.find_spec("flax") is None:
            print("-- metadata: Flax is not installed")
            continue
        print(f"-- {name}", flush=True)
        options = SCRIPTS[name][a.quick]
        code, found = run(name, (*options, "--torch", a.torch) if name == "peers" and a.torch else options)
        if not found or (code and name != "metadata"):  # metadata exits with 1 where a target is missed
            broken.append(f"{name} (exit code {code})")
        rows += found
    show(rows)
    print(f"{time.perf_counter() - begin:.0f} s{', quick: these figures say nothing about speed' if a.quick else ''}")
    if broken:
        print(f"broken: {', '.join(broken)}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
