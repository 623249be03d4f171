"""`register_task`: scopes that become tasks by their names."""

import re
import sys
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import manymesh as mm
from stages import assert_agrees, assert_same, reference

pytestmark = pytest.mark.once

WIDTH, ROWS = 16, 24


@pytest.fixture(autouse=True)
def no_tasks_left():
    """What one test registers does not place another's program."""
    yield
    mm.clear_tasks()


def mesh(*ids, axes=("model",)):
    return Mesh(np.array([jax.devices()[i] for i in ids]), axes)


def batch():
    return jnp.asarray(np.random.default_rng(1).normal(size=(ROWS, WIDTH)), jnp.float32)


def weights(count):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(WIDTH, WIDTH)) / 4, jnp.float32) for _ in range(count)]


def dense(w, x):
    return jnp.tanh(x @ w) + x


def layers(names, body=dense):
    """The mean square of a chain of layers, each in a scope of its name."""

    def f(ws, x):
        for name, w in zip(names, ws, strict=True):
            with jax.named_scope(name):
                x = body(w, x)
        return jnp.mean(x**2)

    return f


def explicit(names, devices, body=dense):
    def f(ws, x):
        for name, w in zip(names, ws, strict=True):
            x = mm.task(body, name, devices=[devices[name]])(w, x)
        return jnp.mean(x**2)

    return f


def fragments(fun, *args):
    """(name, devices) of each fragment that holds a task."""
    program = mm.jit(fun).lower(*args).program
    return [(f.name, [d.id for d in program.submeshes[f.submesh].devices.flat]) for f in program.fragments if f.tasks]


# What a pattern matches


def test_a_pattern_matches_a_whole_name():
    """`layer_1` is not `layer_10`."""
    mm.register_task("layer_1", devices=[1])
    mm.register_task("layer_.*", devices=[0])
    f = layers(["layer_1", "layer_10"])
    assert fragments(f, weights(2), batch()) == [("layer_1", [1]), ("layer_10", [0])]


def test_the_outermost_match_decides_and_then_the_first_pattern():
    """What is inside a matched scope belongs to it."""

    def f(w, x):
        with jax.named_scope("outer"):
            x = dense(w, x)
            with jax.named_scope("inner"):
                x = dense(w, x)
        with jax.named_scope("inner"):
            return dense(w, x)

    mm.register_task("inner", devices=[1])
    mm.register_task("outer|inner", devices=[0])
    assert fragments(f, weights(1)[0], batch()) == [("outer", [0]), ("inner", [1])]


def numbered(ws, x, body=dense):
    """Blocks called by their numbers, as some libraries do, and other scopes called so too."""
    with jax.named_scope("embed"), jax.named_scope("0"):
        x = jnp.sin(x)
    for i, w in enumerate(ws):
        with jax.named_scope("h"), jax.named_scope(str(i)):
            x = body(w, x)
            with jax.named_scope("0"):
                x = jnp.sin(x)
    return jnp.mean(x**2)


@pytest.mark.parametrize(
    "body",
    [
        dense,
        jax.jit(dense),
        jax.checkpoint(dense),
        lambda w, x: jax.lax.cond(x.sum() > 0, dense, lambda w, x: x, w, x),
    ],
    ids=["plain", "jit", "checkpoint", "cond"],
)
def test_a_pattern_with_slashes_is_a_path(body):
    """`h/0` is the block, and no other zero; forward and backward."""
    mm.register_task("h/0", devices=[0])
    mm.register_task(r"h/(\d)", callback=lambda match, is_backward: mm.Task(devices=[int(match[1])]))
    grad = jax.grad(lambda ws, x: numbered(ws, x, body))
    placed = {name.removesuffix("_bwd"): ids for name, ids in fragments(grad, weights(3), batch())}
    assert placed == {"h/0": [0], "h/1": [1], "h/2": [2]}
    assert_agrees(grad, weights(3), batch())


def test_a_path_begins_anywhere_and_is_of_scopes_directly_in_each_other():
    """A set of characters may hold a slash; a component matches one scope only."""
    found = fragments(numbered, weights(2), batch())
    assert found == []
    with mm.register_task("[^/]+/0/0", devices=[3]):
        assert fragments(numbered, weights(2), batch()) == [("h/0/0", [3])]
    with mm.register_task("embed/.*/0", devices=[3]), pytest.warns(UserWarning, match="nested scopes; the nearest"):
        mm.jit(numbered).lower(weights(2), batch())


