"""Which transport moves arrays between processes: the one that suits the backend, unless somebody says another."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal, get_args

import jax

from .. import _compat
from .._errors import ProcessError
from ._ports import reserve_port

TransportName = Literal["pull", "device_put", "ppermute"]
NAMES: tuple[TransportName, ...] = get_args(TransportName)
VARIABLE = "MANYMESH_TRANSPORT"
# Seconds that JAX's cross-host transfers wait for each other; our own watch is sooner and has words.
_PATIENCE = 7 * 24 * 3600


def asked_for(argument: str | None) -> TransportName | None:
    """The transport that somebody wants: the argument of `initialize`, or else the environment variable.

    Args:
      argument: what `initialize` was given.

    Raises:
      ProcessError: there is no transport of that name.
    """
    given, place = (argument, "transport") if argument is not None else (os.environ.get(VARIABLE) or None, VARIABLE)
    for name in NAMES:
        if given == name:
            return name
    if given is None:
        return None
    names = ", ".join(map(repr, NAMES))
    raise ProcessError(
        f"distributed.initialize: {place} has to be one of {names}, found {given!r}; without it the backend decides"
    )


def of_backend() -> TransportName:
    """The transport that suits the backend: the one that it has itself, where JAX says that it has one."""
    return "device_put" if _compat.transfers_across_hosts() else "pull"


def prepare(name: TransportName | None, host: str) -> None:
    """Tells JAX what it needs before the backend starts.

    A backend without transfers of its own, as on CPU, gets JAX's over sockets. They want a port that is fixed: with
    port 0 the processes tell each other port 0, and wait for ever.

    Args:
      name: the transport that was asked for; what the backend has itself needs nothing.
      host: address that this process listens on.
    """
    if name != "device_put" or jax.config.values["jax_cross_host_transfer_socket_address"]:
        return
    held = reserve_port(host)
    port = held.getsockname()[1]
    held.detach()  # open until this process ends: the backend may start whenever it likes
    host = f"[{host}]" if ":" in host else host
    jax.config.update("jax_cross_host_transfer_socket_address", f"{host}:{port}")
    if not jax.config.values["jax_cross_host_transport_addresses"]:
        jax.config.update("jax_cross_host_transport_addresses", f"{host}:0,{host}:0")
    if jax.config.values["jax_cross_host_transfer_timeout_seconds"] is None:
        jax.config.update("jax_cross_host_transfer_timeout_seconds", _PATIENCE)


def different_transports(asked: Sequence[str | None]) -> str:
    """What is wrong where processes ask for different transports; empty where all ask for the same one.

    Args:
      asked: what each asks for.
    """
    different = next((p for p, name in enumerate(asked) if name != asked[0]), None)
    if different is None:
        return ""
    return (
        f"the processes ask for different transports: process 0 for {_shown(asked[0])}, process {different} for "
        f"{_shown(asked[different])}; give all of them the same transport= and {VARIABLE}"
    )


def _shown(name: str | None) -> str:
    return repr(name) if name else "that of its backend"
