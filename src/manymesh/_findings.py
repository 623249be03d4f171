"""What looks like a mistake, and the sentences that tell of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

NAMED = 3  # tasks in one sentence


class Finding(NamedTuple):
    """Something that looks like a mistake.

    Attributes:
      text: the whole story; of a task what comes after its name.
      task: the name of the task that it is about, if it is about one. Others may be told the same.
    """

    text: str
    task: str | None = None


def sentences(findings: Iterable[Finding]) -> list[str]:
    """A sentence for each finding, one for all tasks of which the same was found: a name is misspelt in sixty layers."""
    tasks: dict[str, list[str]] = {}
    for finding in findings:
        tasks.setdefault(finding.text, []).extend([] if finding.task is None else [finding.task])
    return [f"{_called(list(dict.fromkeys(names)))}{text}" for text, names in tasks.items()]


def _called(names: list[str]) -> str:
    """``tasks 'a', 'b', 'c' and 61 more: ``; nothing for no name."""
    if not names:
        return ""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"task{'s' * (len(names) > 1)} {', '.join(map(repr, names[:NAMED]))}{more}: "
