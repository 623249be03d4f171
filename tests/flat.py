"""Small flat programs for the tests of passes: written as text, built, and with a pass switched off.

    tasks: front 0, back 1
    inputs: w f32[4,4], x f32[4,4]
    loop 0: 2 microbatches, gpipe
    xs b f32[2,4] = p, q
    carry a f32[] = zero, then s, at last total
    p = x[0:2]
    q = x[2:4]
    zero = lax.full((), 0.0) [layout follows loop]
    0: h = front: lax.tanh(b @ w)
    0: s = a + jnp.sum(h)
    results: total

The right side of an equation is Python on the variables named so far, and may become several nodes. ``front:`` makes it
one task, ``front_bwd:`` and ``front_wgt:`` the other phases of it. What a node says besides stands in brackets, as
`str` of a flat program prints it; ``in NAME`` gives it a name stack. The numbers behind tasks are devices.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

import manymesh as mm
from manymesh import _compat, schedules
from manymesh._implicit import Matcher, registered
from manymesh._microbatch import LoopSpec
from manymesh._passes import _build, _run
from manymesh._passes._scopes import is_backward
from manymesh._program import Carry, FlatProgram, Loop, Node, Pieces
from manymesh._program._check import check
from manymesh._program._flat import Pins, Result
from manymesh._program._rewrite import trace_eqns

DTYPES = {"f32": "float32", "i32": "int32", "bool": "bool", "bf16": "bfloat16"}
NAME = re.compile(r"[A-Za-z_]\w*")


def switch_off(monkeypatch, name):
    """From here on to the end of the test, programs are built without one pass."""
    assert name in [p.name for p in _run.PASSES], f"no pass is called {name!r}"
    monkeypatch.setattr(_build, "PASSES", tuple(p for p in _build.PASSES if p.name != name))


def find_pass(name):
    """A pass of the list, or what makes a fact hold."""
    (found,) = [p for p in (*_run.PASSES, *_run.PROVIDERS.values()) if p.name == name]
    return found


def run(name, flat):
    """One pass over a program, with the facts that it needs, and nothing else; both ends are checked."""
    check(flat)
    after = flat
    for fact, provider in _run.PROVIDERS.items():
        if fact in find_pass(name).needs and provider.name != name:
            after = provider.run(after)
    after = find_pass(name).run(after)
    check(after)
    return after


def lines(flat):
    """The text of a program, without what calls compute."""
    return "\n".join(line for line in str(flat).splitlines() if not line.startswith("    "))


def text(source):
    """A multi-line string of a test, as it would be at the margin."""
    return textwrap.dedent(source).strip()


def program(source, **given):
    """The flat program that a text means.

    Args:
      given: other fields of the program; ``rows``: of a custom schedule; ``states``: (name of an input, position of a result);
        ``stacked``: name -> names of its slices; ``results``: name of a task's result -> which one it is;
        ``tasks``: name -> `Task`, for meshes.
    """
    return _Reader(given).read(text(source))


def looped(source, *equations):
    """The program of a text in which ``{}`` stands for equations of the body of loop 0."""
    return program(source.format("\n".join(f"0: {line}" for line in equations)))


class _Reader:
    def __init__(self, given):
        self.given = given
        self.tasks = dict(given.pop("tasks", {}))
        self.rows = given.pop("rows", None)
        self.vars, self.nodes, self.inputs = {}, [], ()
        self.specs, self.ties = [], []

    def read(self, source):
        outvars = ()
        for line in source.splitlines():
            head, _, rest = line.strip().partition(" ")
            if head == "tasks:":
                for word in rest.split(", "):
                    name, *devices = word.split()
                    self.tasks[name] = mm.Task(name, devices=[int(d) for d in devices] or None)
            elif head == "inputs:":
                self.inputs = tuple(self.declare(word) for word in rest.split(", ") if word)
            elif head == "loop":
                number, count, schedule = re.fullmatch(r"(\d+): (\d+) microbatches, (\S+)", rest).groups()
                assert int(number) == len(self.specs), "loops are numbered from 0"
                self.specs.append(LoopSpec("step", int(count), schedules.get(schedule), custom_schedule=self.rows))
            elif head in ("xs", "carry", "ys"):
                self.ties.append((len(self.specs) - 1, head, rest))
                self.declare_ties(head, rest)
            elif head == "results:":
                outvars = tuple(self.vars[name] for name in rest.split(", ") if name)
            elif line.strip():
                self.equation(line.strip())
        states = tuple((self.vars[name], o) for name, o in self.given.pop("states", ()))
        stacked = {self.vars[k]: tuple(self.vars[v] for v in c) for k, c in self.given.pop("stacked", {}).items()}
        results = {self.vars[k]: Result((which,)) for k, which in self.given.pop("results", {}).items()}
        self.given.setdefault("pins", Pins(states=states))
        self.given.setdefault("registered", Matcher(registered()))
        loops = tuple(self.loop(i) for i in range(len(self.specs)))
        return FlatProgram(
            self.inputs,
            outvars,
            tuple(self.nodes),
            loops,
            tasks=self.tasks,
            stacked=stacked,
            results=results,
            **self.given,
        )

    def declare(self, word):
        name, kind = word.split(" ")
        dtype, shape = re.fullmatch(r"(\w+)\[(.*)\]", kind).groups()
        shape = tuple(int(n) for n in shape.split(",") if n)
        self.vars[name] = _compat.new_var(jax.core.ShapedArray(shape, jnp.dtype(DTYPES[dtype])))
        return self.vars[name]

    def declare_ties(self, head, rest):
        left, _, right = rest.partition(" = ")
        if head == "ys":  # ys p f32[2], q f32[2] = y
            for word in re.findall(r"\w+ \w+\[[^]]*\]", left):
                self.declare(word)
            return
        inner = self.declare(left)
        if head == "carry":
            final = right.rsplit(" ", 1)[1]
            self.vars[final] = _compat.new_var(inner.aval)

    def loop(self, index):
        carries, xs, ys = [], [], []
        for _, head, rest in (t for t in self.ties if t[0] == index):
            left, _, right = rest.partition(" = ")
            if head == "carry":
                init, out, final = re.fullmatch(r"(\w+), then (\w+), at last (\w+)", right).groups()
                carries.append(Carry(*(self.vars[v] for v in (left.split()[0], out, init, final))))
            elif head == "xs":
                xs.append(Pieces(self.vars[left.split()[0]], tuple(self.vars[v] for v in right.split(", "))))
            else:
                names = [word.split()[0] for word in re.findall(r"\w+ \w+\[[^]]*\]", left)]
                ys.append(Pieces(self.vars[right], tuple(self.vars[v] for v in names)))
        return Loop(self.specs[index], tuple(carries), tuple(xs), tuple(ys))

    def equation(self, line):
        tags = {}
        scope = re.match(r"(\d+): ", line)
        if scope:
            tags["loop"], line = int(scope[1]), line[scope.end() :]
        words = re.search(r" \[([^]]*)\]$", line)
        if words and not re.search(r"\w\[[^]]*\]$", line):
            line = line[: words.start()]
            tags.update(pair for word in words[1].split(", ") for pair in self.tag(word))
        left, _, expression = line.partition(" = ")
        task = re.match(r"(\w+?)(_bwd|_wgt|): ", expression)
        if task:
            expression = expression[task.end() :]
            tags |= {"task": task[1], "backward": task[2] != "", "weight": task[2] == "_wgt"}
        used = [v for v in dict.fromkeys(NAME.findall(expression)) if v in self.vars]
        operands = [self.vars[v] for v in used]

        def fun(*xs):
            return eval(expression, {"jnp": jnp, "lax": lax, "jax": jax, **dict(zip(used, xs, strict=True))})

        flat_fun = lambda *xs: jax.tree.leaves(fun(*xs))  # noqa: E731
        names = left.split(", ")
        if task:
            given = [_compat.new_var(v.aval) for v in operands]
            eqns, outs = trace_eqns(flat_fun, given)
            results = [_compat.new_var(v.aval) for v in outs]
            eqns = [_compat.call_eqn(task[1], _compat.new_jaxpr(given, outs, eqns), operands, results)]
        else:
            eqns, results = trace_eqns(flat_fun, operands)
        self.nodes += [Node(e, **tags) for e in eqns]
        self.vars.update(zip(names, results, strict=True))

    @staticmethod
    def tag(word):
        if word.startswith("in "):
            yield "stack", word[3:]
            yield "backward", is_backward(word)
        elif word.startswith("with "):
            yield "colocated_with", word[5:]
        else:
            yield word.replace(" ", "_"), True


def placed(flat):
    """Where each node of a placed program is: its task or primitive, and the first devices of its submeshes."""
    first = [m.devices.flat[0].id for m in flat.placement.submeshes]
    named = lambda n: flat.tasks[n.task].name if n.task else n.primitive  # noqa: E731
    return [(named(n), *(first[s] for s in flat.placement.node[n])) for n in flat.nodes]


def node(flat, primitive):
    """The one node of a primitive, or of a task."""
    (found,) = [n for n in flat.nodes if primitive in (n.primitive, n.task)]
    return found


def changed(flat, primitive, **fields):
    """The program with one node changed."""
    old = node(flat, primitive)
    return replace(flat, nodes=tuple(replace(n, **fields) if n is old else n for n in flat.nodes))
