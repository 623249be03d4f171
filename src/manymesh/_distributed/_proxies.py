"""Proxies of the environment, which gRPC takes: by it processes speak to the coordination service."""

from __future__ import annotations

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
    said = variables.get(_EXCEPTIONS) or variables.get(_EXCEPTIONS_OF_ALL)
    return {_EXCEPTIONS: f"{said},{host}" if said else host}


def words_on_proxies(variables: Mapping[str, str], host: str) -> str:
    """What to look at where a host was not reached, if a proxy is asked for connections to it; else nothing.

    Args:
      variables: the environment.
      host: name or address, as in what is connected to.
    """
    proxy = _proxy(variables)
    name = next((name for name in (_EXCEPTIONS, _EXCEPTIONS_OF_ALL) if variables.get(name)), _EXCEPTIONS_OF_ALL)
    endings = [ending.strip() for ending in variables.get(name, "").split(",")]
    if proxy is None or any(host.endswith(ending) for ending in endings if ending):
        return ""
    return f"; {proxy} is set, so processes ask that proxy for {host}: name {host} in {name}"


def _proxy(variables: Mapping[str, str]) -> str | None:
    return next((name for name in _PROXIES if variables.get(name)), None)
