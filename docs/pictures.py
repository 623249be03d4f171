"""Draws the pictures of the pages from the schedules' simulator.

python docs/pictures.py
"""

from __future__ import annotations

from pathlib import Path

from manymesh.schedules import simulate

STATIC = Path(__file__).parent / "_static"
COLOURS = {"F": "#4878b0", "B": "#3a9463", "W": "#c98a2c"}
WORDS = {"F": "forward", "B": "backward", "W": "weight gradient"}
UNIT, ROW, LEFT = 16, 26, 84  # pixels: a unit of time, a row, and where time begins


def timeline(schedule: str, stages: int, num_microbatches: int) -> str:
    """One row for each submesh, a box for each task of each microbatch, as SVG."""
    run = simulate(schedule, stages=stages, num_microbatches=num_microbatches)
    width, height = LEFT + UNIT * run.makespan + 8, ROW * stages + 34
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height}" width="{width:g}" height="{height}" '
        'font-family="sans-serif" font-size="11">'
    ]
    for submesh in range(stages):
        y = ROW * submesh
        lines.append(f'<text x="0" y="{y + 16}" fill="#808080">submesh {submesh}</text>')
        lines.append(f'<rect x="{LEFT}" y="{y}" width="{UNIT * run.makespan:g}" height="{ROW - 4}" fill="#80808030"/>')
    for slot in run.timeline:
        x, y, long = LEFT + UNIT * slot.start, ROW * slot.submesh, UNIT * (slot.end - slot.start)
        colour = COLOURS[slot.action.kind]
        lines.append(f'<rect x="{x:g}" y="{y}" width="{long - 1:g}" height="{ROW - 4}" rx="2" fill="{colour}"/>')
        lines.append(
            f'<text x="{x + long / 2:g}" y="{y + 15}" fill="white" text-anchor="middle">{slot.action.microbatch}</text>'
        )
    kinds = sorted({slot.action.kind for slot in run.timeline}, key="FBW".index)
    for i, kind in enumerate(kinds):
        x, y = LEFT + 130 * i, ROW * stages + 12
        lines.append(f'<rect x="{x}" y="{y}" width="12" height="12" rx="2" fill="{COLOURS[kind]}"/>')
        lines.append(f'<text x="{x + 18}" y="{y + 10}" fill="#808080">{WORDS[kind]}</text>')
    return "\n".join([*lines, "</svg>", ""])


PICTURES = {
    "timeline.svg": lambda: timeline("1f1b", 4, 8),
    "timeline-zero-bubble.svg": lambda: timeline("zero-bubble-h1", 4, 8),
}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (STATIC / name).write_text(draw(), "utf-8")
