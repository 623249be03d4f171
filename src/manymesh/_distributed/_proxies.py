"""Proxies of the environment, which gRPC takes: by it processes speak to the coordination service."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping

# In the order in which gRPC looks; it knows no others, and none in capitals.
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
_EXCEPTIONS, _EXCEPTIONS_OF_ALL = "no_grpc_proxy", "no_proxy"


def past_proxies(variables: Mapping[str, str], host: str) -> dict[str, str]:
    """The variables by which gRPC reaches a host by no proxy, and all others as it did; nothing but gRPC takes them.

    Where no proxy is asked for there are none: JAX warns of every variable whose name looks like this.

    Args:
      variables: the environment.
      host: name or address, as in what is connected to.
    """
    if _proxy(variables) is None:
        return {}
    said = variables.get(_exceptions(variables))
    return {_EXCEPTIONS: f"{said},{host}" if said else host}


def words_on_proxies(variables: Mapping[str, str], host: str) -> str:
    """What to look at where a host was not reached, if a proxy is asked for connections to it; else nothing.

    Args:
      variables: the environment.
      host: name or address, as in what is connected to.
    """
    proxy = _proxy(variables)
    name = _exceptions(variables)
    if proxy is None or any(_covers(word.strip(), host) for word in variables.get(name, "").split(",")):
        return ""
    return f"; {proxy} is set, so processes ask that proxy for {host}: name {host} in {name}"


def _exceptions(variables: Mapping[str, str]) -> str:
    """The variable that gRPC looks at: its own goes before that of all, also where it is empty."""
    return _EXCEPTIONS if _EXCEPTIONS in variables else _EXCEPTIONS_OF_ALL


def _covers(exception: str, host: str) -> bool:
    """Whether one of the exceptions, the end of a name or a range of addresses, is about a host."""
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(exception, strict=False)
    except ValueError:  # one of them is a name
        return bool(exception) and host.endswith(exception)


def _proxy(variables: Mapping[str, str]) -> str | None:
    return next((name for name in _PROXIES if variables.get(name)), None)
