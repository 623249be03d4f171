"""Hypothesis strategies for whole programs."""

from __future__ import annotations

import dataclasses
from typing import Any

import hypothesis
from hypothesis import strategies as st

from .known import works
from .metrics import METRICS, PENALTIES, WATCHED
from .modules import PARTS
from .operations import OPERATIONS
from .optimizers import OPTIMIZERS
from .program import NESTED, Layer, Program
from .wraps import FORWARDS, INNER, STACKED, TWICE, VMAPPED, WRAPS

APART = (
    ((0, 1, 1), (1, 1, 1)),
    ((0, 2, 2), (4, 2, 2)),
    ((0, 2, 2), (4, 2, 1), (6, 1, 2)),
    ((0, 1, 2), (2, 1, 1), (4, 2, 2)),
    ((0, 1, 1), (1, 1, 1), (2, 1, 1)),
    ((0, 2, 1), (2, 2, 1), (4, 2, 1)),
    ((0, 4, 1), (4, 1, 4)),
    ((0, 1, 2), (2, 1, 2)),
    ((0, 2, 1), (2, 1, 1)),
)
OVERLAPPING = (
    ((0, 4, 2), (0, 2, 2), (4, 2, 2)),
    ((0, 2, 1), (1, 2, 1)),
    ((0, 2, 2), (0, 1, 1), (4, 2, 2)),
)
KERNEL_AXES = ((None, "hidden"), ("hidden", None), ("batch", "hidden"), ("embed", "hidden"), (None, None))
ACTIVATIONS = (None, ("batch", None), ("batch", "hidden"), (None, "hidden"))
SCHEDULES = ("gpipe", "1f1b", "eager-1f1b", "zero-bubble-h1", "zero-bubble-h2", "wavefront")
# They cut the backward pass; bits are equal within a class.
SPLIT = ("zero-bubble-h1", "zero-bubble-h2", "zbv", "dualpipev", "custom, split")
LAYOUTS = ("chain", "chain", "free", "v", "cyclic")
# Constructs that are drawn only once they work, by the flag that says so.
WRAP_FLAGS = {
    "observed_cond": "observed_branches",
    "guarded_while": "guarded_while",
    "empty_scan": "empty_scan_around",
    "examples": "examples_under_vmap",
    "returned_number": "returned_number",
}


def _operations(draw, size: int, random: bool, wrap: str, inner: str, unequal: bool) -> tuple[str, ...]:
    fit = _fitting(size == 1, random, wrap in VMAPPED or inner == "rows", unequal, wrap)
    return tuple(draw(st.lists(st.sampled_from(fit), min_size=1, max_size=2)))


def _fitting(whole: bool, random: bool, vmapped: bool, unequal: bool, wrap: str) -> list[str]:
    """Names of operations that can be where these things hold."""
    if unequal and not works("unequal_sizes_under_grad"):
        return list(WITHOUT_CONSTANTS)
    return [
        name
        for name, op in OPERATIONS.items()
        if (works("reductions_by_a_function") or name not in BY_A_FUNCTION)
        and (whole or not op.unsharded)
        and (random or not op.random)
        and not (vmapped and op.alone)
        and not (wrap in FORWARDS and op.backwards)
        and not (wrap in TWICE and op.once)
    ]


BY_A_FUNCTION = ("window_of_products", "reduce_generic")
# What can be drawn on submeshes of different sizes today, and in which constructs.
WITHOUT_CONSTANTS = (
    "matmul",
    "tanh",
    "sine",
    "negative",
    "transpose",
    "reduce_max",
    "take",
    "bfloat16",
    "cumsum",
    "layer_norm",
)
# A bias before a normalisation has rounding errors for a gradient; these make whole steps of them.
BY_SIGN = ("sign_sgd", "lion", "lars", "lamb", "fromage", "adafactor")
LOOPS = ("nested", "around", "nested_around", "loop_in_scan", "gathered")
CLEAR = ("plain", "keywords", "jit", "checkpoint", "policy", "python_loop", "scoped", "nested")
# Each phase of the task is there once in a microbatch.
ONE_TASK = ("plain", "keywords", "jit", "checkpoint", "policy", "scoped", "nested")
PLACED = ("task", "task", "task", "scope", "path", "callback")
PUT = (("data", None), ("data", "model"), (None, "model"), (None, None))


@st.composite
def programs(draw, small: bool = False) -> Program:
    """Tasks that are functions, or in one program of eight modules of a framework."""
    return draw(of_modules(small) if draw(st.sampled_from([False] * 7 + [True])) else of_functions(small))