def test_a_path_through_a_conditional_and_a_scan():
    """The scopes around what holds the rest of the path count, and iterations are of its last component."""

    def f(ws, x):
        def layer(x, w):
            with jax.named_scope("1"):
                return dense(w, x), None

        with jax.named_scope("h"):
            x = jax.lax.scan(layer, x, ws)[0]
        with jax.named_scope("g"):
            return jax.lax.cond(x.sum() > 0, lambda x: jax.lax.scan(layer, x, ws)[0], lambda x: x, x)

    ws = jnp.stack(weights(2))
    place = lambda match, is_backward: mm.Task(devices=[2 + int(match[1])])  # noqa: E731
    with mm.register_task(r"h/1\[(\d)\]", callback=place), mm.register_task("g/1", devices=[0]):
        assert fragments(f, ws, batch()) == [("h/1[0]", [2]), ("h/1[1]", [3]), ("g/1", [0])]
        assert_agrees(f, ws, batch())


def test_names_survive_transformations():
    """vmap, grad, a scope around them, jit within."""

    def f(w, x):
        with jax.named_scope("model"):
            inner = lambda w, x: layers(["front"], jax.jit(dense))([w], x)  # noqa: E731
            return jax.vmap(jax.value_and_grad(inner), in_axes=(None, 0))(w, x.reshape(2, -1, WIDTH))

    with mm.register_task("front", devices=[3]):
        assert [d for _, d in fragments(f, weights(1)[0], batch())] == [[3], [3]]
        assert_agrees(f, weights(1)[0], batch())


def test_scopes_whose_names_hold_other_names():
    """A slash or the word of a transformation in a name."""
    mm.register_task("b", devices=[0])
    mm.register_task("transpose", devices=[1])
    found = fragments(jax.grad(layers(["a/b", "transpose"])), weights(2), batch())
    assert found == [("b", [0]), ("transpose", [1]), ("transpose_bwd", [1]), ("b_bwd", [0])]


def test_a_callback_that_declines():
    """None means that it is not a task; an inner scope, or another pattern, may still be one."""
    asked = []

    def place(match, is_backward):
        asked.append((match[0], is_backward))
        return None if match[0] == "outer" else mm.Task(devices=[2])

    def f(w, x):
        with jax.named_scope("outer"):
            x = x * 2
            with jax.named_scope("inner"):
                return dense(w, x)

    mm.register_task(".*", callback=place)
    assert fragments(f, weights(1)[0], batch()) == [("inner", [2])]
    assert asked == [("outer", False), ("inner", False)]


def test_a_callback_may_place_the_backward_pass_elsewhere():
    """It is told which it is asked for."""
    mm.register_task("a", callback=lambda match, is_backward: mm.Task(devices=[int(is_backward)]))
    f = jax.value_and_grad(layers(["a"]))
    assert fragments(f, weights(1), batch()) == [("a", [0]), ("a_bwd", [1])]
    assert_agrees(f, weights(1), batch())


def test_defaults_of_a_callback():
    """What its Task leaves open comes from the other arguments; its own words come first."""
    two = mesh(0, 1)
    asked = {}

    def place(match, is_backward):
        return {
            "open": mm.Task(),
            "named": mm.Task("mine"),
            "placed": mm.Task(mesh=mesh(2, 3)),
            "ruled": mm.Task(mesh=mesh(2, 3), logical_axes=[("hidden", None)]),
            "bare": mm.Task(devices=[2, 3]),
        }[match[0]]

    def specs(w, x):
        for name in ("open", "named", "placed", "ruled", "bare"):
            with jax.named_scope(name):
                x = mm.with_sharding_constraint(dense(w, x), (None, "hidden"))
                asked[name] = x
        return x

    mm.register_task(".*", callback=place, name="theirs", mesh=two, logical_axes=[("hidden", "model")])
    program = mm.jit(specs).lower(weights(1)[0], batch()).program
    assert [(f.name, f.submesh) for f in program.fragments] == [
        ("theirs", 0), ("mine", 0), ("theirs_2", 1), ("theirs_3", 1), ("theirs_4", 2)
    ]  # fmt: skip
    constraints = [
        re.findall(r"sharding=NamedSharding\(.*?spec=(P\w*\(.*?\))", str(f.jaxpr)) for f in program.fragments
    ]
    hidden = ["'model'" in c[0] for c in constraints]
    assert hidden == [True, True, True, False, False]


