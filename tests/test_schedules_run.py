"""Every schedule on real programs: the values of the plain loop, the same bits within a class."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import manymesh as mm
from manymesh import schedules
from manymesh.schedules import AbstractSchedule, Action, Custom, GPipe, Interleaved1F1B
from stages import assert_agrees, loss, microbatched, rows
from stages import parameters as stage_parameters

pytestmark = pytest.mark.once

TABLE = [(1, 4), (2, 4), (3, 5), (4, 8), (8, 16)]
ANYWHERE = ("gpipe", "1f1b", "eager-1f1b", "wavefront", "zero-bubble-h1", "zero-bubble-h2")
WIDTH = 4


def block(w, x):
    return x + jnp.tanh(x @ w[0]) @ w[1]


def plain_loss(params, x):
    for p in params:
        x = block(p, x)
    return jnp.mean(x**2)


@functools.cache
def runner():
    """One step for every chain of blocks: stages that are alike share their executables."""

    def step(params, x, placement, schedule, microbatches):
        tasks = [mm.task(block, f"s{i}", devices=[d]) for i, d in enumerate(placement)]

        def loss(params, x):
            for run, p in zip(tasks, params, strict=True):
                x = run(p, x)
            return jnp.mean(x**2)

        run = mm.microbatch(
            jax.value_and_grad(loss), argnum=1, num_microbatches=microbatches, schedule=schedule, reduce="mean"
        )
        return run(params, x)

    return mm.jit(step, static_argnums=(2, 3, 4))


def parameters(stages):
    rng = np.random.default_rng(0)
    weight = lambda: jnp.asarray(rng.normal(size=(WIDTH, WIDTH)) * 0.3, jnp.float32)  # noqa: E731
    return [(weight(), weight()) for _ in range(stages)]


def batch(microbatches):
    return jnp.asarray(np.random.default_rng(1).normal(size=(2 * microbatches, WIDTH)), jnp.float32)


def plain_loop(params, x, microbatches):
    """The mean over pieces, in a loop that uses nothing of the library."""
    one = jax.jit(jax.value_and_grad(plain_loss))
    results = [one(params, x[2 * m : 2 * m + 2]) for m in range(microbatches)]
    return jax.tree.map(lambda *parts: sum(parts) / microbatches, *results)


def by_hand(placement, microbatches, split):
    """An order of nobody else's: the first two microbatches together, then one after the other."""
    rows = [[] for _ in range(max(placement) + 1)]
    stages = list(enumerate(placement))
    for group in ([0, 1], *([m] for m in range(2, microbatches))):
        for s, d in stages:
            rows[d] += [Action("F", s, m) for m in group]
        for s, d in reversed(stages):
            rows[d] += [Action("B", s, m) for m in group]
    for s, d in stages if split else ():
        rows[d] += [Action("W", s, m) for m in range(microbatches)]
    return Custom(tuple(map(tuple, rows)))


