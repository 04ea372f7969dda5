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


# ---------------------------------------------------------------- backward, float16 and bfloat16


@dataclass(frozen=True)
class _Gradients:
    """A shape of raw_kernels/backward.cu; its text says what the numbers mean."""

    queries: int
    keys: int
    warps: int
    sharers: int  # warps that have the same keys: 2 where dK and dV of a warp would not fit its registers
    fragments: int  # of 16 keys a warp
    chunk: int  # queries whose dP is in registers
    part: int  # queries whose S is in registers
    kept_k: int  # steps of 16 columns of K in registers
    kept_v: int  # and of V
    stages: int
    resident: int = 1
    dq_part: int = 8  # blocks of 16 columns of dQ at once
    pins: int = 0  # addresses that the compiler may not make before the loop


# By the larger of the head dims.  docs/kernels.md tells why.
_BACKWARD = {
    "80": {
        32: _Gradients(64, 128, 4, 1, 2, 32, 16, 0, 2, 2, 2),
        64: _Gradients(64, 128, 4, 1, 2, 32, 16, 0, 4, 2, 2, pins=4),
        96: _Gradients(64, 128, 8, 2, 2, 32, 32, 0, 6, 2),
        128: _Gradients(64, 128, 8, 2, 2, 32, 32, 0, 1, 2),
        192: _Gradients(64, 64, 8, 2, 1, 32, 32, 0, 0, 2),
        256: _Gradients(64, 64, 8, 2, 1, 32, 32, 0, 0, 1, dq_part=2),
    },
    # sm_86, 89, 120: 99 KB a block of threads, 100 KB a multiprocessor
    "86": {
        32: _Gradients(64, 128, 4, 1, 2, 32, 16, 0, 2, 2, 2),
        64: _Gradients(64, 128, 4, 1, 2, 32, 16, 0, 4, 1, 2),
        96: _Gradients(64, 128, 8, 1, 1, 32, 32, 0, 6, 1),
        128: _Gradients(64, 128, 8, 1, 1, 32, 32, 0, 8, 1),
        192: _Gradients(64, 64, 8, 2, 1, 32, 32, 0, 12, 1),
        256: _Gradients(32, 64, 8, 2, 1, 16, 16, 0, 16, 1, dq_part=2),
    },
    # 64 KB
    "75": {
        32: _Gradients(64, 128, 4, 1, 2, 32, 16, 0, 2, 1, 2),
        64: _Gradients(64, 128, 4, 1, 2, 32, 16, 0, 4, 1),
        96: _Gradients(64, 64, 4, 1, 1, 32, 32, 0, 6, 1),
        128: _Gradients(32, 128, 8, 1, 1, 32, 32, 0, 8, 1),
        192: _Gradients(32, 64, 8, 2, 1, 16, 16, 0, 12, 1),
        256: _Gradients(32, 32, 4, 2, 1, 16, 16, 0, 16, 1, dq_part=2),
    },
}
_BACKWARD["89"] = _BACKWARD["120"] = _BACKWARD["86"]
_BACKWARD["90"] = _BACKWARD["100"] = {**_BACKWARD["80"], 256: _Gradients(64, 64, 8, 2, 1, 32, 32, 0, 0, 2, dq_part=2)}

_HALF_TYPES = {"float16": 2, "bfloat16": 3}


def _half(arch: str, dtype: str) -> int:
    if dtype not in _HALF_TYPES:
        raise ValueError(f"dtype: the tensor-core kernels take float16 and bfloat16, got {dtype}")
    if dtype == "bfloat16" and arch == "75":
        raise ValueError("dtype: bfloat16 needs sm_80 or newer, this GPU is sm_75; float16 is possible")
    return _HALF_TYPES[dtype]