def test_a_task_as_default_and_device_axes_alone():
    """`task=` gives its fields; `device_axes` names the axes of a callback's devices."""
    with mm.register_task("a", callback=lambda match, _: mm.Task("x"), task=mm.Task("y", devices=[5])):
        assert fragments(layers(["a"]), weights(1), batch()) == [("x", [5])]
    with mm.register_task("a", callback=lambda match, _: mm.Task(devices=[6, 7]), device_axes=("model",)):
        program = mm.jit(layers(["a"])).lower(weights(1), batch()).program
        assert dict(program.submeshes[0].shape) == {"model": 2}


# Registrations


def test_a_registration_ends():
    """With its block, by name, or all at once; twice does no harm."""
    f = layers(["a"])
    first = mm.register_task("a", devices=[1])
    with mm.register_task("a", devices=[2]) as second:
        assert fragments(f, weights(1), batch()) == [("a", [2])]
        first.remove()
        first.close()
        assert fragments(f, weights(1), batch()) == [("a", [2])]
        assert (repr(first), repr(second)) == ("register_task('a', removed)", "register_task('a')")
        with mm.register_task("b", devices=[3]):
            mm.clear_tasks()
            assert not second.active
    assert fragments(f, weights(1), batch()) == []


def test_an_error_in_the_block_ends_it_too():
    """As for any context manager."""
    with pytest.raises(KeyError), mm.register_task("a", devices=[1]) as handle:
        raise KeyError
    assert not handle.active


def test_one_of_two_equal_registrations_can_end():
    """A handle removes its own, not what equals it."""
    first, second = (mm.register_task("a", devices=[1]) for _ in range(2))
    first.remove()
    assert second.active and fragments(layers(["a"]), weights(1), batch()) == [("a", [1])]


def test_the_same_pattern_again_takes_the_place_of_the_one_before():
    """As when a cell of a notebook runs once more; in its place, before the patterns that came later, until it is removed."""
    f = layers(["layer_1", "layer_2"])

    def place(other):
        def callback(match, is_backward):
            return None if match[1] == "1" else mm.Task(devices=[other])

        return callback

    def cell(first, other):
        mm.register_task("layer_1", devices=[first])
        return mm.register_task(r"layer_(\d)", callback=place(other))

    cell(0, 1)
    assert fragments(f, weights(2), batch()) == [("layer_1", [0]), ("layer_2", [1])]
    again = cell(2, 3)
    assert fragments(f, weights(2), batch()) == [("layer_1", [2]), ("layer_2", [3])]
    again.remove()
    with mm.register_task("layer_1", devices=[4]):
        assert fragments(f, weights(2), batch()) == [("layer_1", [4]), ("layer_2", [1])]
    assert fragments(f, weights(2), batch()) == [("layer_1", [2]), ("layer_2", [1])]


def test_a_callback_may_leave_a_match_to_the_same_pattern_without():
    """They are two registrations."""
    mm.register_task(".*", callback=lambda match, _: mm.Task(devices=[2]) if match[0] == "b" else None)
    mm.register_task(".*", devices=[1])
    assert fragments(layers(["a", "b"]), weights(2), batch()) == [("a", [1]), ("b", [2])]


def test_the_same_registration_again_compiles_nothing():
    """What holds is what held."""
    step = mm.jit(layers(["a"]))
    for _ in range(3):
        mm.register_task("a", devices=[1])
        step(weights(1), batch())
    assert "1 program compiled" in repr(step)


def test_all_threads_share_the_registry():
    """What one registers another one sees, and none is lost."""
    seen = []

    def work(i):
        mm.register_task(f"t{i}", devices=[i])
        seen.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    names = [f"t{i}" for i in range(8)]
    assert fragments(layers(names), weights(8), batch()) == [(n, [i]) for i, n in enumerate(names)]


def test_a_change_of_the_registry_compiles_anew_and_an_equal_one_does_not():
    """Programs are kept by what was registered."""
    traces = []

    def f(ws, x):
        traces.append(1)
        return layers(["a"])(ws, x)

    step = mm.jit(f)
    for device in (1, 2, 1):
        with mm.register_task("a", devices=[device]):
            assert step(weights(1), batch()).devices() == {jax.devices()[device]}
    assert len(traces) == 2
    step(weights(1), batch())
    assert len(traces) == 3


