"""What C runs gives the bits that NumPy gives: every operation over wild operands, masks and predicates, and whole kernels
down to their registers, memories and sanitiser."""

import hashlib
import itertools
import re

import cuda_kit
import host_kit
import ml_dtypes
import numpy as np
import pytest
from ptxmachine import cupy, stretches
from ptxmachine.faults import Fault
from ptxmachine.machine import Group, Machine, Run
from ptxmachine.memory import GlobalMemory
from ptxsupport import launch, machine, ptx, source
from test_ptx_attention import run as run_mma
from test_ptx_seeded_faults import ATTENTION, MATMUL, run_attention, run_matmul
from test_ptx_toolkits import broad

needs_c = pytest.mark.skipif(stretches.core() is None, reason="PTX_MACHINE_LANES=numpy, or no C compiler")

LANES = 256
PREFIX = {16: "%h", 32: "%r", 64: "%d"}
SIGNED = {16: ("s16", "u16"), 32: ("s32", "u32"), 64: ("s64", "u64")}


def line(opcode, *operands):
    """PTX of an instruction: an operand is its width, "p" for a predicate, or text."""
    names, used = [], 0
    for operand in operands:
        if operand == "p" or operand in PREFIX:
            names.append("%s%d" % ("%p" if operand == "p" else PREFIX[operand], used))
            used += 1
        else:
            names.append(operand)
    return "%s %s;" % (opcode, ", ".join(names))