def backward(arch: str, dtype: str, d: int, dv: int) -> Kernel:
    """Give the kernel of dK, dV and, by atomic sums, dQ: raw_kernels/backward.cu.

    Raises
    ------
    ValueError
        bfloat16 on sm_75; a head dim that is no multiple of 8 or above 256.
    """
    kind, d, dv = _half(arch, dtype), padded(d), padded(dv)
    shape = _BACKWARD[arch][max(d, dv)]
    kept_v = min(shape.kept_v, dv // 16)
    stays = kept_v == dv // 16
    columns = next(c for c in (4, 2) if c < shape.warps and d // 16 % c == 0 and (d % 64 == 0 or c == 2))
    shared = (
        shape.keys * 2 * (d + (0 if stays else dv))
        + shape.stages * shape.queries * (2 * (d + dv) + 16)
        + shape.sharers * shape.keys * 2 * shape.queries
    )
    tile = Tile(shape.queries, shape.keys, shape.warps, shape.stages, shared, shape.resident)
    defines = {
        "TYPE": kind, "HEAD_DIM": d, "HEAD_DIM_V": dv, "TILE_Q": shape.queries, "TILE_K": shape.keys,
        "WARPS": shape.warps, "STAGES": shape.stages, "SHARED": shared, "SHARED_LIMIT": SHARED_LIMIT[arch],
        "SHARERS": shape.sharers, "FRAGMENTS": shape.fragments, "CHUNK": shape.chunk, "PART": shape.part,
        "K_KEPT": shape.kept_k, "V_KEPT": kept_v, "RESIDENT": shape.resident,
        "DQ_ROWS": min(shape.warps // columns, shape.queries // 16), "DQ_COLUMNS": columns, "DQ_PART": shape.dq_part,
        "PINS": shape.pins,
    }  # fmt: skip
    return Kernel("backward", tile, defines, sum_bytes=4 * d, prepared_bytes=24)


@dataclass(frozen=True)
class _Queries:
    """A shape of raw_kernels/backward_queries.cu."""

    queries: int
    keys: int
    warps: int
    fragments: int  # of 16 queries a warp
    chunk: int  # keys whose S is in registers
    part: int  # keys whose dP is in registers
    kept_q: int  # steps of 16 columns of Q in registers
    kept_do: int  # and of dO
    stages: int
    resident: int = 1


_BACKWARD_QUERIES = {
    "80": {
        32: _Queries(128, 64, 4, 2, 32, 16, 2, 2, 2, 2),
        64: _Queries(128, 64, 4, 2, 32, 16, 4, 4, 2, 2),
        96: _Queries(128, 64, 4, 2, 32, 16, 0, 0, 2),
        128: _Queries(128, 64, 4, 2, 32, 16, 0, 0, 2),
        192: _Queries(128, 64, 8, 1, 32, 32, 0, 0, 1),
        256: _Queries(128, 32, 8, 1, 32, 16, 0, 0, 1),
    },
    "86": {
        32: _Queries(128, 64, 4, 2, 32, 16, 2, 2, 2, 2),
        64: _Queries(128, 64, 4, 2, 32, 16, 4, 4, 2, 2),
        96: _Queries(128, 32, 4, 2, 32, 16, 0, 0, 2),
        128: _Queries(128, 32, 4, 2, 32, 16, 0, 0, 2),
        192: _Queries(64, 32, 4, 1, 32, 32, 0, 0, 2),
        256: _Queries(64, 32, 4, 1, 32, 16, 0, 0, 1),
    },
    "75": {
        32: _Queries(128, 64, 4, 2, 32, 16, 2, 2, 1, 2),
        64: _Queries(128, 64, 4, 2, 32, 16, 4, 4, 1),
        96: _Queries(64, 64, 4, 1, 32, 32, 0, 0, 1),
        128: _Queries(64, 32, 4, 1, 32, 32, 0, 0, 1),
        192: _Queries(64, 16, 4, 1, 16, 16, 0, 0, 1),
        256: _Queries(32, 16, 2, 1, 16, 16, 0, 0, 1),
    },
}
_BACKWARD_QUERIES["89"] = _BACKWARD_QUERIES["120"] = _BACKWARD_QUERIES["86"]
_BACKWARD_QUERIES["90"] = _BACKWARD_QUERIES["100"] = {
    **_BACKWARD_QUERIES["80"],
    192: _Queries(128, 64, 8, 1, 32, 32, 0, 0, 2),
    256: _Queries(128, 32, 8, 1, 32, 16, 0, 0, 2),
}


def backward_queries(arch: str, dtype: str, d: int, dv: int) -> Kernel:
    """Give the kernel of dQ alone, with the same bits each time: raw_kernels/backward_queries.cu.

    Raises
    ------
    ValueError
        As ``backward``.
    """
    kind, d, dv = _half(arch, dtype), padded(d), padded(dv)
    shape = _BACKWARD_QUERIES[arch][max(d, dv)]
    kept_q, kept_do = min(shape.kept_q, d // 16), min(shape.kept_do, dv // 16)
    queries, loop = shape.queries * 2 * (d + dv), shape.stages * shape.keys * (2 * (d + dv) + 4)
    stay = kept_q == d // 16 and kept_do == dv // 16
    shared = max(queries, loop) if stay else queries + loop
    tile = Tile(shape.queries, shape.keys, shape.warps, shape.stages, shared, shape.resident)
    defines = {
        "TYPE": kind, "HEAD_DIM": d, "HEAD_DIM_V": dv, "TILE_Q": shape.queries, "TILE_K": shape.keys,
        "WARPS": shape.warps, "STAGES": shape.stages, "SHARED": shared, "SHARED_LIMIT": SHARED_LIMIT[arch],
        "FRAGMENTS": shape.fragments, "CHUNK": shape.chunk, "PART": shape.part,
        "Q_KEPT": kept_q, "DO_KEPT": kept_do, "RESIDENT": shape.resident,
    }  # fmt: skip
    return Kernel("backward_queries", tile, defines)