@st.composite
def of_modules(draw, small: bool) -> Program:
    """Blocks of a framework, one after the other, and a step that trains them."""
    framework = draw(st.sampled_from(["linen", "nnx", "equinox"]))
    submeshes = draw(st.sampled_from([c for c in APART if len(c) == 2] if small else APART))
    count = draw(st.sampled_from([1, 2] if small else [2, 3]))
    microbatches = draw(st.sampled_from([1, 2, 4] if small else [1, 2, 3, 4]))
    layers = tuple(_block(draw, i, count, submeshes, framework) for i in range(count))
    schedules = _schedules(draw, "chain", layers, submeshes, microbatches, "train", small)
    optimizers = sorted(set(OPTIMIZERS).difference(BY_SIGN))
    optimizer = draw(st.sampled_from(optimizers + ["sgd"] * (len(optimizers) * 3 if small else 0)))
    donate = draw(st.booleans())
    return Program(
        submeshes,
        layers,
        microbatches=microbatches,
        reduce=draw(st.sampled_from(["mean", "mean", "sum"])),
        schedules=schedules,
        optimizer=optimizer,
        clipped=draw(st.booleans()),
        donate=donate and optimizer != "prodigy",  # which begins with the very arrays of the parameters
        order=draw(st.integers(0, 9)),
        framework=framework,
    )


def _block(draw, i: int, count: int, submeshes, framework: str) -> Layer:
    submesh = i * len(submeshes) // count
    _, a, b = submeshes[submesh]
    annotated = draw(st.sampled_from(["never", "box"]))
    wrap = draw(st.sampled_from(["plain", "plain", "plain", "checkpoint", "stacked"]))
    parts = draw(st.lists(st.sampled_from(PARTS), max_size=2))
    if framework == "equinox" and wrap == "stacked":  # states are apart from modules, and would have to be stacked too
        parts = [part for part in parts if part != "batch_norm"]
    inner = draw(st.sampled_from(["plain"] * 4 + list(INNER)))
    named = framework in ("linen", "nnx")  # Equinox opens no scopes
    return Layer(
        submesh,
        i,
        (i,),
        _operations(draw, a * b, False, wrap, inner, False),
        wrap,
        inner,
        draw(st.sampled_from(KERNEL_AXES)) if annotated != "never" else None,
        annotated,
        draw(st.sampled_from(ACTIVATIONS)) if framework == "linen" else None,
        between=draw(st.sampled_from([None, None, None, *_fitting(False, False, False, False, "plain")])),
        placed=draw(st.sampled_from(["task", "task", "scope", "callback"])) if named else "task",
        put=draw(st.sampled_from([None, None, None, None, *PUT])) if i + 1 < count else None,
        modules=tuple(parts),
    )