def test_a_program_keeps_what_was_registered_when_it_was_traced():
    """Later changes do not reach it."""
    with mm.register_task("a", devices=[1]):
        traced = mm.jit(layers(["a"])).trace(weights(1), batch())
    assert [m.devices.flat[0].id for m in traced.lower().program.submeshes] == [1]


def test_only_mm_jit_knows_registered_tasks():
    """Plain jit and the reference mode see the plain function."""
    f = layers(["a"], lambda w, x: mm.with_sharding_constraint(dense(w, x), ("no", "such")))
    plain = str(jax.make_jaxpr(f)(weights(1), batch()))
    mm.register_task("a", mesh=mesh(2, 3))
    assert str(jax.make_jaxpr(f)(weights(1), batch())) == plain
    assert jax.jit(f)(weights(1), batch()).devices() == {jax.devices()[0]}
    assert reference(mm.jit(f), weights(1), batch()).devices() == {jax.devices()[0]}


def test_a_pattern_that_matches_nothing_is_said_once():
    """For each jitted function, with the nearest names."""
    mm.register_task(r"layr_(\d+)", devices=[0])
    mm.register_task("layer_0", devices=[1])
    step = mm.jit(layers(["layer_0", "layer_1"]))
    for _ in range(2):  # where warnings are errors
        with warnings.catch_warnings(), pytest.raises(UserWarning, match="matches no scope"):
            warnings.simplefilter("error")
            step(weights(2), batch())
    with pytest.warns(UserWarning) as found:
        step(weights(2), batch())
        step(weights(2), batch()[:8])
    assert [str(w.message) for w in found] == [
        r"mm.jit(f): register_task('layr_(\\d+)') matches no scope of this program, so it places nothing; a pattern has "
        "to match a whole name, or with slashes the names of as many nested scopes; the nearest names are ['layer_1', 'layer_0']"
    ]
    assert found[0].filename == __file__
    with pytest.warns(UserWarning, match="the program has no scopes"):
        mm.jit(lambda x: x + 1)(batch())


def test_a_pattern_that_another_one_covers_is_no_mistake():
    """It matches; it only came second."""
    mm.register_task("a", devices=[0])
    mm.register_task("a|b", devices=[1])
    mm.jit(layers(["a"]))(weights(1), batch())


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"pattern": "layer_("}, ValueError, r"register_task\('layer_\('\): no regular expression: missing \).*re.escape"),
        ({"pattern": 3}, TypeError, "the pattern has to be a regular expression as text, found int 3"),
        ({"pattern": re.compile(b"a")}, TypeError, "as text, found Pattern"),
        ({"pattern": "a"}, ValueError, r"register_task\('a'\): says nothing about the task; give mesh="),
        ({"pattern": "a", "task": "b"}, TypeError, "task has to be a manymesh.Task, found str 'b'"),
        ({"pattern": "a", "callback": 1}, TypeError, "callback has to be a function of a match and a bool, found int 1"),
        ({"pattern": "a", "task": mm.Task("b"), "devices": [0]}, ValueError, "task= is a complete description.* devices"),
        ({"pattern": "a", "devices": [0], "logical_axes": [("x", "y")]}, ValueError, "logical_axes were given, but no"),
        ({"pattern": "a", "devices": [99]}, ValueError, "99"),
        ({"pattern": "a", "devices": [[0]], "device_axes": ("x",), "callback": print}, ValueError, "device_axes"),
    ],
)  # fmt: skip
def test_wrong_arguments(arguments, kind, text):
    """Said where they are written, and nothing is registered."""
    with pytest.raises(kind, match=text):
        mm.register_task(arguments.pop("pattern"), **arguments)
    assert fragments(layers(["a"]), weights(1), batch()) == []


def test_wrong_answers_of_a_callback():
    """What it returned, or raised, and for which scope."""
    with (
        mm.register_task("a", callback=lambda match, _: "left"),
        pytest.raises(TypeError, match="returned str 'left'") as e,
    ):
        mm.jit(layers(["a"])).lower(weights(1), batch())
    assert "in the callback of register_task('a'), for the scope 'a'" in e.value.__notes__
    with mm.register_task("a", callback=lambda match, _: {}["b"]), pytest.raises(KeyError) as e:
        mm.jit(layers(["a"])).lower(weights(1), batch())
    assert e.value.__notes__[0] == "in the callback of register_task('a'), for the scope 'a'"


