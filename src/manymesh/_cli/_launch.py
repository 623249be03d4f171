"""``python -m manymesh launch``: a script in several processes of this machine."""

from __future__ import annotations

import argparse
import os
import sys

from .._distributed._launch import run_processes
from .._distributed._restarts import Restarts
from .._errors import ProcessError

NAME = "launch"
HELP = "run a script in several processes of this machine"

_DESCRIPTION = """Runs a script in several local processes, which find each other by manymesh.distributed.initialize().

Each line that they print begins with the number of the process. The exit code is that of the first one that failed, and
whatever happens, none of them is left behind. With --max-restarts all are started again when one has failed, for scripts
that go on from their last checkpoint."""

_EPILOG = """
examples:
  python -m manymesh launch -n 4 train.py --steps 100                  four processes
  python -m manymesh launch -n 4 --devices-per-process 2 train.py      each with two simulated CPU devices
  python -m manymesh launch -n 4 -m package.train --steps 100          a module, as of python -m
  python -m manymesh launch -n 2 --timeout 600 train.py                ended after ten minutes, with code 124
  python -m manymesh launch -n 4 --max-restarts 9 train.py             started again up to nine times when one dies
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `COMMANDS`."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.add_argument("-n", "--processes", type=int, required=True, metavar="N", help="how many processes")
    parser.add_argument(
        "--devices-per-process", type=int, metavar="D",
        help="simulated CPU devices of each; without it each process has the devices that JAX finds",
    )  # fmt: skip
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="end all of them after so long, with code 124")
    parser.add_argument(
        "--grace", type=float, metavar="SECONDS",
        help="how long they may go on after Ctrl-C or SIGTERM, to save something; without it 5 after Ctrl-C, 2 after SIGTERM",
    )  # fmt: skip
    parser.add_argument(
        "--max-restarts", type=int, default=0, metavar="R",
        help="when one fails, start all again, so many times at most; MANYMESH_RESTARTS tells them how often that was",
    )  # fmt: skip
    parser.add_argument(
        "--min-processes", type=int, metavar="M",
        help="each time that one was killed or fell silent, start one fewer, but M at least; the same number without it",
    )  # fmt: skip
    parser.add_argument(
        "-m", "--module", action="store_true", help="the script is the name of a module, as of python -m"
    )
    parser.add_argument("script", help="a Python file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")


def run(args: argparse.Namespace) -> int:
    """Runs the script; gives the exit code of the first process that failed, or 0."""
    if not args.module and not os.path.exists(args.script):
        print(f"python -m manymesh launch: there is no file {args.script!r}; a module is run by -m", file=sys.stderr)
        return 2
    command = [sys.executable, *["-m"] * args.module, args.script, *args.arguments]
    restarts = Restarts(args.max_restarts, args.min_processes)
    try:
        code = run_processes(
            command, args.processes, args.devices_per_process, timeout=args.timeout, restarts=restarts, grace=args.grace
        )
        _flush()
        return code
    except ProcessError as error:
        print(f"python -m manymesh {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _flush() -> None:
    """What cannot be written any more is not tried again when Python ends, with an exit code of its own."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # what is flushed at exit goes there
