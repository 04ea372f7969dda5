"""Attention on a GPU: the verbs of ``base.Backend`` over the CUDA kernels of raw_kernels, by CuPy.

Kernels are compiled at first use for the device at hand (``modules``), their shapes come from one table (``tiles``).
All that a verb does is enqueued on the current stream of the device; it returns a ``Launch`` that tells when it is done.
"""

from __future__ import annotations

import numpy as np

from ..buffers import Blueprint
from ..rules import Scores
from . import tiles
from .base import Dims, Work
from .modules import Modules

__all__ = ["CudaBackend"]

TYPES = {"float64": 0, "float32": 1, "float16": 2, "bfloat16": 3}

_TENSOR = [("data", np.uint64), ("batch", np.int64), ("row", np.int64), ("head", np.int64)]
_VECTOR = [("data", np.uint64), ("batch", np.int64), ("head", np.int64), ("row", np.int64)]
_TENSORS = ("q", "k", "v", "out", "last", "dout", "dq", "dk", "dv")
_POINTERS = ("at", "lo", "hi", "pos", "reach", "extent", "order", "slopes", "work")
_COUNTS = (
    "batch", "heads", "kv_heads", "d", "dim_v", "rows_q", "rows_k", "tile_q", "tile_k", "tiles_q", "tiles_k",
    "first", "fresh_q", "fresh_kv", "splits", "section",
)  # fmt: skip

# struct Block of raw_kernels/block.cuh
BLOCK = np.dtype(
    [
        *((name, _TENSOR) for name in _TENSORS),
        ("lse", _VECTOR),
        ("delta", _VECTOR),
        *((name, np.uint64) for name in _POINTERS),
        ("scale", np.float64),
        ("softcap", np.float64),
        *((name, np.int32) for name in _COUNTS),
    ],
    align=True,
)

SURVEY_WARPS = 8  # a warp a tile, see survey.cu


class Event:
    """A ``Launch``: done when the event has come."""

    def __init__(self, event):
        self._event = event

    def done(self) -> bool:
        return self._event.done


class CudaBackend:
    """The verbs of ``base.Backend`` on the current device.

    Parameters
    ----------
    deterministic : bool
        Whether the same call gives the same bits: dQ by a kernel of its own in place of atomic sums.
    """

    name = "cuda"
    slack = 0

    def __init__(self, *, deterministic: bool = False):
        import cupy

        self._cupy = cupy
        self.deterministic = deterministic
        device = cupy.cuda.Device()
        self.arch = tiles.architecture(device.compute_capability)
        self.processors = device.attributes["MultiProcessorCount"]
        self._modules = Modules(cupy)

    # ------------------------------------------------------------ forward

    def attend(self, q, k, v, out, lse, work: Work, *, first, final=None):
        """(out, lse) ← (out, lse) ⊕ attend(q, k, v); see ``base.Backend.attend``."""
        if not q.size or not k.shape[1]:
            return self._attend_nothing(out, lse, first, final)
        kernel = tiles.forward(self.arch, q.dtype.name, q.shape[3], v.shape[3])
        block = self._block(q, k, v, lse, work, kernel.tile)
        block["first"] = first
        block["out"] = _tensor(out)
        if final is not None:
            block["last"] = _tensor(final)
        self._survey(block, work, kernel.tile, queries=True)
        block["splits"] = self._splits(block)
        defines = {**kernel.defines, **_score_defines(work.scores)}
        pairs = int(block["batch"]) * int(block["heads"])
        self._run(kernel.source, "forward", kernel.tile, pairs * int(block["tiles_q"]) * int(block["splits"]), block, defines)
        if block["splits"] > 1:
            self._run(kernel.source, "forward_merge", kernel.tile, pairs * int(block["tiles_q"]), block, defines)
        return self._launched()

    def _run(self, source, name, tile, blocks, block, defines) -> None:
        kernel = self._modules.kernel(source, name, tile.shared, **defines)
        kernel((blocks,), (tile.threads,), (block[()],), shared_mem=tile.shared)

    def _launched(self):
        event = self._cupy.cuda.Event(disable_timing=True)
        event.record()
        return Event(event)

    # ------------------------------------------------------------ parts

    def _block(self, q, k, v, lse, work: Work, tile) -> np.ndarray:
        """What all kernels of attention want to know, as a struct Block."""
        block = np.zeros((), BLOCK)
        block["batch"], block["rows_q"], block["heads"], block["d"] = q.shape
        block["rows_k"], block["kv_heads"], block["dim_v"] = k.shape[1], k.shape[2], v.shape[3]
        block["tile_q"], block["tile_k"] = tile.queries, tile.keys
        block["tiles_q"] = -(-q.shape[1] // tile.queries)
        block["tiles_k"] = -(-k.shape[1] // tile.keys)
        block["q"], block["k"], block["v"], block["lse"] = _tensor(q), _tensor(k), _tensor(v), _vector(lse)
        for name in ("at", "lo", "hi", "pos"):
            block[name] = getattr(work.sight, name).data.ptr
        block["scale"] = work.scores.scale
        block["softcap"] = work.scores.softcap or 0
        return block