def instructions():
    """Yield PTX of every operation that C knows."""
    for w in (16, 32, 64):
        s, u = SIGNED[w]
        for kind in (s, u, "b%d" % w):
            yield line("mov." + kind, w, w)
            yield line("selp." + kind, w, w, w, "p")
            yield line("selp." + kind, w, w, w, "!%p3")
        for kind in (s, u):
            for op in ("add", "sub", "min", "max", "div", "rem", "mul.lo", "mul.hi"):
                yield line("%s.%s" % (op, kind), w, w, w)
            yield line("mad.lo." + kind, w, w, w, w)
            yield line("shr." + kind, w, w, 32)
            for test in ("eq", "ne", "lt", "le", "gt", "ge"):
                yield line("setp.%s.%s" % (test, kind), "p", w, w)
            if w < 64:
                yield line("mad.hi." + kind, w, w, w, w)
                yield line("mul.wide." + kind, 2 * w, w, w)
                yield line("mad.wide." + kind, 2 * w, w, w, 2 * w)
        for test in ("lo", "ls", "hi", "hs"):
            yield line("setp.%s.%s" % (test, s), "p", w, w)
        yield line("neg." + s, w, w)
        yield line("abs." + s, w, w)
        for op in ("and", "or", "xor"):
            yield line("%s.b%d" % (op, w), w, w, w)
        yield line("not.b%d" % w, w, w)
        yield line("shl.b%d" % w, w, w, 32)
        yield line("shr.b%d" % w, w, w, 32)
        for to in (16, 32, 64):
            for a, b in itertools.product(SIGNED[to] + (("u8", "s8") if to == 16 else ()), (s, u)):
                yield line("cvt.%s.%s" % (a, b), to, w)
        for a in ("u8", "s8", "u16", "s16", "u32", "s32"):
            if int(a[1:]) <= w:
                yield line("cvt.%s.%s" % (a, u), w, w)
            if int(a[1:]) < w:
                yield line("cvt.%s.%s" % (u, a), w, w)
                yield line("cvt.%s.%s" % (s, a), w, w)
    for kind in ("u8", "s8"):
        for to in (16, 32, 64):
            yield line("cvt.u%d.%s" % (to, kind), to, 16)
    for op, mods in itertools.product(("l", "r"), ("wrap", "clamp")):
        yield line("shf.%s.%s.b32" % (op, mods), 32, 32, 32, 32)
    for table in (0xE8, 0x96, 0x01, 0xCA):
        yield line("lop3.b32", 32, 32, 32, 32, str(table))
    yield line("prmt.b32", 32, 32, 32, 32)
    for op in ("popc", "clz"):
        yield line(op + ".b32", 32, 32)
        yield line(op + ".b64", 32, 64)
    for w in (32, 64):
        yield line("brev.b%d" % w, w, w)
        yield line("bfe.u%d" % w, w, w, 32, 32)
        yield line("bfe.s%d" % w, w, w, 32, 32)
        yield line("bfi.b%d" % w, w, w, w, 32, 32)
        yield line("cvta.to.global.u64", 64, 64)
        yield line("cvta.shared.u64", 64, 64)
    for op in ("and", "or", "xor"):
        yield line(op + ".pred", "p", "p", "p")
        yield line(op + ".pred", "p", "!%p3", "p")
    yield line("not.pred", "p", "p")
    yield line("mov.pred", "p", "p")
    yield line("mov.b32", 32, "{%h1, %h2}")
    yield line("mov.b64", 64, "{%r1, %r2}")
    yield line("mov.b64", 64, "{%h1, %h2, %h3, %h4}")
    yield line("mov.b32", "{%h1, %h2}", 32)
    yield line("mov.b64", "{%r1, %r2}", 64)
    yield line("mov.b64", "{%h1, %h2, %h3, _}", 64)
    for text in ("and.s32", "or.u32", "xor.ftz.f32"):
        combine, kind = text.split(".", 1)
        for test, targets, negate in itertools.product(("lt", "ne"), ("%p1", "%p1|%p2", "%p3|_"), ("", "!")):
            yield line("setp.%s.%s.%s" % (test, combine, kind), targets, 32, 32, negate + "%p3")
    yield line("setp.gt.f64", "%p1|%p2", 64, 64)
    # floats
    for flush, sat in itertools.product(("", ".ftz"), ("", ".sat")):
        for op in ("add.rn", "sub", "mul.rn"):
            yield line(op + flush + sat + ".f32", 32, 32, 32)
        yield line("fma.rn" + flush + sat + ".f32", 32, 32, 32, 32)
    for flush in ("", ".ftz"):
        for op in ("div.rn", "div.full", "div.approx", "min", "max"):
            yield line(op + flush + ".f32", 32, 32, 32)
        for op in ("min", "max"):
            yield line(op + flush + ".NaN.f32", 32, 32, 32)
        for op in ("rcp.approx", "rcp.rn", "sqrt.approx", "sqrt.rn", "rsqrt.approx", "abs", "neg"):
            yield line(op + flush + ".f32", 32, 32)
    ordered = ("eq", "ne", "lt", "le", "gt", "ge")
    for test in (*ordered, *(name + "u" for name in ordered), "num", "nan"):
        yield line("setp.%s.f32" % test, "p", 32, 32)
        yield line("setp.%s.ftz.f32" % test, "p", 32, 32)
        yield line("setp.%s.f64" % test, "p", 64, 64)
    for op in ("add.rn", "sub.rn", "mul.rn", "div.rn", "min", "max"):
        yield line(op + ".f64", 64, 64, 64)
    yield line("fma.rn.f64", 64, 64, 64, 64)
    for op in ("rcp.rn", "sqrt.rn", "rsqrt.approx", "abs", "neg"):
        yield line(op + ".f64", 64, 64)
    for fmt, pairs in itertools.product(("f16", "bf16"), ("", "x2")):
        kind, w = fmt + pairs, 32 if pairs else 16
        for op in ("add.rn", "sub.rn", "mul.rn", "min", "max", "min.NaN", "max.NaN"):
            yield line("%s.%s" % (op, kind), w, w, w)
        yield line("fma.rn." + kind, w, w, w, w)
        for op in ("abs", "neg"):
            yield line("%s.%s" % (op, kind), w, w)
    for fmt in ("f16", "bf16"):
        for flush in ("", ".ftz"):
            yield line("cvt.rn%s.%s.f32" % (flush, fmt), 16, 32)
            yield line("cvt%s.f32.%s" % (flush, fmt), 32, 16)
        yield line("cvt.rn.%sx2.f32" % fmt, 32, 32, 32)
    for flush in ("", ".ftz"):
        yield line("cvt%s.f64.f32" % flush, 64, 32)
        yield line("cvt.rn%s.f32.f64" % flush, 32, 64)
        yield line("cvt%s.f32.f32" % flush, 32, 32)
        yield line("cvt%s.sat.f32.f32" % flush, 32, 32)
    yield line("cvt.rna.tf32.f32", 32, 32)
    for kind in ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"):
        for to in (32, 64):
            yield line("cvt.rn.f%d.%s" % (to, kind), to, max(16, int(kind[1:])))
    for whole in ("rni", "rzi", "rmi", "rpi"):
        for flush in ("", ".ftz"):
            yield line("cvt.%s%s.f32.f32" % (whole, flush), 32, 32)
            for kind in ("s32", "u32"):
                yield line("cvt.%s%s.%s.f32" % (whole, flush, kind), 32, 32)
        for kind in ("s32", "u32", "s64"):
            yield line("cvt.%s.%s.f64" % (whole, kind), int(kind[1:]), 64)
        yield line("cvt.%s.s64.f32" % whole, 64, 32)
        yield line("cvt.%s.f64.f64" % whole, 64, 64)


