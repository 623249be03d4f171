"""One rank of ``torch.distributed.pipelining`` on the workload; started by peers.py, driven over standard input.

    python _torch_worker.py RANK WORLD PORT SCHEDULE SIZE

``SIZE`` is a JSON object with the fields of `_model.Size`. With a world of 1 it accumulates gradients over the
microbatches on one core, without a pipeline. Each line ``go`` is one step; it answers with its seconds and its loss.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as nnf
from torch.distributed import pipelining


class Block(torch.nn.Module):
    """``x <- LayerNorm(x + gelu(x W1) W2)``."""

    def __init__(self, up: np.ndarray, down: np.ndarray) -> None:
        super().__init__()
        self.up, self.down = (torch.nn.Parameter(torch.from_numpy(w)) for w in (up, down))

    def forward(self, x: Any) -> Any:
        x = x + nnf.gelu(x @ self.up, approximate="tanh") @ self.down
        return nnf.layer_norm(x, (x.shape[-1],))


def problem(size: dict[str, int]) -> tuple[list[Block], Any, Any]:
    """Blocks and data, the same as in `_model.Size`."""
    rng = np.random.default_rng(0)
    shapes = (size["width"], size["hidden"]), (size["hidden"], size["width"])
    blocks = [Block(*(rng.normal(0, 0.02, s).astype(np.float32) for s in shapes)) for _ in range(size["blocks"])]
    rng = np.random.default_rng(1)
    x, y = (rng.normal(size=(size["batch"], size["width"])).astype(np.float32) for _ in range(2))
    return blocks, torch.from_numpy(x), torch.from_numpy(y)


def serial(size: dict[str, int]) -> Any:
    """The step without a pipeline."""
    blocks, x, y = problem(size)
    net = torch.nn.Sequential(*blocks)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-4, fused=True)
    count = size["microbatches"]

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for piece, target in zip(x.chunk(count), y.chunk(count), strict=True):
            loss = nnf.mse_loss(net(piece), target) / count
            loss.backward()
            total += loss.item()
        optimizer.step()
        return total

    return step


def pipelined(rank: int, world: int, schedule: str, size: dict[str, int]) -> Any:
    """The step of one rank under one of torch's schedules; those for several stages a rank get two."""
    blocks, x, y = problem(size)
    kind = getattr(pipelining, f"Schedule{schedule}", None) or getattr(pipelining.schedules, f"Schedule{schedule}")
    several = schedule not in ("GPipe", "1F1B")
    stages = 2 * world if several else world
    mine = [rank]
    if several:  # the V comes back to the rank where it began
        mine.append(stages - 1 - rank if schedule in ("ZBVZeroBubble", "DualPipeV") else rank + world)
    each = size["blocks"] // stages
    modules = [torch.nn.Sequential(*blocks[s * each : (s + 1) * each]) for s in mine]
    example = torch.zeros(size["batch"] // size["microbatches"], size["width"])
    device = torch.device("cpu")
    parts = [
        pipelining.PipelineStage(m, s, stages, device, input_args=(example,))
        for m, s in zip(modules, mine, strict=True)
    ]
    run = kind(parts if several else parts[0], size["microbatches"], loss_fn=nnf.mse_loss)
    optimizer = torch.optim.Adam([p for m in modules for p in m.parameters()], lr=1e-4, fused=True)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        losses: list[Any] = []
        given = (x,) if 0 in mine else ()
        run.step(*given, **({"target": y, "losses": losses} if stages - 1 in mine else {}))
        optimizer.step()
        loss = torch.tensor([float(torch.stack(losses).mean()) if losses else 0.0])
        dist.all_reduce(loss)  # also the barrier at the end of a step
        return float(loss)

    return step


def main() -> None:
    """Waits for work."""
    rank, world, port, schedule, size = sys.argv[1:]
    torch.set_num_threads(1)
    if world == "1":
        step = serial(json.loads(size))
    else:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, GLOO_SOCKET_IFNAME="lo")
        dist.init_process_group("gloo", rank=int(rank), world_size=int(world))
        step = pipelined(int(rank), int(world), schedule, json.loads(size))
    step()
    print("ready", flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        loss = step()
        print(json.dumps([time.perf_counter() - start, loss]), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
