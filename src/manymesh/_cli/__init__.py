"""The command line: ``python -m manymesh``.

Each command is a module with ``NAME``, ``HELP``, ``add_arguments(parser)`` and ``run(args) -> int``, and an entry in
`COMMANDS`. Exit codes: 0 all is well, 1 something is wrong with what was asked about, 2 the words make no sense.
"""

from __future__ import annotations

import difflib
import io
import os
import sys
from collections.abc import Sequence
from typing import NoReturn, Protocol, cast

from .._errors import ManyMeshError
from . import _doctor, _launch, _plan, _schedule, _trace
from ._parser import Parser


class Command(Protocol):
    """What a module of a command has."""

    NAME: str
    HELP: str

    def add_arguments(self, parser: Parser, /) -> None:
        """Adds its options, and says in `description` and `epilog` what it is for, with examples."""

    def run(self, args: object, /) -> int:
        """Does it; gives the exit code."""


COMMANDS = (_schedule, _plan, _doctor, _trace, _launch)

_EPILOG = """
start here:
  python -m manymesh doctor                                    is this machine ready?
  python -m manymesh schedule --compare --stages 4 --num-microbatches 8
                                                               which schedule wastes least?
  python -m manymesh plan train.py:plan --devices 64           what would run where, on devices you do not have?
  python -m manymesh trace run.json --out run.html             where did the time of a recorded run go?

Every command has --help with examples; all but launch have --json, for programs that read what they say.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
      argv: the words after ``python -m manymesh``; those of this process by default.

    Returns:
      The exit code.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")  # it may have no code for a character in somebody's names
    parser = Parser(
        prog="python -m manymesh", description="Looks at pipelines before and after they run.", epilog=_EPILOG
    )
    parser.add_argument(
        "--version", action="version", version=f"manymesh {_doctor.version_of('manymesh') or 'unknown'}"
    )
    commands = parser.add_subparsers(title="commands", metavar="command", dest="command", required=True)
    for module in COMMANDS:
        command = cast(Command, module)
        child = commands.add_parser(command.NAME, help=command.HELP)
        command.add_arguments(child)
        child.set_defaults(run=command.run, parser=child)
    if not (sys.argv[1:] if argv is None else argv):
        parser.print_help()
        return 2
    try:
        args, unknown = parser.parse_known_args(argv)
        if unknown:
            _reject(args.parser, unknown)
    except SystemExit as exit:  # --help, or a word that makes no sense, which the parser has said
        return exit.code if isinstance(exit.code, int) else 2
    try:
        return int(args.run(args))
    except (ManyMeshError, OSError) as error:
        if isinstance(error, BrokenPipeError):  # whoever read has seen enough
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # what is flushed at exit goes there
            return 0
        words = str(error)
        if isinstance(error, OSError) and error.strerror:
            words = f"{error.filename}: {error.strerror}"
        print(f"manymesh {args.command}: {' '.join(words.split())}", file=sys.stderr)
        for note in getattr(error, "__notes__", ()):  # such as which pieces of a batch a shape is that of
            if not note.startswith(("see docs", "----")):  # nor what JAX says of its own frames
                print(f"  {' '.join(note.split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _reject(parser: Parser, words: Sequence[str]) -> NoReturn:
    """Ends with the words that a command does not know, and the options that come near."""
    options = [option for action in parser._actions for option in action.option_strings]
    names = [word.partition("=")[0] for word in words if word.startswith("-")]
    near = sorted(
        {o for o in options for n in names if n.strip("-") in o or o in difflib.get_close_matches(n, options, 1)}
    )
    said = f" (did you mean {', '.join(near)}?)" if near else ""
    parser.error(f"unrecognized arguments: {' '.join(words)}{said}")
