"""Every variant of the CUDA kernels runs on the PTX machine with all its checks on, against float64.

A cell is an architecture, a type, a pair of head dims and a bend of the scores.  Each of its builds (``variant_kit``) is launched on
problems made for its tile: full, cut and empty tiles, long runs of full ones, tails on both sides, two hops, grouped heads, rows that see
nothing, keys out of order where a build is for such, splits that are merged.  What was launched is recorded, and must be what the
list says.

Two architectures often get the very same PTX but for the lines .version and .target: that program is run once, on the first of them.

    ./mpi_run.sh test -n 0 -m slow tests/test_cuda_every_variant.py -k "sm_90 and float16"    # some cells

BURSTMPI_SWEEP_RECORD names a file of what has passed, so that a sweep which was ended goes on where it was; a change of the library, of
survey.cu, plain.cu or a header of raw_kernels, of the machine or of these tests makes all of it void.
"""

import gc
import hashlib
import os
import sys
from collections import Counter
from functools import cache, lru_cache
from pathlib import Path
from types import SimpleNamespace

import cuda_kit
import host_kit
import numpy as np
import pytest
from support import slopes
from test_cuda_plain import rounded, values
from variant_kit import BENDS, DIMS, DTYPES, OTHER, PAIRS, UNEQUAL, Launches, digest, helpers, variants

from burstmpi.backends import modules, tiles
from burstmpi.rules import Rules

sys.path.insert(0, str(cuda_kit.PTX))

pytestmark = pytest.mark.skipif(cuda_kit.REAL, reason="all architectures: on the PTX machine")
HEADS = 2, 1
OPTIONS = {"plain": {}, "softcap": {"softcap": 2.0}, "alibi": {"alibi_slopes": slopes(2)}, "both": {"softcap": 2.0, "alibi_slopes": slopes(2)}}


# ---------------------------------------------------------------- problems


def long_for_queries(tile):
    """rows_q, rows_k, cut, rules: more than three full tiles of keys in a row, on the second hop; the first one has cut and empty ones."""
    rows_q = tile.queries + tile.queries // 8 + 1
    left, right = tile.queries + 7 * tile.keys // 2, tile.keys // 2
    rows_k = rows_q + left + 3 * tile.keys // 2 + 1
    return rows_q, rows_k, tile.queries + 2 * tile.keys - 1, {"window": (left, right)}


