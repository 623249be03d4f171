"""What devices can do: peak rates, bandwidths and latencies, of machines one has and of machines one has not."""

from __future__ import annotations

import contextlib
import difflib
import functools
import math
import numbers
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._errors import ArgumentError


@dataclass(frozen=True)
class Hardware:
    """One kind of device, and what connects several of them.

    Ready are, each from its vendor's figures, which no program reaches quite (``scaled`` says by how much):

    - ``Hardware.h100()``, SXM: NVIDIA's data sheet, https://www.nvidia.com/en-us/data-center/h100/
    - ``Hardware.h200()``, SXM: NVIDIA's data sheet, https://www.nvidia.com/en-us/data-center/h200/
    - ``Hardware.b200()``, in an HGX B200: NVIDIA Blackwell architecture technical brief,
      https://resources.nvidia.com/en-us-blackwell-architecture, memory: https://www.nvidia.com/en-us/data-center/hgx/
    - ``Hardware.tpu_v5p()``: https://cloud.google.com/tpu/docs/v5p
    - ``Hardware.tpu_v6e()``: https://cloud.google.com/tpu/docs/v6e

    Rates are dense ones, half of what NVIDIA prints for sparse matrices. Products of float32 count as JAX computes them
    by default (https://docs.jax.dev/en/latest/201/precision.html): in TF32 on these GPUs, in bfloat16 on TPUs. A link is
    what one device sends to another, one way: half of NVLink's rate, one of the ports of a TPU's interconnect. Latencies
    and launch overheads are no vendor's figures but orders of magnitude; ``measure`` finds them.

    Attributes:
      name: what it is called.
      peak_flops: FLOP/s of products, by the dtype of their operands; ``float32`` also for other arithmetic.
      memory_bandwidth: bytes a second to and from a device's memory.
      link_bandwidth: bytes a second from one device to another.
      link_latency: seconds until a transfer starts to arrive.
      launch_overhead: seconds that it takes to start a fragment, however small.
      memory_bytes: memory of one device; None if nobody says.
      cores: where devices share the cores of one computer, how many there are; None where each has its own.
    """

    name: str
    peak_flops: Mapping[str, float]
    memory_bandwidth: float
    link_bandwidth: float
    link_latency: float = 5e-6
    launch_overhead: float = 5e-6
    memory_bytes: int | None = None
    cores: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise ArgumentError(f"Hardware: name has to be a text, found {self.name!r}")
        if not isinstance(self.peak_flops, Mapping):
            raise ArgumentError(
                "Hardware: peak_flops has to be a mapping from dtypes to FLOP/s, such as {'float32': 1e12}, found "
                f"{self.peak_flops!r}"
            )
        for dtype in self.peak_flops:
            _check_dtype(dtype)
        if "float32" not in self.peak_flops:
            raise ArgumentError(
                "Hardware: peak_flops needs 'float32', by which dtypes that it does not name are counted"
            )
        rates = {f"peak_flops[{dtype!r}]": rate for dtype, rate in self.peak_flops.items()}
        rates |= {"memory_bandwidth": self.memory_bandwidth, "link_bandwidth": self.link_bandwidth}
        rates |= {name: n for name in ("memory_bytes", "cores") if (n := getattr(self, name)) is not None}
        for name, value in rates.items():
            if not (_is_number(value) and value > 0):
                raise ArgumentError(f"Hardware: {name} has to be a positive number, found {value!r}")
        for name in ("link_latency", "launch_overhead"):
            seconds = getattr(self, name)
            if not (_is_number(seconds) and 0 <= seconds < math.inf):
                raise ArgumentError(f"Hardware: {name} has to be a number of seconds, 0 or more, found {seconds!r}")

    def flops_per_second(self, dtype: str) -> float:
        """The peak rate for operands of a dtype; that of float32 where nothing else is known."""
        return self.peak_flops.get(dtype, self.peak_flops["float32"])

    def scaled(self, efficiency: float) -> Hardware:
        """The same hardware with a part of its FLOP/s, such as 0.4: what programs reach of the vendor's figures."""
        if not _is_number(efficiency):
            raise ArgumentError(f"Hardware: efficiency has to be a number, such as 0.4, found {efficiency!r}")
        rates = {dtype: rate * efficiency for dtype, rate in self.peak_flops.items()}
        return Hardware(
            self.name, rates, self.memory_bandwidth, self.link_bandwidth, self.link_latency, self.launch_overhead,
            self.memory_bytes, self.cores,
        )  # fmt: skip

    @classmethod
    def h100(cls) -> Hardware:
        """NVIDIA H100 SXM."""
        rates = _gpu(bf16=989.4e12, tf32=494.7e12, fp8=1978.9e12, fp64=67e12)
        return cls("H100", rates, 3.35e12, 450e9, memory_bytes=80 * 10**9)

    @classmethod
    def h200(cls) -> Hardware:
        """NVIDIA H200 SXM: an H100 with more and faster memory."""
        rates = _gpu(bf16=989.4e12, tf32=494.7e12, fp8=1978.9e12, fp64=67e12)
        return cls("H200", rates, 4.8e12, 450e9, memory_bytes=141 * 10**9)

    @classmethod
    def b200(cls) -> Hardware:
        """NVIDIA B200 in an HGX B200."""
        rates = _gpu(bf16=2.25e15, tf32=1.1e15, fp8=4.5e15, fp64=40e12)
        return cls("B200", rates, 8e12, 900e9, memory_bytes=180 * 10**9)

    @classmethod
    def tpu_v5p(cls) -> Hardware:
        """Google TPU v5p, one chip."""
        return cls("TPU v5p", _tpu(bf16=459e12, int8=918e12), 2.765e12, 100e9, 1e-6, memory_bytes=95 * 10**9)

    @classmethod
    def tpu_v6e(cls) -> Hardware:
        """Google TPU v6e (Trillium), one chip."""
        return cls("TPU v6e", _tpu(bf16=918e12, int8=1836e12), 1.6e12, 100e9, 1e-6, memory_bytes=32 * 10**9)

    @classmethod
    def ready(cls) -> dict[str, Hardware]:
        """Those above, by name in small letters: ``h100``, ``h200``, ``b200``, ``tpu_v5p``, ``tpu_v6e``."""
        return {make.__name__: make() for make in (cls.h100, cls.h200, cls.b200, cls.tpu_v5p, cls.tpu_v6e)}

    @classmethod
    def of(cls, device: Any) -> Hardware | None:
        """What is known of a device of ``jax.devices()`` by its kind; None for one that is not among those above."""
        kind = str(getattr(device, "device_kind", "")).lower()
        words = {
            "h100": "h100",
            "h200": "h200",
            "b200": "b200",
            "v5p": "tpu_v5p",
            "v6e": "tpu_v6e",
            "v6 lite": "tpu_v6e",
        }
        return next((cls.ready()[name] for word, name in words.items() if word in kind), None)

    @classmethod
    def measure(cls, size: int | None = None) -> Hardware:
        """Measures this machine, on the first devices of ``jax.local_devices()``: seconds of work, more on a slow machine.

        A product of square matrices in float32 and bfloat16, a sum of large vectors, copies to a second device (or to
        the same one, where there is only one), and the shortest launch; of each as many, one after the other, as take
        a twentieth of a second.

        Args:
          size: rows and columns of the matrices; 1024 on CPU and 8192 elsewhere by default.
        """
        return _measure(size)


