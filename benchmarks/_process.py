"""What a benchmark needs from its process: devices and memory settings, which have to stand before JAX starts."""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path

# Freed memory stays in the process. With glibc's defaults each step gives hundreds of megabytes back to the kernel
# and takes them again page by page, which costs as much as the arithmetic and hits whoever frees more.
_KEEP_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 34),
    "MALLOC_TOP_PAD_": str(1 << 26),
}
_MARK = "MANYMESH_BENCHMARK_PROCESS"


def prepare(devices: int, *, quiet: bool = False) -> None:
    """Starts this script again with virtual CPU devices and malloc settings; call it before importing JAX.

    Args:
      devices: how many devices.
      quiet: whether XLA keeps its messages to itself.
    """
    if os.environ.get(_MARK):
        return
    if "jax" in sys.modules:
        raise RuntimeError("prepare() has to come before `import jax`: devices are made when JAX starts")
    flags = [f for f in os.environ.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in f]
    flags.append(f"--xla_force_host_platform_device_count={devices}")
    env = {**os.environ, **_KEEP_MEMORY, _MARK: "1", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags)}
    if quiet:
        env["TF_CPP_MIN_LOG_LEVEL"] = "3"
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *sys.argv], env)


def spread_threads() -> None:
    """Gives each core its share of XLA's compute threads; call it after JAX has made its devices.

    The kernel may leave two busy threads on one core for seconds, which halves the speed of whoever runs then.
    """
    threads = Path("/proc/self/task")
    if not threads.is_dir() or not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    seen: Counter[str] = Counter()
    for thread in sorted(threads.iterdir(), key=lambda t: int(t.name)):
        try:
            name = (thread / "comm").read_text().strip()
        except FileNotFoundError:
            continue
        if name == "tf_XLAEigen":
            os.sched_setaffinity(int(thread.name), {cores[seen[name] % len(cores)]})
            seen[name] += 1
