"""Two processes, four devices each: the same values as one process, wherever values and submeshes lie."""

import jax
import numpy as np
import programs
import pytest

import manymesh as mm
import turns

GROUPS = {
    "one stage each": [(0, 1), (4, 5)],
    "several stages on one process": [(0,), (1,), (4,), (5,)],
    "back and forth": [(0,), (4,), (1,), (5,)],
    "unequal": [(0,), (4, 5, 6, 7)],
    "spanning": [(0, 4), (1, 5)],
    "spanning all": [(0, 1, 2, 3, 4, 5, 6, 7), (0, 1, 2, 3)],
    "sharing devices": [(0, 1), (1, 4)],
}


# Where no submesh spans both processes, losses and parameters are those of one process, bit by bit. Sums of two devices have
# one order; four are added in another one than in a run of one process, so that "unequal" is not here.
WITHIN = ("one stage each", "several stages on one process", "back and forth")


@pytest.mark.parametrize("name", GROUPS)
def test_training_equals_one_process(pool, name):
    """The same bits where no sum crosses processes; else losses to six digits, parameters to what the order of sums may change."""
    expected = programs.training(GROUPS[name])
    for losses, counts, params in pool.call("programs.training", GROUPS[name]):
        assert counts == expected[1]
        if name in WITHIN:
            assert losses == expected[0]
        np.testing.assert_allclose(losses, expected[0], rtol=1e-6)
        for a, e in zip(params, expected[2], strict=True):
            if name in WITHIN:
                np.testing.assert_array_equal(a, e)
            np.testing.assert_allclose(a, e, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("schedule", ["gpipe", "zero-bubble-h1", "eager-1f1b"])
def test_schedules(pool, schedule):
    """The same bits under others than 1F1B, with more microbatches than fit into a window."""
    groups = GROUPS["one stage each"]
    expected = programs.training(groups, 20, schedule, 2)
    for losses, _, params in pool.call("programs.training", groups, 20, schedule, 2):
        assert losses == expected[0]
        for a, e in zip(params, expected[2], strict=True):
            np.testing.assert_array_equal(a, e)


def test_fetch(pool):
    """Values from wherever they are, in every process or in one."""
    (first, second, some), (first_1, _, some_1) = pool.call("programs.fetching")
    expected = {
        "one": np.arange(8.0), "two": np.arange(6).reshape(2, 3), "both": np.arange(16.0).reshape(4, 4),
        "key": jax.random.key_data(jax.random.key(5)), "scalar": 2.5, "host": 7, "bare": [1, 1],
    }  # fmt: skip
    for given in (first, second, first_1):
        for name, value in expected.items():
            assert isinstance(given[name], np.ndarray)
            np.testing.assert_array_equal(given[name], value)
    assert some == {"one": None, "two": None}
    np.testing.assert_array_equal(some_1["two"], expected["two"])
    np.testing.assert_array_equal(some_1["one"], expected["one"])


def test_ghosts(pool):
    """An array of the other process has all but its value, can be an argument, and is gone when it was donated."""
    for process, seen in enumerate(pool.call("programs.ghosts")):
        assert seen["sharding"]
        assert (seen["shape"], seen["dtype"], seen["here"]) == ((4,), "float32", process)
        assert seen["value"] == [0, 4, 8, 12]
        assert seen["again"] == [0, 8, 16, 24]
        assert "donated to an earlier call" in seen["donated"]


def test_arguments_come_from_anywhere(pool):
    """Host values, arrays that were put nowhere, and arrays on other devices of both processes."""
    for results, expected in pool.call("programs.arguments"):
        for value in results.values():
            np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)


