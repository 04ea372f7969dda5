"""Copies with a change of type, clearing, adding and delta on the PTX machine, with all its checks."""

import ml_dtypes
import numpy as np
import pytest
from cuda_kit import backend
from host_kit import DTYPES

NAMES = list(DTYPES)
SHAPES = [(2, 5, 3, 16), (1, 7, 2, 6), (2, 3, 33), (65,), (1,), (2, 9, 1, 3), ()]


def values(shape, dtype, seed=0):
    """Numbers of many sizes, ties and infinities among them, in a type."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-20, 12, shape)
    if x.size > 40:
        x.reshape(-1)[:5] = [np.inf, -np.inf, 0.0, -0.0, 1 + 2.0**-9]
        x.reshape(-1)[5:9] = [1 + 2.0**-8 + 2.0**-30, 65519.9, 65520.0, 1 + 2.0**-11]
    with np.errstate(over="ignore"):
        return x.astype(DTYPES[dtype])


def view(cupy, x, kind):
    """The same values on the device: as they are, as the middle of a larger array, or behind odd strides."""
    if kind == "whole" or not x.ndim:
        return cupy.asarray(x)
    # Columns lie side by side in both; "odd" starts where no 16 bytes start.
    before, more = (8, 8) if kind == "view" else (1, 3)
    big = np.full((*(n + 2 for n in x.shape[:-1]), x.shape[-1] + more), np.nan).astype(x.dtype)
    part = (*(slice(1, 1 + n) for n in x.shape[:-1]), slice(before, before + x.shape[-1]))
    big[part] = x
    whole = cupy.asarray(big)
    return whole[part]


def rounded(x, dtype):
    """x in another type, rounded once: ml_dtypes takes float64 to bfloat16 by way of float32, so by hand."""
    if x.dtype == np.float64 and dtype == ml_dtypes.bfloat16:
        bits = x.astype(np.longdouble)  # to a grid of 8 bits: halves and ties as round-to-even of the quotient
        with np.errstate(invalid="ignore", over="ignore"):
            step = np.exp2(np.floor(np.log2(np.abs(np.where(np.isfinite(x) & (x != 0), x, 1)))) - 7)
            return np.where(np.isfinite(x), np.rint(bits / step) * step, x).astype(np.float32).astype(dtype)
    with np.errstate(over="ignore"):
        return x.astype(dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kinds", [("whole", "whole"), ("view", "whole"), ("whole", "odd"), ("odd", "view")], ids="-".join)
def test_copies_of_any_shape(shape, kinds):
    b = backend("80")
    for pair in (("float32", "bfloat16"), ("float32", "float32"), ("float64", "float64"), ("bfloat16", "bfloat16")):
        x = values(shape, pair[0])
        source, target = view(b._cupy, x, kinds[0]), view(b._cupy, np.zeros(shape, DTYPES[pair[1]]), kinds[1])
        around = b._cupy.asnumpy(target.base if target.base is not None else target)
        b.copy(target, source)
        got = b._cupy.asnumpy(target)
        assert got.tobytes() == rounded(x, DTYPES[pair[1]]).tobytes()
        if target.base is not None:  # nothing else was written
            after = b._cupy.asnumpy(target.base)
            assert np.isnan(after.astype(float)).sum() == np.isnan(around.astype(float)).sum()


@pytest.mark.parametrize("source", NAMES)
@pytest.mark.parametrize("arch", ["75", "80", "90"])
def test_copies_between_types_round_once(arch, source):
    b = backend(arch)
    x = values((3, 50), source)
    for target in NAMES:
        y = b._cupy.empty(x.shape, DTYPES[target])
        b.copy(y, b._cupy.asarray(x))
        assert b._cupy.asnumpy(y).tobytes() == rounded(x, DTYPES[target]).tobytes(), target


@pytest.mark.parametrize("dtype", NAMES)
@pytest.mark.parametrize("kind", ["whole", "view", "odd"])
def test_clear(dtype, kind):
    b = backend("80")
    for shape in ((2, 3, 33), (2, 5, 3, 16)):
        for value in (0.0, -np.inf):
            target = view(b._cupy, values(shape, dtype), kind)
            b.clear(target, value)
            assert (b._cupy.asnumpy(target) == value).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", ["whole", "view", "odd"])
def test_add(dtype, kind):
    b = backend("80")
    for shape in ((2, 3, 33), (2, 5, 3, 16), (7,)):
        x, y = (np.random.default_rng(seed).standard_normal(shape).astype(dtype) for seed in (1, 2))
        target = view(b._cupy, x, kind)
        b.add(target, b._cupy.asarray(y))
        assert b._cupy.asnumpy(target).tobytes() == (x + y).tobytes()
    with pytest.raises(TypeError, match="bfloat16"):
        b.add(b._cupy.zeros(3, DTYPES["bfloat16"]), b._cupy.zeros(3, DTYPES["bfloat16"]))


@pytest.mark.parametrize("arch", ["75", "80"])
@pytest.mark.parametrize("dtype", NAMES)
def test_delta(arch, dtype):
    b = backend(arch)
    wide = np.longdouble if dtype == "float64" else np.float64
    acc = np.float64 if dtype == "float64" else np.float32
    for shape, kind in (((2, 37, 3, 64), "whole"), ((1, 65, 2, 40), "view"), ((1, 1, 1, 256), "odd"), ((2, 33, 1, 5), "odd")):
        rng = np.random.default_rng(3)
        dout, out = (rng.standard_normal(shape).astype(DTYPES[dtype]) for _ in range(2))
        delta = b._cupy.empty((shape[0], shape[2], shape[1]), acc)
        b.delta(view(b._cupy, dout, kind), view(b._cupy, out, kind), delta)
        products = dout.astype(wide) * out.astype(wide)
        true = products.sum(axis=3).transpose(0, 2, 1)
        # a sum in any order: at most (terms) roundings of the sum of magnitudes
        allowed = np.finfo(acc).eps / 2 * (shape[3] + 1) * np.abs(products).sum(axis=3).transpose(0, 2, 1)
        assert (np.abs(b._cupy.asnumpy(delta) - true) <= allowed).all()


def test_nothing_to_do():
    b = backend("80")
    empty = b._cupy.empty((0, 4), np.float32)
    for launch in (b.copy(empty, empty), b.clear(empty), b.add(empty, empty)):
        while not launch.done():
            pass


def test_large_arrays_count_in_64_bits():
    """The index that a build uses follows from the number of pieces; 64 bits give the same."""
    from burstmpi.backends.plain import pieces

    assert pieces((2**31, 8), [(0, (32, 4), 4)]) == (4, [(1, 0), (1, 0), (1, 0), (2**34, 4)])


@pytest.mark.parametrize("dtype, target", [("float32", "bfloat16"), ("float64", "float64"), ("float32", "float32")])
def test_whole_sectors(dtype, target):
    """Every global access of a copy, an addition, clearing and delta moves full 32-byte sectors."""
    b = backend("80", count=True)
    sim = b._cupy.simulation()
    x = b._cupy.asarray(values((2, 64, 2, 64), dtype))
    y, z = b._cupy.zeros(x.shape, DTYPES[target]), b._cupy.zeros(x.shape, DTYPES[dtype])
    delta = b._cupy.empty((2, 2, 64), DTYPES[dtype])
    for verb in (lambda: b.copy(y, x), lambda: b.clear(y), lambda: b.add(z, x), lambda: b.delta(x, z, delta)):
        verb()
        b._cupy.cuda.Device().synchronize()
        assert sim.machine.counters.sector_efficiency == 1.0, sim.machine.counters.table()