# The same program as with explicit tasks


def assert_as_explicit(names, wrap=lambda f: f, body=dense, arguments=None):
    devices = {n: i for i, n in enumerate(names)}
    args = arguments or (weights(len(names)), batch())
    written = repr(mm.jit(wrap(explicit(names, devices, body))).lower(*args).program)
    with mm.register_task("|".join(names), callback=lambda match, _: mm.Task(devices=[devices[match[0]]])):
        step = mm.jit(wrap(layers(names, body)))
        assert repr(step.lower(*args).program) == written
        assert_same(step(*args), reference(step, *args))


def test_gradients_that_add_up_stay_outside():
    """A parameter of three tasks: each makes its part, no task waits for another one's."""

    def tied(make):
        return lambda f: jax.value_and_grad(lambda w, x: f([w["tied"], w["own"], w["tied"], w["tied"]], x))

    args = ({"tied": weights(1)[0], "own": weights(2)[1]}, batch())
    assert_as_explicit(["a", "b", "c", "d"], tied(None), arguments=args)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble-h1"])
def test_microbatches(schedule):
    """The pipeline is that of explicit tasks, also with the weight gradients split off."""
    loop = lambda f: mm.microbatch(  # noqa: E731
        jax.value_and_grad(f), argnum=1, num_microbatches=4, reduce="mean", schedule=schedule
    )
    assert_as_explicit(["a", "b", "c"], loop)


def test_custom_derivatives_and_casts():
    """A rule of the user's own; a weight's cast that both passes read is kept by none."""

    @jax.custom_vjp
    def double(x):
        return 2 * x

    double.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))

    def body(w, x):
        return double(x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32)

    names, args = ["a", "b"], (weights(2), batch())
    step = lambda f: mm.microbatch(jax.grad(f), argnum=1, num_microbatches=2)  # noqa: E731
    devices = {"a": 0, "b": 1}
    written = mm.jit(step(explicit(names, devices, body))).lower(*args).program
    mm.register_task("a|b", callback=lambda match, _: mm.Task(devices=[devices[match[0]]]))
    jitted = mm.jit(step(layers(names, body)))
    assert repr(jitted.lower(*args).program) == repr(written)
    assert_same(jitted(*args), reference(jitted, *args), 2e-2)


# Scopes that are no simple chain


def test_a_module_called_twice_in_a_row_is_one_task():
    """Its two calls cannot be told apart, and nothing needs them apart."""
    mm.register_task("a", devices=[1])
    f = jax.value_and_grad(layers(["a", "a"]))
    assert fragments(f, weights(2), batch()) == [("a", [1]), ("a_bwd", [1])]
    assert_agrees(f, weights(2), batch())


def test_a_module_called_again_after_another_is_two_tasks():
    """Cut where the other one needs it, in both passes; the stages pair up."""
    mm.register_task("a", devices=[1])
    mm.register_task("b", devices=[2])
    f = jax.value_and_grad(layers(["a", "b", "a"]))
    assert [n for n, _ in fragments(f, weights(3), batch())] == ["a", "b", "a_2", "a_bwd", "b_bwd", "a_bwd_2"]
    assert_agrees(f, weights(3), batch())
    loop = mm.microbatch(f, argnum=1, num_microbatches=3, reduce="mean")
    program = mm.jit(loop).lower(weights(3), batch()).program
    stage = {f.name: f.stage for f in program.fragments if f.tasks}
    assert (stage["a"], stage["b"], stage["a_2"]) == (0, 1, 2)
    assert (stage["a_bwd"], stage["b_bwd"], stage["a_bwd_2"]) == (2, 1, 0)
    assert_agrees(loop, weights(3), batch())


def test_two_scopes_that_wait_for_each_other():
    """Each alone could be one task, but not both."""

    def f(w, x):
        with jax.named_scope("a"):
            y = dense(w, x)
        with jax.named_scope("b"):
            z = dense(w, x + 1)
        with jax.named_scope("b"):
            y = dense(w, y)
        with jax.named_scope("a"):
            z = dense(w, z)
        return y + z

    mm.register_task("a", devices=[0])
    mm.register_task("b", devices=[1])
    assert sorted(n for n, _ in fragments(f, weights(1)[0], batch())) in (["a", "a_2", "b"], ["a", "b", "b_2"])
    assert_agrees(f, weights(1)[0], batch())
    assert_agrees(jax.grad(lambda w, x: jnp.sum(f(w, x))), weights(1)[0], batch())


