"""The one table of tile shapes: (architecture, type, head dims, direction) → rows, warps, stages.

A GPU kernel gets its shape by ``-D``; what it needs of shared memory is told here and checked by a static_assert there,
so that a shape that does not fit fails when it is compiled.  docs/kernels.md derives the choices.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["ARCHITECTURES", "HEAD_DIMS", "SHARED_LIMIT", "Kernel", "Tile", "architecture", "padded"]

HEAD_DIMS = (32, 64, 96, 128, 192, 256)  # native; others are filled up with zeros in shared memory

# Opt-in shared memory of one block of threads, in bytes.
SHARED_LIMIT = {
    "75": 64 << 10,
    "80": 163 << 10,
    "86": 99 << 10,
    "89": 99 << 10,
    "90": 227 << 10,
    "100": 227 << 10,
    "120": 99 << 10,
}
ARCHITECTURES = tuple(SHARED_LIMIT)


@dataclass(frozen=True)
class Tile:
    """The shape of one kernel."""

    queries: int  # rows of a tile of queries
    keys: int  # rows of a tile of keys
    warps: int
    stages: int  # of the copies from global to shared memory
    shared: int  # bytes of shared memory; the kernel's own sum must be the same
    resident: int = 1  # blocks of threads that a multiprocessor holds at the same time

    @property
    def threads(self) -> int:
        return 32 * self.warps


def architecture(capability: str) -> str:
    """Give the architecture whose entry serves a compute capability such as "80" or "87".

    Raises
    ------
    ValueError
        Older than the oldest.
    """
    known = [a for a in ARCHITECTURES if int(a) <= int(capability)]
    if not known:
        raise ValueError(f"GPU: compute capability {capability} is too old, sm_{ARCHITECTURES[0]} or newer is needed")
    # sm_87 is an sm_86 with more shared memory, sm_103 an sm_100, sm_121 an sm_120: the next older one fits
    return known[-1]


def padded(d: int) -> int:
    """Give the native head dim that a head dim is filled up to.

    Raises
    ------
    ValueError
        Not a multiple of 8, or above 256.
    """
    if d % 8 or not 0 < d <= HEAD_DIMS[-1]:
        raise ValueError(f"head dim: must be a multiple of 8 up to {HEAD_DIMS[-1]} on a GPU, got {d}")
    return next(native for native in HEAD_DIMS if native >= d)


@dataclass(frozen=True)
class Kernel:
    """A kernel family with one shape: raw_kernels/<source>.cu, compiled with these -D."""

    source: str
    tile: Tile
    defines: dict = field(hash=False)
    sum_bytes: int = 0  # backward: of dQ on its way by atomic sums, of one query row, at the start of Block.work
    prepared_bytes: int = 0  # backward: of what ``backward_prepare`` lays out behind them, of one query row

    def sums(self, batch: int, heads: int, rows_q: int) -> int:
        """Bytes at the start of Block.work that must be 0 before ``backward``; whole tiles of queries."""
        return batch * heads * -(-rows_q // self.tile.queries) * self.tile.queries * self.sum_bytes

    def work(self, batch: int, heads: int, rows_q: int, sums: bool) -> int:
        """Bytes of Block.work of a backward kernel; ``sums``: with dQ by atomic sums."""
        rows = batch * heads * -(-rows_q // self.tile.queries) * self.tile.queries
        return rows * (self.sum_bytes * sums + self.prepared_bytes)


# ---------------------------------------------------------------- wide: float32 and float64
#
# Rows are (queries, keys, warps, more -D), the largest first; the first one that fits the architecture's shared memory is
# taken, with two stages where they fit too.  docs/kernels.md says why.  A lane holds RM x RN numbers of S: queries / warps / 4
# times keys / 8 (DMMA: / 8, / 4).

WIDE_DMMA = ("80", "90", "100")  # where float64 has tensor cores worth the name

_WIDE_FORWARD = {
    # (type, DMMA): {padded head dim (the larger one): [(queries, keys, warps)]}
    ("float32", 0): {
        32: [(64, 64, 4)],
        64: [(128, 64, 8), (64, 32, 4)],
        96: [(128, 64, 8), (128, 32, 8), (64, 32, 4)],
        128: [(128, 64, 8), (96, 32, 8), (32, 32, 4)],
        192: [(128, 32, 8), (64, 32, 8), (48, 32, 4), (32, 16, 4)],
        256: [(96, 32, 8), (64, 32, 8), (48, 16, 4), (16, 16, 4)],
    },
    ("float64", 0): {
        32: [(64, 32, 4)],
        64: [(64, 32, 4), (32, 32, 4)],
        96: [(32, 32, 4), (32, 16, 4)],
        128: [(32, 16, 4), (16, 16, 4)],
        192: [(16, 16, 4), (16, 8, 4), (8, 8, 2)],
        256: [(16, 16, 4), (16, 8, 4), (8, 8, 2)],
    },
    ("float64", 1): {
        32: [(64, 32, 4)],
        64: [(64, 32, 4)],
        96: [(64, 32, 4)],
        128: [(64, 32, 4), (64, 16, 4)],
        192: [(32, 16, 4)],
        256: [(32, 16, 4)],
    },
}
_WIDE_BACKWARD = {
    # (queries, keys, warps, warps of S along queries x keys, of dK and dV along keys, of dQ along queries)
    ("float32", 0): {
        32: [(64, 64, 4, 2, 2, 4, 4), (32, 64, 4, 2, 2, 4, 4)],
        64: [(64, 64, 8, 4, 2, 4, 4), (32, 64, 4, 2, 2, 2, 2), (32, 32, 4, 2, 2, 2, 2)],
        96: [(32, 64, 4, 2, 2, 4, 4), (32, 32, 4, 2, 2, 4, 4), (16, 32, 4, 2, 2, 4, 4)],
        128: [(32, 64, 8, 2, 4, 4, 2), (32, 32, 4, 2, 2, 2, 2), (16, 32, 4, 2, 2, 2, 2), (16, 16, 4, 2, 2, 2, 2)],
        192: [(32, 32, 8, 4, 2, 4, 4), (16, 32, 8, 2, 4, 4, 4), (16, 16, 4, 2, 2, 2, 2), (8, 16, 4, 2, 2, 2, 2)],
        256: [(32, 32, 8, 4, 2, 2, 2), (16, 16, 4, 2, 2, 2, 2), (8, 16, 4, 2, 2, 2, 2)],
    },
    ("float64", 0): {
        32: [(32, 32, 4, 2, 2, 4, 4), (16, 32, 4, 2, 2, 4, 4)],
        64: [(32, 32, 4, 2, 2, 2, 2), (16, 16, 4, 2, 2, 2, 2)],
        96: [(16, 16, 4, 2, 2, 2, 2), (8, 16, 4, 2, 2, 2, 2)],
        128: [(16, 16, 4, 2, 2, 2, 2), (8, 8, 4, 2, 1, 2, 2)],
        192: [(8, 16, 4, 2, 2, 2, 2), (8, 8, 4, 2, 1, 2, 2), (4, 8, 4, 1, 1, 2, 1)],
        256: [(8, 8, 4, 2, 1, 2, 2), (4, 8, 4, 1, 1, 2, 1)],
    },
    ("float64", 1): {
        32: [(32, 32, 4, 2, 2, 4, 4)],
        64: [(32, 32, 4, 2, 2, 2, 2)],
        96: [(16, 32, 4, 2, 2, 2, 2)],
        128: [(16, 32, 4, 1, 4, 2, 1)],
        192: [(16, 16, 4, 1, 2, 1, 1)],
        256: [(16, 16, 4, 1, 2, 1, 1)],
    },
}
_WIDE_QUERIES = {
    ("float32", 0): {
        32: [(64, 64, 4)],
        64: [(64, 64, 4), (64, 32, 4), (32, 32, 4)],
        96: [(64, 32, 4), (32, 32, 4), (32, 16, 4)],
        128: [(64, 32, 4), (32, 32, 4), (16, 16, 4)],
        192: [(32, 32, 4), (32, 16, 4), (16, 16, 4), (16, 8, 4)],
        256: [(32, 32, 4), (16, 16, 4), (16, 8, 4)],
    },
    ("float64", 0): {
        32: [(32, 32, 4), (16, 32, 4)],
        64: [(32, 16, 4), (16, 16, 4)],
        96: [(16, 16, 4), (16, 8, 4)],
        128: [(16, 16, 4), (8, 8, 2)],
        192: [(16, 8, 4), (8, 8, 2), (4, 8, 1)],
        256: [(8, 8, 2), (4, 8, 1)],
    },
    ("float64", 1): {
        32: [(64, 32, 4)],
        64: [(32, 32, 4)],
        96: [(32, 16, 4)],
        128: [(32, 16, 4)],
        192: [(16, 16, 2)],
        256: [(16, 16, 2)],
    },
}


def _wide_lines(columns: int, item: int) -> int:
    return -(-columns * item // 128) * 128


def _wide_sizes(name: str, dmma: int, d: int, dv: int, keys: int):
    """Bytes of a row of Q and K, of V and dO, and of P, as raw_kernels/wide.cuh has them; bytes of lse of n rows."""
    item = 8 if name == "float64" else 4
    q, v = (_wide_lines(n, item) + (32 if dmma else 16) for n in (d, dv))
    return q, v, _wide_lines(keys, item) + (32 if dmma or item == 4 else 64), lambda rows: _wide_lines(rows, item)


def _wide(table, source, arch, name, d, dv, stages, shared_of, extra=lambda row: {}, **more) -> Kernel:
    """The first row of a table that fits, with two stages where they fit too."""
    d, dv = padded(d), padded(dv)
    dmma = int(name == "float64" and arch in WIDE_DMMA)
    limit = SHARED_LIMIT[arch]
    rows = table[name, dmma][max(d, dv)]
    for row in rows:
        for count in stages:
            q, v, p, line = _wide_sizes(name, dmma, d, dv, row[1])
            shared = shared_of(*row[:2], count, q, v, p, line)
            if shared > limit:
                continue
            # blocks side by side: by shared memory, and with all 255 registers that a thread may have
            resident = max(1, min((limit + 1024) // (shared + 1024), 65536 // (256 * 32 * row[2])))
            defines = {
                "TYPE": {"float64": 0, "float32": 1}[name], "DMMA": dmma, "HEAD_DIM": d, "HEAD_DIM_V": dv,
                "TILE_Q": row[0], "TILE_K": row[1], "WARPS": row[2], "STAGES": count, "SHARED": shared,
                "SHARED_LIMIT": limit, "RESIDENT": resident, **extra(row),
            }  # fmt: skip
            tile = Tile(row[0], row[1], row[2], count, shared, resident)
            return Kernel(source, tile, defines, **more)
    raise ValueError(f"{source}: no tile of {name}, head dims {d} and {dv}, fits {limit} bytes of shared memory (sm_{arch})")


def wide_forward(arch: str, name: str, d: int, dv: int) -> Kernel:
    """Forward of float32 and float64: raw_kernels/wide_forward.cu."""
    size = lambda nq, nk, stages, q, v, p, line: nq * (q + p) + nk * (q + v)  # noqa: E731
    return _wide(_WIDE_FORWARD, "wide_forward", arch, name, d, dv, (1,), size)


def wide_backward(arch: str, name: str, d: int, dv: int) -> Kernel:
    """dK, dV, and dQ by atomic sums, of float32 and float64: raw_kernels/wide_backward.cu."""

    def size(nq, nk, stages, q, v, p, line):
        return nk * (q + v) + 2 * nq * p + stages * (nq * (q + v) + 2 * line(nq))

    def warps(row):
        return {"SCORE_WARPS": row[3], "WARPS_K": row[4], "KEY_WARPS": row[5], "QUERY_WARPS": row[6]}

    item = 8 if name == "float64" else 4
    return _wide(_WIDE_BACKWARD, "wide_backward", arch, name, d, dv, (2, 1), size, warps, sum_bytes=padded(d) * item)


def wide_backward_queries(arch: str, name: str, d: int, dv: int) -> Kernel:
    """dQ alone, the same bits each time, of float32 and float64: raw_kernels/wide_backward.cu with -DQUERIES."""

    def size(nq, nk, stages, q, v, p, line):
        return nq * (q + v + p) + 2 * line(nq) + stages * nk * (q + v)

    return _wide(_WIDE_QUERIES, "wide_backward", arch, name, d, dv, (2, 1), size, lambda row: {"QUERIES": 1})
