"""An exception in a line, for messages to other processes."""

from __future__ import annotations

LONGEST = 1000  # characters of what an exception says; it may show a whole array
INTERRUPTED = "KeyboardInterrupt"  # what `in_a_line` gives for Ctrl-C
_TRACEBACK = "Traceback (most recent call last):"
# What JAX says of arrays on devices of other processes, and what to do instead; the first that fits.
_REMEDIES = (
    (
        (
            "Cannot reshard an input that is not fully addressable",
            "must be a fully addressable array",
            "represents addressable devices",
            "cross-host device transfers",
            "cross-host reshard",
            "Cross-host transfers are not supported",
        ),
        "jax.device_put does not move arrays between these processes. A step does, made once: move = manymesh.jit(lambda x: x, "
        "out_shardings=sharding), then move(x); all of them have to call it.",
    ),
    # This one says itself what to write.
    (("`dtype` must be provided",), ""),
    (
        ("non-addressable", "non-fully-addressable", "not fully addressable", "no addressable shards"),
        "This array is on devices of another process, and its value is not here. manymesh.fetch(x) brings it to "
        "every process; all of them have to call it.",
    ),
)


def text_of(error: BaseException) -> str:
    """What an exception says."""
    try:
        return str(error)
    except Exception:  # whatever a user's class does there
        return "<exception str() failed>"  # as Python says it


def remedy_of(error: BaseException) -> str:
    """What to do where an array is on devices of another process, of which JAX knows no way; empty for other exceptions."""
    text = text_of(error)
    return next((remedy for words, remedy in _REMEDIES if any(each in text for each in words)), "")


def first_line(error: BaseException) -> str:
    """The first line of what an exception says; that of the cause too where it ends in a traceback, as of a failed callback."""
    first, *rest = text_of(error).strip().splitlines() or [type(error).__name__]
    if not first.endswith(_TRACEBACK):
        return first
    last = max((k for k, line in enumerate(rest, 1) if line == _TRACEBACK), default=0)
    cause = next((line for line in rest[last:] if line and not line.startswith(" ")), "")
    return first.removesuffix(_TRACEBACK) + cause if cause else first


def in_a_line(error: BaseException) -> str:
    """The kind of an exception, and `first_line`, of which a message takes no more than `LONGEST`."""
    kind, line = type(error).__name__, first_line(error)
    return f"{kind}: {line[:LONGEST]}{'…' * (len(line) > LONGEST)}" if line != kind else kind
