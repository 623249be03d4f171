"""The carrier of this process, by the name of its transport."""

from __future__ import annotations

from collections.abc import Callable

from .._distributed._transports import of_backend
from .._distributed._world import World, several
from ._carrier import Carrier
from ._cross_host import CrossHostPuts
from ._permute import Permutes
from ._pull import Puller

_KINDS: dict[str, Callable[[World], Carrier]] = {"pull": Puller, "device_put": CrossHostPuts, "ppermute": Permutes}


def carrier() -> Carrier:
    """What carries arrays between this process and others.

    Made when it is first needed, because it needs devices. All processes have to ask for the first time together: they
    find each other there.
    """
    world = several()
    name = world.asked or of_backend()
    if name not in world.carriers:
        world.carriers[name] = _KINDS[name](world)
    return world.carriers[name]  # type: ignore[no-any-return]  # the world is below what carries
