"""Run a backend's verbs on whole arrays, block of keys by block of keys, and a naive run of the same type beside it."""

from __future__ import annotations

import hashlib
import itertools
import platform
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import ml_dtypes
import numpy as np
import pytest

from burstmpi.backends import host, reference
from burstmpi.backends.base import Dims, Tally, Work
from burstmpi.checks import accumulator
from burstmpi.rules import Rules, Sight

DTYPES = {"float64": np.float64, "float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}

IN_C = Path(__file__).resolve().parent / "cross" / "avx512.h"


def flags_for(isa):
    """Flags with which this CPU runs the kernels of an instruction set: none where it has it; skips the test where that cannot be.

    Where it lacks AVX-512 or AMX, their intrinsics are plain C (cross/avx512.h): the same kernels by other instructions.  Little is
    optimised then, as that would take the compiler twenty times as long.
    """
    lacks = host.missing(isa)
    if not lacks:
        return ()
    if isa == "sve":
        pytest.skip("no SVE; test_host_cross.py runs it under an emulator")
    if isa == "amx-bf16":
        pytest.skip(f"this CPU has no {', '.join(lacks)}, and in plain C these kernels are those of amx and of avx512")
    if platform.machine() != "x86_64" or host.missing("avx2"):
        pytest.skip(f"this CPU has no {', '.join(lacks)}")
    version = hashlib.sha256(IN_C.read_bytes()).hexdigest()[:16]  # for the cache, which looks at the kernels' own headers only
    return (
        "-mno-amx-bf16", "-mno-amx-tile", "-mno-avx512f", "-mavx2", "-mfma", "-Wno-psabi", "-Og",
        f"-DAVX512_IN_C=0x{version}", "-include", str(IN_C),
    )  # fmt: skip


def isas(slow=()):
    """Every instruction set as a parameter; slow are those that are named, and those that this CPU would run in plain C."""
    here = [isa for isa in host.ISAS if isa != "sve" or not host.missing(isa)]
    return [pytest.param(isa, marks=pytest.mark.slow) if isa in slow or host.missing(isa) else isa for isa in here]


def plain():
    """Instruction sets that this CPU runs in plain C alone."""
    return [isa for isa in host.ISAS if host.missing(isa) and isa not in ("amx-bf16", "sve")]


def backend_of(isa, threads=1, extra_flags=()):
    """A backend of an instruction set, in plain C where this CPU lacks it."""
    flags = flags_for(isa)
    with mock.patch.object(host, "missing", lambda isa: []) if flags else nullcontext():
        try:
            return host.HostBackend(isa, threads=threads, extra_flags=(*flags, *extra_flags))
        except host.BuildError as error:
            if not flags:
                raise
            pytest.skip(f"this CPU has no {isa}, and the compiler does not know it: {error}")  # probe.c; no kernel was compiled


def arrays(rng, batch, rows_q, rows_k, heads, kv_heads, d, dv, dtype, gain=1.0):
    """q, k, v, dout of a type; gain multiplies the logits."""
    make = lambda *shape: rng.standard_normal(shape)  # noqa: E731
    q = make(batch, rows_q, heads, d) * gain
    k, v = make(batch, rows_k, kv_heads, d), make(batch, rows_k, kv_heads, dv)
    dout = make(batch, rows_q, heads, dv)
    return tuple(x.astype(DTYPES[dtype]) for x in (q, k, v, dout))


def _work(backend, dims, rules, rows_q, rows_k, most_k, backward, tally, progress, positions):
    at, lo, hi = rules.intervals(positions, rows_q, rows_k)
    scores = rules.scores(dims.d)
    scratch = backend.allocate(backend.scratch_bytes(dims, scores, rows_q, most_k, backward))
    scratch[:] = 0xFF  # NaN wherever it is read before it is written

    def of(positions):
        extra = {} if progress is None else {"progress": progress}
        return Work(Sight(at, lo, hi, positions.astype(np.int32)), scores, scratch, tally=tally, **extra)

    return of


def _dims(q, k, v):
    return Dims(q.shape[0], q.shape[2], k.shape[2], q.shape[3], v.shape[3], q.dtype, accumulator(q.dtype))


def _cuts(rows_k, cuts):
    """Blocks of keys as slices: a block of a view stays a view, with the strides that the caller chose."""
    return [slice(*ends) for ends in itertools.pairwise((0, *cuts, rows_k))]


def _longest(blocks):
    return max(block.stop - block.start for block in blocks)


def forward(backend, q, k, v, *, cuts=(), tally=None, progress=None, positions=None, **options):
    """out, lse of whole arrays, the keys coming in blocks.  positions: of the rows of q and of k, where they are not in order."""
    rules, dims, tally = Rules(**options), _dims(q, k, v), tally or Tally()
    at, where = positions or (np.arange(q.shape[1]), np.arange(k.shape[1]))
    blocks = _cuts(k.shape[1], cuts)
    work = _work(backend, dims, rules, q.shape[1], k.shape[1], _longest(blocks), False, tally, progress, at)
    state = np.full((*q.shape[:3], v.shape[3]), np.nan, dims.accumulator)
    lse = np.full((q.shape[0], q.shape[2], q.shape[1]), np.nan, dims.accumulator)
    out = np.full(state.shape, np.nan, q.dtype)
    for i, keys in enumerate(blocks):
        last = i == len(blocks) - 1
        backend.attend(q, k[:, keys], v[:, keys], state, lse, work(where[keys]), first=i == 0, final=out if last else None)
    return out, lse


def backward(backend, dout, q, k, v, out, lse, *, cuts=(), tally=None, progress=None, positions=None, **options):
    """dq, dk, dv of whole arrays in the accumulator's type, the keys coming in blocks."""
    rules, dims, tally = Rules(**options), _dims(q, k, v), tally or Tally()
    at, where = positions or (np.arange(q.shape[1]), np.arange(k.shape[1]))
    blocks = _cuts(k.shape[1], cuts)
    work = _work(backend, dims, rules, q.shape[1], k.shape[1], _longest(blocks), True, tally, progress, at)
    delta = np.full(lse.shape, np.nan, dims.accumulator)
    backend.delta(dout, out, delta)
    dq, dk, dv = (np.full(x.shape, np.nan, dims.accumulator) for x in (q, k, v))
    for i, keys in enumerate(blocks):
        part_k, part_v = (np.full(x[:, keys].shape, np.nan, dims.accumulator) for x in (k, v))
        backend.attend_backward(
            dout, q, k[:, keys], v[:, keys], lse, delta, dq, part_k, part_v, work(where[keys]), fresh_q=i == 0, fresh_kv=True
        )
        dk[:, keys], dv[:, keys] = part_k, part_v
    return dq, dk, dv


def rounded_gradients(backend, dout, q, k, v, out, lse, cut_q, cut_k, way, **options):
    """dq, dk, dv in the caller's type, queries and keys coming in two blocks each.

    way : "after": sums are rounded when all is done; "within": the last block of each sum writes the result
    """
    rules, dims = Rules(**options), _dims(q, k, v)
    blocks_q, blocks_k = _cuts(q.shape[1], (cut_q,)), _cuts(k.shape[1], (cut_k,))
    at, lo, hi = rules.intervals(np.arange(q.shape[1]), q.shape[1], k.shape[1])
    scores, pos = rules.scores(dims.d), np.arange(k.shape[1], dtype=np.int32)
    scratch = backend.allocate(backend.scratch_bytes(dims, scores, _longest(blocks_q), _longest(blocks_k), True))
    delta = np.full(lse.shape, np.nan, dims.accumulator)
    backend.delta(dout, out, delta)
    sums = [np.full(x.shape, np.nan, dims.accumulator) for x in (q, k, v)]
    results = [np.full((*x.shape[:3], x.shape[3] + 5), np.nan, q.dtype)[..., 3:-2] for x in (q, k, v)]
    for i, qs in enumerate(blocks_q):
        for j, ks in enumerate(blocks_k):
            work = Work(Sight(at[qs], lo[qs], hi[qs], pos[ks]), scores, scratch)
            dq, dk, dv = (x[:, rows] for x, rows in zip(sums, (qs, ks, ks)))
            last = (j == 1, i == 1, i == 1) if way == "within" else (False,) * 3
            final = [x[:, rows] if take else None for x, rows, take in zip(results, (qs, ks, ks), last)]
            backend.attend_backward(
                dout[:, qs], q[:, qs], k[:, ks], v[:, ks], lse[:, :, qs], delta[:, :, qs], dq, dk, dv, work,
                fresh_q=j == 0, fresh_kv=i == 0, final=final,
            )  # fmt: skip
    if way == "after":
        for result, total in zip(results, sums):
            backend.copy(result, total)
    return results


def naive(dout, q, k, v, *, narrow=False, **options):
    """Dense attention and gradients with every array in the accumulator's type: what rounding alone costs.

    narrow : P and dS are rounded to q's type before they are multiplied, as tensor units want them

    Returns out, lse, dq, dk, dv, and a floor for the error of out, dq, dk, dv and lse: see ``_floors``.  Where sums cancel, or
    where the type is the oracle's own, the difference of a naive run from the oracle says nothing.
    """
    acc, own = accumulator(q.dtype), q.dtype
    rules = Rules(**options)
    dout, q, k, v = (x.astype(acc) for x in (dout, q, k, v))
    group = q.shape[2] // k.shape[2]
    kk, vv = np.repeat(k, group, 2), np.repeat(v, group, 2)
    mask, at = reference.visible(rules, q.shape[1], k.shape[1])
    scores = rules.scores(q.shape[3])
    s = np.matmul(q.transpose(0, 2, 1, 3), kk.transpose(0, 2, 3, 1)) * acc.type(scores.scale)
    slope = acc.type(1)
    if scores.softcap is not None:
        t = np.tanh(s / acc.type(scores.softcap))
        s, slope = acc.type(scores.softcap) * t, 1 - t * t
    if scores.slopes is not None:
        s = s - np.array(scores.slopes, acc)[:, None, None] * np.abs(at[:, None] - np.arange(k.shape[1])).astype(acc)
    s = np.where(mask, s, acc.type(-np.inf))
    top = s.max(axis=3, initial=-np.inf)
    safe = np.where(np.isneginf(top), 0, top).astype(acc)
    p = np.exp(s - safe[..., None])
    total = p.sum(axis=3)
    with np.errstate(divide="ignore"):
        lse = safe + np.log(total)
    p = np.exp(s - np.where(np.isneginf(lse), np.inf, lse)[..., None].astype(acc))
    vt, dt = vv.transpose(0, 2, 1, 3), dout.transpose(0, 2, 1, 3)
    factor = (lambda x: x.astype(own).astype(acc)) if narrow else (lambda x: x)
    out = np.matmul(factor(p), vt)
    delta = (out.astype(own).astype(acc) * dt).sum(axis=3)  # backward gets out as the caller's type holds it
    gap = np.matmul(dt, vt.swapaxes(2, 3)) - delta[..., None]
    ds = p * gap * slope
    ds = factor(ds) * acc.type(scores.scale)
    fold = lambda x: x.reshape(x.shape[0], -1, group, *x.shape[2:]).sum(axis=2).transpose(0, 2, 1, 3)  # noqa: E731
    dq = np.matmul(ds, kk.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    dk = fold(np.matmul(ds.swapaxes(2, 3), q.transpose(0, 2, 1, 3)))
    dv = fold(np.matmul(factor(p).swapaxes(2, 3), dt))
    wide = dt, q.transpose(0, 2, 1, 3), kk.transpose(0, 2, 1, 3), vt, p, gap
    floors = _floors(*wide, group, scores.scale, acc)
    if narrow:
        floors = tuple(map(sum, zip(floors, _narrow_floors(*wide, out, slope, group, scores.scale, own))))
    return out.transpose(0, 2, 1, 3), lse, dq, dk, dv, floors


def _floors(dout, q, k, v, p, gap, group, scale, acc):
    """Give the rms error of out, dq, dk, dv and lse that roundings cost, by a model of them.

    dout, q, k, v : (batch, heads, rows, columns); p, gap = dP - delta : (batch, heads, queries, keys); group : query heads of a key head

    A rounding errs by u/√3 of its number in the root mean square, u half a unit in the last place.  Terms of a sum are
    taken for independent, so that the k-th partial sum of x·y, n terms, is about |x||y| √k / n, and all n roundings of
    them, and of the products, cost u |x||y| √(1/6 + 1/(3n)).  That is for sums from left to right, as long dot products of
    registers and tensor cores are; pairwise ones are better.  delta = dout·out costs as much as dP, and 1/(3n) for out's own rounding:

        S            errs by  u scale |q_i| |k_j| √(1/6 + 1/(3d)),  however small S is
        P            errs by  u P √r,  r = 1 + (what S errs by / u)²
        dP - delta   errs by  u |dout_i| |v_j| √(1/3 + 1/dv),       also where it is 0: one key, P = 1, dq = dk = 0

    Each such error goes into a row of results times some vector, and rows of dk and dv are sums over the heads of a group.
    With E_r the sum of the squares of these products for row r, the squares of all errors sum up to χ² = ΣE_r on average.
    Few errors may all be unlucky: √χ² <= √ΣE + √(2 t max E) but for a chance of e^-t (Laurent and Massart's bound for
    sums of weighted squares).  t = 4; the tests' factor of 2 makes 8 of it, 1 in 3000, and leaves √2 for the oracle's own errors.
    """
    u, d, dv = np.finfo(acc).eps / 2, k.shape[3], v.shape[3]
    p, gap = (x.astype(np.float64) ** 2 for x in (p, gap))
    dout, q, k, v = ((x.astype(np.float64) ** 2).sum(axis=3) for x in (dout, q, k, v))  # (batch, heads, rows), of lengths
    scores = scale**2 * (1 / 6 + 1 / (3 * d)) * q[..., None] * k[..., None, :]
    weights = p * (1 + scores)
    slopes = scale**2 * (p * (1 / 3 + 1 / dv) * dout[..., None] * v[..., None, :] + gap * weights)
    over_keys, over_queries = _sums(group)
    energies = {  # of a row of d numbers
        "out": (over_keys(weights, v), dv), "dq": (over_keys(slopes, k), d), "dk": (over_queries(slopes, q), d),
        "dv": (over_queries(weights, dout), dv),
        "lse": ((p * scores).sum(axis=3)[p.any(axis=3)], 1),  # of rows that see anything, as ``rms`` takes them
    }  # fmt: skip
    return tuple(u * _unlucky(energy, 4) / max(1, energy.size * columns) ** 0.5 for energy, columns in energies.values())


def _unlucky(energy, t):
    """What all errors together hardly exceed, see ``_floors``: but for a chance of e^-t."""
    return energy.sum() ** 0.5 + (2 * t * energy.max(initial=0)) ** 0.5


def _sums(group):
    """What errors of pairs (query, key) add up to, times a vector's squared length: over keys, and over queries of a group's heads."""
    over_keys = lambda x, y: np.einsum("bhij,bhj->bhi", x, y)  # noqa: E731
    over_queries = lambda x, y: np.einsum("bhij,bhi->bhj", x, y).reshape(x.shape[0], -1, group, x.shape[3]).sum(axis=2)  # noqa: E731
    return over_keys, over_queries


def _narrow_floors(dout, q, k, v, p, gap, out, slope, group, scale, own):
    """Give the part of ``_floors`` that roundings to the caller's own type cost where tensor units want them.

    The naive run has these roundings, but with one query or one key it may be lucky: bfloat16, one query, three keys,
    logits x 8, 40 seeds: the kernel's error of dq was 0.71 of the naive run's in the root mean square, and from 0.08 to
    7.8 of it case by case.  Roundings, each u √(1 / (8 ln 2)) of its number (u/√3 at most, over mantissas whose logarithms are
    spread evenly):

        P -> out, dv        dS -> dq, dk        out -> delta:  Σ_c dout_c (out's error)_c,  and P's by way of out:  Σ_j dP_j (P's error)_j

    delta's error is common to the keys of a row, so that it enters dq by the length of Σ_j P_j k_j.  Then as in ``_floors``, with
    t = 8 and half of the bound, as the tests double it: with many rows it is below the naive run's error, which then decides.
    """
    over_keys, over_queries = _sums(group)
    dout, q, k, v, p, gap, out = (x.astype(np.float64) for x in (dout, q, k, v, p, gap, out))
    length = lambda x: (x * x).sum(axis=3)  # noqa: E731
    delta = length(out * dout) + length(p * np.matmul(dout, v.swapaxes(2, 3)))
    slopes = (p * gap * slope) ** 2
    energies = {
        "out": (over_keys(p * p, length(v)), v), "dq": (scale**2 * (over_keys(slopes, length(k)) + delta * length(np.matmul(p * slope, k))), k),
        "dk": (scale**2 * over_queries(slopes + (p * slope) ** 2 * delta[..., None], length(q)), q),
        "dv": (over_queries(p * p, length(dout)), v),
    }  # fmt: skip
    u = float(ml_dtypes.finfo(own).eps) / 2
    floors = (u / (32 * np.log(2)) ** 0.5 * _unlucky(energy, 8) / max(1, energy.size * x.shape[3]) ** 0.5 for energy, x in energies.values())
    return *floors, 0.0


def exact(dout, q, k, v, **options):
    """The float64 oracle: out, lse, dq, dk, dv."""
    out, lse = reference.forward(q, k, v, **options)
    return out, lse, *reference.backward(dout, q, k, v, out, lse, **options)


def rms(x):
    """Root mean square of the finite part: the size of something.  For the error of a result see ``error``."""
    x = np.asarray(x, np.float64)
    x = x[np.isfinite(x)]
    return float(np.sqrt(np.mean(x * x))) if x.size else 0.0


def error(name, got, true):
    """Root mean square of got - true; NaN and infinities must be where the truth has them, and nowhere else."""
    got = got.astype(np.promote_types(true.dtype, np.float64))
    assert got.shape == true.shape, f"{name}: shape {got.shape}, expected {true.shape}"
    strange = ~(np.isfinite(got) & np.isfinite(true))
    same = np.isclose(got[strange], true[strange], rtol=0, atol=0, equal_nan=True)
    assert same.all(), f"{name}: {(~same).sum()} of {got.size} numbers are not finite here and finite in the reference, or the reverse"
    return rms(got[~strange] - true[~strange])


def check(name, got, true, same_type, dtype, factor=2.0, score=0.0, floor=0.0):
    """Hold an error against that of the naive run, or of the model of one, plus one rounding of the result's own type.

    score : size of the scores.  One rounding of a score s changes P by a factor 1 + ulp s; a naive run of few keys
    may be lucky and make no error at all.  floor : what a model says of such a run, by ``_floors``.
    """
    far = error(name, got, true)
    with np.errstate(invalid="ignore"):
        allowed = rms(same_type.astype(np.float64) - true)
    ulp = {"float64": 2**-53, "float32": 2**-24, "float16": 2**-11, "bfloat16": 2**-8}
    own, wide = ulp[dtype], ulp["float64" if dtype == "float64" else "float32"]
    bound = factor * max(allowed, floor) + (own + wide * (1 + score)) * rms(true) + 1e-30
    assert far <= bound, f"{name}: error {far:.3g}, allowed {bound:.3g} (naive {allowed:.3g})"
