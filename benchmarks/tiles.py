"""Share of the FMA peak over keys x queries per tile, as a table and as a picture.

    python benchmarks/tiles.py                                  # table
    python benchmarks/tiles.py --svg docs/tiles.svg             # and the picture of docs/host.md

Each size is a build of its own (-DBURST_KEYS_FORWARD, -DBURST_KEYS_BACKWARD, -DBURST_PANELS).  All builds are run in
turn, round after round, and the peak before each run; a cell is its best run beside the best peak, as what disturbs a run only
slows it: with medians a shared machine's neighbours outweigh the sizes.  float32, one thread.  Groups
are made smaller where there would be too few tasks or more than 1 MB (tasks.h); eight heads keep them as they are told to
be up to 1056 queries forward and 720 backward at d 64, 720 and 432 at d 128: columns beyond that repeat, but for noise.
"""

from __future__ import annotations

import argparse

import host as bench

from burstmpi.backends import host

KEYS = (24, 48, 96, 144, 192, 384)
PANELS = (2, 4, 8, 16, 24)
DEFAULT = (96, 24)  # tile.h and tasks.h


def sweep(isa, d, rows, heads, rounds):
    """{(keys, panels): (forward, backward)} shares of the peak, and the lanes of a panel."""
    cells = {}
    for keys in KEYS:
        for panels in PANELS:
            flags = [f"-DBURST_KEYS_FORWARD={keys}", f"-DBURST_KEYS_BACKWARD={keys}", f"-DBURST_PANELS={panels}"]
            cells[keys, panels] = bench.Ours(host.HostBackend(isa, threads=1, extra_flags=flags), "float32", d, {}, heads, rows)
    peak = bench.Peak(isa)
    limit, rates = 0.0, {at: ([], []) for at in cells}
    for _ in range(rounds):
        for at, block in cells.items():
            for run, flops, into in zip((block.forward, block.backward), block.flops, rates[at]):
                limit = max(limit, peak())
                into.append(flops / bench.seconds(run) * 1e-9)
    lanes = next(iter(cells.values())).backend._unit(bench.np.float32).tile_rows
    return {at: tuple(max(rate) / limit for rate in pair) for at, pair in rates.items()}, lanes


def table(cells, lanes, way):
    head = "| keys \\ queries of a group | " + " | ".join(str(p * lanes) for p in PANELS) + " |"
    lines = [head, "|---" * (len(PANELS) + 1) + "|"]
    for keys in KEYS:
        mark = lambda p: "**" if (keys, p) == DEFAULT else ""  # noqa: E731
        lines.append(f"| {keys} | " + " | ".join(f"{mark(p)}{cells[keys, p][way]:.0%}{mark(p)}" for p in PANELS) + " |")
    return "\n".join(lines)


def picture(results, lanes):
    """An SVG: a field of squares for each head dim and pass, darker is faster, the default framed."""
    size, gap, left, top = 46, 70, 60, 50
    fields = [(d, way, cells) for d, cells in results.items() for way in (0, 1)]
    values = [pair[way] for _, way, cells in fields for pair in cells.values()]
    low, high = min(values), max(values)
    width, height = left + len(fields) * (len(PANELS) * size + gap), top + len(KEYS) * size + 60
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for n, (d, way, cells) in enumerate(fields):
        x0 = left + n * (len(PANELS) * size + gap)
        parts.append(f'<text x="{x0}" y="20" font-weight="bold">d {d}, {("forward", "backward")[way]}: % of the FMA peak</text>')
        for row, keys in enumerate(KEYS):
            y = top + row * size
            parts.append(f'<text x="{x0 - 6}" y="{y + size / 2 + 4}" text-anchor="end">{keys}</text>')
            for column, panels in enumerate(PANELS):
                share = cells[keys, panels][way]
                depth = (share - low) / (high - low or 1)
                shade = f"rgb({int(245 - 205 * depth)},{int(248 - 138 * depth)},{int(250 - 90 * depth)})"
                x = x0 + column * size
                frame = ' stroke="#c00" stroke-width="3"' if (keys, panels) == DEFAULT else ' stroke="white"'
                parts.append(f'<rect x="{x}" y="{y}" width="{size - 3}" height="{size - 3}" fill="{shade}"{frame}/>')
                ink = "white" if depth > 0.5 else "black"
                middle = f'x="{x + (size - 3) / 2}" y="{y + size / 2 + 3}" text-anchor="middle"'
                parts.append(f'<text {middle} fill="{ink}">{100 * share:.0f}</text>')
        for column, panels in enumerate(PANELS):
            x, y = x0 + column * size + (size - 3) / 2, top - 8
            parts.append(f'<text x="{x}" y="{y}" text-anchor="middle">{panels * lanes}</text>')
    parts.append(
        f'<text x="{left}" y="{height - 20}">rows: keys of a tile; columns: queries of a group (panels of {lanes}); '
        "framed: the default</text></svg>"
    )
    return "\n".join(parts) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isa", default=None, choices=["avx512", "avx2", "portable"])
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--svg", help="write the picture here")
    args = parser.parse_args()
    isa = args.isa or next(isa for isa in host.available() if isa in ("avx512", "avx2", "portable"))
    results = {}
    for d in (64, 128):
        results[d], lanes = sweep(isa, d, args.rows, args.heads, args.rounds)
        for way in (0, 1):
            print(f"\n{isa}, float32, d {d}, {('forward', 'backward')[way]}\n\n{table(results[d], lanes, way)}", flush=True)
        if args.svg:
            with open(args.svg, "w") as file:
                file.write(picture(results, lanes))


if __name__ == "__main__":
    main()
