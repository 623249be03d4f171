"""The tutorial "From one process to four", followed by copying: what its commands print is what stands below them."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.once

PAGE = Path(__file__).resolve().parents[2] / "docs/tutorials/processes.md"
BLOCKS = re.compile(
    r"^```(?P<language>py|sh)\n(?P<code>.*?)^```\n(?:^```text\n(?P<text>.*?)^```\n)?", re.MULTILINE | re.DOTALL
)


def printed(command: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a command of the page prints; a plain run of the script stays in this process, which has the devices."""
    words = shlex.split(command)
    assert words[0] == "python", command
    if words[1] != "-m":
        monkeypatch.setattr(sys, "argv", words[1:])
        with contextlib.redirect_stdout(io.StringIO()) as out:
            runpy.run_path(words[1], run_name="__main__")
        return out.getvalue()
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MANYMESH_")}
    done = subprocess.run(
        [sys.executable, *words[1:3], words[3], "--timeout", "200", *words[4:]],
        capture_output=True, text=True, timeout=500, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return "".join(f"{line}\n" for line in done.stdout.splitlines() if " step " in line)


def test_the_losses_are_equal_in_one_process_and_in_four(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint of two stages goes on in four, and one of four processes in one."""
    monkeypatch.chdir(tmp_path)
    script, line, *others = (b for b in BLOCKS.finditer(PAGE.read_text("utf-8")) if b["language"] == "py")
    assert not others and line["code"] == "mm.distributed.initialize()\n"
    before = "import manymesh as mm\n"
    assert before in script["code"]
    losses: dict[int, set[str]] = {}
    for block in BLOCKS.finditer(PAGE.read_text("utf-8")):
        if block["language"] == "py":
            changed = block["code"] != line["code"]
            code = script["code"] if changed else script["code"].replace(before, before + line["code"])
            Path("train.py").write_text(code, "utf-8")
            continue
        assert printed(block["code"], monkeypatch) == block["text"]
        for number, loss in re.findall(r"step (\d+): (\S+)", block["text"]):
            losses.setdefault(int(number), set()).add(loss)
    assert sorted(losses) == [1, 2, 3, 4, 5, 6] and all(len(found) == 1 for found in losses.values())