def test_explicit_tasks_inside_a_matched_scope():
    """On the same mesh they merge, on another one it is an error that names both."""

    def f(device):
        inner = mm.task(dense, "inner", devices=[device])
        return layers(["outer"], lambda w, x: inner(w, x * 2))

    mm.register_task("outer", devices=[1])
    assert fragments(jax.grad(f(1)), weights(1), batch()) == [("outer", [1]), ("outer_bwd", [1])]
    assert_agrees(jax.grad(f(1)), weights(1), batch())
    with pytest.raises(
        ValueError, match=r"'inner' on devices \[2\] .* 'outer' on devices \[1\], which register_task\('outer'\)"
    ):
        mm.jit(f(2)).lower(weights(1), batch())


def test_inside_an_explicit_task_nothing_is_matched():
    """It was said more directly."""
    mm.register_task("inner", devices=[1])
    f = mm.task(layers(["inner"]), "outer", devices=[2])
    assert fragments(f, weights(1), batch()) == [("outer", [2])]


def test_control_flow():
    """A scan and a conditional are opened; a loop of unknown length is one task; inside a matched scope all stay whole."""

    def looped(w, x):
        return jax.lax.while_loop(lambda c: jnp.sum(c) < 9, lambda c: layer(w, c) + 1, x)

    def layer(w, x):
        with jax.named_scope("layer"):
            return dense(w, x)

    def chosen(w, x):
        return jax.lax.cond(x[0, 0] > 0, lambda: layer(w, x), lambda: x)

    def scanned(w, x):
        return jax.lax.scan(lambda c, _: (layer(w, c), None), x, length=3)[0]

    def whole(w, x):
        with jax.named_scope("whole"):
            return looped(w, scanned(w, chosen(w, x)))

    w, x = weights(1)[0], jnp.abs(batch())
    with mm.register_task("layer", devices=[1]):
        assert [n for n, _ in fragments(scanned, w, x)] == ["layer", "layer_2", "layer_3"]
        assert_agrees(jax.grad(lambda w, x: jnp.sum(scanned(w, x))), w, x)
        assert fragments(chosen, w, x) == [("layer", [1])]
        assert_agrees(chosen, w, x)
        assert fragments(looped, w, x) == [("layer", [1])]
        assert_agrees(looped, w, x)
    mm.register_task("whole", devices=[2])
    mm.register_task("layer", devices=[1])
    assert fragments(whole, w, x) == [("whole", [2])]
    assert_agrees(whole, w, x)