def long_for_keys(tile):
    """The same with a long run of full tiles of queries, for who has the keys: on the first hop, which has a whole tile of keys and 3 more."""
    rows_k = tile.keys + 3 + max(5, tile.keys // 3)
    left, right = tile.keys // 2, tile.keys + 5 * tile.queries // 2
    return rows_k + right + 3 * tile.queries // 2 + 1, rows_k, tile.keys + 3, {"window": (left, right)}


def narrow(tile):
    """Few keys a row, so that one too many or too few is seen in the result; the first rows see none."""
    rows_q = max(11, tile.queries + tile.queries // 4 + 1)
    rows_k = rows_q + tile.keys + 5
    return rows_q, rows_k, rows_k // 2 + 1, {"window": (5, 2), "documents": ([0, 7, rows_q], [0, 0, rows_k])}


def kinds(tile, rows_q, blocks, options, spans=False):
    """Pairs of tiles by what is seen of them: empty, cut, full."""
    rows_k = sum(map(len, blocks))
    _, lo, hi = Rules(**options).intervals(np.arange(rows_q), rows_q, rows_k)
    seen = Counter()
    for pos in blocks:
        pos = np.sort(pos) if spans else pos
        sees = (lo[:, None] <= pos) & (pos < hi[:, None])
        for first_q in range(0, rows_q, tile.queries):
            for first_k in range(0, len(pos), tile.keys):
                part = sees[first_q : first_q + tile.queries, first_k : first_k + tile.keys]
                full = part.all() and part.shape == (tile.queries, tile.keys)
                seen["full" if full else "cut" if part.any() else "empty"] += 1
    return seen


@lru_cache(32)
def problem(make, tile, dtype, d, dv, bend):
    """Arrays of a problem, what is true of them, and what a naive run of the same type makes of them; architectures share it."""
    rows_q, rows_k, cut, options = make(tile)
    options |= OPTIONS[bend]
    q, k, v, dout = host_kit.arrays(np.random.default_rng(rows_q + d), 1, rows_q, rows_k, *HEADS, d, dv, dtype)
    true = host_kit.exact(dout, q, k, v, **options)
    same = host_kit.naive(dout, q, k, v, narrow=dtype in ("float16", "bfloat16"), **options)
    return SimpleNamespace(q=q, k=k, v=v, dout=dout, true=true, same=same, cut=cut, options=options, dtype=dtype, tile=tile)


def order(p, how):
    """Keys as they lie: in order, each hop's own out of order, or all of them."""
    numbers, rng = np.arange(p.k.shape[1]), np.random.default_rng(3)
    if how == "hop":
        return np.concatenate([rng.permutation(x) for x in np.split(numbers, (p.cut,))])
    return rng.permutation(numbers) if how == "all" else numbers


def forward(backend, p, how):
    out, lse = cuda_kit.forward(backend, p.q, p.k, p.v, cuts=(p.cut,), order_k=order(p, how), **p.options)
    true, same, floors = p.true, p.same, p.same[5]
    wide = "float64" if p.dtype == "float64" else "float32"
    host_kit.check("out", out, true[0], same[0], p.dtype, 2.0, host_kit.rms(true[1]), floors[0])
    host_kit.check("lse", lse, true[1], same[1], wide, 2.0, floor=floors[4] + np.finfo(lse.dtype).eps)


def backward(backend, p, travels):
    out, lse = p.true[0].astype(p.q.dtype), p.true[1].astype(np.float64 if p.dtype == "float64" else np.float32)
    got = cuda_kit.backward(backend, p.dout, p.q, p.k, p.v, out, lse, cuts=(p.cut,), travels=travels, **p.options)
    for name, mine, want, near, floor in zip(("dq", "dk", "dv"), got, p.true[2:], p.same[2:5], p.same[5][1:]):
        host_kit.check(name, mine, want, near, p.dtype, 2.0, host_kit.rms(p.true[1]), floor)


# ---------------------------------------------------------------- cells


def groups(arch, dtype, d, dv, bend):
    """The builds of a cell, those that one call of a verb launches together: [(verb, builds)]."""
    every = list(variants(arch, dtype, d, dv, bend))
    of = lambda direction, **way: [x for x in every if x.direction == direction and way.items() <= dict(x.way).items()]  # noqa: E731
    together = [("forward", [x]) for x in of("forward")]
    together += [("backward", of("backward", WITH_DQ=1)), ("backward", of("backward", WITH_DQ=0) + of("backward_queries"))]
    assert sorted(map(repr, every)) == sorted(repr(x) for _, builds in together for x in builds)
    return together


def run(verb, builds, arch, dtype, d, dv, bend):
    """Launch builds on the problems of their tiles, and hold the results against the truth; the launches' record."""
    cupy = cuda_kit.device(arch)
    from burstmpi.backends.cuda import CudaBackend

    told = Launches(cupy)

    def backend(**options):
        made = CudaBackend(**options)
        made._modules = told
        return made

    first = builds[0]
    d, dv, tile = d - first.fill, dv - first.fill, first.kernel.tile
    case = lambda make, tile: problem(make, tile, dtype, d, dv, bend)  # noqa: E731
    if verb == "forward":
        ordered = dict(first.way).get("SORTED", 0) == 0
        p = case(long_for_queries, tile)
        blocks = np.split(order(p, "hop"), (p.cut,))
        assert len(kinds(tile, p.q.shape[1], blocks, p.options, spans=True)) == 3
        forward(backend(splits=1), p, "order" if ordered else "hop")
        forward(backend(splits=3), case(narrow, tile), "order" if ordered else "all")
    else:
        deterministic = len(builds) == 2
        p = case(long_for_keys, tile)
        assert len(kinds(tile, p.q.shape[1], np.split(order(p, "order"), (p.cut,)), p.options)) == 3
        backward(backend(deterministic=deterministic), p, "kv")
        backward(backend(deterministic=deterministic), case(narrow, tile), "q")
        if deterministic:
            backward(backend(deterministic=True), case(long_for_queries, builds[1].kernel.tile), "kv")
    assert set(told._modules) == {(source, defines) for source, _, defines in told.launched}  # nothing is compiled that is not used
    return told.launched


def program(variant):
    """Which program a build is: the digest of its PTX, and the shape of its launch."""
    from ptxmachine.cupy.module import compile_ptx

    code = (modules.folder() / f"{variant.source}.cu").read_text()
    ptx, _ = compile_ptx(code, modules.options(dict(variant.defines)), variant.arch)
    return digest(ptx), variant.kernel.tile


IN_KEYS = [f"{name}.cu" for name in ("forward", "backward", "backward_queries", "wide_forward", "wide_backward")]


class Passed:
    """What has run and was right: in this process, and in the file that BURSTMPI_SWEEP_RECORD names."""

    def __init__(self):
        self.path = os.environ.get("BURSTMPI_SWEEP_RECORD")
        self.keys = set(Path(self.path).read_text().split()) if self.path and Path(self.path).exists() else set()

    def key(self, *what):
        return hashlib.sha256(repr((self.judge(), what)).encode()).hexdigest()

    @staticmethod
    @cache
    def judge():
        """A digest of all Python, C and CUDA C that makes a verdict, but for kernels of attention: these are in the keys as PTX."""
        found = hashlib.sha256()
        root = Path(__file__).resolve().parent.parent
        for folder, mask in (("burstmpi", "**/*.py"), ("tests", "*.py"), ("tests/ptx/ptxmachine", "**/*.[pch]*"), ("raw_kernels", "*.*")):
            for path in sorted((root / folder).glob(mask)):
                if path.suffix in (".py", ".c", ".h", ".cu", ".cuh") and path.name not in IN_KEYS:
                    found.update(path.read_bytes())
        return found.hexdigest()

    def add(self, key):
        self.keys.add(key)
        if self.path:
            with open(self.path, "a") as file:
                file.write(key + "\n")


passed = Passed()
_programs = set()
_builds = Counter()


@pytest.fixture
def kept_small(monkeypatch):
    """Thousands of builds: none of them stays in memory, and none parsed in the cache folder; garbage is looked for once a cell."""
    from ptxmachine import stored
    from ptxmachine.cupy import module

    monkeypatch.setattr(stored, "_write", lambda path, parsed: None)
    gc.disable()
    yield
    module._compiled.clear()
    gc.enable()
    gc.collect()


# Each quarter of the list has every architecture, type and pair of head dims once, its bends in turn.
CELLS = [
    (arch, dtype, d, dv, list(BENDS)[(turn + i + tiles.ARCHITECTURES.index(arch) + DTYPES.index(dtype)) % 4])
    for turn in range(4)
    for i, (d, dv) in enumerate(DIMS)
    for arch, dtype in PAIRS
]


# Head dims that differ, outside that list: every 29 cells have each pair once, with architectures and types in turn.
PAIRS_OF_DIMS = [
    (*OTHER[(7 * turn + 7 * i) % len(OTHER)], d, dv, "plain")
    for turn in range(len(OTHER))
    for i, (d, dv) in enumerate(x for x in UNEQUAL if x not in DIMS)
]


def ids(cells):
    return [f"sm_{arch}-{dtype}-{d}_{dv}-{bend}" for arch, dtype, d, dv, bend in cells]


@pytest.mark.slow
@pytest.mark.parametrize("arch, dtype, d, dv, bend", CELLS, ids=ids(CELLS))
def test_every_variant(arch, dtype, d, dv, bend, kept_small):
    run_cell(arch, dtype, d, dv, bend)


@pytest.mark.slow
@pytest.mark.parametrize("arch, dtype, d, dv, bend", PAIRS_OF_DIMS, ids=ids(PAIRS_OF_DIMS))
def test_every_pair_of_head_dims(arch, dtype, d, dv, bend, kept_small):
    run_cell(arch, dtype, d, dv, bend)


def run_cell(arch, dtype, d, dv, bend):
    fresh = 0
    for verb, builds in groups(arch, dtype, d, dv, bend):
        programs = tuple(map(program, builds))
        key = passed.key(verb, programs, dtype, d - builds[0].fill, dv - builds[0].fill, bend, builds[0].way)
        _builds["all"] += len(builds)
        _programs.update(programs)
        if key not in passed.keys:
            launched = run(verb, builds, arch, dtype, d, dv, bend)
            missing = set().union(*(x.launches for x in builds)) - launched
            assert not missing, missing
            fresh += len(builds)
            passed.add(key)
    print(f"{fresh} builds run here; {len(_programs)} programs of {_builds['all']} builds so far")


# ---------------------------------------------------------------- what is no attention


class Counting64(Launches):
    """Pieces of arrays are counted in 64 bits, as where there are more than 2^32 of them."""

    def kernel(self, source, name, shared=0, **defines):
        return super().kernel(source, name, shared, **defines | ({"INDEX": "u64"} if "INDEX" in defines else {}))


def plain(arch, told):
    """copy, clear, add and delta of all types, with as many columns at once as VECTOR says: views that begin where no more are aligned."""
    from burstmpi.backends.cuda import CudaBackend

    made = CudaBackend()
    made._modules, cupy = told, made._cupy
    for width in (1, 2, 4, 8):

        def view(x, before=width):
            return cupy.asarray(np.concatenate([x[:before], x]))[before:]

        for of in host_kit.DTYPES:
            x = values((7 * width,), of)
            for to, kind in host_kit.DTYPES.items():
                target = view(np.zeros(7 * width, kind))
                made.copy(target, view(x))
                assert cupy.asnumpy(target).tobytes() == rounded(x, kind).tobytes(), (of, to, width)
            target = view(x)
            made.clear(target, 3.0)
            assert (cupy.asnumpy(target).astype(float) == 3).all(), (of, width)
            if of in ("float32", "float64"):
                target = view(x)
                made.add(target, view(x))
                assert cupy.asnumpy(target).tobytes() == (x + x).tobytes(), (of, width)
            dout, out = np.random.default_rng(width).integers(-4, 5, (2, 1, 33, 2, 7 * width)).astype(host_kit.DTYPES[of])
            delta = cupy.empty((1, 2, 33), np.float64 if of == "float64" else np.float32)
            made.delta(*(view(a.reshape(-1)).reshape(a.shape) for a in (dout, out)), delta)
            want = (dout.astype(float) * out.astype(float)).sum(axis=3).transpose(0, 2, 1)  # of small integers: exact
            assert (cupy.asnumpy(delta) == want).all(), (of, width)


@pytest.mark.slow
@pytest.mark.parametrize("arch", tiles.ARCHITECTURES, ids=lambda arch: f"sm_{arch}")
def test_every_helper(arch, kept_small):
    """Surveys through attention on keys out of order with slopes, and through a kernel that takes keys as they lie."""
    launched = set()
    for dtype, wanted in (("float16", {"SORTED": 1}), ("float32", {"WITH_DQ": 1})):
        verb, builds = next(x for x in groups(arch, dtype, 32, 32, "alibi") if dict(x[1][0].way) == wanted)
        launched |= run(verb, builds, arch, dtype, 32, 32, "alibi")
    for kind in (Launches, Counting64):
        told = kind(cuda_kit.device(arch))
        plain(arch, told)
        launched |= told.launched
    missing = set(helpers()) - launched
    assert not missing, missing


# ---------------------------------------------------------------- a few of them, in the default run

# Each architecture with each bend, and each call of a verb with each bend; sm_80 and what no bend does are
# in test_cuda_forward, test_cuda_backward and test_cuda_wide.
SORTED, FORWARD, WITH_DQ, WITHOUT = {"SORTED": 1}, {}, {"WITH_DQ": 1}, {"WITH_DQ": 0}
SOME = [
    ("75", "float16", "softcap", SORTED, 8), ("75", "float32", "alibi", WITH_DQ, 0), ("75", "float64", "both", FORWARD, 0),
    ("86", "float32", "alibi", FORWARD, 0), ("86", "float64", "softcap", FORWARD, 0), ("86", "float32", "both", WITH_DQ, 0),
    ("89", "float16", "both", SORTED, 8), ("89", "float32", "softcap", WITHOUT, 0), ("89", "float64", "alibi", WITH_DQ, 0),
    ("90", "float32", "both", FORWARD, 0), ("90", "float32", "softcap", FORWARD, 0), ("90", "float64", "alibi", WITHOUT, 0),
    ("100", "float16", "softcap", SORTED, 8), ("100", "float64", "alibi", WITH_DQ, 0), ("100", "float32", "both", WITHOUT, 0),
    ("120", "bfloat16", "alibi", SORTED, 0), ("120", "float64", "softcap", WITH_DQ, 0), ("120", "float32", "both", FORWARD, 0),
]  # fmt: skip


@pytest.mark.parametrize("arch, dtype, bend, way, fill", SOME, ids=[f"sm_{x[0]}-{x[1]}-{x[2]}-{i}" for i, x in enumerate(SOME)])
def test_some_variants(arch, dtype, bend, way, fill):
    found = [x for x in groups(arch, dtype, 32, 32, bend) if dict(x[1][0].way) == way and x[1][0].fill == fill]
    ((verb, builds),) = found if way else found[:1]
    launched = run(verb, builds, arch, dtype, 32, 32, bend)
    assert set().union(*(x.launches for x in builds)) <= launched


def test_the_list_is_whole():
    """What the table and the sources' switches multiply to, counted by hand; all other CUDA C is in ``Passed.judge``."""
    sources = {f"{x.source}.cu" for dtype in ("float16", "float64") for x in variants("80", dtype, 64, 64)}
    assert sorted(sources) == sorted(IN_KEYS) and {"survey.cu", "plain.cu"} == {x.name for x in modules.folder().glob("*.cu")} - sources
    halves, wide = 13, 14  # pairs of architecture and type: no bfloat16 on sm_75
    counted = sum(len(list(variants(arch, dtype, *dims, bend))) for arch, dtype in PAIRS for dims in DIMS for bend in BENDS)
    assert counted == len(DIMS) * len(BENDS) * (halves * (2 * 2 + 2 + 1) + wide * (1 + 2 + 1)) == 4116
    assert len(set(PAIRS_OF_DIMS)) == len(PAIRS_OF_DIMS) == 29 * 6 * 3
    assert len(CELLS) == 756 and len(set(helpers())) == 6 + 13 + 2 * (13 + 45 + 5)
