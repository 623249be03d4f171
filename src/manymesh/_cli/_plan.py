"""``plan``: what a step would do, without running it."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import importlib.util
import inspect
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import jax

from .. import Compiled, Lowered, Traced, planned_devices
from .._api._jit import FunctionLike, jit
from .._errors import ArgumentError, ManyMeshError
from .._hardware import Hardware
from ._parser import add_json, console, print_json, whole

NAME = "plan"
HELP = "say what a step would run where, and what would cross; nothing is compiled"

_DESCRIPTION = """Plans a step without compiling or running it, also for devices that nobody has here.

The function describes the step. It takes nothing, or the devices to plan for, and returns one of

    mm.jit(step).lower(state, batch)          what is planned
    mm.jit(step), state, batch                a step and its arguments

where jax.ShapeDtypeStruct will do for arrays, so that nothing is ever allocated:

    def plan(devices):
        mesh = jax.make_mesh((4, len(devices) // 4), ("stage", "data"), devices=devices)
        ...
        return mm.jit(step), jax.eval_shape(init, key), jax.ShapeDtypeStruct((256, 1024), "int32")"""

_EPILOG = """
examples:
  python -m manymesh plan train.py:plan --devices 64
  python -m manymesh plan my_package.training:plan
  python -m manymesh plan train.py:plan --devices 64 --hardware h100
  python -m manymesh plan train.py:plan --devices 64 --json > plan.json

With --devices the function gets planned devices if it has a parameter called devices; if it has none, jax.devices()
gives so many simulated ones.
"""


# This file and what imports a script.
_OURS = (__file__, importlib.__file__, "<frozen importlib")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `COMMANDS`."""
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.add_argument("function", metavar="SCRIPT.py:FUNCTION", help="or package.module:function")
    parser.add_argument(
        "--devices", type=whole, metavar="N", help="plan for so many devices; those of this machine by default"
    )
    parser.add_argument(
        "--hardware", choices=sorted(Hardware.ready()), metavar="NAME",
        help=f"what to predict the time of a step for: {', '.join(sorted(Hardware.ready()))}",
    )  # fmt: skip
    parser.add_argument("--layout", action="store_true", help="also print the layout of every value and its reason")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """See `COMMANDS`."""
    begin = time.perf_counter()
    try:
        with _without_our_words(args.function):
            lowered = _lowered(args.function, args.devices)
    except (ManyMeshError, OSError):  # which end in a line
        raise
    except Exception as error:
        traceback.print_exception(error.with_traceback(_users_part(error.__traceback__)))
        return 1
    report = lowered.report(None if args.hardware is None else Hardware.ready()[args.hardware])
    if args.json:
        print_json({"function": args.function, "devices": args.devices, "report": report.to_dict()})
        return 0
    out = console()
    out.print(str(report), soft_wrap=True, markup=False)
    if args.layout:
        out.print(str(lowered.layout), soft_wrap=True, markup=False)
    out.print(f"planned in {time.perf_counter() - begin:.1f} s; nothing was compiled", soft_wrap=True)
    return 0


def _users_part(frames: TracebackType | None) -> TracebackType | None:
    """A traceback from the first line of the user's on: how this command came there is nothing to them."""
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(_OURS):
        frames = frames.tb_next
    return frames


@contextlib.contextmanager
def _without_our_words(spec: str) -> Iterator[None]:
    """A script that reads its arguments finds none: those of this process are not its own."""
    before, script = sys.argv, spec.rpartition(":")[0]
    sys.argv = [script]
    try:
        yield
    except SystemExit as exit:
        raise ArgumentError(
            f"{script} ended with {exit.code!r} as it was imported or called, without arguments; put what needs them under "
            "if __name__ == '__main__':, or give them defaults"
        ) from exit
    finally:
        sys.argv = before


def _lowered(spec: str, devices: int | None) -> Lowered:
    """What the function describes, lowered."""
    if devices is not None:
        _simulate(devices)
    function = _function(spec)
    parameters = inspect.signature(function).parameters
    if "devices" in parameters:
        function = functools.partial(function, devices=jax.devices() if devices is None else planned_devices(devices))
    needed = [
        n for n, p in parameters.items()
        if n != "devices" and p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]  # fmt: skip
    if needed:
        raise ArgumentError(
            f"{spec} needs {', '.join(needed)}; plan calls it with nothing, or with devices: give the others defaults"
        )
    return _as_lowered(spec, function())


def _as_lowered(spec: str, given: object) -> Lowered:
    if isinstance(given, Compiled):
        raise ArgumentError(f"{spec} returns a compiled step; return what lower gives, before compile()")
    if isinstance(given, Lowered):
        return given
    if isinstance(given, Traced):
        return given.lower()
    step, *arguments = given if isinstance(given, tuple) and given else (None,)
    if not callable(step):
        raise ArgumentError(
            f"{spec} has to return mm.jit(step).lower(...), or a tuple of the step and its arguments; it returned "
            f"{type(given).__name__}"
        )
    jitted: Any = step if isinstance(step, FunctionLike) else jit(step)  # that of NNX and of Equinox, too
    return jitted.lower(*arguments)  # type: ignore[no-any-return]  # they are alike in this


def _simulate(devices: int) -> None:
    """Has JAX simulate as many CPU devices, for functions that ask it for devices."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    flags = [f for f in os.environ.get("XLA_FLAGS", "").split() if "xla_force_host_platform_device_count" not in f]
    os.environ["XLA_FLAGS"] = " ".join([*flags, f"--xla_force_host_platform_device_count={devices}"])
    jax.config.update("jax_platforms", "cpu")


def _function(spec: str) -> Callable[..., object]:
    path, colon, name = spec.rpartition(":")
    if not colon or not path or not name:
        raise ArgumentError(f"expected SCRIPT.py:FUNCTION or package.module:function, found {spec!r}")
    module = _module(path)
    function = getattr(module, name, None)
    if not callable(function):
        found = sorted(n for n, f in vars(module).items() if inspect.isfunction(f) and f.__module__ == module.__name__)
        raise ArgumentError(f"{path} has no function {name!r}; it has {', '.join(found) or 'none'}")
    return function  # type: ignore[no-any-return]  # callable is all that is known


def _module(path: str) -> ModuleType:
    if not path.endswith(".py"):
        sys.path.insert(0, os.getcwd())
        try:
            return importlib.import_module(path)
        except ModuleNotFoundError as error:
            if error.name and path.startswith(error.name):
                raise ArgumentError(f"there is no module {path!r} here; a script is named with its .py") from None
            raise
    file = Path(path).resolve()
    if not file.is_file():
        raise ArgumentError(f"there is no file {path}")
    sys.path.insert(0, str(file.parent))  # scripts import what stands beside them
    loader = importlib.util.spec_from_file_location(file.stem, file)
    assert loader is not None and loader.loader is not None, "a path that ends in .py has a loader"
    module = importlib.util.module_from_spec(loader)
    sys.modules[file.stem] = module  # as dataclasses and pickles want it
    loader.loader.exec_module(module)
    return module