# What it costs that five layers do not divide over three submeshes is said once, as a warning.
@pytest.mark.filterwarnings("ignore:.*are not used in equal blocks by 3 submeshes:UserWarning")
def test_layers_of_a_scan_by_index():
    """A scope directly in the body is also called by its iteration; the backward pass has the same numbers."""

    def f(ws, x):
        def body(h, w):
            with jax.named_scope("layer"):
                return dense(w, h), None

        return jnp.mean(jax.lax.scan(body, x, ws)[0] ** 2)

    stacked = jnp.stack(weights(5))
    step = mm.microbatch(jax.value_and_grad(f), argnum=1, num_microbatches=2, reduce="mean")
    names = [f"layer[{i}]" for i in range(5)]
    with mm.register_task(r"layer\[(\d+)\]", callback=lambda match, _: mm.Task(devices=[int(match[1]) // 2])):
        found = fragments(step, stacked, batch())
        assert found[:5] == [(n, [i // 2]) for i, n in enumerate(names)]
        assert found[5:] == [(f"{n}_bwd", [i // 2]) for i, n in reversed(list(enumerate(names)))]
        assert_agrees(step, stacked, batch())
    with mm.register_task("layer", mesh=[mesh(0), mesh(1), mesh(2)]):
        assert [d for _, d in fragments(f, stacked, batch())] == [[0], [0], [1], [1], [2]]
        assert_agrees(step, stacked, batch())
        with pytest.raises(ValueError, match=r"'layer', which register_task\('layer'\) makes .* 3 meshes .* lax.scan"):
            mm.jit(layers(["layer"])).lower(weights(1), batch())


# Constraints and boxes


def hidden(w, x):
    return mm.with_sharding_constraint(dense(w, x), (None, "hidden"))


def test_constraints_mean_what_the_task_says():
    """Also in a loop inside the task."""

    def body(w, x):
        return jax.lax.fori_loop(0, 3, lambda _, c: hidden(w, c), x)

    for fun in (hidden, body):
        f = lambda w, x, fun=fun: layers(["a"], fun)([w], x) + 0 * jnp.sum(x)  # noqa: E731
        with mm.register_task("a", mesh=mesh(2, 3), logical_axes=[("hidden", "model")]):
            text = mm.jit(f).lower(weights(1)[0], batch()).compile().as_text()
        assert re.search(r"f32\[24,8\]", text)  # half the columns on each device
        assert_agrees(f, weights(1)[0], batch())


def test_a_result_constrained_in_a_task():
    """It arrives as it was constrained."""

    def f(w, x):
        with jax.named_scope("a"):
            return hidden(w, x)

    with mm.register_task("a", mesh=mesh(2, 3), logical_axes=[("hidden", "model")]):
        assert tuple(mm.jit(f)(weights(1)[0], batch()).sharding.spec) == (None, "model")
    with mm.register_task("a", devices=[2, 3]):
        assert mm.jit(f)(weights(1)[0], batch()).is_fully_replicated


def test_names_that_nobody_knows_and_dimensions_that_do_not_divide():
    """In the words of explicit tasks."""
    f = lambda w, x: layers(["a"], hidden)([w], x)  # noqa: E731
    written = mm.task(hidden, "a", mesh=mesh(0, 1))
    with pytest.warns(UserWarning) as expected:
        mm.jit(lambda w, x: jnp.mean(written(w, x) ** 2), strict=False)(weights(1)[0], batch())
    message = str(expected[0].message).split(": ", 1)[1]
    mm.register_task("a", mesh=mesh(0, 1))
    with pytest.warns(UserWarning, match=re.escape(message)):
        mm.jit(f)(weights(1)[0], batch())
    with pytest.raises(ValueError, match="axis name 'hidden'"):
        mm.jit(f, strict=True)(weights(1)[0], batch())
    mm.clear_tasks()
    mm.register_task("a", mesh=mesh(0, 1, 2), logical_axes=[("hidden", "model")])
    with pytest.raises(
        ValueError, match=r"task 'a': dimension 1 \('hidden'\) of shape \(24, 16\) .* 3 devices"
    ) as error:
        mm.jit(f).lower(weights(1)[0], batch())
    assert "in task 'a'" in error.value.__notes__


def test_a_task_without_a_mesh_lets_constraints_travel():
    """To where it is placed."""

    def f(w, x):
        with jax.named_scope("a"):
            y = mm.with_sharding_constraint(dense(w, x), (None, "model"))
        return mm.task(lambda y: y * 2, "b", mesh=mesh(2, 3))(y)

    mm.register_task("a", name="somewhere")
    assert fragments(f, weights(1)[0], batch()) == [("somewhere", [2, 3]), ("b", [2, 3])]
    program = mm.jit(f).lower(weights(1)[0], batch()).program
    assert "P(None, 'model')" in str(program.fragments[0].jaxpr)
    assert_agrees(f, weights(1)[0], batch())


# How much work it is


def work(fun, *args):
    """Calls of functions, Python's and C's, that it takes to plan a traced function."""
    mm.jit(fun).lower(*args)  # fills JAX's caches
    traced = mm.jit(fun).trace(*args)
    calls = 0

    def count(frame, event, arg):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        traced.lower()
    finally:
        sys.setprofile(None)
    return calls


def training(f, microbatches):
    return mm.microbatch(jax.value_and_grad(f), argnum=1, num_microbatches=microbatches, reduce="mean")


def test_twice_the_layers_are_twice_the_work():
    """With a registration for each layer and many microbatches, too."""

    def planned(count):
        names = [f"layer_{i}" for i in range(count)]
        for i, name in enumerate(names):
            mm.register_task(name, devices=[i % 8])
        calls = work(training(layers(names), 24), weights(count), batch())
        mm.clear_tasks()
        return calls

    assert planned(96) < 2.1 * planned(48)


def test_more_microbatches_are_no_more_work_than_for_explicit_tasks():
    """The body of the loop is looked at once."""
    names = [f"layer_{i}" for i in range(8)]
    devices = {name: i for i, name in enumerate(names)}
    args = weights(len(names)), batch()

    def more(f):
        return work(training(f, 24), *args) - work(training(f, 12), *args)

    expected = more(explicit(names, devices))
    for name in names:
        mm.register_task(name, devices=[devices[name]])
    assert more(layers(names)) < 1.1 * expected


def test_patterns_for_one_name_and_for_many_are_tried_in_order():
    """Escaped names, names with an iteration, and patterns, the first one first."""

    def f(ws, x):
        def body(h, w):
            with jax.named_scope("layer-a"):
                h = dense(w, h)
            with jax.named_scope("layer"):
                return dense(w, h), None

        return jax.lax.scan(body, x, ws)[0]

    mm.register_task(re.escape("layer-a[1]"), devices=[1])
    mm.register_task("LAYER", devices=[7])
    mm.register_task(re.compile("LAYER[-]A", re.IGNORECASE), devices=[2])
    mm.register_task(r"layer\[[02]\]", devices=[3])
    mm.register_task("layer", devices=[4])
    mm.register_task(".*", devices=[5])
    with pytest.warns(UserWarning, match=r"register_task\('LAYER'\) matches no scope") as found:
        placed = fragments(f, jnp.stack(weights(3)), batch())
    assert str(found[0].message).count("matches no scope") == 1
    assert [device for _, (device,) in placed] == [2, 3, 1, 4, 2, 3]


def test_gradients_that_nobody_reads_are_dropped_in_linear_time():
    """Of a step that returns the loss alone."""
    names = [f"layer_{i}" for i in range(96)]
    mm.register_task("layer_.*", callback=lambda match, _: mm.Task(devices=[int(match[0][6:]) % 8]))

    def planned(count):
        step = training(layers(names[:count]), 2)
        return work(lambda ws, x: step(ws, x)[0], weights(count), batch())

    assert planned(96) < 2.1 * planned(48)


def test_a_constraint_outside_tasks_is_read_by_the_rules_of_a_scope():
    """A parameter that is constrained before its scope is entered lies as the task that the scope becomes says."""
    submesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "model"))

    def step(w, x):
        w = mm.with_sharding_constraint(2 * w, ("batch", "hidden"))
        kept = w[:, :2]  # a reader outside of the scope, so that the constraint is outside too
        with jax.named_scope("layer"):
            return x @ w, kept

    rules = [("batch", "data"), ("hidden", "model")]
    with mm.register_task("layer", mesh=submesh, logical_axes=rules), warnings.catch_warnings():
        warnings.simplefilter("error")
        lowered = mm.jit(step).lower(jnp.ones((4, 4)), jnp.ones((2, 4)))
    assert "P('data', 'model')" in str(lowered.layout)


def test_an_argument_may_arrive_on_the_submesh_of_a_scope():
    """Also where another one, a task's, is a part of it."""
    whole, part = mesh(0, 1), mesh(0)
    inner = mm.task(jnp.sin, "part", mesh=part)

    def step(w, x):
        with jax.named_scope("layer"):
            h = x @ w
        return inner(h)

    wanted = NamedSharding(whole, PartitionSpec(None, "model"))
    with mm.register_task("layer", mesh=whole):
        compiled = mm.jit(step, in_shardings=(wanted, None)).prepare(weights(1)[0], batch())
    assert compiled.input_shardings[0][0].is_equivalent_to(wanted, 2)


def test_a_pattern_whose_scopes_are_in_a_task_elsewhere_is_told_of():
    """As where a pattern for some parts matches the whole model, too."""

    def model(x):
        with jax.named_scope("model"):
            for i in range(2):
                with jax.named_scope(f"block_{i}"):
                    x = jax.nn.gelu(x) + i  # a call in the scope
        return x

    told = pytest.warns(UserWarning, match="'block_1'.* places nothing: .* 'model', which .* match less")
    with mm.register_task("model|block_0", devices=[0]), mm.register_task("block_1", devices=[1]), told:
        mm.jit(model).lower(jnp.ones(8))
    again = lambda x: jax.named_scope("block_1")(jnp.cos)(model(x))  # noqa: E731
    for devices, used in ([0], model), ([1], again):  # on the same devices nothing changes, elsewhere it may be used
        places = mm.register_task("model", devices=[0]), mm.register_task("block_1", devices=devices)
        with places[0], places[1], warnings.catch_warnings():
            warnings.simplefilter("error")
            mm.jit(used).lower(jnp.ones(8))