@st.composite
def of_functions(draw, small: bool) -> Program:
    """Tasks on submeshes, what they are wrapped in, and the step around them; with one or two tasks if ``small``."""
    choices = APART + OVERLAPPING if works("overlapping_submeshes") else APART
    submeshes = draw(st.sampled_from([c for c in choices if len(c) == 2] if small else choices))
    mode = draw(
        st.sampled_from(["train"] * 6 + (["forward"] * 12 if small else ["forward", "twice", "scanned", *LOOPS]))
    )
    unequal = len({a * b for _, a, b in submeshes}) > 1 and mode != "forward"
    key, raw = draw(st.sampled_from([None, None, "threefry2x32", "rbg", "unsafe_rbg"])), draw(st.booleans())
    order = "chain" if small else draw(st.sampled_from(LAYOUTS))
    count = {"v": 2 * len(submeshes), "cyclic": 2 * len(submeshes)}.get(order) or draw(
        st.sampled_from([1, 1, 2] if small else [1, 2, 2, 3])
    )
    if count > 4:
        order, count = "chain", 3
    # The schedules for a V and for several stages on each submesh are for tasks that are a stage each.
    plain = order in ("v", "cyclic") and draw(st.booleans())
    layers = tuple(_layer(draw, i, count, order, submeshes, key is not None, unequal, plain) for i in range(count))
    used = sorted({layer.parameter for layer in layers})
    layers = tuple(_renamed(layer, used) for layer in layers)
    if mode == "gathered" and draw(st.booleans()):  # towers: what is kept of each for its gradient is the batch itself
        layers = tuple(dataclasses.replace(layer, reads=(0,), operations=()) for layer in layers)
    microbatches = draw(st.sampled_from([1, 2, 4] if small else [1, 2, 2, 3, 4]))
    aux = mode not in LOOPS and draw(st.booleans())
    reduces = ["mean", "mean", "sum"] + (["max", "last", "weighted", "stack"] if aux else [])
    schedules = _schedules(draw, order, layers, submeshes, microbatches, mode, small)
    state = draw(st.sampled_from(["dict", "tuple", "dataclass", "train_state"]))
    apart = len(layers) == 1 or any(layer.wrap in STACKED or layer.annotated == "box" for layer in layers)
    ways = ["stack", "vector"] + ["grid"] * (len(used) % 2 == 0)
    together = None if apart else draw(st.sampled_from([None, None, *ways]))
    # A loop of no steps traces no task, and what is the submesh of none cannot be asked for.
    traced = [layer.submesh for layer in (layers[0], layers[-1]) if layer.wrap != "empty_scan"]
    return Program(
        submeshes,
        layers,
        mode=mode,
        microbatches=microbatches,
        reduce=draw(st.sampled_from(reduces)) if mode in ("train", "twice") else "mean",
        schedules=schedules,
        optimizer=draw(st.sampled_from(sorted(OPTIMIZERS) + ["sgd"] * (len(OPTIMIZERS) * 3 if small else 0)))
        if mode != "forward"
        else "sgd",
        clipped=draw(st.sampled_from([False, False, True] if small else [False, False, True, "vector"])),
        ema=draw(st.sampled_from([False, False, True])),
        state=state,
        donate=draw(st.booleans()),
        aux=aux,
        key=key,
        raw_key=raw and key is not None and key == "threefry2x32",
        key_from=_key_from(draw, key, layers, mode),
        weak=draw(st.booleans()),
        in_shardings=draw(st.sampled_from([False, False, False, True])) and together is None,
        arrives=draw(st.sampled_from([False, False, False, True])),
        collected=draw(st.sampled_from([None] * 9 + traced)),
        again=draw(st.sampled_from([False] * 7 + [True])),
        order=draw(st.integers(0, 9)),
        together=together,
        viewed=draw(st.sampled_from([None, None, None, "scaled", "reshaped", "normalized"])),
        index=draw(st.sampled_from(["number", "computed", "dynamic_slice", "take"])) if together else "number",
        **_returned(draw, aux, mode, len(layers)),
        **(
            _carried(draw, count, schedules, state)
            if mode == "train" and not aux and order == "chain" and None not in schedules
            else {}
        ),
    )


def _returned(draw, aux: bool, mode: str, layers: int) -> dict[str, Any]:
    """What the step returns besides, and what it makes of its gradients and parameters for that."""
    updates = mode != "forward"
    some = st.lists(st.sampled_from(sorted(METRICS)), max_size=min(2, layers), unique=True)
    seen = st.lists(st.sampled_from(sorted(WATCHED)), max_size=2, unique=True)
    return {
        "metrics": tuple(draw(some)) if aux else (),
        "watched": tuple(draw(seen)) if updates and draw(st.booleans()) else (),
        "penalty": draw(st.sampled_from([None, None, None, None, *sorted(PENALTIES)])),
        "refused": draw(st.sampled_from([None, None, None, None, "where", "cond"])) if updates else None,
    }


def _carried(draw, layers: int, schedules, state: str) -> dict[str, Any]:
    """None, or up to three values that go from one microbatch to the next.

    Numbers are read by the layer that they are made after or a later one, so that schedules apply. Rows also go back,
    where no custom schedule has them in mind.
    """
    found = []
    back = not any(schedule.startswith("custom") for schedule in schedules)
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2, 3]))):
        how, made = draw(st.sampled_from(["count", "mean", "was", "rows"])), draw(st.integers(0, layers - 1))
        first = 0 if how == "rows" and back else made
        found.append((how, made, draw(st.integers(first, layers - 1))))
    kept = bool(found) and state != "train_state" and draw(st.booleans())
    return {"carried": tuple(found), "kept": kept}


def _key_from(draw, key: str | None, layers: tuple[Layer, ...], mode: str) -> str:
    ways = ["argument"]
    if key != "unsafe_rbg" or works("unsafe_rbg_folded"):
        ways.append("folded")
    # JAX cannot do this in an inner jit, with or without tasks: a loop over microbatches that is differentiated is one.
    unable = ("custom_vjp", "custom_vjp_optimized") if mode == "nested_around" else ("custom_vjp_optimized",)
    if all(layer.wrap not in unable for layer in layers):
        ways.append("closed_over")
    if works("constant_key"):
        ways.append("constant")
    return draw(st.sampled_from(ways)) if key is not None else "argument"