def variants(text):
    """Yield the instruction under predicates, in place, and with a constant for its last operand."""
    yield text
    yield "@%p5 " + text
    yield "@!%p5 " + text
    opcode, rest = text[:-1].split(" ", 1)
    operands = re.findall(r"\{[^}]*\}|[^,\s]+", rest)
    first, second, last = operands[0], operands[1], operands[-1]
    if first[:2] == second[:2] and "|" not in first:
        yield "%s %s;" % (opcode, ", ".join([second, *operands[1:]]))
        yield "@%%p5 %s %s;" % (opcode, ", ".join([second, *operands[1:]]))
    if len(operands) > 2 and re.fullmatch(r"%[hrd]\d", last):
        kind = opcode.rsplit(".", 1)[1]
        double = kind.startswith("f") and kind in ("f32", "f64")
        for constant in ("0f3fc00000", "0fff800000") if double else ("5", "-3"):
            yield "%s %s;" % (opcode, ", ".join([*operands[:-1], constant]))


SPECIAL32 = (0, 1, 0x007FFFFF, 0x00800000, 0x3F800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC01234, 0x7FFFFFFF)
SPECIAL32 += (0x3F7FFFFF, 0x4B000001, 0x4F000000, 0x4EFFFFFF, 0x38800000, 0x33800000, 0x477FEFFF, 0x7E800001, 31, 32, 33, 63, 64)
SPECIAL16 = (0, 1, 0x3FF, 0x400, 0x3C00, 0x7BFF, 0x7C00, 0x7C01, 0x7FFF, 0x7F80, 0x7F81, 0x007F, 0x0080, 0x3F80, 0x3BFF)


def fill(rng, arrays, style):
    """Random registers: wild bits, special values, or numbers near one another whose sums cancel."""
    for array in arrays:
        if array.dtype == np.bool_:
            array[:] = rng.integers(0, 2, array.size)
            continue
        bits, size = rng.integers(0, 1 << 64, array.size, np.uint64, endpoint=False), array.itemsize
        if style == "special":
            sign = rng.integers(0, 2, array.size).astype(np.uint64)
            if size == 2:
                bits = rng.choice(np.array(SPECIAL16, np.uint64), array.size) | sign << np.uint64(15)
            else:
                low = rng.choice(np.array(SPECIAL32, np.uint64), array.size) | sign << np.uint64(31)
                if size == 4:
                    low = np.where(rng.random(array.size) < 0.1, bits, low)
                doubles = low.astype(np.uint32).view(np.float32).astype(np.float64).view(np.uint64)
                extremes = rng.choice(
                    np.array([1, 0x000FFFFFFFFFFFFF, 0x0010000000000000, 0x7FEFFFFFFFFFFFFF, 0x43E0000000000000], np.uint64),
                    array.size,
                )
                bits = low if size == 4 else np.where(rng.random(array.size) < 0.7, doubles, extremes | sign << np.uint64(63))
        elif style == "near":
            x = rng.choice([1.0, -1.0], array.size) * (1 + rng.integers(0, 64, array.size) * 2.0 ** -rng.integers(3, 12, array.size))
            if size == 2:
                halves = x.astype(np.float16).view(np.uint16) if rng.random() < 0.5 else x.astype(ml_dtypes.bfloat16).view(np.uint16)
                bits = halves.astype(np.uint64)
            elif size == 4:
                x = x + rng.integers(-9, 9, array.size) * 2.0**-23
                bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
            else:
                bits = (x + rng.integers(-9, 9, array.size) * 2.0**-52).view(np.uint64)
        array[:] = bits.astype(array.dtype)


