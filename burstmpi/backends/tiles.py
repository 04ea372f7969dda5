"""The one table of tile shapes: (architecture, type, head dims, direction) → rows, warps, stages.

A GPU kernel gets its shape by ``-D``; what it needs of shared memory is told here and checked by a static_assert there,
so that a shape that does not fit fails when it is compiled.  docs/kernels.md derives the choices.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["ARCHITECTURES", "HEAD_DIMS", "SHARED_LIMIT", "Kernel", "Tile", "architecture", "forward", "padded"]

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


# ---------------------------------------------------------------- forward, float16 and bfloat16

_HALVES = {"float16": 2, "bfloat16": 3}  # TYPE of raw_kernels/block.cuh


@dataclass(frozen=True)
class _Forward:
    """A row of forward's table."""

    queries: int
    keys: int
    warps: int
    v_stages: int  # K has two
    q_in_registers: bool
    chunk: int  # keys whose scores are made at a time
    resident: int  # blocks of threads on a multiprocessor: by registers and shared memory

    def shared(self, d: int, dv: int) -> int:
        """Bytes of shared memory, as raw_kernels/forward_shape.cuh has them."""
        tiles = 2 * self.keys * (2 * d + self.v_stages * dv)
        queries = 2 * self.queries * d
        held = max(tiles, queries) if self.q_in_registers else tiles + queries
        return held + 2 * self.keys * 4 + self.queries * 8 + self.warps * 96


# (the wider of the two padded head dims) -> tile, for each amount of shared memory.  32 rows a warp where registers
# allow it: with 16, shared memory feeds K and V to half as many products, and binds.
_FORWARD = {
    "large": {  # sm_80, 90, 100: 163 KB and more
        32: _Forward(128, 64, 4, 2, True, 16, 3),
        64: _Forward(128, 64, 4, 2, True, 16, 2),
        96: _Forward(128, 64, 4, 2, False, 32, 2),
        128: _Forward(128, 64, 4, 1, False, 64, 2),
        192: _Forward(128, 64, 8, 1, False, 64, 1),
        256: _Forward(128, 64, 8, 1, False, 64, 1),
    },
    "small": {  # sm_86, 89, 120: 99 KB
        32: _Forward(128, 64, 4, 2, True, 16, 2),
        64: _Forward(128, 64, 4, 2, True, 16, 2),
        96: _Forward(128, 64, 4, 1, False, 32, 1),
        128: _Forward(128, 64, 4, 1, False, 32, 1),
        192: _Forward(64, 32, 4, 1, False, 32, 1),
        256: _Forward(64, 32, 4, 1, False, 32, 1),
    },
    "75": {  # 64 KB, no asynchronous copies
        32: _Forward(128, 64, 4, 1, True, 16, 2),
        64: _Forward(128, 64, 4, 1, True, 16, 2),
        96: _Forward(64, 32, 4, 1, False, 32, 2),
        128: _Forward(64, 32, 4, 1, False, 32, 1),
        192: _Forward(64, 32, 4, 1, False, 32, 1),
        256: _Forward(64, 16, 4, 1, False, 16, 1),
    },
}


def forward(arch: str, dtype: str, d: int, dv: int) -> Kernel:
    """Give forward's kernel for an architecture, a type and head dims of Q, K and of V.

    Raises
    ------
    ValueError
        A head dim that no kernel serves; bfloat16 on a GPU whose tensor cores do not know it.
    """
    if arch == "75" and dtype == "bfloat16":
        raise ValueError(f"dtype: bfloat16 needs tensor cores of sm_80 or newer, this GPU is sm_{arch}; use float16")
    padded_d, padded_dv = padded(d), padded(dv)
    small = SHARED_LIMIT[arch] < 163 << 10
    shape = _FORWARD["75" if arch == "75" else "small" if small else "large"][max(padded_d, padded_dv)]
    tile = Tile(shape.queries, shape.keys, shape.warps, 2, shape.shared(padded_d, padded_dv), shape.resident)
    defines = {
        "TYPE": _HALVES[dtype],
        "HEAD_DIM": padded_d,
        "HEAD_DIM_V": padded_dv,
        "TILE_Q": tile.queries,
        "TILE_K": tile.keys,
        "WARPS": tile.warps,
        "V_STAGES": shape.v_stages,
        "Q_IN_REGISTERS": int(shape.q_in_registers),
        "FULL_CHUNK": shape.chunk,
        "CUT_CHUNK": max(shape.chunk, shape.keys if max(padded_d, padded_dv) <= 64 else 16),
        "PADDED": int((d, dv) != (padded_d, padded_dv)),
        "SHARED": tile.shared,
        "SHARED_LIMIT": SHARED_LIMIT[arch],
    }
    return Kernel("forward", tile, defines)
