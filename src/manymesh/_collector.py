"""Python's cyclic garbage collector, which costs a third of the time in which a large program is traced and planned."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
            if not gc.get_freeze_count():  # otherwise somebody has frozen objects, which are to stay so
                gc.freeze()
                gc.unfreeze()  # into the oldest generation, unseen
            gc.enable()