def _layer(draw, i: int, count: int, order: str, submeshes, random: bool, unequal: bool, plain: bool) -> Layer:
    n = len(submeshes)
    submesh = {"chain": i * n // count, "v": min(i, 2 * n - 1 - i) % n, "cyclic": i % n}.get(order)
    if submesh is None:
        submesh = draw(st.integers(0, n - 1))
    _, a, b = submeshes[submesh]
    wraps = [w for w in WRAPS if works(WRAP_FLAGS.get(w, ""))]
    if unequal and not works("unequal_sizes_under_grad"):
        wraps = list(CLEAR)
    wrap = "plain" if plain else draw(st.sampled_from(["plain"] * len(wraps) + wraps + list(STACKED)))
    inner = draw(st.sampled_from(["plain"] * 4 + list(INNER)))
    if unequal and not works("unequal_sizes_under_grad"):
        inner = "plain"
    reads = {i} if order != "free" else set(draw(st.lists(st.integers(0, i), max_size=1))) | {i}
    annotated = draw(st.sampled_from(_annotations()))
    activation = draw(st.sampled_from(ACTIVATIONS))
    if wrap in VMAPPED:
        activation = None if activation is None else (None, *activation[1:])
    size = a * b if wrap not in ("layers", *STACKED) else 2
    between = draw(st.sampled_from([None, None, None, "draw"]))
    placed = draw(st.sampled_from(PLACED))
    put = draw(st.sampled_from([None, None, None, None, *PUT])) if i + 1 < count else None
    return Layer(
        submesh,
        draw(st.sampled_from([i, i, max(i - 1, 0)])),
        tuple(sorted(reads)),
        _operations(draw, size, random, wrap, inner, unequal),
        wrap,
        inner,
        draw(st.sampled_from(KERNEL_AXES)) if annotated != "never" else None,
        annotated,
        activation,
        draw(st.sampled_from(["mm", "mm", "jax"])) if placed == "task" else "mm",  # JAX's reads the mesh of a task
        draw(st.sampled_from(_fitting(False, random, False, unequal, "plain"))) if between else None,
        placed,
        put,
        depth=draw(st.sampled_from([2, 2, 3, 4])) if wrap in STACKED else 2,
    )


def _annotations() -> list[str]:
    return ["never", "inside", "box"] + (["outside"] if works("constraint_outside") else [])


def _renamed(layer: Layer, used: list[int]) -> Layer:
    return Layer(**{**vars(layer), "parameter": used.index(layer.parameter)})


def _schedules(draw, order, layers, submeshes, microbatches: int, mode: str, small: bool) -> tuple[str | None, ...]:
    """One schedule, or two that give the same bits."""
    if mode == "scanned" or (microbatches == 1 and mode not in NESTED):
        return (None,)
    split_layers = any(layer.wrap in ("layers", *STACKED) for layer in layers)
    names = list(SCHEDULES)
    if mode in LOOPS:  # the reverse of a loop is a loop of its own, and rows of tasks are for one loop
        return (draw(st.sampled_from(names)),)
    if split_layers and not works("split_backward_of_split_layers"):
        names = [n for n in names if n not in SPLIT]
    plain = all(layer.wrap == "plain" for layer in layers)
    if order == "v" and plain:
        names += ["zbv"] * 4 + ["dualpipev"] * 4
    if order == "cyclic" and plain and len(submeshes) == 2:
        names += ["interleaved"] * 4
    if order in ("chain", "v", "cyclic") and all(layer.wrap in ONE_TASK for layer in layers):
        names += ["custom"] * 2 + ["custom, split"] * (mode != "forward")
    first = draw(st.sampled_from(names))
    if not draw(st.sampled_from([False, False, not small])) or first in ("zbv", "dualpipev", "interleaved"):
        return (first,)
    alike = [n for n in SCHEDULES if (n in SPLIT) == (first in SPLIT) and n != first]
    return first, draw(st.sampled_from(alike))


def drawn(number: int, small: bool = False) -> Program:
    """The program of a number.

    Each is drawn with a seed of its own: in one run, Hypothesis draws many programs that are alike.
    """
    found: list[Program] = []

    @hypothesis.seed(number)
    @hypothesis.settings(max_examples=2, database=None, derandomize=False, phases=[hypothesis.Phase.generate])
    @hypothesis.given(program=programs(small))
    def keep(program: Program) -> None:
        found.append(program)

    keep()
    return found[-1]  # the first one is always the simplest
