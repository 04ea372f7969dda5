"""Attention on a GPU: the verbs of ``base.Backend`` over the CUDA kernels of raw_kernels, by CuPy.

Kernels are compiled at first use for the device at hand (``modules``), their shapes come from one table (``tiles``).
All that a verb does is enqueued on the current stream of the device, and verbs follow each other in its order; who must
know when something is done sets a mark there (``gpu.Gpu.mark``).
"""

from __future__ import annotations

import numpy as np

from ..buffers import Blueprint
from ..rules import Scores
from . import tiles
from .base import Dims, Work
from .block import BLOCK, tensor, vector
from .gpu import Enqueued, Gpu, GpuMemory
from .modules import Modules
from .plain import PlainVerbs

__all__ = ["CudaBackend"]

SURVEY_WARPS = 8  # a warp a tile, see survey.cu
SURVEY_WAYS = 8  # runs that become one in a step of sorting
SLOPES = 128  # of one launch
_SLOPES = np.dtype([("value", np.float64, SLOPES), ("count", np.int32), ("wide", np.int32)], align=True)


class CudaBackend(GpuMemory, PlainVerbs):
    """The verbs of ``base.Backend`` on the current device.

    Parameters
    ----------
    deterministic : bool
        Whether the same call gives the same bits: dQ by a kernel of its own in place of atomic sums.
    splits : int or None
        Parts that the keys of a block are cut into in forward; None cuts them where the device would not be filled.
    """

    name = "cuda"
    rounds_sums = False

    def __init__(self, *, deterministic: bool = False, splits: int | None = None):
        import cupy

        self._cupy = cupy
        self.deterministic, self.splits = deterministic, splits
        self.gpu = Gpu(cupy)
        device = self.gpu.device
        self.arch = tiles.architecture(device.compute_capability)
        self.processors = device.attributes["MultiProcessorCount"]
        self.cache_bytes = device.attributes["L2CacheSize"]
        self._modules = Modules(cupy)

    # ------------------------------------------------------------ sizes

    def scratch_bytes(self, dims: Dims, scores: Scores, rows_q: int, rows_k: int, backward: bool) -> int:
        """What the kernels of a block keep in global memory: a few numbers a tile, and sums on their way."""
        name, d, dv = dims.dtype.name, dims.d, dims.dv
        room = lambda kernel, work: self._room(kernel, rows_q, rows_k, _slope_bytes(scores, dims.accumulator), work).nbytes  # noqa: E731
        if not backward:
            kernel = tiles.kernel("forward", self.arch, name, d, dv)
            work = self._split_bytes(dims, kernel.tile, rows_q, rows_k)
            return room(kernel, work)
        kernel = tiles.kernel("backward", self.arch, name, d, dv)
        work = kernel.work(dims.batch, dims.heads, rows_q, not self.deterministic)
        nbytes = room(kernel, work)
        if self.deterministic:
            other = tiles.kernel("backward_queries", self.arch, name, d, dv)
            work = other.work(dims.batch, dims.heads, rows_q, False)
            nbytes = max(nbytes, room(other, work))
        return nbytes

    def _attention_kernels(self, dims: Dims, backward: bool) -> list:
        """The kernels that compute a block, each in a walk of its own over the pairs of tiles."""
        names = ["forward"] if not backward else ["backward", *["backward_queries"] * self.deterministic]
        return [tiles.kernel(name, self.arch, dims.dtype.name, dims.d, dims.dv) for name in names]

    def tile_count(self, dims: Dims, positions_q, positions_k) -> int:
        """Pairs of a tile of queries and a tile of keys of forward's kernel, over batch and heads."""
        return self.tile_pairs(dims, False, len(positions_q), len(positions_k), None)[1]

    def tile_pairs(self, dims: Dims, backward: bool, rows_q: int, rows_k: int, sight) -> tuple[int, int]:
        """Pairs of tiles that the kernels of a block compute, and all there are, over batch and heads.

        Parameters
        ----------
        sight : lo, hi [rows_q] and pos [rows_k] of the host, or None for a block that is not computed

        What raw_kernels/sight.cuh does on the device: a pair is empty where pos_max < lo_min or pos_min >= hi_max.  Both
        cannot be, so that per tile of queries two searches among the sorted extents tell how many are left.
        Kernels with spans take keys in the order of their positions, and their places in it for these.
        """
        computed = every = 0
        for kernel in self._attention_kernels(dims, backward):
            tile = kernel.tile
            every += _ceil(rows_q, tile.queries) * _ceil(rows_k, tile.keys)
            if sight is not None and rows_q and rows_k:
                computed += _visible_pairs(*(_placed(*sight) if kernel.spans else sight), tile.queries, tile.keys)
        return dims.batch * dims.heads * computed, dims.batch * dims.heads * every

    def _room(self, kernel, rows_q, rows_k, slopes, work) -> Blueprint:
        """The parts of scratch."""
        tiles_q, tiles_k = _ceil(rows_q, kernel.tile.queries), _ceil(rows_k, kernel.tile.keys)
        room = Blueprint()
        room.add("reach", (tiles_q, 4), np.int32)
        room.add("extent", (tiles_k, 2), np.int32)
        room.add("spans", (rows_q * kernel.spans, 2), np.int32)
        room.add("keys", (rows_k * kernel.spans,), np.int32)
        room.add("keys_before", (rows_k * kernel.spans,), np.int32)  # a step of sorting
        room.add("order", (max(tiles_q, tiles_k),), np.int32)
        room.add("weights", (max(tiles_q, tiles_k),), np.int32)
        room.add("slopes", (slopes,), np.uint8)
        room.add("work", (work,), np.uint8)
        return room

    def _slots(self, tile) -> int:
        """Blocks of threads that the device runs at the same time."""
        return self.processors * tile.resident

    def _split_count(self, pairs, tiles_q, tiles_k, tile) -> int:
        """Into how many parts the keys are cut: as many as fill the device, each with a tile at least."""
        wanted = self._slots(tile) // (pairs * tiles_q) if self.splits is None else self.splits
        return max(1, min(wanted, tiles_k))

    def _split_bytes(self, dims, tile, rows_q, rows_k) -> int:
        """Room for the partial states of all parts, for a block of these rows or fewer: fewer rows make more parts,
        but never more blocks of threads than the device has slots."""
        tiles_q, tiles_k, pairs = _ceil(rows_q, tile.queries), _ceil(rows_k, tile.keys), dims.batch * dims.heads
        if not rows_q or not rows_k:
            return 0
        row = (dims.dv + 1) * dims.accumulator.itemsize
        if self.splits is not None:
            parts = max(1, min(self.splits, tiles_k))
            return parts * pairs * rows_q * row if parts > 1 else 0
        if self._slots(tile) < 2 * pairs or tiles_k < 2:
            return 0
        return min(self._slots(tile), pairs * tiles_q * tiles_k) * tile.queries * row

    # ------------------------------------------------------------ forward

    def attend(self, q, k, v, out, lse, work: Work, *, first, final=None):
        """(out, lse) ← (out, lse) ⊕ attend(q, k, v); see ``base.Backend.attend``."""
        if not q.size or not k.shape[1]:
            return self._attend_nothing(out, lse, first, final)
        kernel = tiles.kernel("forward", self.arch, q.dtype.name, q.shape[3], v.shape[3])
        block, room = self._block(q, k, v, lse, work, kernel, self._split_bytes)
        block["first"], block["out"] = first, tensor(out)
        if final is not None:
            block["last"] = tensor(final)
        more = {}
        if kernel.spans and not work.sight.ascending:
            self._sort(block, room)
            more["SORTED"] = 1
        self._survey(block, room, queries=True)
        batch, heads, tiles_q, tiles_k = (int(block[x]) for x in ("batch", "heads", "tiles_q", "tiles_k"))
        blocks = batch * heads * tiles_q
        splits = block["splits"] = self._split_count(batch * heads, tiles_q, tiles_k, kernel.tile)
        self._run(kernel, "forward", blocks * splits, block, work.scores, **more)
        if splits > 1:
            self._run(kernel, "forward_merge", blocks, block, work.scores, **more)
        return self._launched()

    def _attend_nothing(self, out, lse, first, final):
        if first:
            self.clear(out)
            self.clear(lse, -np.inf)
        if final is not None:
            self.copy(final, out)
        return self._launched()

    # ------------------------------------------------------------ backward

    def attend_backward(self, dout, q, k, v, lse, delta, dq, dk, dv, work: Work, *, fresh_q, fresh_kv):
        """Add a block's share to dq, dk, dv; see ``base.Backend.attend_backward``."""
        if not q.size or not k.shape[1]:
            for fresh, total in ((fresh_q, dq), (fresh_kv, dk), (fresh_kv, dv)):
                if fresh:
                    self.clear(total)
            return self._launched()
        name, d, dim_v = q.dtype.name, q.shape[3], v.shape[3]
        kernel = tiles.kernel("backward", self.arch, name, d, dim_v)
        self._backward_kernel(kernel, (dout, q, k, v, lse, delta, dq, dk, dv), work, fresh_q, fresh_kv)
        if self.deterministic:
            other = tiles.kernel("backward_queries", self.arch, name, d, dim_v)
            self._backward_queries(other, (dout, q, k, v, lse, delta, dq, dk, dv), work, fresh_q, fresh_kv)
        return self._launched()

    def _gradients(self, kernel, arrays, work, fresh_q, fresh_kv, sums):
        dout, q, k, v, lse, delta, dq, dk, dv = arrays
        size = lambda dims, tile, rows_q, rows_k: kernel.work(dims.batch, dims.heads, rows_q, sums)  # noqa: E731
        block, room = self._block(q, k, v, lse, work, kernel, size)
        block["dout"], block["delta"] = tensor(dout), vector(delta)
        block["dq"], block["dk"], block["dv"] = tensor(dq), tensor(dk), tensor(dv)
        block["fresh_q"], block["fresh_kv"] = fresh_q, fresh_kv
        return block, room

    def _backward_kernel(self, kernel, arrays, work, fresh_q, fresh_kv) -> None:
        """dK and dV, and dQ by atomic sums unless it must be the same each time."""
        sums = not self.deterministic
        block, room = self._gradients(kernel, arrays, work, fresh_q, fresh_kv, sums)
        dout, q, k = arrays[:3]
        block["section"] = max(1, self._section((q, dout), 1) // (q.shape[2] // k.shape[2]))  # a block takes a whole group
        self._survey(block, room, queries=False)
        batch, heads, kv_heads, tiles_q, tiles_k = (
            int(block[x]) for x in ("batch", "heads", "kv_heads", "tiles_q", "tiles_k")
        )
        with_dq = {"WITH_DQ": int(sums)}
        if kernel.prepared_bytes:
            self._run(kernel, "backward_prepare", batch * heads * tiles_q, block, work.scores, **with_dq)
        if sums:
            self._zero(room["work"], kernel.sums(batch, heads, int(block["rows_q"])))
        self._run(kernel, "backward", batch * kv_heads * tiles_k, block, work.scores, **with_dq)
        if sums:
            self._run(kernel, "backward_fold", batch * heads * tiles_q, block, work.scores, **with_dq)

    def _backward_queries(self, kernel, arrays, work, fresh_q, fresh_kv) -> None:
        """dQ alone, a tile of queries a block: no atomics, a fixed order."""
        block, room = self._gradients(kernel, arrays, work, fresh_q, fresh_kv, False)
        self._survey(block, room, queries=True)
        blocks = int(block["batch"]) * int(block["heads"]) * int(block["tiles_q"])
        if kernel.prepared_bytes:
            self._run(kernel, "backward_prepare", blocks, block, work.scores)
        self._run(kernel, "backward_queries", blocks, block, work.scores)

    # ------------------------------------------------------------ parts of a verb

    def _block(self, q, k, v, lse, work: Work, kernel, work_bytes):
        """What all kernels of attention want to know, as a struct Block, and the parts of scratch that it points to."""
        scores, tile = work.scores, kernel.tile
        dims = Dims(q.shape[0], q.shape[2], k.shape[2], q.shape[3], v.shape[3], q.dtype, lse.dtype)
        slopes = _slope_bytes(scores, dims.accumulator)
        plan = self._room(kernel, q.shape[1], k.shape[1], slopes, work_bytes(dims, tile, q.shape[1], k.shape[1]))
        if plan.nbytes > work.scratch.nbytes:
            raise ValueError(f"scratch: {work.scratch.nbytes} bytes are too few for this block, {plan.nbytes} are needed")
        room = plan.views(self, work.scratch)
        block = np.zeros((), BLOCK)
        block["batch"], block["rows_q"], block["heads"], block["d"] = q.shape
        block["rows_k"], block["kv_heads"], block["dim_v"] = k.shape[1], k.shape[2], v.shape[3]
        block["tile_q"], block["tile_k"] = tile.queries, tile.keys
        block["tiles_q"], block["tiles_k"] = _ceil(q.shape[1], tile.queries), _ceil(k.shape[1], tile.keys)
        block["q"], block["k"], block["v"], block["lse"] = tensor(q), tensor(k), tensor(v), vector(lse)
        for name in ("at", "lo", "hi", "pos"):
            block[name] = getattr(work.sight, name).data.ptr
        for name in ("reach", "extent", "order", "work"):
            block[name] = room[name].data.ptr
        if kernel.spans:
            block["spans"] = room["spans"].data.ptr
        block["scale"], block["splits"] = scores.scale, 1
        block["section"] = self._section((k, v), q.shape[2] // k.shape[2])
        if scores.softcap is not None:
            block["softcap"] = scores.softcap
        if scores.slopes is not None:
            block["slopes"] = room["slopes"].data.ptr
            self._put_slopes(scores.slopes, room["slopes"], dims.accumulator)
        return block, room

    def _put_slopes(self, slopes, target, dtype) -> None:
        """ALiBi's slopes to the workspace, [heads], as arguments of a kernel."""
        kernel = self._modules.kernel("survey", "survey_slopes")
        for start in range(0, len(slopes), SLOPES):
            some = np.zeros((), _SLOPES)
            some["count"] = len(slopes[start : start + SLOPES])
            some["value"][: some["count"]] = slopes[start : start + SLOPES]
            some["wide"] = dtype.itemsize == 8
            kernel((1,), (SLOPES,), (some, target[start * dtype.itemsize :]))

    def _section(self, passing, group: int) -> int:
        """Pairs (batch, head) of a grid that work side by side: see raw_kernels/order.cuh.

        passing : the two arrays whose rows pass by all blocks of a head; they are to fit half of L2 together
        """
        head = sum(x.shape[1] * x.shape[3] * x.dtype.itemsize for x in passing)
        return max(1, self.cache_bytes // 2 // max(1, head) * group)

    def _sort(self, block, room) -> None:
        """The keys in the order of their positions, for a kernel with spans: see raw_kernels/sight.cuh."""
        kernel, rows, width = self._modules.kernel("survey", "survey_sort"), int(block["rows_k"]), 1
        target, source = room["keys"], room["keys_before"]
        while width == 1 or width < rows:
            target, source = source, target
            kernel((_ceil(rows, 32 * SURVEY_WARPS),), (32 * SURVEY_WARPS,), (block, source, target, np.int32(width)))
            width *= SURVEY_WAYS
        block["keys"] = target.data.ptr

    def _survey(self, block, room, *, queries: bool) -> None:
        """Reach and extent of each tile, then the order of work of the tiles of queries, or of keys."""
        tiles_q, tiles_k = int(block["tiles_q"]), int(block["tiles_k"])
        ordered = tiles_q if queries else tiles_k
        told = (room["weights"], np.int32(queries))
        for name, count, more in (
            *([] if block["spans"] else [("survey_keys", tiles_k, ())]),
            ("survey_queries", tiles_q, ()),
            ("survey_weights", ordered, told),
            ("survey_order", ordered, told),
        ):
            kernel = self._modules.kernel("survey", name)
            kernel((_ceil(count, SURVEY_WARPS),), (32 * SURVEY_WARPS,), (block, *more))

    def _run(self, kernel, name, blocks, block, scores, **more) -> None:
        """Launch a kernel of a family on this many blocks of threads."""
        defines = {
            **kernel.defines,
            "BURST_SOFTCAP": int(scores.softcap is not None),
            "BURST_ALIBI": int(scores.slopes is not None),
            **more,
        }
        launch = self._modules.kernel(kernel.source, name, kernel.tile.shared, **defines)
        launch((blocks,), (kernel.tile.threads,), (block,), shared_mem=kernel.tile.shared)

    def _zero(self, target, nbytes) -> None:
        if not self._modules.rehearsing:
            target.data.memset_async(0, nbytes)

    def rehearsal(self):
        """A context in which verbs compile the kernels that they would launch, and launch nothing."""
        return self._modules.rehearsal()

    def _launched(self):
        return Enqueued(self.gpu)


def _placed(lo, hi, pos):
    """The same with places in the order of positions in place of these: see raw_kernels/sight.cuh."""
    ranked = np.sort(pos)
    return *(np.searchsorted(ranked, x).astype(np.int32) for x in (lo, hi)), np.arange(len(pos), dtype=np.int32)


def _visible_pairs(lo, hi, pos, tile_q: int, tile_k: int) -> int:
    """Pairs of tiles that are not empty: lo, hi [rows_q], pos [rows_k], int32."""
    starts_q, starts_k = (np.arange(0, len(x), tile) for x, tile in ((lo, tile_q), (pos, tile_k)))
    sees = lo < hi
    least = np.minimum.reduceat(np.where(sees, lo, np.iinfo(np.int32).max), starts_q)
    most = np.maximum.reduceat(np.where(sees, hi, np.iinfo(np.int32).min), starts_q)
    some = least < most  # tiles with a row that sees anything
    first, last = (reduce.reduceat(pos, starts_k) for reduce in (np.minimum, np.maximum))
    before = np.searchsorted(np.sort(last), least[some], "left")  # pos_max < lo_min
    behind = len(first) - np.searchsorted(np.sort(first), most[some], "left")  # pos_min >= hi_max
    return int((len(first) - before - behind).sum())


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _slope_bytes(scores: Scores, dtype) -> int:
    return 0 if scores.slopes is None else len(scores.slopes) * dtype.itemsize