def test_results_go_where_they_are_wanted(pool):
    """Also onto devices of another process."""
    for there, (y, x) in pool.call("programs.moved_results"):
        assert there
        assert (y.tolist(), x.tolist()) == ([1, 2, 3, 4], [0, 1, 2, 3])


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("program", ["in: program", "1.5", "2.5"]),
        ("task", ["in: program\n  program:\n    process 0: …", " 1.5:float32()", " 2.5:float32()"]),
        (
            "precision",
            [
                "in: settings, program\n  settings:\n    process 0: jax_default_matmul_precision: None\n    process 1: jax_default_"
                "matmul_precision: highest\n  program:\n    process 0: …",
                "precision=None",
            ],
        ),
        (
            "nans",
            ["in: settings, ", "process 0: jax_debug_nans: False\n    process 1: jax_debug_nans: True\n  donation:"],
        ),
        (
            "donated",
            ["in: settings, ", "process 0: donate_argnums: (0,)\n    process 1: donate_argnums: ()\n", "\n  donation:"],
        ),
        ("shape", ["in: arguments\n", "args[0]: float32[4]", "args[0]: float32[5]"]),
        (
            "more",
            [
                "in: arguments\n  arguments:\n    process 0: (nothing)\n    process 1: args[0]['a']: float32[4] None\nEvery"
            ],
        ),
        ("values", ["in: values\n", "process 0: args[0]['batch']: value ", "process 1: args[0]['batch']: value "]),
        ("numbers", ["in: values\n", "process 0: args[0][0]: value 0.01\n", "process 1: args[0][0]: value 0.02\n"]),
        ("committed", ["in: arguments\n", "process 0: args[0]: float32[4]", "process 1: args[0]: float32[4]"]),
        (
            "later",
            [
                "the arguments of <lambda> (program ",
                "in: arguments\n  arguments:\n    process 0: args[0]['b']: SingleDeviceSharding on [0]\n    process 1: args[0]['b']: ",
            ],
        ),
    ],
)
def test_processes_that_differ_are_refused(pool, case, words):
    """In every process, with the lines that differ."""
    for text in pool.call("programs.disagreement", case):
        assert "the processes did not derive the same; process 1 differs from process 0" in text
        for word in words:
            assert word in text


def test_a_key_of_which_every_process_has_a_copy(pool):
    for drawn, words in pool.call("programs.a_key_of_all"):
        np.testing.assert_allclose(drawn, jax.random.normal(jax.random.key(3), (3,)), rtol=1e-6)
        assert words.tolist() == [0, 3]


def test_processes_at_different_places_are_told_where(pool):
    """And not that everything differs."""
    for text in pool.call("programs.disagreement", "place"):
        assert "manymesh.fetch" in text and "<lambda>" in text
        assert "derive" not in text


def test_each_process_records_what_it_runs(pool):
    """And says of the rest that it is elsewhere."""
    for process, (here, elsewhere, text) in enumerate(pool.call("programs.recorded")):
        assert (here, elsewhere) == ([process], (1 - process,))
        assert f"{1 - process} | recorded in another process" in text


def test_a_step_of_several_processes_is_not_timed(pool):
    """Each has a part of it alone."""
    expected = [
        f"<lambda>: {name}() runs in one process; start the script without others" for name in ("measure", "durations")
    ]
    assert pool.call("programs.timed") == [expected] * 2


def test_each_process_measures_its_own_machine(pool):
    """On devices that it has."""
    assert pool.call("programs.measured_machine") == [["float32", "bfloat16"]] * 2


def test_a_call_leaves_nothing_behind(pool):
    """Nor what stands for a random key of another process, which was traced for in each call."""
    for objects in pool.call("programs.left_behind"):
        assert objects < 1


def test_what_is_moved_in_each_call_can_be_placed_as_it_is_told(pool):
    """Between processes a step moves what was put somewhere; `jax.device_put` does not."""
    how = "mm.jit(lambda x: x, out_shardings=compiled.input_shardings[0][0])(args[0])"
    assert pool.call("programs.moved_again") == [(how, [])] * 2


PARTS = 5


@pytest.mark.parametrize("part", range(PARTS))
def test_laws_hold_on_generated_programs(pool, part, shared, request):
    """The laws of one process hold in two. Ten programs a part, three in a brief run; fuzz_processes.py runs more."""
    brief = request.config.getoption("--hypothesis-profile") == "brief"
    for number in range(part, 15 if brief else 50, PARTS):
        pool.call("programs.generated", number, shared)