def bound(body):
    """A run of the straight-line kernel `body` over LANES lanes, not started."""
    registers = ".reg .b16 %h<6>; .reg .b32 %r<6>; .reg .b64 %d<6>; .reg .pred %p<6>;\n"
    m = machine()
    module = m.load(ptx(registers + body))
    run = Run(m, module, module.program("t"), 2, LANES // 2, 0)
    run.begin(np.arange(2), (2, 1, 1), (LANES // 2, 1, 1), b"", None, None)
    return run


@needs_c
def test_every_operation_gives_the_same_bits():
    """Registers hold the same after an instruction of C as after the builder's."""
    code = [text for one in dict.fromkeys(instructions()) for text in variants(one)]
    run = bound("\n".join(code))
    table = run.stretches.table
    used = set()
    rng = np.random.default_rng(0)
    masks = [np.ones(LANES, bool), rng.random(LANES) < 0.5, np.arange(LANES) == 77, np.arange(LANES) < 160]
    arrays = run.register_arrays
    with np.errstate(all="ignore"):
        for style in ("wild", "special", "near", "special", "near"):
            fill(rng, arrays, style)
            before = [array.copy() for array in arrays]
            for pc, text in enumerate(code):
                assert run.stretches.takes(pc), text
                used.update(table.records["op"][table.first[pc] : table.first[pc + 1]])
                for mask in masks if style == "wild" else masks[:2]:
                    results = []
                    for function in (run.stretches.stretch(pc, pc + 1), run.operation(pc)):
                        for array, old in zip(arrays, before):
                            array[:] = old
                        function(Group(run, mask))
                        results.append([array.copy() for array in arrays])
                    for got, expected in zip(*results):
                        wrong = np.flatnonzero(got != expected)
                        assert not len(wrong), "%s, %s, lane %d: C 0x%x, NumPy 0x%x, operands %s" % (
                            text,
                            style,
                            wrong[0],
                            got[wrong[0]],
                            expected[wrong[0]],
                            [hex(old[wrong[0]]) for old in before],
                        )
    operations = run.stretches.core.operations
    assert {name for name, (number, _) in operations.items() if number not in used} == set()


def warp_instructions():
    """Yield PTX of what C does for whole warps."""
    for mode, c in itertools.product(("up", "down", "bfly", "idx"), ("0x1f", "0x0", "0x181f", "0x0c17", "%r3")):
        yield "shfl.sync.%s.b32 %%r0|%%p1, %%r1, %%r2, %s, 0xffffffff;" % (mode, c)
        yield "shfl.sync.%s.b32 %%r1, %%r1, 5, %s, -1;" % (mode, c)
    r = lambda *numbers: "{%s}" % ", ".join("%%r%d" % n for n in numbers)
    d = lambda *numbers: "{%s}" % ", ".join("%%d%d" % n for n in numbers)
    for kind in ("f16", "bf16"):
        yield "mma.sync.aligned.m16n8k16.row.col.f32.%s.%s.f32 %s, %s, %s, %s;" % (
            kind, kind, r(0, 1, 2, 3), r(2, 3, 4, 5), r(0, 1), r(0, 1, 2, 3)
        )  # fmt: skip
        yield "mma.sync.aligned.m16n8k8.row.col.f32.%s.%s.f32 %s, %s, {%%r5}, %s;" % (
            kind, kind, r(0, 1, 2, 3), r(2, 3), r(5, 4, 3, 2)
        )  # fmt: skip
    yield "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 %s, %s, %s, %s;" % (
        r(0, 1, 2, 3), r(2, 3, 4, 5), r(0, 1), r(0, 1, 2, 3)
    )  # fmt: skip
    yield "mma.sync.aligned.m16n8k4.row.col.f32.tf32.tf32.f32 %s, %s, {%%r0}, %s;" % (r(0, 1, 2, 3), r(2, 3), r(4, 1, 2, 3))
    yield "mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 %s, {%%d1}, {%%d2}, %s;" % (d(0, 3), d(4, 5))
    yield "mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 %s, %s, %s, %s;" % (
        d(0, 1, 2, 3), d(2, 3, 4, 5), d(1, 0), d(5, 1, 2, 3)
    )  # fmt: skip


@needs_c
def test_instructions_of_warps_give_the_same_bits():
    """Shuffles and products of matrices, with all warps or some; sums of matrices go over k in order here and in BLAS."""
    code = [text for one in warp_instructions() for text in (one, "@%p5 " + one)]
    run = bound("\n".join(code))
    rng = np.random.default_rng(1)
    masks = [np.ones(LANES, bool), np.repeat(rng.random(LANES // 32) < 0.5, 32)]
    arrays, done = run.register_arrays, 0
    with np.errstate(all="ignore"):
        for style in ("special", "near", "wild", "near", "near"):
            fill(rng, arrays, style)
            run.registers["%p5"][:] = np.repeat(rng.random(LANES // 32) < 0.5, 32)
            before = [array.copy() for array in arrays]
            for (pc, text), mask in itertools.product(enumerate(code), masks):
                assert run.stretches.takes(pc), text
                results, numpy = [], run.operation(pc)
                for function in (run.stretches.stretch(pc, pc + 1), numpy):
                    for array, old in zip(arrays, before):
                        array[:] = old
                    run.serial += 1
                    run.ops[pc] = lambda g: called.append(pc) or numpy(g)
                    called = []
                    function(Group(run, mask))
                    done += not called
                    run.ops[pc] = numpy
                    results.append([array.copy() for array in arrays])
                for got, expected in zip(*results):
                    wrong = np.flatnonzero(got != expected)
                    assert not len(wrong), "%s, %s, lane %d" % (text, style, wrong[0])
    # The second of each pair is NumPy itself; only f64 products with a NaN among the results come back to it.
    assert done - len(code) * 5 * 2 >= 0.9 * len(code) * 5 * 2


def recorded(patch, lanes, work):
    """Run work() with PTX_MACHINE_LANES=lanes; return (instructions that C took, digests after every chunk of blocks)."""
    digests, taken, real = [], [0], Run.execute

    def execute(run):
        assert (run.stretches is not None) == (lanes == "c")
        real(run)
        taken[0] += sum(map(run.stretches.takes, range(len(run.program.code)))) if run.stretches else 0
        memory, digest = run.memory, hashlib.sha256()
        names = ("wrote", "read", "clock", "known", "floor", "turn", "turns", "writer", "author")
        arrays = list(run.register_arrays) + [run.shared.data, run.local.data]
        arrays += [memory.data[: memory.next], memory.state[: memory.next], memory.owner[: memory.next // 2]]
        if run.shadow is not None:
            arrays += [getattr(run.shadow, name) for name in names]
        for array in arrays:
            digest.update(np.ascontiguousarray(array))
        digests.append((run.program.name, run.steps, digest.hexdigest()))

    with patch.context() as here:
        here.setenv("PTX_MACHINE_LANES", lanes)
        here.setattr(Run, "execute", execute)
        work()
    return taken[0], digests


def scan(**switches):
    """Loads and stores of all sizes and signs, in shared and local memory too, and atomics that meet."""
    text = """
    extern "C" __global__ void mixed(const signed char* a, const unsigned short* b, const double* c, float* sums, double* wide,
                                     short* out, int n) {
        __shared__ short tile[256];
        int i = blockIdx.x * blockDim.x + threadIdx.x, stack[4];
        for (int k = 0; k < 4; k++) stack[(k + threadIdx.x) & 3] = k * i;
        tile[threadIdx.x] = i < n ? a[i] + b[i] : -1;
        __syncthreads();
        if (i >= n) return;
        int j = tile[255 - threadIdx.x];
        atomicAdd(sums + (i & 3), (float)c[i] * j);
        atomicAdd(wide + (i & 1), c[i] + stack[i & 3]);
        out[i] = (short)(j + stack[(j + i) & 3]);
    }"""
    rng, n = np.random.default_rng(3), 700
    a, b = rng.integers(-128, 128, n).astype(np.int8), rng.integers(0, 1 << 16, n).astype(np.uint16)
    arguments = [a, b, rng.standard_normal(n), np.zeros(4, np.float32), np.zeros(2), np.zeros(n, np.int16), n]
    launch(text, "mixed", (3,), (256,), arguments, **switches)


def library(dtype, **switches):
    """Forward and backward of the library on a small block."""
    arrays = host_kit.arrays(np.random.default_rng(5), 1, 21, 19, 2, 1, 8, 8, dtype, 1.0)
    q, k, v, dout = arrays
    backend = cuda_kit.backend("80", **switches)
    out, lse = cuda_kit.forward(backend, q, k, v, causal=True)
    cuda_kit.backward(backend, dout, q, k, v, out, lse, causal=True)


WORK = {
    "matmul": lambda **s: run_matmul(MATMUL, 37, 20, 41, **s),
    "attention_small": lambda **s: run_attention(ATTENTION, 45, 70, **s),
    "attention_mma": lambda **s: run_mma(65, 129, 2, **s),
    "broad": lambda **s: (cupy.reset(arch="80", memory=1 << 26, **s), broad(cupy.RawModule(code=source("broad.cu")))),
    "mixed": scan,
    **{dtype: (lambda dtype: lambda **s: library(dtype, **s))(dtype) for dtype in ("float32", "float64", "bfloat16", "float16")},
}


@needs_c
@pytest.mark.parametrize("switches", [{}, {"check": False}, {"order": "reverse", "count": True}], ids=["checks", "none", "counted"])
@pytest.mark.parametrize("name", WORK)
def test_kernels_leave_the_same(name, switches, monkeypatch):
    """Registers, memories, what the sanitiser knows and the steps, after every chunk of blocks."""
    taken, digests = recorded(monkeypatch, "c", lambda: WORK[name](**switches))
    assert taken > 20 and recorded(monkeypatch, "numpy", lambda: WORK[name](**switches)) == (0, digests)


def test_without_a_compiler_numpy_serves(monkeypatch, tmp_path):
    monkeypatch.setenv("CC", str(tmp_path / "none"))
    monkeypatch.setenv("BURSTMPI_CACHE", str(tmp_path / "cache"))  # nor anything that one has built
    assert stretches._core.__wrapped__("") is None
    with pytest.raises(stretches.compile.BuildError, match="no such compiler"):
        stretches._core.__wrapped__("c")
    with pytest.raises(ValueError, match="PTX_MACHINE_LANES: c or numpy expected, got 'cc'"):
        stretches._core.__wrapped__("cc")


@needs_c
def test_an_access_that_is_refused_changes_nothing(monkeypatch):
    """The report, and the memory at the time of the fault, are those of NumPy alone."""
    bodies = [
        "mov.u32 %r1, %tid.x; st.shared.u32 [0], %r1;",  # two values in one word
        "mov.u32 %r1, %tid.x; shr.u32 %r1, %r1, 5; st.shared.u32 [0], %r1;",
        "mov.u32 %r1, 7; st.shared.u32 [0], %r1;",  # two warps at once
        "mov.u32 %r1, %tid.x; shl.b32 %r1, %r1, 2; ld.shared.u32 %r2, [%r1];",  # never written
        "mov.u32 %r1, %tid.x; shl.b32 %r1, %r1, 2; st.shared.u32 [%r1+4], %r1;",  # the last one is outside
        "mov.u32 %r1, %tid.x; shl.b32 %r1, %r1, 2; st.shared.u32 [%r1], %r1; xor.b32 %r1, %r1, 128; ld.shared.u32 %r2, [%r1];",
        "mov.u32 %r1, %tid.x; shl.b32 %r1, %r1, 2; st.shared.u32 [%r1], %r1; xor.b32 %r1, %r1, 4; st.shared.u32 [%r1], %r1;",
        "ld.param.u64 %d1, [p]; mov.u32 %r1, %tid.x; st.global.u32 [%d1], %r1;",
        "ld.param.u64 %d1, [p]; mov.u32 %r1, %ctaid.x; st.global.u32 [%d1], 5;",  # two blocks
        "ld.param.u64 %d1, [p]; mov.u32 %r1, %tid.x; mul.wide.u32 %d2, %r1, 8; add.u64 %d1, %d1, %d2; ld.global.u64 %d3, [%d1+8];",
        "ld.param.u64 %d1, [p]; mov.u32 %r1, %tid.x; mul.wide.u32 %d2, %r1, 8; add.u64 %d1, %d1, %d2; st.global.u64 [%d1+4], %d2;",
        "ld.param.u64 %d1, [p]; st.global.u32 [%d1], 5; red.global.add.f32 [%d1], 0f3f800000;",
    ]
    registers = ".shared .align 16 .b8 tile[256];\n.reg .b32 %r<6>; .reg .b64 %d<6>; mov.u32 %r0, tile;\n"
    for body in bodies:
        seen = []
        for lanes in ("c", "numpy"):
            with monkeypatch.context() as here:
                here.setenv("PTX_MACHINE_LANES", lanes)
                m = Machine(GlobalMemory(1 << 22))
                module, at = m.load(ptx(registers + body, ".param .u64 p")), m.memory.alloc(512)
                m.memory.span(at, 512)[1][:256] = 3
                with pytest.raises(Fault) as caught:
                    m.launch(module, "t", 2, 64, at.to_bytes(8, "little"))
                run = next(iter(m._runs.values()))
                memory = [m.memory.data, m.memory.state, m.memory.owner, run.shared.data, *run.register_arrays]
                memory += [run.shadow.wrote, run.shadow.writer, run.shadow.read, run.shadow.turn, run.shadow.author]
                seen.append((str(caught.value), [array.tobytes() for array in memory]))
        assert seen[0][0] == seen[1][0], body
        assert seen[0][1] == seen[1][1], body
