"""Connections between processes, for short messages: signs of life, acknowledgements, and why somebody ends.

Values do not go this way; `manymesh._runtime._pull` moves them.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import selectors
import socket
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Any

Message = dict[str, Any]
CONNECT_TIMEOUT = 10.0  # seconds


class Wire:
    """One connection: lines of JSON in both directions. Nothing here blocks."""

    def __init__(self, sock: socket.socket, peer: int | None) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock, self.peer = sock, peer
        self._lock = threading.Lock()
        self._waiting, self._partial = b"", b""

    def post(self, message: Message) -> None:
        """Sends a message, or keeps what the connection does not take now for the next time."""
        with self._lock:
            self._waiting += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Sends what is left of earlier messages."""
        # A peer that is gone is noticed by who reads from it.
        with self._lock, contextlib.suppress(OSError):
            while self._waiting:
                self._waiting = self._waiting[self.sock.send(self._waiting) :]

    def read(self) -> list[Message] | None:
        """The messages that have arrived; None where the other end is closed or speaks something else."""
        try:
            chunk = self.sock.recv(65536)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not chunk:
            return None
        *lines, self._partial = (self._partial + chunk).split(b"\n")
        if len(self._partial) > 65536:
            return None
        try:
            return [dict(json.loads(line)) for line in lines]
        except (ValueError, TypeError):
            return None


class Wires:
    """The connections of one process.

    A stranger who connects has to give a token that only the processes of the run know; else it is cut off.

    Args:
      process: number of this process.
      host: address to listen on.
    """

    def __init__(self, process: int, host: str) -> None:
        self.process, self.token = process, secrets.token_hex(16)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self._listener.setblocking(False)
        self.host, self.port = host, int(self._listener.getsockname()[1])
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_in, selectors.EVENT_READ)
        self._lock = threading.Lock()
        self._new: list[Wire] = []
        self._by_peer: defaultdict[int, list[Wire]] = defaultdict(list)

    @property
    def address(self) -> str:
        """What another process needs to connect."""
        return json.dumps([self.host, self.port, self.token])

    def connect(self, peer: int, address: str) -> None:
        """Connects to another process.

        Raises:
          OSError: nobody listens there.
        """
        host, port, token = json.loads(address)
        wire = Wire(socket.create_connection((host, port), CONNECT_TIMEOUT), peer)
        wire.post({"kind": "hello", "from": self.process, "token": token})
        with self._lock:
            self._by_peer[peer].append(wire)
            self._new.append(wire)
        self._wake_out.send(b"x")

    def has(self, peer: int) -> bool:
        """Whether there is a connection to another process."""
        return bool(self._by_peer.get(peer))

    def post(self, peer: int, message: Message) -> None:
        """Sends a message to a process that there is a connection to."""
        with self._lock:
            wires = self._by_peer[peer][:1]
        for wire in wires:
            wire.post(message)

    def flood(self, message: Message, besides: int | None = None) -> None:
        """Sends a message to everybody there is a connection to, but for the one it came from."""
        for peer in list(self._by_peer):
            if peer != besides:
                self.post(peer, message)

    def poll(self, timeout: float, handle: Callable[[int, Message | None], None]) -> None:
        """Waits for messages and hands them over; None says that a connection ended."""
        with self._lock:
            new, self._new = self._new, []
        for wire in new:
            self._selector.register(wire.sock, selectors.EVENT_READ, wire)
        for key, _ in self._selector.select(timeout):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is self._wake_in:
                with contextlib.suppress(BlockingIOError):
                    self._wake_in.recv(4096)
            else:
                self._receive(key.data, handle)
        for wires in list(self._by_peer.values()):
            for wire in list(wires):
                wire.flush()

    def close(self) -> None:
        """Closes all of them, for this process: one that shares them, because it forked this one or was forked, keeps them."""
        sockets = {wire.sock for wires in self._by_peer.values() for wire in wires}
        registered = self._selector.get_map() or {}  # None where they have been closed before
        sockets |= {key.fileobj for key in registered.values()}  # type: ignore[misc]  # only sockets are in it
        for sock in {self._listener, self._wake_in, self._wake_out, *sockets}:
            sock.close()
        self._selector.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            sock, _ = self._listener.accept()
            self._selector.register(sock, selectors.EVENT_READ, Wire(sock, None))

    def _receive(self, wire: Wire, handle: Callable[[int, Message | None], None]) -> None:
        messages = wire.read()
        for message in messages or ():
            if wire.peer is not None:
                handle(wire.peer, message)
            elif message.get("kind") == "hello" and message.get("token") == self.token:
                wire.peer = int(message["from"])
                with self._lock:
                    self._by_peer[wire.peer].append(wire)
            else:
                messages = None
        if messages is None:
            self._selector.unregister(wire.sock)
            wire.sock.close()
            if wire.peer is not None:
                with self._lock:
                    self._by_peer[wire.peer].remove(wire)
                handle(wire.peer, None)
