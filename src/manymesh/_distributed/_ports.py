"""Free ports of this machine, for servers that want to be told one."""

from __future__ import annotations

import socket


def reserve_port(host: str) -> socket.socket:
    """A socket with a free port that nobody else gets while it is open, but servers of this user that share their port.

    Those of JAX do. A port that is let go before they listen may be somebody else's a moment later, as when several
    runs start at once on a machine, and JAX's coordination service then crashes the process.

    Args:
      host: address of this machine.
    """
    held = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind((host, 0))
    return held
