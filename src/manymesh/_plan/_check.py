"""`check`: what every plan promises."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ._instructions import Plan, Receive, Run, Send, Tag, Value

_EMPTY, _FULL, _FREED = range(3)


def check(plan: Plan) -> None:
    """Asserts what every plan promises; a failure is a bug in ManyMesh.

    - A slot is filled once, before it is read, and with a value of the shape and dtype that its readers expect.
    - What is read or filled is freed once, and not used after. Results are not freed.
    - An instruction touches slots of its own submesh only, and a fragment runs always on the same one.
    - Each `Send` has one `Receive`, right behind it, that agrees about tag, ends and variables. No tag occurs twice.
    - Every result is there at the end.
    - What may be donated dies in every run of its fragment, is read once there and shares its buffer with nothing.

    Args:
      plan: the plan of all submeshes.

    Raises:
      AssertionError: the plan is broken. The message names the instruction by its position.
    """
    _Checker(plan).run()


class _Checker:
    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.state = bytearray(plan.num_slots)
        self.touched = bytearray(plan.num_slots)
        self.submesh = [-1] * plan.num_slots
        self.value: list[Value | None] = [None] * plan.num_slots  # None: an input that was not read yet
        self.home: dict[int, int] = {}
        self.tags: set[Tag] = set()

    def run(self) -> None:
        """Goes through the plan once."""
        plan = self.plan
        for position, s, slot in plan.inputs:
            self._fill(f"input {position}", s, (slot,), (None,))
            self.touched[slot] = 0
        sent: Send | None = None
        for k, ins in enumerate(plan.instructions):
            context = f"instruction {k}, {type(ins).__name__} on submesh {ins.submesh}"
            if isinstance(ins, Receive):
                self._check_pair(context, sent, ins)
                sent = None
                self._fill(context, ins.submesh, ins.outputs, [plan.variables[v] for v in ins.variables])
            else:
                assert sent is None, f"{context}: stands between {sent} and its Receive"
                if isinstance(ins, Send):
                    sent = ins
                    self._read(context, ins.submesh, ins.inputs, [plan.variables[v] for v in ins.variables])
                else:
                    self._run(context, ins)
            self._free(context, ins.submesh, ins.free)
        assert sent is None, f"nobody receives {sent}"
        self._check_end()

    def _run(self, context: str, ins: Run) -> None:
        ports = self.plan.ports[ins.fragment]
        home = self.home.setdefault(ins.fragment, ins.submesh)
        assert home == ins.submesh, f"{context}: fragment {ins.fragment} ran on submesh {home} before"
        self._read(context, ins.submesh, ins.inputs, [self.plan.variables[v] for v in ports.reads])
        self._fill(context, ins.submesh, ins.outputs, [self.plan.variables[v] for v in ports.makes])
        donatable = self.plan.donatable.get(ins.fragment, ())
        free, times = frozenset(ins.free if donatable else ()), Counter(ins.inputs if donatable else ())
        for position in donatable:
            slot = ins.inputs[position]
            assert slot in free, f"{context}: input {position} may be donated, but slot {slot} does not die here"
            assert times[slot] == 1, f"{context}: input {position} may be donated and is read twice"
            assert slot not in self.plan.aliases, (
                f"{context}: input {position} may be donated, but slot {slot} is shared"
            )

    def _check_pair(self, context: str, send: Send | None, receive: Receive) -> None:
        assert send is not None, f"{context}: receives {receive.tag}, which nobody sends"
        assert send.tag == receive.tag, f"{context}: receives {receive.tag}, but {send.tag} was sent"
        assert receive.tag not in self.tags, f"{context}: {receive.tag} was sent before"
        self.tags.add(receive.tag)
        ends = (send.submesh, send.target), (receive.source, receive.submesh)
        assert ends[0] == ends[1] and receive.tag.target == receive.submesh, (
            f"{context}: ends {ends[1]}, sent {ends[0]}"
        )
        assert send.variables == receive.variables, f"{context}: variables {receive.variables}, sent {send.variables}"

    def _read(self, context: str, s: int, slots: Sequence[int], values: Sequence[Value]) -> None:
        assert len(slots) == len(values), f"{context}: reads {len(slots)} slots as {len(values)} values"
        for slot, value in zip(slots, values, strict=True):
            assert self.state[slot] == _FULL, f"{context}: reads slot {slot}, which is {self._state(slot)}"
            assert self.submesh[slot] == s, f"{context}: reads slot {slot} of submesh {self.submesh[slot]}"
            if self.value[slot] != value:
                assert self.value[slot] is None, f"{context}: reads {value} in slot {slot} of {self.value[slot]}"
                self.value[slot] = value
            self.touched[slot] = 1

    def _fill(self, context: str, s: int, slots: Sequence[int], values: Sequence[Value | None]) -> None:
        assert len(slots) == len(values), f"{context}: fills {len(slots)} slots with {len(values)} values"
        for slot, value in zip(slots, values, strict=True):
            assert self.state[slot] == _EMPTY, f"{context}: fills slot {slot}, which is {self._state(slot)}"
            self.state[slot], self.submesh[slot], self.value[slot], self.touched[slot] = _FULL, s, value, 1

    def _free(self, context: str, s: int, slots: Sequence[int]) -> None:
        for slot in slots:
            assert self.state[slot] == _FULL, f"{context}: frees slot {slot}, which is {self._state(slot)}"
            assert self.submesh[slot] == s, f"{context}: frees slot {slot} of submesh {self.submesh[slot]}"
            self.state[slot] = _FREED

    def _check_end(self) -> None:
        for o, slot in enumerate(self.plan.outputs):
            assert slot is None or self.state[slot] == _FULL, f"result {o}: slot {slot} is {self._state(slot)}"
        kept = set(self.plan.outputs)
        for slot, (state, touched) in enumerate(zip(self.state, self.touched, strict=True)):
            assert state != _EMPTY, f"slot {slot} is never filled"
            # An input that nobody reads stays until the end of the call.
            assert state == _FREED or slot in kept or not touched, f"slot {slot} is never freed"

    def _state(self, slot: int | None) -> str:
        return "empty" if slot is None else ("empty", "full", "freed")[self.state[slot]]
