"""What JAX knows of other processes, and the service through which they find each other."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
from typing import Any

from jax._src import api, clusters, distributed, xla_bridge
from jax._src.lib import _jax  # type: ignore[attr-defined]  # JAX re-exports this without saying so


def backends_have_started() -> bool:
    """Whether JAX has looked for devices, after which it takes no settings about processes any more."""
    return xla_bridge.backends_are_initialized()


def cluster_name() -> str | None:
    """The kind of cluster that JAX finds in the environment (Slurm, Kubernetes, Open MPI, TPU pods), if any."""
    for kind in clusters.ClusterEnv._cluster_types:
        if not kind.opt_in_only_method and kind.is_env_present():
            return kind.__name__.removesuffix("Cluster")
    return None


def coordination_client() -> Any:
    """The client of the service through which processes find each other; None in a process of its own."""
    return distributed.global_state.client


def coordinator_address() -> str | None:
    """Where that service is."""
    return distributed.global_state.coordinator_address


def start_coordination_service(address: str, processes: int, heartbeat_timeout: int) -> Any:
    """Hosts that service here; it stops when what is returned is dropped.

    Args:
      address: ``host:port`` to listen on.
      processes: how many will come.
      heartbeat_timeout: seconds of silence after which it takes a process for dead.
    """
    return _jax.get_distributed_runtime_service(address, processes, heartbeat_timeout=heartbeat_timeout)


def transfers_across_hosts() -> bool:
    """Whether the backend itself moves arrays between processes, as JAX asks it."""
    return bool(getattr(xla_bridge.get_backend(), "supports_cross_host_transfers", False))


def process_numbers() -> tuple[int, int]:
    """The number of this process and how many there are, without looking for devices."""
    return distributed.global_state.process_id, distributed.global_state.num_processes


def leave_without_farewell() -> None:
    """Takes back what JAX does when Python ends: it would wait there for processes that are gone, or abort without them."""
    atexit.unregister(api.clean_up)
    state = distributed.global_state
    for kept in (state.preemption_sync_manager, state.client, state.service, *xla_bridge._backends.values()):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))  # nothing takes them apart before the process is gone


def leave_with_farewell() -> None:
    """Does what JAX does when Python ends, its farewell too where what it does before that fails."""
    atexit.unregister(api.clean_up)
    with contextlib.suppress(Exception):  # another one of JAX's, which runs later, says what it is
        api.clean_up()
    distributed.shutdown()


def stored_text(client: Any, key: str, seconds: float) -> str | None:
    """A text of the coordination service, if it is written within a time; without any, if it is written now.

    Waiting for a moment only would not do: on a busy machine the answer takes longer.
    """
    try:
        if seconds <= 0:
            return str(client.key_value_try_get(key))
        return str(client.blocking_key_value_get(key, max(1, int(1000 * seconds))))
    except Exception as error:  # what it raises has no class of its own
        if "DEADLINE_EXCEEDED" not in str(error) and "NOT_FOUND" not in str(error):
            raise
        return None