def test_each_process_loads_its_part_of_the_batch(pool):
    """`prepare_batch` joins them."""
    expected = programs.parts_of_a_batch()
    for losses, steps in pool.call("programs.parts_of_a_batch"):
        np.testing.assert_allclose(losses, expected[0], rtol=1e-5)
        assert steps == expected[1]


def test_a_step_of_ones_own_on_joined_parts(pool):
    """By the function in the documentation."""
    expected, _ = programs.parts_by_hand()
    for losses, text in pool.call("programs.parts_by_hand"):
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
        assert "1 program compiled" in text


def test_the_example_of_the_readme(pool):
    """Word for word, in two processes; also in reference mode, which is plain JAX in each of them."""
    (loss, plain, step), other = pool.call("programs.readme")
    assert (loss, plain, step) == other
    assert step == 21
    assert 0 < plain < 0.06


def test_one_process_compares(pool):
    """The reference mode from host values needs nobody else: the other process may go on, or end."""
    (losses, reference), (other, nothing) = pool.call("programs.compared_by_one_process")
    np.testing.assert_allclose(losses, reference, rtol=1e-6)
    assert (other, nothing) == (losses, None)


@pytest.mark.parametrize("donate", [False, True])
def test_arguments_on_meshes_of_other_names_come_out_alike_in_every_process(pool, donate):
    """So that the next step, and `mm.fetch`, can be given them."""
    (first, values), (second, others) = pool.call("programs.called_otherwise", donate)
    assert first == second
    jax.tree.map(np.testing.assert_array_equal, values, others)
    y, again, w, v, tokens = values
    np.testing.assert_array_equal(y, again)
    np.testing.assert_array_equal(w, np.eye(4))
    np.testing.assert_array_equal(v, 2 * np.eye(4))
    assert tokens.sum() == 128


def test_the_hosts_run_a_loop_together(pool):
    """Each process reads the condition, and runs the body as often."""
    for results, expected, step in pool.call("programs.host_loops"):
        for found, wanted in zip(results, expected, strict=True):
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found, wanted)
        assert len({int(r["count"]) for r in results}) > 1
        assert "1 program compiled" in step


def test_what_is_closed_over_is_in_every_process(pool):
    """Whoever has not the value of an array says whose it is; of a scalar result each has a copy."""
    for process, (words, scaled, expected) in enumerate(pool.call("programs.closing_over_results")):
        for text, name in zip(words, ("evaluate", "<lambda>"), strict=True):
            assert text == (
                f"mm.jit({name}): the step, or a function in it, closes over an array float32[8,8] of process {1 - process}, "
                "whose value is not here; pass it as an argument"
            )
        np.testing.assert_allclose(scaled, expected, rtol=1e-6)


def test_nothing_is_compiled_twice(pool):
    """A scalar that comes back as a copy in every process is where it was; nothing is made of what is not here."""
    for process, (text, count, changes) in enumerate(pool.call("programs.counted_programs")):
        assert text.endswith("1 program compiled")
        assert count == 3
        assert changes == [True] * (1 - process)


def test_states_stay_in_the_memory_of_the_host(pool):
    """Each process keeps its own part there."""
    for kinds, state, expected in pool.call("programs.states_on_the_host"):
        assert kinds == [["pinned_host"]] * 2
        for a, e in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, e, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("first", [0, 6])
def test_steps_that_take_turns(pool, first):
    """On a state of which each reads some, replaces some and hands on the rest, from wherever it lies."""
    for number in range(first, first + 6):
        with mm.ignore_transforms():
            expected = turns.run(number)
        for found in pool.call("turns.run", number):
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)


def test_what_is_handed_on_stays_where_it_is(pool):
    (where, moved, state), (where_1, moved_1, state_1) = pool.call("programs.handed_on")
    assert where == where_1 == {"a": True, "b": True, "both": True, "key": True}
    assert not moved and not moved_1
    keys = [jax.random.key_data(each.pop("key")).tolist() for each in (state, state_1)]
    assert keys == [jax.random.key_data(jax.random.key(3)).tolist()] * 2
    jax.tree.map(np.testing.assert_array_equal, state, state_1)
