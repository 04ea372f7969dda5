"""What survey.cu says of tiles, against the definitions worked out in NumPy; on the PTX machine."""

import cuda_kit
import numpy as np
import pytest
from cuda_kit import device
from support import problem

from burstmpi.backends import tiles
from burstmpi.backends.block import BLOCK
from burstmpi.backends.cuda import _placed, _visible_pairs
from burstmpi.rules import Rules

TILE_Q, TILE_K = 16, 8


def survey(lo, hi, pos, queries, spans=False):
    """reach, extent, order of tiles of TILE_Q queries and TILE_K keys, and spans and sorted keys where they are asked for, from the device."""
    cupy = device()
    from burstmpi.backends import cuda

    backend = cuda.CudaBackend()
    tiles_q, tiles_k = -(-len(lo) // TILE_Q), -(-len(pos) // TILE_K)
    kernel = tiles.Kernel("", tiles.Tile(TILE_Q, TILE_K, 4, 2, 0), {}, spans=spans)
    plan = backend._room(kernel, len(lo), len(pos), 0, 0)
    room = plan.views(backend, backend.allocate(plan.nbytes))
    block = np.zeros((), BLOCK)
    keep = [cupy.asarray(x.astype(np.int32)) for x in (lo, hi, pos)]
    block["lo"], block["hi"], block["pos"] = (x.data.ptr for x in keep)
    for name in ("reach", "extent", "order", *["spans"] * spans):
        block[name] = room[name].data.ptr
    block["rows_q"], block["rows_k"], block["tile_q"], block["tile_k"] = len(lo), len(pos), TILE_Q, TILE_K
    block["tiles_q"], block["tiles_k"] = tiles_q, tiles_k
    keys = None
    if spans:
        backend._sort(block, room)
        (keys,) = (cupy.asnumpy(x) for x in (room["keys"], room["keys_before"]) if x.data.ptr == int(block["keys"]))
    backend._survey(block, room, queries=queries)
    get = cupy.asnumpy
    return get(room["reach"]), get(room["extent"]), get(room["order"][: tiles_q if queries else tiles_k]), get(room["spans"]), keys


CASES = {
    "causal": (100, {"causal": True}),
    "window": (77, {"window": (9, 3)}),
    "documents": (130, {"documents": [0, 40, 41, 90, 130], "causal": True}),
    "one row": (1, {}),
    "full": (64, {}),
}


def positions_of(kind, rows):
    """Positions of queries and keys, as a rank may have them."""
    rng = np.random.default_rng(0)
    if kind == "shuffled":
        return rng.permutation(rows)
    if kind == "any steps":  # ascending, some in a row, some far apart
        return np.sort(rng.choice(3 * rows, rows, replace=False))
    return np.arange(rows)


@pytest.mark.parametrize("spans", (False, True))
@pytest.mark.parametrize("kind", ("in order", "any steps", "shuffled"))
@pytest.mark.parametrize("name", CASES)
def test_tiles(name, kind, spans):
    """Reach and extent are what their definitions say, of positions or, where spans are asked for, of places in their order."""
    rows, options = CASES[name]
    positions = positions_of(kind, rows).astype(np.int32)
    every = 3 * rows if kind == "any steps" else rows
    if "documents" in options:
        options = options | {"documents": [*options["documents"][:-1], every]}
    _, lo, hi = Rules(**options).intervals(positions, every, every)
    visible = (lo[:, None] <= positions) & (positions < hi[:, None])
    reach, extent, order, told, keys = survey(lo, hi, positions, True, spans)
    if spans:
        assert (keys == np.argsort(positions, kind="stable")).all()
        lo, hi, positions = _placed(lo, hi, positions)
        assert (told == np.stack([lo, hi], axis=1)).all()
        visible = visible[:, keys]
    seen = (lo[:, None] <= positions) & (positions < hi[:, None])
    assert (seen == visible).all()  # the same keys by either measure
    weights = []
    for i in range(len(reach)):
        part = slice(i * TILE_Q, (i + 1) * TILE_Q)
        seeing = lo[part] < hi[part]
        assert reach[i, 0] == lo[part][seeing].min(initial=2**31 - 1)
        assert reach[i, 1] == hi[part][seeing].max(initial=-(2**31))
        assert (reach[i, 2], reach[i, 3]) == (lo[part].max(), hi[part].min())
        weights.append(0)
        for j in range(len(extent)):
            keys = slice(j * TILE_K, (j + 1) * TILE_K)
            least, most = extent[j]
            tile = positions[keys]
            assert (least, most) == (tile.min(), tile.max())
            seen, full = most >= reach[i, 0] and least < reach[i, 1], least >= reach[i, 2] and most < reach[i, 3]
            assert seen or not visible[part, keys].any()
            assert not full or visible[part, keys].all()
            weights[-1] += bool(seen)
    assert sorted(order) == list(range(len(reach)))
    assert sorted(weights, reverse=True) == [weights[t] for t in order]
    assert _visible_pairs(lo, hi, positions, TILE_Q, TILE_K) == sum(weights)  # what attn.stats tells


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (20, 3)}, {"documents": [0, 50, 130, 300]}, {"window": (0, 0)}])
def test_a_kernel_computes_the_pairs_that_are_counted(options):
    """The kernel of float32 passes two barriers a pair of tiles with each of its warps, and no others."""
    rows, heads = 300, 2
    backend = cuda_kit.backend(count=True, splits=1)
    p = problem(rows, batch=1, heads=heads, kv_heads=1, d=8, dv=8, dtype="float32")
    cuda_kit.forward(backend, p.q, p.k, p.v, **options)
    from ptxmachine.cupy import simulation

    (counters,) = [c for c in simulation().machine.history if c.program.name == "forward"]
    _, lo, hi = Rules(**options).intervals(np.arange(rows), rows, rows)
    bench = cuda_kit.Bench(backend, p.q, p.k, p.v)
    pairs, every = backend.tile_pairs(bench.dims, False, rows, rows, (lo, hi, np.arange(rows, dtype=np.int32)))
    tile = tiles.kernel("forward", "80", "float32", 8, 8).tile
    assert every == heads * (-(-rows // tile.queries)) * (-(-rows // tile.keys)) >= pairs
    assert counters.mix().get("barrier", 0) == 2 * tile.warps * pairs
    assert (pairs < every) == bool(options)


@pytest.mark.parametrize("rows", (1, 2, 7, 8, 9, 64, 65, 511, 513, 1000))
def test_sorted_keys(rows):
    """The keys in the order of their positions, of equal ones in their own, for any number of runs; extreme positions too."""
    rng = np.random.default_rng(rows)
    for positions in (rng.permutation(rows), rng.integers(0, 5, rows), np.arange(rows)[::-1], rng.integers(-(2**31), 2**31 - 1, rows)):
        *_, keys = survey(np.zeros(1), np.ones(1), positions, True, True)
        assert (keys == np.argsort(positions, kind="stable")).all()


def test_order_of_keys():
    """Of a causal mask the first keys are seen by most."""
    rows = 100
    _, lo, hi = Rules(causal=True).intervals(np.arange(rows), rows, rows)
    _, _, order, *_ = survey(lo, hi, np.arange(rows), False)
    assert order[-1] == len(order) - 1 and set(order[:2]) == {0, 1}


def test_row_that_sees_nothing():
    """Rows with an empty interval keep a tile from being full, and widen nothing."""
    lo, hi = np.array([5] * 15 + [0]), np.array([9] * 15 + [0])
    reach, *_ = survey(lo, hi, np.arange(20), True)
    assert reach.tolist() == [[5, 9, 5, 0]]


ITEMS = """
#include "order.cuh"
extern "C" __global__ void items(const __grid_constant__ Block block, int heads, int tiles, int splits, int count, int4 *found)
{
    const int number = blockIdx.x * blockDim.x + threadIdx.x;
    if (number >= count) return;
    const Item item = work_item(block, number, heads, tiles, splits);
    found[number] = {item.tile, item.head, item.batch, item.split};
}
"""


@pytest.mark.parametrize("section", (1, 2, 3, 5, 6, 100))
@pytest.mark.parametrize("splits", (1, 3))
def test_work_items(section, splits):
    """Each (tile, head, batch, split) once; sections of heads one after another, each with its heavy tiles first."""
    cupy = device()
    from burstmpi.backends import modules

    batch, heads, tiles_ = 2, 3, 4
    order = cupy.asarray(np.array([2, 0, 3, 1], np.int32))
    block = np.zeros((), BLOCK)
    block["batch"], block["section"], block["order"] = batch, section, order.data.ptr
    count = batch * heads * tiles_ * splits
    found = cupy.zeros((count, 4), np.int32)
    kernel = cupy.RawModule(code=ITEMS, options=modules.options({})).get_function("items")
    kernel((2,), (96,), (block, np.int32(heads), np.int32(tiles_), np.int32(splits), np.int32(count), found))
    items = [tuple(row) for row in cupy.asnumpy(found).tolist()]
    assert len(set(items)) == count
    assert set(items) == set(np.ndindex(tiles_, heads, batch, splits))
    pairs = [b * heads + h for _, h, b, _ in items]
    ranks = [[2, 0, 3, 1].index(t) for t, *_ in items]
    keys = [(pair // section, rank) for pair, rank in zip(pairs, ranks)]
    assert keys == sorted(keys)


@pytest.mark.parametrize("dtype", (np.float32, np.float64))
@pytest.mark.parametrize("heads", (1, 128, 129, 300))
def test_slopes(heads, dtype):
    """Any number of slopes reaches the workspace, in the accumulator's type."""
    cupy = device()
    from burstmpi.backends.cuda import CudaBackend

    slopes = tuple(np.random.default_rng(heads).uniform(0, 1, heads))
    backend, target = CudaBackend(), cupy.zeros(heads * np.dtype(dtype).itemsize, np.uint8)
    backend._put_slopes(slopes, target, np.dtype(dtype))
    assert (cupy.asnumpy(target.view(dtype)) == np.array(slopes, dtype)).all()
