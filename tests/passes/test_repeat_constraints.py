"""A constraint of what no microbatch changes is repeated by each task that reads the value, in each phase."""

from flat import program, run

SPEC = (
    "jax.sharding.NamedSharding(jax.sharding.AbstractMesh((2,), ('d',), axis_types=(jax.sharding.AxisType.Auto,)), "
    "jax.sharding.PartitionSpec('d'))"
)

BODY = """
    tasks: front 0
    inputs: w f32[4,4], x f32[2,4]
    loop 0: 2 microbatches, 1f1b
    carry h f32[2,4] = x, then t, at last total
    {where}c = lax.with_sharding_constraint(w, spec)
    0: y = front: {read}
    0: t = front_bwd: y * lax.reduce_sum(c, (0, 1))
    results: total
"""


def body(where, read, operand="w"):
    return program(BODY.format(where=where, read=read).replace("(w, spec)", f"({operand}, {SPEC})"))


def constraints(flat):
    """What the program says of its constraints: the loop and phase of each, and the task whose submesh it is on."""
    return [(n.loop, n.backward, n.colocated_with) for n in flat.nodes if n.primitive == "sharding_constraint"]


def test_each_phase_has_its_own():
    """Inside the loop or before it: nothing that a phase leaves to the next is a copy of the weight."""
    for where in ("0: ", ""):
        after = run("repeat_constraints", body(where, "h @ c"))
        assert [(loop, backward) for loop, backward, _ in constraints(after)] == [(0, False), (0, True)]
        assert len({v for n in after.nodes if n.primitive == "sharding_constraint" for v in n.outputs}) == 2


def test_one_that_one_phase_alone_reads_stays():
    """Nothing changes, and the same program comes back."""
    flat = body("0: ", "lax.tanh(h)")
    assert run("repeat_constraints", flat) is flat


def test_one_of_a_microbatch_stays():
    """A constrained activation is another one in each microbatch: what the backward pass reads of it is kept."""
    flat = body("0: ", "h * lax.reduce_sum(c, (0, 1))", operand="h @ w @ w")
    assert len(constraints(flat)) == 1
    assert run("repeat_constraints", flat) is flat


def test_the_order_is_that_of_the_program():
    """Of many that one reader reads, in every process: no order of a set, which is that of addresses."""
    many = range(12)
    inputs = ", ".join(f"w{k} f32[4,4]" for k in many)
    lines = "\n".join(f"    c{k} = lax.with_sharding_constraint(w{k}, {SPEC})" for k in many)
    flat = program(
        f"tasks: front 0\ninputs: {inputs}\n{lines}\n    y = front: {' + '.join(f'c{k}' for k in many)}\n"
        f"    z = front_bwd: y * {' + '.join(f'c{k}' for k in many)}\n    results: z"
    )
    after = run("repeat_constraints", flat)
    read = [n.inputs[0] for n in after.nodes if n.primitive == "sharding_constraint"]
    assert read == [*flat.invars, *flat.invars]
