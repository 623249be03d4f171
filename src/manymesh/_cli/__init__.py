"""``python -m manymesh``: one module for each command."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from . import _launch

# Each has NAME, HELP, add_arguments(parser) and run(args) -> exit code.
COMMANDS = (_launch,)


def main(argv: Sequence[str]) -> int:
    """Runs a command.

    Args:
      argv: its name and arguments.

    Returns:
      The exit code.
    """
    parser = argparse.ArgumentParser("python -m manymesh", description=__doc__)
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        sub = subparsers.add_parser(command.NAME, help=command.HELP, description=command.HELP)
        command.add_arguments(sub)
        sub.set_defaults(run=command.run)
    args = parser.parse_args(argv)
    return int(args.run(args))


__all__ = ["COMMANDS", "main"]