def cases(stages, microbatches):
    """Placements for a line of the table, each with the schedules that admit it."""
    line = tuple(range(stages))
    half = tuple(range(stages if stages <= 4 else stages // 2))  # two stages or more on each of these
    yield line, [*ANYWHERE, by_hand(line, microbatches, False), by_hand(line, microbatches, True)]
    yield half * 2, ["1f1b", "interleaved", Interleaved1F1B(2), "zero-bubble-h1", by_hand(half * 2, microbatches, True)]
    yield half * 3, ["gpipe", Interleaved1F1B(3)]
    yield half + half[::-1], ["zbv", "dualpipev", "zero-bubble-h2", "eager-1f1b", "wavefront"]


def test_the_table_has_every_schedule():
    """A schedule that is registered is tried on devices; "interleaved-4" is registered by an example in a docstring."""
    tried = {schedules.get(s).name for line in TABLE for _, named in cases(*line) for s in named}
    assert tried >= set(schedules.names()) - {"interleaved-4"}


@pytest.mark.parametrize("stages,microbatches", TABLE)
def test_every_schedule_gives_the_values_of_the_plain_loop(stages, microbatches):
    """Loss and gradients, for every schedule that admits the shape; equal bits where the backward is cut alike."""
    x = batch(microbatches)
    for placement, named in cases(stages, microbatches):
        params = parameters(len(placement))
        expected = plain_loop(params, x, microbatches)
        first = {}
        for schedule in named:
            result = jax.tree.map(np.asarray, runner()(params, x, placement, schedule, microbatches))
            for a, e in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
                np.testing.assert_allclose(a, e, rtol=2e-5, atol=1e-5, err_msg=f"{schedule} on {placement}")
            same = first.setdefault(schedules.get(schedule).splits_backward, result)
            for a, e in zip(jax.tree.leaves(result), jax.tree.leaves(same), strict=True):
                np.testing.assert_array_equal(a, e, err_msg=f"{schedule} on {placement}")


@pytest.mark.parametrize("schedule", [*ANYWHERE, "interleaved"])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_fewer_microbatches_than_stages(schedule, microbatches):
    """They run, and wait."""
    params, x = parameters(3), batch(microbatches)
    result = runner()(params, x, (0, 1, 2), schedule, microbatches)
    for a, e in zip(jax.tree.leaves(result), jax.tree.leaves(plain_loop(params, x, microbatches)), strict=True):
        np.testing.assert_allclose(a, e, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("placement", [(0,), (0, 1, 2), (0, 1, 1, 0), (0, 1, 0, 1)])
def test_each_row_runs_in_the_order_of_the_schedule(placement):
    """Instruction by instruction: what a submesh runs is the row of the order, weight gradients included."""
    names = [*ANYWHERE, by_hand(placement, 4, False), by_hand(placement, 4, True)]
    if placement == (0, 1, 1, 0):
        names += ["zbv", "dualpipev"]
    for name in names:
        lowered = runner().lower(parameters(len(placement)), batch(4), placement, name, 4)
        fragments, (loop,) = lowered.program.fragments, lowered.program.loops
        order = loop.schedule.order(loop.placement, 4)
        assert loop.placement == placement or name in ANYWHERE  # which let neighbours on one submesh be one stage
        for submesh, row in enumerate(order.rows):
            ran = [
                Action(f.kind, f.stage, i.microbatch)
                for i in lowered.plan.stream(submesh)
                if hasattr(i, "fragment") and (f := fragments[i.fragment]).tasks
            ]
            assert tuple(dict.fromkeys(ran)) == row, f"{name} on {placement}"


def test_the_weight_gradients_are_a_fragment_of_their_own():
    """Zero-bubble schedules split the backward of every stage, the first included; others do not."""

    def fragments(schedule):
        return runner().lower(parameters(3), batch(4), (0, 1, 2), schedule, 4).program.fragments

    whole = {f"s{i}{end}": kind for i in range(3) for end, kind in (("", "F"), ("_bwd", "B"), ("_wgt", "W"))}
    for schedule in ("zero-bubble-h1", by_hand((0, 1, 2), 4, True)):
        assert {f.name: f.kind for f in fragments(schedule) if f.tasks} == whole
    for schedule in ("1f1b", by_hand((0, 1, 2), 4, False)):
        assert not any(f.kind == "W" for f in fragments(schedule))


ROWS = [["front", "front", "front_bwd", "front_bwd"], ["back", "back_bwd", "back", "back_bwd"]]


def two_tasks(rows, microbatches=2, **statements):
    front = mm.task(block, "front", devices=[0])
    back = mm.task(lambda w, x: jnp.sum(block(w, x)), "back", devices=[1])

    def loss(ws, x):
        return back(ws[1], front(ws[0], x))

    run = mm.microbatch(
        jax.grad(loss), argnum=1, num_microbatches=microbatches, schedule="custom", custom_schedule=rows, **statements
    )
    params = [(jnp.eye(WIDTH), jnp.eye(WIDTH))] * 2
    return run, params, jnp.ones((4, WIDTH))


def test_a_custom_schedule_of_task_names():
    """Rows of names run as written, and give what the plain loop gives."""
    run, params, x = two_tasks(ROWS, num_stages=2, interleave=1)
    with mm.ignore_transforms():
        expected = run(params, x)
    for a, e in zip(jax.tree.leaves(mm.jit(run)(params, x)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, e, rtol=1e-5)


def there_and_back(rows, microbatches=2, before=False):
    """A chain that goes through the front twice: four stages on two submeshes."""
    front, middle, back = (mm.task(block, name, devices=[i]) for i, name in ((0, "front"), (1, "middle"), (1, "back")))

    def loss(ws, x):
        return jnp.sum(back(ws[1], front(ws[0], middle(ws[1], front(ws[0], x)))) ** 2)

    grad = microbatched(jax.grad(loss), num_microbatches=microbatches, schedule="custom", custom_schedule=rows)

    def run(ws, x):
        return grad(ws, front(ws[0], x) if before else x)

    return run, [(jnp.eye(WIDTH), jnp.eye(WIDTH))] * 2, jnp.ones((4, WIDTH))


AGAIN = [
    ["front", "front", "front_2", "front_2", "front_bwd", "front_bwd", "front_bwd_2", "front_bwd_2"],
    ["middle", "middle", "back", "back_bwd", "back", "back_bwd", "middle_bwd", "middle_bwd"],
]


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_task_in_several_stages_is_named_as_its_fragments_are(microbatches):
    """With the numbers that the program prints."""
    run, *args = there_and_back(AGAIN if microbatches == 2 else [["front", "front_2"], ["middle"]], microbatches)
    assert_agrees(run, *args)
    if microbatches == 2:
        (plan,) = (program := mm.jit(run).lower(*args).program).loops
        assert plan.placement == (0, 1, 0, 1)
        names = [f.name for f in program.body(0) if f.tasks]
        assert set(names) == {name for row in AGAIN for name in row}


def test_numbers_count_from_what_the_step_does_before():
    """A call outside of the loop has the first name."""
    later = {"front": "front_2", "front_2": "front_3"}
    run, *args = there_and_back([[later.get(name, name) for name in row] for row in AGAIN], before=True)
    names = {f.name for f in mm.jit(run).lower(*args).program.fragments}
    assert {"front", "front_2", "front_3"} < names
    assert_agrees(run, *args)


def test_a_task_in_several_stages_under_one_name_says_how_to_name_it():
    """Which is meant cannot be told."""
    run, *args = there_and_back([["front"] * 4 + ["front_bwd"] * 4, AGAIN[1]])
    with pytest.raises(mm.errors.ScheduleError) as error:
        mm.jit(run).lower(*args)
    assert str(error.value) == (
        "microbatch(loss): submesh 0 lists front:F2, but microbatches are numbered 0 to 1. Task 'front' is in several "
        "stages; rows name them front, front_2, front_bwd, front_bwd_2."
    )
    run, *args = there_and_back([[name for name in AGAIN[0] if name != "front_2"], AGAIN[1]])
    with pytest.raises(mm.errors.ScheduleError, match="submesh 0 never lists front_2:F0; "):
        mm.jit(run).lower(*args)


@pytest.mark.parametrize("rows", [ROWS, [ROWS[0], ["back", "back", "back_bwd", "back_bwd"]]])
def test_what_is_in_no_task_runs_where_a_custom_schedule_leaves_room(rows):
    """On the first submesh the loss goes on with what the last task made: a stage without a task, which no row can name."""
    front, back = (mm.task(block, name, devices=[i]) for i, name in enumerate(("front", "back")))

    def loss(ws, x):
        h = front(ws[0], x)
        return jnp.sum(jnp.sin(h) * jnp.mean(back(ws[1], h)))

    run = mm.microbatch(jax.value_and_grad(loss), argnum=1, num_microbatches=2, schedule="custom", custom_schedule=rows)
    params = [(jnp.eye(WIDTH), jnp.eye(WIDTH))] * 2
    assert_agrees(run, params, jnp.ones((4, WIDTH)))


NO_GRADIENT = {  # rows, what the first task is differentiated by, and the second one
    "of the first": ([["front", "front"], ["back", "back_bwd", "back", "back_bwd"]], (False, True)),
    "of the first, of weights apart": (
        [["front", "front"], ["back", "back_bwd", "back_wgt", "back", "back_bwd", "back_wgt"]],
        (False, True),
    ),
    "of the weights of the second": (
        [
            ["front", "front", "front_bwd", "front_wgt", "front_bwd", "front_wgt"],
            ["back", "back_bwd", "back", "back_bwd"],
        ],
        (True, None),
    ),
    "of the second": ([["front", "front", "front_bwd", "front_bwd"], ["back", "back"]], (True, False)),
}


@pytest.mark.parametrize(
    "rows,statements,words",
    [
        (
            [["front"], ["back"]],
            {"interleave": 2},
            r"interleave=2 .* the stages are on submeshes \(0, 1\); correct interleave",
        ),
        (
            [[(1, "front")], ["back"]],
            {},
            "row 0 of custom_schedule lists microbatch 1 of 'front', but there is one microbatch",
        ),
    ],
)
def test_one_microbatch_has_a_schedule_that_fits_too(rows, statements, words):
    """Nothing of it is looped, and what is said about stages is looked at all the same."""
    run, params, x = two_tasks(rows, microbatches=1, **statements)
    with pytest.raises(mm.errors.ScheduleError, match=words):
        mm.jit(run).lower(params, x)


def test_a_row_that_is_missing_where_a_stage_could_be_put_in():
    run, params, x = two_tasks([["front", "front"]])
    with pytest.raises(mm.errors.ScheduleError, match="placement .0, 1. has 2 submeshes; give one row per submesh"):
        mm.jit(lambda ws, x: run([jax.lax.stop_gradient(w) for w in ws], x)).lower(params, x)


@pytest.mark.parametrize("name", NO_GRADIENT)
def test_what_is_not_differentiated_has_no_place_in_a_custom_schedule(name):
    """No row can name what a task does not have."""
    rows, (first, second) = NO_GRADIENT[name]
    front, back = (mm.task(block, task, devices=[i]) for i, task in enumerate(("front", "back")))
    fixed = (jnp.eye(WIDTH), jnp.eye(WIDTH))

    def loss(ws, x):
        h = front(ws if first else fixed, x @ ws[0] if first else x)
        made = back(ws if second else fixed, h)
        return jnp.sum(h**2) + jnp.sum(jax.lax.stop_gradient(made) if second is False else made)

    run = microbatched(
        jax.value_and_grad(loss), num_microbatches=2, reduce="sum", schedule="custom", custom_schedule=rows
    )
    assert_agrees(run, fixed, jnp.ones((4, WIDTH)))


@pytest.mark.parametrize(
    "rows,statements,words",
    [
        (
            [["frnt"], ["back"]],
            {},
            "microbatch(loss): row 0 of custom_schedule names 'frnt'; did you mean 'front'? The tasks are "
            "['back', 'back_bwd', 'front', 'front_bwd']",
        ),
        (
            [["front"], ["zzz"]],
            {},
            "microbatch(loss): row 1 of custom_schedule names 'zzz'; the tasks are",
        ),
        (
            [ROWS[0], ["back", "back", "back_bwd", "back_bwd"]],
            {"num_stages": 3},
            "microbatch(loss): num_stages=3, but the program has 2 stages on submeshes (0, 1) (2 if every task counts); "
            "correct num_stages or leave it out",
        ),
        (
            ROWS,
            {"interleave": 2},
            "microbatch(loss): interleave=2 says how many stages each submesh has, but the program has submesh 0: 1, "
            "submesh 1: 1; correct interleave or leave it out",
        ),
        (
            [["front", "front_bwd", "front", "front_bwd"], ["back", "back", "back_bwd", "back_bwd"]],
            {},
            "microbatch(loss): the schedule deadlocks: front:F1 waits for back:B0 waits for front:F1. In it submesh 0 "
            "lists front:B0, which reads back:B0, before front:F1, and submesh 1 lists back:F1, which reads front:F1, "
            "before back:B0; move one of them so that the circle opens.",
        ),
        (
            [ROWS[0], ["back", "back_bwd"]],
            {},
            "microbatch(loss): submesh 1 never lists back:F1; list each action of its stages for each microbatch once.",
        ),
        (
            [["front", "front", "front_bwd", "front_bwd"]],
            {},
            "microbatch(loss): the schedule has 1 rows, but placement (0, 1) has 2 submeshes; give one row per submesh.",
        ),
        (
            [[(1, "front"), (0, "front"), "front_bwd", "front_bwd"], ROWS[1]],
            {},
            "microbatch(loss): submesh 0 lists front:F1 before front:F0; keep the microbatches of a stage in order",
        ),
    ],
)
def test_an_impossible_custom_schedule_says_why(rows, statements, words):
    """Unknown names, wrong statements, circles and gaps are refused before anything compiles."""
    run, params, x = two_tasks(rows, **statements)
    with pytest.raises(mm.errors.ScheduleError) as error:
        mm.jit(run).lower(params, x)
    assert str(error.value).startswith(words)


def test_a_circle_of_four_microbatches_names_the_tasks():
    """The one of the documentation: front:F3 waits for back:B1 waits for front:F3."""
    front = ["front"] * 3 + ["front_bwd"] * 2 + ["front"] + ["front_bwd"] * 2
    back = ["back", "back_bwd"] + ["back"] * 3 + ["back_bwd"] * 3
    run, params, _ = two_tasks([front, back], microbatches=4)
    with pytest.raises(mm.errors.ScheduleError) as error:
        mm.jit(run).lower(params, jnp.ones((8, WIDTH)))
    assert "front:F3 waits for back:B1 waits for front:F3" in str(error.value)
    assert "submesh 0 lists front:B1, which reads back:B1, before front:F3" in str(error.value)


def test_a_custom_object_names_the_tasks_too():
    """Rows of actions, given as a schedule, are checked under the names of the program."""
    rows = [[Action(kind, s, m) for m in range(2) for kind in kinds] for s, kinds in enumerate(("BF", "FB"))]
    with pytest.raises(mm.errors.ScheduleError, match="s0:B0 waits for s0:F0 waits for s0:B0"):
        runner().lower(parameters(2), batch(2), (0, 1), Custom(rows), 2)


@pytest.mark.parametrize("backward", [True, False])
def test_a_wrong_order_of_a_class_names_the_tasks_too(backward):
    """A schedule that somebody wrote, which forgets the last microbatch."""

    class Short(AbstractSchedule):
        name = "short"

        def order(self, placement, num_microbatches, *, backward=True):
            return GPipe().order(placement, num_microbatches - 1, backward=backward)

    run = microbatched(None if backward else loss, num_microbatches=2, schedule=Short())
    with pytest.raises(mm.errors.ScheduleError) as error:
        mm.jit(run).lower(stage_parameters(), rows(4))
    assert str(error.value).startswith(
        f"microbatch(loss): schedule 'short', order((0, 1), 2, backward={backward}): submesh 0 never lists front:F1; "
    )


@pytest.mark.parametrize(
    "options,words",
    [
        ({"schedule": "1f1c"}, "unknown schedule '1f1c'; did you mean '1f1b'?"),
        ({"schedule": 3}, "expected the name of a schedule or a schedule, found 3"),
        ({"schedule": "custom"}, "schedule 'custom' needs rows"),
        (
            {"schedule": "gpipe", "custom_schedule": ROWS},
            "microbatch(plain_loss): custom_schedule goes with schedule='custom', found 'gpipe'",
        ),
    ],
)
def test_a_schedule_that_is_none(options, words):
    """Said when the loop is described, before anything is traced."""
    with pytest.raises(mm.errors.ScheduleError) as error:
        mm.microbatch(plain_loss, argnum=1, num_microbatches=2, **options)
    assert str(error.value).startswith(words)


@pytest.mark.parametrize(
    "schedule,placement,words",
    [
        (
            "zbv",
            (0, 1, 2),
            "microbatch(loss): schedule 'zbv' needs two stages on each submesh in a V, for these submeshes",
        ),
        (
            "dualpipev",
            (0, 1, 0, 1),
            "(0, 1, 1, 0), but found (0, 1, 0, 1); place the stages so or choose a schedule that",
        ),
        (
            Interleaved1F1B(2),
            (0, 1, 2),
            "microbatch(loss): schedule 'interleaved' needs 2 stages on each submesh, dealt out",
        ),
    ],
)
def test_a_schedule_that_needs_another_placement_says_which(schedule, placement, words):
    """The program's placement and the one that would do are both in the message."""
    with pytest.raises(mm.errors.ScheduleError) as error:
        runner().lower(parameters(len(placement)), batch(4), placement, schedule, 4)
    assert words in str(error.value)
    assert str(placement) in str(error.value)


@pytest.mark.parametrize("schedule", ["zero-bubble-h1", "zero-bubble-h2"])
def test_weight_gradients_of_several_stages_that_are_added_up(schedule):
    """A stack of weights whose first slice another stage uses too: one stage's weight half waits for another's."""
    device = lambda i: Mesh(np.array(jax.devices()[i : i + 1]), ("d",))  # noqa: E731
    front = mm.task(lambda w, h: jnp.tanh(h @ w), "front", mesh=[device(1), device(0)])
    back = mm.task(lambda w, h: h @ w, "back", mesh=device(2))

    def tied(ws, x):
        h = jax.lax.scan(lambda h, w: (front(w, h), None), x, ws)[0]
        return jnp.mean(back(ws[0], h) ** 2)

    ws = jax.random.normal(jax.random.key(0), (2, 4, 4))
    assert_agrees(microbatched(jax.value_and_grad(tied), num_microbatches=3, schedule=schedule), ws, rows(12))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble-h1"])
def test_two_answers_of_two_models_are_compared(schedule):
    """As in direct preference optimization: the stages of the frozen model come before the last one of the trained model."""

    def stage(w, h):
        return h + jnp.tanh(h @ w)

    trained, frozen = (
        [mm.task(stage, f"{name}_{i}", devices=[d]) for i, d in enumerate(at)]
        for name, at in (("policy", (0, 1)), ("reference", (2, 3)))
    )

    def likelihood(tasks, params, tokens):
        h = params["embedding"][tokens]
        for task, w in zip(tasks, params["layers"], strict=True):
            h = task(w, h)
        logits = jax.nn.log_softmax(h[:, :-1] @ params["head"])
        return jnp.take_along_axis(logits, tokens[:, 1:, None], -1).sum((1, 2))

    def loss(params, reference, better, worse):
        margins = [likelihood(trained, params, x) - likelihood(frozen, reference, x) for x in (better, worse)]
        return -jax.nn.log_sigmoid(margins[0] - margins[1]).mean()

    step = mm.microbatch(jax.value_and_grad(loss), argnum=(2, 3), num_microbatches=4, schedule=schedule, reduce="mean")
    rng = np.random.default_rng(0)

    def weights():
        return {
            "embedding": rng.normal(size=(20, 16)).astype("f4"),
            "layers": [(rng.normal(size=(16, 16)) / 4).astype("f4") for _ in range(2)],
            "head": rng.normal(size=(16, 20)).astype("f4") / 4,
        }

    args = weights(), weights(), *(rng.integers(0, 20, (16, 9)) for _ in range(2))
    (plan,) = mm.jit(step).lower(*args).program.loops
    assert plan.placement == (0, 2, 3, 1) and plan.in_order
    assert_agrees(step, *args)


@pytest.mark.parametrize("schedule", ["zbv", "dualpipev"])
@pytest.mark.parametrize(
    "layers, ends", [((0, 1, 1, 0), True), ((0, 0, 1, 1, 1, 1, 0, 0), False), ((0, 1, 2, 2, 2, 1, 0), True)]
)
def test_a_v_has_several_tasks_in_a_stage(layers, ends, schedule):
    """The stages in which it turns are next to each other on one submesh, with half of its tasks each."""
    tasks = [mm.task(lambda w, x: x + jnp.tanh(x @ w), f"layer_{i}", devices=[d]) for i, d in enumerate(layers)]
    tasks = [mm.task(lambda w, x: x @ w, name, devices=[0]) for name in ["first"] * ends] + tasks
    tasks += [mm.task(lambda w, x: x @ w, name, devices=[0]) for name in ["last"] * ends]

    def loss(ws, x):
        for task, w in zip(tasks, ws, strict=True):
            x = task(w, x)
        return jnp.mean(x**2)

    ws = [jax.random.normal(jax.random.key(i), (4, 4)) / 2 for i in range(len(tasks))]
    step = microbatched(jax.value_and_grad(loss), num_microbatches=6, schedule=schedule)
    (plan,) = mm.jit(step).lower(ws, rows(12)).program.loops
    half = tuple(range(1 + max(layers)))
    assert plan.placement == half + half[::-1] and plan.in_order
    assert_agrees(step, ws, rows(12))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero-bubble-h1"])
@pytest.mark.parametrize("again", [False, True])
def test_a_task_that_says_no_submesh_may_be_elsewhere_in_the_backward_pass(again, schedule):
    """Then it is of another stage there: one of the submesh that it is on."""
    front = mm.task(lambda w, x: jnp.tanh(x @ w), "front", devices=[0])
    back = mm.task(lambda w, x: jnp.sin(x @ w) + x, "back", devices=[1])
    scale = mm.task(lambda w, x: jnp.sin(x * jnp.sum(w)), "scale")

    def loss(ws, x):
        if again:
            return jnp.mean(back(ws[1], jax.checkpoint(lambda x: scale(ws[0], front(ws[2], x)))(x)))
        return jnp.mean(scale(ws[0], back(ws[1], scale(ws[2], front(ws[0], scale(ws[0], x))))))

    rng = np.random.default_rng(0)
    ws, x = (rng.normal(size=shape).astype(np.float32) / 2 for shape in ((3, 8, 8), (8, 8)))
    assert_agrees(microbatched(jax.value_and_grad(loss), schedule=schedule), ws, x)
