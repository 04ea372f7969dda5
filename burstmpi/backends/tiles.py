"""The one table of tile shapes: (architecture, type, head dims, direction) → rows, warps, stages.

A GPU kernel gets its shape by ``-D``; what it needs of shared memory is told here and checked by a static_assert there,
so that a shape that does not fit fails when it is compiled.  docs/kernels.md derives the choices.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

__all__ = ["ARCHITECTURES", "HEAD_DIMS", "SHARED_LIMIT", "Kernel", "Tile", "architecture", "kernel", "padded"]

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
    spans: bool = False  # whether it reads Block.spans: raw_kernels/sight.cuh
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
    keeps_rows: bool = True  # the main loop keeps pointers to rows in registers; else it finds them anew for each tile

    def shared(self, d: int, dv: int) -> int:
        """Bytes of shared memory, as raw_kernels/forward_shape.cuh has them."""
        tiles = 2 * self.keys * (2 * d + self.v_stages * dv)
        queries = 2 * self.queries * d
        held = max(tiles, queries) if self.q_in_registers else tiles + queries
        return held + 2 * self.keys * 4 + self.warps * 96


# (the pair of padded head dims, or else the wider of them) -> tile, for each amount of shared memory.  32 rows a warp where registers
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
        # four warps copy 32 short rows at once, more than such a tile of keys has
        **{(d, 256): _Forward(64, 32, 4, 1, False, 32, 1) for d in (32, 96)},
        **{(256, dv): _Forward(32, 16, 2, 1, False, 16, 1) for dv in (32, 96)},
    },
}
_FORWARD["100"] = {**_FORWARD["large"], 128: replace(_FORWARD["large"][128], keeps_rows=False)}


def _entry(shapes, d, dv):
    """The shape of a pair of head dims: its own, or else that of the wider one."""
    return shapes.get((d, dv)) or shapes[max(d, dv)]


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
    shapes = _FORWARD[arch if arch in _FORWARD else "small" if small else "large"]
    shape = _entry(shapes, padded_d, padded_dv)
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
        "KEEPS_ROWS": int(shape.keeps_rows),
        "SORTED": 0,  # 1: a block whose keys do not come in the order of their positions
        "FULL_CHUNK": shape.chunk,
        "CUT_CHUNK": max(shape.chunk, shape.keys if max(padded_d, padded_dv) <= 64 else 16),
        "PADDED": int((d, dv) != (padded_d, padded_dv)),
        "SHARED": tile.shared,
        "SHARED_LIMIT": SHARED_LIMIT[arch],
    }
    return Kernel("forward", tile, defines, spans=True)


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
    pins_alone: int | None = None  # the same where dQ is made elsewhere; None: 372 where a warp has its keys alone, else pins
    pins_scores: tuple[int, int] | None = None  # the same with ALiBi and with softcap; None: pins
    pins_alone_scores: tuple[int, int] | None = None  # likewise without dQ; None: pins_alone
    bound: int = 0  # blocks that the compiler shall leave room for, where fewer run: it then takes fewer registers
    products: int = 1  # 2: of the warps that have the same keys some make dK, the others dV; where d = dv
    s_fragments: int = 0  # of the keys, whose S is in registers; 0: all of a warp
    kept_q: int = 0  # steps of Q that stay in registers from S of the first of these fragments to that of the others
    dq_columns: int = 0  # warps beside each other over dQ's columns; 0: 4 or 2
    positions: int = 0  # 1: those of the keys in shared memory, not in registers
    cut_chunk: int = 64  # at most so many queries at once where it masks
    pad: int = 0  # bytes at the end of each row of shared memory: 0 or 16
    anew: int = 0  # 1: kept steps of K are read from shared memory for each tile of queries, so that dQ has their registers
    halved: int = 0  # 1: half of V is kept, the other half stands in shared memory; else, where not all is kept, all of V
    known: int = 1  # 0: seldom used numbers stay in registers, as 32 bytes of shared memory would cost a block of threads


# By the pair of head dims, or else by the larger of them.  docs/kernels.md tells why.  Pins are found by trying: which of them
# leave the loop without local memory differs by architecture, head dims, scores, and whether there is dQ.
_LARGE = {
    32: _Gradients(64, 128, 4, 1, 2, 32, 16, 0, 2, 2, 3, pins=260),
    64: _Gradients(64, 128, 4, 1, 2, 32, 16, 0, 4, 2, 2, pins=260, pins_scores=(256, 256)),
    96: _Gradients(64, 128, 8, 2, 2, 32, 32, 0, 6, 2, pins=1284),
    128: _Gradients(64, 128, 8, 2, 2, 32, 32, 0, 1, 2),
    192: _Gradients(64, 64, 8, 2, 1, 32, 32, 0, 0, 2, pins=1280),
    256: _Gradients(64, 64, 8, 2, 1, 32, 32, 0, 0, 1, dq_part=2, pins=1280),
}
# sm_86, 89, 120: 99 KB a block of threads, 100 KB a multiprocessor
_SMALL = {
    32: _Gradients(64, 128, 4, 1, 2, 32, 16, 0, 2, 2, 2, pins=260, bound=3),
    64: _Gradients(64, 128, 4, 1, 2, 32, 16, 0, 4, 1, 2, pins=260, known=0),
    96: _Gradients(64, 128, 8, 1, 1, 32, 32, 0, 6, 1, pins=1280),
    128: _Gradients(64, 128, 8, 1, 1, 32, 32, 0, 8, 1, pins=1288),
    192: _Gradients(64, 64, 8, 2, 1, 32, 32, 0, 12, 1, pins=1280),
    256: _Gradients(32, 64, 8, 2, 1, 16, 16, 0, 16, 1, dq_part=2, pins=384),
    (32, 256): _Gradients(32, 64, 8, 2, 1, 16, 16, 0, 0, 1, dq_part=2, pins=384),  # V on its way to registers finds no room
}
_BACKWARD = {
    "80": {**_LARGE, (192, 128): replace(_LARGE[192], pins=0, pins_alone=1280)},
    "90": {
        **_LARGE,
        32: replace(_LARGE[32], pins=388),
        64: _Gradients(
            128, 128, 4, 1, 2, 16, 16, 4, 3, 1, 2, anew=1, dq_columns=1, pad=16, positions=1, cut_chunk=16,
            pins=1280, pins_alone=1825, pins_scores=(1316, 1280), pins_alone_scores=(1825, 1312),
        ),  # fmt: skip
        96: replace(_LARGE[96], cut_chunk=16, pins=1540, pins_alone=1536),
        128: replace(_LARGE[128], kept_v=0, pins_alone=1024),
        (128, 128): _Gradients(
            128, 128, 8, 4, 4, 32, 32, 0, 0, 1, products=2, s_fragments=2, kept_q=1, dq_columns=2, pad=16, positions=1, cut_chunk=16,
            pins=256, pins_alone=1290, pins_scores=(256, 1312), pins_alone_scores=(1034, 1034),
        ),  # fmt: skip
        192: replace(_LARGE[192], pins=3332),
        (192, 128): replace(_LARGE[192], pins=1409, pins_alone=3332),
    },
    "100": {
        **_LARGE,
        32: replace(_LARGE[32], chunk=16, pins=1288),
        64: replace(_LARGE[64], pins=388, pins_scores=None),
        96: replace(_LARGE[96], pins=1412, pins_alone=260),
        128: replace(_LARGE[128], kept_v=0, pins_alone=1024),
    },
    "86": _SMALL,
    "89": _SMALL,
    "120": {
        **_SMALL,
        32: replace(_SMALL[32], chunk=16, pins=1024),
        64: replace(_SMALL[64], pins=772),
        128: replace(_SMALL[128], pins=1280, pins_alone=272),
        256: replace(_SMALL[256], pins=388, pins_alone=384),
    },
    # 64 KB
    "75": {
        32: _Gradients(64, 128, 4, 1, 2, 32, 16, 0, 2, 1, 1, pins=256, bound=2),
        64: _Gradients(64, 128, 8, 1, 1, 32, 32, 0, 4, 1, pins=260),
        96: _Gradients(64, 64, 4, 1, 1, 32, 32, 0, 6, 1, pins=260),
        128: _Gradients(32, 64, 8, 2, 1, 16, 16, 0, 8, 1, pins=256),
        192: _Gradients(32, 64, 8, 2, 1, 16, 16, 0, 12, 1, pins=256),
        256: _Gradients(32, 32, 4, 2, 1, 16, 16, 0, 16, 1, dq_part=2, pins=260, pins_alone=256),
        (256, 256): _Gradients(32, 32, 4, 2, 1, 16, 16, 0, 8, 1, halved=1, dq_part=4, dq_columns=4, positions=1, pins=5903, pins_alone=1295),
    },
}


def _half(arch: str, dtype: str) -> int:
    if dtype not in _HALVES:
        raise ValueError(f"dtype: the tensor-core kernels take float16 and bfloat16, got {dtype}")
    if dtype == "bfloat16" and arch == "75":
        raise ValueError("dtype: bfloat16 needs sm_80 or newer, this GPU is sm_75; float16 is possible")
    return _HALVES[dtype]


def backward(arch: str, dtype: str, d: int, dv: int) -> Kernel:
    """Give the kernel of dK, dV and, by atomic sums, dQ: raw_kernels/backward.cu.

    Raises
    ------
    ValueError
        bfloat16 on sm_75; a head dim that is no multiple of 8 or above 256.
    """
    kind, d, dv = _half(arch, dtype), padded(d), padded(dv)
    shape = _entry(_BACKWARD[arch], d, dv)
    kept_k, kept_v, kept_q = min(shape.kept_k, d // 16), min(shape.kept_v, dv // 16), min(shape.kept_q, d // 16)
    stays, pad = kept_v == dv // 16, shape.pad
    columns = shape.dq_columns or next(c for c in (4, 2) if c < shape.warps and d // 16 % c == 0 and (d % 64 == 0 or c == 2))
    shared = (
        shape.keys * (2 * d + pad + (0 if stays else (dv if shape.halved else 2 * dv) + pad))
        + shape.stages * shape.queries * (2 * (d + dv + pad) + 16)
        + min(shape.sharers, 2) * shape.keys * (2 * shape.queries + pad * (-(-shape.queries // d) if pad else 0))
        + 32 * shape.known + pad + 4 * shape.keys * shape.positions + 16 * shape.warps * (shape.products - 1)
    )
    tile = Tile(shape.queries, shape.keys, shape.warps, shape.stages, shared, shape.resident)
    alone = shape.pins_alone
    if alone is None:
        alone = 372 if shape.sharers == 1 and dv <= shape.queries else shape.pins
    scores, alone_scores = shape.pins_scores or (shape.pins,) * 2, shape.pins_alone_scores or (alone,) * 2
    defines = {
        "TYPE": kind, "HEAD_DIM": d, "HEAD_DIM_V": dv, "TILE_Q": shape.queries, "TILE_K": shape.keys,
        "WARPS": shape.warps, "STAGES": shape.stages, "SHARED": shared, "SHARED_LIMIT": SHARED_LIMIT[arch],
        "SHARERS": shape.sharers, "PRODUCTS": shape.products, "FRAGMENTS": shape.fragments,
        "S_FRAGMENTS": shape.s_fragments or shape.fragments, "CHUNK": shape.chunk, "PART": shape.part,
        "CUT_CHUNK": shape.cut_chunk, "K_KEPT": kept_k, "V_KEPT": kept_v, "Q_KEPT": kept_q,
        "V_HALVED": shape.halved, "ANEW": shape.anew, "RESIDENT": shape.bound or shape.resident,
        "DQ_ROWS": min(shape.warps // columns, shape.queries // 16), "DQ_COLUMNS": columns, "DQ_PART": shape.dq_part,
        "PINS": shape.pins, "PINS_ALONE": alone,
        "PINS_ALIBI": scores[0], "PINS_SOFTCAP": scores[1], "PINS_ALONE_ALIBI": alone_scores[0], "PINS_ALONE_SOFTCAP": alone_scores[1],
        "PAD": pad, "POSITIONS": shape.positions, "KNOWN": shape.known,
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
    fences: int = 0  # places that loads do not pass: the compiler would start more than registers hold


_QUERIES_LARGE = {
    32: _Queries(128, 64, 4, 2, 16, 16, 2, 2, 2, 2),
    64: _Queries(128, 64, 4, 2, 16, 16, 4, 4, 2, 2, fences=7),
    96: _Queries(128, 64, 8, 1, 16, 16, 6, 6, 2),
    128: _Queries(128, 64, 8, 1, 32, 32, 8, 8, 2),
    192: _Queries(128, 64, 8, 1, 32, 32, 0, 0, 1),
    256: _Queries(128, 32, 8, 1, 32, 16, 0, 0, 1),
}
_BACKWARD_QUERIES = {
    "80": _QUERIES_LARGE,
    "90": {
        **_QUERIES_LARGE,
        192: _Queries(128, 64, 8, 1, 32, 32, 0, 0, 2, fences=7),
        256: _Queries(128, 32, 8, 1, 32, 16, 0, 0, 2, fences=7),
    },
    "86": {
        **_QUERIES_LARGE,
        192: _Queries(64, 32, 4, 1, 32, 32, 0, 0, 2),
        256: _Queries(64, 32, 4, 1, 32, 16, 0, 0, 1),
    },
    "75": {
        32: _Queries(128, 64, 4, 2, 32, 16, 2, 2, 1, 2, fences=7),
        64: _Queries(128, 64, 8, 1, 32, 16, 4, 4, 1, fences=7),
        96: _Queries(64, 64, 4, 1, 16, 16, 0, 0, 1, fences=7),
        128: _Queries(64, 32, 4, 1, 32, 32, 0, 0, 1, fences=7),
        192: _Queries(64, 16, 4, 1, 16, 16, 0, 0, 1),
        256: _Queries(32, 16, 2, 1, 16, 16, 0, 0, 1),
    },
}
_BACKWARD_QUERIES["89"] = _BACKWARD_QUERIES["120"] = _BACKWARD_QUERIES["86"]
_BACKWARD_QUERIES["100"] = _BACKWARD_QUERIES["90"]


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
    shared = (max(queries, loop) if stay else queries + loop) + 32
    tile = Tile(shape.queries, shape.keys, shape.warps, shape.stages, shared, shape.resident)
    defines = {
        "TYPE": kind, "HEAD_DIM": d, "HEAD_DIM_V": dv, "TILE_Q": shape.queries, "TILE_K": shape.keys,
        "WARPS": shape.warps, "STAGES": shape.stages, "SHARED": shared, "SHARED_LIMIT": SHARED_LIMIT[arch],
        "FRAGMENTS": shape.fragments, "CHUNK": shape.chunk, "PART": shape.part,
        "Q_KEPT": kept_q, "DO_KEPT": kept_do, "RESIDENT": shape.resident, "FENCES": shape.fences,
    }  # fmt: skip
    return Kernel("backward_queries", tile, defines)


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
    # (queries, keys, warps, warps of S along queries x keys, of dK and dV along keys, of dQ along queries[, least stages])
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
        128: [(32, 32, 4, 2, 2, 2, 2, 2), (16, 32, 4, 1, 4, 2, 1)],
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
        64: [(64, 32, 4)],
        96: [(64, 16, 4)],
        128: [(64, 16, 4), (32, 16, 4)],
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
            if shared > limit or count < (row[7] if len(row) > 7 else 1):
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

    def size(nq, nk, stages, q, v, p, line):
        return nq * (q + p) + nk * (q + v)

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


# ---------------------------------------------------------------- all of them

_FAMILIES = {
    "forward": (forward, wide_forward),
    "backward": (backward, wide_backward),
    "backward_queries": (backward_queries, wide_backward_queries),
}


def kernel(direction: str, arch: str, dtype: str, d: int, dv: int) -> Kernel:
    """Give the kernel of a direction: "forward", "backward", or "backward_queries" (dQ alone, the same bits each time).

    Raises
    ------
    ValueError
        A head dim that no kernel serves; bfloat16 on a GPU whose tensor cores do not know it.
    """
    halves, wide = _FAMILIES[direction]
    return (wide if dtype in ("float32", "float64") else halves)(arch, dtype, d, dv)
