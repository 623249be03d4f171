"""Python's cyclic garbage collector, which costs a third of the time in which a large program is traced and planned."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# Objects that the collector may as well look through once: that takes some milliseconds.
MANY = 30_000


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pauses the collector.

    Tracing and planning make millions of small objects that live on. Each few thousand of them the collector looks
    through more and more, and finds nothing. Afterwards they count as old at once: as new ones they would all be
    looked through with the next object that anybody makes.
    """
    paused = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if paused:
            # Where somebody has frozen objects they are to stay so; to ask takes as long as there are frozen ones.
            if gc.get_count()[0] > MANY and not gc.get_freeze_count():
                gc.freeze()
                gc.unfreeze()  # into the oldest generation, unseen
            gc.enable()
