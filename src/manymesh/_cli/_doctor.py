"""``doctor``: what this machine has, and whether it works."""

from __future__ import annotations

import argparse
import os
import platform
from collections import Counter
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import jax
from rich.markup import escape
from rich.table import Table

from ._parser import add_json, console, print_json
from ._selftests import CHECKS, Outcome

NAME = "doctor"
HELP = "versions, devices, settings that matter, and a test of each way that values travel"

_DESCRIPTION = """Says what this machine has and tests that it works: versions, devices, the settings of JAX and XLA that change
what ManyMesh does, and a short run of each way in which values get from one submesh to another.

The exit code is 1 if anything fails. Put its output into a report of a problem."""

_EPILOG = """
examples:
  python -m manymesh doctor
  XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m manymesh doctor      with simulated devices
  python -m manymesh doctor --json
"""

_PACKAGES = (
    "manymesh", "jax", "jaxlib", "numpy", "rich", "flax", "optax", "equinox", "orbax-checkpoint", "matplotlib",
)  # fmt: skip
_VARIABLES = (
    "JAX_PLATFORMS", "XLA_FLAGS", "LIBTPU_INIT_ARGS", "XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "CUDA_VISIBLE_DEVICES", "MANYMESH_TRANSPORT",
)  # fmt: skip
# Settings of JAX, with what they mean for us where they are not as usual.
_SETTINGS = {
    "jax_enable_x64": "values take twice the bytes, also where they cross",
    "jax_debug_nans": "arguments are not donated, and every task is checked",
    "jax_disable_jit": "steps run as plain Python, on no submesh",
    "jax_use_shardy_partitioner": "layouts are found by Shardy's pass; without it every task is compiled to look",
    "jax_compilation_cache_dir": "executables are kept on disk, one for each submesh",
    "jax_default_matmul_precision": "",
    "jax_num_cpu_devices": "",
    "jax_cpu_collectives_implementation": "",
}


@dataclass(frozen=True)
class Diagnosis:
    """What `doctor` found.

    Attributes:
      versions: package -> version, None where it is not installed.
      devices: kind of device -> how many this process sees.
      processes: how many processes JAX runs.
      variables: environment variables that are set.
      settings: settings of JAX.
      advice: what to do about it.
      checks: the tests.
    """

    versions: dict[str, str | None]
    devices: dict[str, int]
    processes: int
    variables: dict[str, str]
    settings: dict[str, object]
    advice: tuple[str, ...]
    checks: tuple[Outcome, ...]

    @property
    def healthy(self) -> bool:
        """Whether no test failed."""
        return not any(c.ok is False for c in self.checks)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `COMMANDS`."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """See `COMMANDS`."""
    found = examine()
    if args.json:
        print_json({"healthy": found.healthy, **vars(found)})
    else:
        _show(found)
    return 0 if found.healthy else 1


def examine() -> Diagnosis:
    """Looks at everything and runs the tests."""
    versions = {"python": platform.python_version(), **{name: version_of(name) for name in _PACKAGES}}
    devices = dict(Counter(f"{d.platform} {d.device_kind}" for d in jax.devices()))
    variables = {name: os.environ[name] for name in _VARIABLES if os.environ.get(name)}
    settings = {name: getattr(jax.config, name) for name in _SETTINGS if hasattr(jax.config, name)}
    checks = tuple(check() for check in CHECKS)
    return Diagnosis(versions, devices, jax.process_count(), variables, settings, tuple(_advice(settings)), checks)


def version_of(name: str) -> str | None:
    """The version of a package; None where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _advice(settings: dict[str, object]) -> list[str]:
    advice = []
    if len(jax.devices()) == 1:
        advice.append(
            "there is one device: to try pipelines on this machine, set "
            "XLA_FLAGS=--xla_force_host_platform_device_count=8 before Python starts"
        )
    for name, words in _SETTINGS.items():
        if words and settings.get(name) and name != "jax_use_shardy_partitioner":
            advice.append(f"{name}={settings[name]}: {words}")
    if settings.get("jax_use_shardy_partitioner") is False:
        advice.append(f"jax_use_shardy_partitioner=False: {_SETTINGS['jax_use_shardy_partitioner']}")
    return advice


def _show(found: Diagnosis) -> None:
    out = console()
    out.print("[bold]Versions[/]  " + "  ".join(f"{k} {v}" for k, v in found.versions.items() if v), soft_wrap=True)
    missing = [k for k, v in found.versions.items() if v is None]
    if missing:
        out.print(f"          not installed (optional): {', '.join(missing)}", soft_wrap=True)
    kinds = ", ".join(f"{count} x {kind}" for kind, count in found.devices.items())
    out.print(f"[bold]Devices[/]   {kinds}; {found.processes} process{'es' * (found.processes != 1)}", soft_wrap=True)
    settings = [f"{k}={v}" for k, v in {**found.variables, **found.settings}.items() if v not in (None, "", False, -1)]
    out.print("[bold]Settings[/]  " + escape("\n          ".join(settings) or "none"), soft_wrap=True)
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    for check in found.checks:
        mark = {True: "[green]ok[/]", False: "[red]failed[/]", None: "[yellow]left out[/]"}[check.ok]
        table.add_row(mark, check.name, check.words)
    out.print("[bold]Tests[/]")
    out.print(table)
    for words in found.advice:
        out.print(f"[bold]Note[/]      {words}", soft_wrap=True)
    out.print("all is well" if found.healthy else "something is wrong: see what failed above", soft_wrap=True)
