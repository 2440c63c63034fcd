"""Draw figures against the number of processes or nodes, as SVG, with both axes logarithmic.

The picture has a light panel of its own, as the boxes of the other drawings have, so that dark pages show it as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from math import ceil, floor, log10

COLOURS = ("#1f5fa8", "#12807a", "#b3431f", "#8a5a00", "#6b6b6b", "#7a3e9d")
WIDTH, HEIGHT = 720, 420
LEFT, RIGHT, TOP, BOTTOM = 64, 556, 44, 368
LABEL_HEIGHT = 15
DASHED = ("bare floor",)
DECADES_MAX = 4
"""A taller picture has lines at 1, 10, 100 only, and not at 2 and 5."""

Lines = Mapping[str, Mapping[int, float]]


def _tick(value: float) -> str:
    return f"{value:,}" if value < 1_000_000 else f"{value // 1_000_000:,} M"


def draw(title: str, across: str, lines: Lines, dashed: Sequence[str] = DASHED) -> str:
    """Return the picture of `lines`, each a figure by the number of processes. Lines named in `dashed` are dashed."""
    sizes = sorted({size for line in lines.values() for size in line})
    values = [value for line in lines.values() for value in line.values()]
    low, high = floor(log10(min(values)) * 2) / 2, ceil(log10(max(values)) * 2) / 2
    digits = (1, 2, 5) if high - low <= DECADES_MAX else (1,)

    def x(size: int) -> float:
        return LEFT + (RIGHT - LEFT) * log10(size / sizes[0]) / log10(sizes[-1] / sizes[0])

    def y(value: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * (log10(value) - low) / (high - low)

    def parts() -> Iterator[str]:
        yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="Helvetica,Arial,'
        yield f'sans-serif" font-size="12" fill="#10202f" role="img"><title>{escape(title)}</title>'
        yield f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#f3f5f8" stroke="#9aa7b8"/>'
        yield f'<text x="{LEFT}" y="26" font-size="14" font-weight="bold">{escape(title)}</text>'
        for tick in (digit * 10**power for power in range(int(low) - 1, int(high) + 1) for digit in digits):
            if low <= log10(tick) <= high:
                yield f'<path d="M{LEFT} {y(tick):.1f}H{RIGHT}" stroke="#d3dae3"/>'
                yield f'<text x="{LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{_tick(tick)}</text>'
        for size in sizes:
            yield f'<text x="{x(size):.1f}" y="{BOTTOM + 20}" text-anchor="middle">{size}</text>'
        yield f'<text x="{(LEFT + RIGHT) / 2}" y="{BOTTOM + 42}" text-anchor="middle">{escape(across)}</text>'
        free = float("inf")  # labels stand at the ends of their lines, the lowest first, and none covers another
        ends = sorted(zip(lines.items(), COLOURS, strict=False), key=lambda each: -y(list(each[0][1].values())[-1]))
        for (name, line), colour in ends:
            points = [(x(size), y(line[size])) for size in sorted(line)]
            dashes = ' stroke-dasharray="5 4"' if name in dashed else ""
            path = "L".join(f"{across:.1f} {down:.1f}" for across, down in points)
            yield f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>'
            yield from (f'<circle cx="{across:.1f}" cy="{down:.1f}" r="3" fill="{colour}"/>' for across, down in points)
            free = min(points[-1][1], free - LABEL_HEIGHT)
            yield f'<text x="{RIGHT + 10}" y="{free + 4:.1f}" fill="{colour}">{escape(name)}</text>'
        yield "</svg>\n"

    return "\n".join(parts())
