"""What looks like a mistake, and the sentences that tell of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ._shown import joined


class Finding(NamedTuple):
    """Something that looks like a mistake.

    Attributes:
      text: the whole story; of a task what comes after its name.
      task: the name of the task that it is about, if it is about one. Others may be told the same.
    """

    text: str
    task: str | None = None


def listed(names: Iterable[str]) -> str:
    """The first three of some names, each once, and how many more there are."""
    shown = list(dict.fromkeys(names))
    return ", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "")


def sentences(findings: Iterable[Finding]) -> list[str]:
    """A sentence for each finding, one for all tasks of which the same was found: a name is misspelt in sixty layers."""
    tasks: dict[str, list[str]] = {}
    for finding in findings:
        tasks.setdefault(finding.text, []).extend([] if finding.task is None else [finding.task])
    called = {text: list(dict.fromkeys(map(repr, names))) for text, names in tasks.items()}
    return [
        f"task{'s' * (len(names) > 1)} {joined(names)}: {text}" if names else text for text, names in called.items()
    ]
