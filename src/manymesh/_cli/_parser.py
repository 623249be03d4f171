"""What all commands share: a parser that says what is wrong in one line, and how things are printed."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping
from typing import NoReturn

from rich.console import Console

from .._shown import page_width


class Parser(argparse.ArgumentParser):
    """Keeps the lines of examples as they are, and says what is wrong in one line."""

    def __init__(self, **options: object) -> None:
        options = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False, **options}
        super().__init__(**options)  # type: ignore[arg-type]  # handed on as they come

    def error(self, message: str) -> NoReturn:
        """Ends with exit code 2."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def add_json(parser: argparse.ArgumentParser) -> None:
    """The option that every command has."""
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def whole(word: str) -> int:
    """A whole number of at least one."""
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, found {word!r}")
    return int(word)


def console() -> Console:
    """Where text goes. A pipe has no width of its own, and gets neither colours nor cut words."""
    return Console(width=None if sys.stdout.isatty() else page_width(120), highlight=False, soft_wrap=False)


def drawn(text: str, plain: str) -> str:
    """A text, or a plain one where standard output has no code for it."""
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return plain
    return text


def print_json(value: object) -> None:
    """Prints plain data, dataclasses included."""
    print(json.dumps(plain(value), indent=2))


def plain(value: object) -> object:
    """Anything as what JSON knows: dataclasses as objects, what it does not know as text."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value) if not f.name.startswith("_")}
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(v) for v in value]
    return str(value)