_KNOWN = (
    "bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2", "int8", "int4",
)  # fmt: skip
_SHORT = {"tf32": "float32", "fp8": "float8_e4m3fn", "float8": "float8_e4m3fn"}


def _check_dtype(dtype: object) -> None:
    """Raises for what is no name of a dtype: nothing would be counted by it."""
    if isinstance(dtype, str):
        with contextlib.suppress(TypeError):
            found = np.dtype(dtype)
            if found.name == dtype and jnp.issubdtype(found, np.number):
                return
    word = str(getattr(dtype, "name", getattr(dtype, "__name__", dtype))).lower()  # of jnp.float32 and its like
    near = _SHORT.get(word) or next(iter(difflib.get_close_matches(word, _KNOWN, 1, 0.5)), None)
    meant = f"{near!r} is meant" if near else f"write one such as {', '.join(map(repr, _KNOWN[:4]))}"
    raise ArgumentError(f"Hardware: peak_flops has {dtype!r}, which is no name of a dtype; {meant}")


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _gpu(bf16: float, tf32: float, fp8: float, fp64: float) -> dict[str, float]:
    low = dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "int8"), fp8)
    return {"bfloat16": bf16, "float16": bf16, "float32": tf32, "float64": fp64, **low}


def _tpu(bf16: float, int8: float) -> dict[str, float]:
    return {"bfloat16": bf16, "float16": bf16, "float32": bf16, "int8": int8}


def _measure(size: int | None) -> Hardware:
    devices = jax.local_devices()
    here, there = devices[0], devices[min(1, len(devices) - 1)]
    on_cpu = here.platform == "cpu"
    if size is not None and (not isinstance(size, int) or size < 1):
        raise ArgumentError(f"Hardware.measure: size has to be a positive int, found {size!r}")
    size = size or (1024 if on_cpu else 8192)
    add = jax.jit(lambda x: x + 1)
    copy = functools.partial(_copy, here=here, there=there)
    with jax.default_device(here):
        rates = {}
        for dtype in (jnp.float32, jnp.bfloat16):
            # A factor that leaves products as large as what is multiplied.
            factor = jax.random.normal(jax.random.key(0), (size, size), dtype) / math.sqrt(size)
            multiply = jax.jit(lambda x, factor=factor: x @ factor)
            rates[jnp.dtype(dtype).name] = 2 * size**3 / _seconds(multiply, factor)
        vector = jnp.ones((16 if on_cpu else 256) * 2**20, jnp.float32)  # larger than a cache
        bandwidth = 2 * vector.nbytes / _seconds(add, vector)
        launch = _seconds(add, jnp.ones(()))
        latency = _seconds(copy, jnp.ones(()))
        copied = _seconds(copy, vector)
    return Hardware(
        f"this machine ({here.device_kind})", rates, bandwidth, vector.nbytes / max(copied - latency, 1e-9), latency,
        launch, cores=float(os.cpu_count() or 1) if on_cpu and len(devices) > 1 else None,
    )  # fmt: skip


def _copy(x: Any, here: Any, there: Any) -> Any:
    """Copies to the other device, or back."""
    return jax.device_put(x, there if x.devices() == {here} else here, may_alias=False)


def _seconds(call: Callable[[Any], Any], x: Any, least: float = 0.05) -> float:
    """The time of a call that takes the result of the one before, the median of five runs.

    A run makes so many calls that it takes ``least`` seconds, and waits for the last one: what an accelerator does is
    not told from the way to it and back otherwise.
    """

    def run(calls: int) -> float:
        nonlocal x
        start = time.perf_counter()
        for _ in range(calls):
            x = call(x)
        jax.block_until_ready(x)
        return time.perf_counter() - start

    run(1)  # compiles
    calls = 1
    while run(calls) < least:
        calls *= 2
    return median(run(calls) for _ in range(5)) / calls
