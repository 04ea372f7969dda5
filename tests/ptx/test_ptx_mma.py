"""mma.sync, ldmatrix, stmatrix, movmatrix: fragment layouts element by element against the manual's tables."""

import numpy as np
import pytest
from ptxmachine.faults import Fault
from ptxmachine.parser import PtxError
from ptxsupport import bits32, download, evaluate, machine, ptx, same, upload

# The manual's tables: element i of lane → (row, col), with g = lane/4 and t = lane%4.
A = {
    ("m16n8k16", 16): lambda g, t, i: (g + (0 if i % 4 < 2 else 8), 2 * t + i % 2 + (0 if i < 4 else 8)),
    ("m16n8k8", 16): lambda g, t, i: (g + (0 if i < 2 else 8), 2 * t + i % 2),
    ("m16n8k8", 32): lambda g, t, i: (g + (8 if i in (1, 3) else 0), t + (4 if i in (2, 3) else 0)),
    ("m16n8k4", 32): lambda g, t, i: (g + 8 * i, t),
    ("m8n8k4", 64): lambda g, t, i: (g, t),
    ("m16n8k4", 64): lambda g, t, i: (g + 8 * i, t),
    ("m16n8k8", 64): lambda g, t, i: (g + (8 if i in (1, 3) else 0), t + (4 if i in (2, 3) else 0)),
    ("m16n8k16", 64): lambda g, t, i: (g, 2 * i + t) if i % 2 == 0 else (g + 8, 2 * i - 2 + t),
}
B = {
    ("m16n8k16", 16): lambda g, t, i: (2 * t + i % 2 + (0 if i < 2 else 8), g),
    ("m16n8k8", 16): lambda g, t, i: (2 * t + i, g),
    ("m16n8k8", 32): lambda g, t, i: (t + 4 * i, g),
    ("m16n8k4", 32): lambda g, t, i: (t, g),
    ("m8n8k4", 64): lambda g, t, i: (t, g),
    ("m16n8k4", 64): lambda g, t, i: (t, g),
    ("m16n8k8", 64): lambda g, t, i: (t + 4 * i, g),
    ("m16n8k16", 64): lambda g, t, i: (t + 4 * i, g),
}


def C(g, t, i):
    return g + (0 if i < 2 else 8), 2 * t + i % 2


CASES = [
    ("m16n8k16", "f16", "f32"),
    ("m16n8k16", "bf16", "f32"),
    ("m16n8k16", "f16", "f16"),
    ("m16n8k8", "f16", "f32"),
    ("m16n8k8", "f16", "f16"),
    ("m16n8k8", "bf16", "f32"),
    ("m16n8k8", "tf32", "f32"),
    ("m16n8k4", "tf32", "f32"),
    ("m8n8k4", "f64", "f64"),
    ("m16n8k4", "f64", "f64"),
    ("m16n8k8", "f64", "f64"),
    ("m16n8k16", "f64", "f64"),
]


def dims(shape):
    m, rest = shape[1:].split("n")
    n, k = rest.split("k")
    return int(m), int(n), int(k)


def encode(x, kind):
    """Values as bit patterns of one element."""
    if kind == "f16":
        return np.asarray(x, np.float16).view(np.uint16)
    if kind == "bf16":
        return (np.asarray(x, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    if kind in ("tf32", "f32"):
        return np.asarray(x, np.float32).view(np.uint32)
    return np.asarray(x, np.float64).view(np.uint64)


def fragment(matrices, place, kind):
    """Pack matrices [warp, row, col] into registers [warp, register, lane] by a table, element after element."""
    count = matrices.shape[1] * matrices.shape[2] // 32
    out = np.empty((len(matrices), 32, count), encode(0.0, kind).dtype)
    for lane in range(32):
        for i in range(count):
            out[:, lane, i] = encode(matrices[(slice(None), *place(lane // 4, lane % 4, i))], kind)
    if out.dtype == np.uint16:
        out = out.view(np.uint32)
    return np.ascontiguousarray(out.swapaxes(1, 2))


def unfragment(registers, shape, kind):
    """The way back for D."""
    if kind == "f16":
        elements = np.ascontiguousarray(registers.swapaxes(1, 2)).view(np.float16).astype(np.float64)
    else:
        elements = (
            np.ascontiguousarray(registers.swapaxes(1, 2))
            .view(np.float32 if kind == "f32" else np.float64)
            .astype(np.float64)
        )
    m, n, _ = dims(shape)
    out = np.empty((len(registers), m, n))
    for lane in range(32):
        for i in range(elements.shape[2]):
            out[(slice(None), *C(lane // 4, lane % 4, i))] = elements[:, lane, i]
    return out


def run_mma(shape, kind, dkind, a, b, c, **switches):
    """Run one mma a warp on matrices [warp, ., .]; one block a warp."""
    width = {"f16": 16, "bf16": 16, "tf32": 32, "f64": 64}[kind]
    fa, fb = fragment(a, A[shape, width], kind), fragment(b, B[shape, width], kind)
    fc = fragment(c, C, dkind)
    word = "b64" if kind == "f64" else "b32"
    dreg = {"f32": ".f32", "f64": ".f64", "f16": ".b32"}[dkind]
    areg = ".f64" if kind == "f64" else ".b32"
    size = 8 if word == "b64" else 4
    lines = [
        ".reg .b64 %p<5>, %o; .reg .b32 %t, %w, %x; mov.u32 %t, %tid.x; mov.u32 %w, %ctaid.x;",
        ".reg %s %%a<9>, %%b<9>; .reg %s %%c<9>, %%d<9>;" % (areg, dreg),
    ]
    names = []
    for j, (letter, frag) in enumerate(zip("abc", (fa, fb, fc))):
        registers = frag.shape[1]
        names.append("{%s}" % ", ".join("%%%s%d" % (letter, i) for i in range(registers)))
        lines.append(
            "ld.param.u64 %%p%d, [p%d]; mad.lo.u32 %%x, %%w, %d, %%t; mul.wide.u32 %%o, %%x, %d; add.u64 %%p%d, %%p%d, %%o;"
            % (j, j, 32 * registers, size, j, j)
        )
        lines += [
            "ld.global.%s %%%s%d, [%%p%d+%d];" % (word, letter, i, j, 32 * size * i) for i in range(registers)
        ]
    registers = fc.shape[1]
    names.insert(0, "{%s}" % ", ".join("%%d%d" % i for i in range(registers)))
    lines.append(
        "mma.sync.aligned.%s.row.col.%s.%s.%s.%s %s, %s, %s, %s;" % (shape, dkind, kind, kind, dkind, *names)
    )
    lines.append(
        "ld.param.u64 %%p3, [p3]; mad.lo.u32 %%x, %%w, %d, %%t; mul.wide.u32 %%o, %%x, %d; add.u64 %%p3, %%p3, %%o;"
        % (32 * registers, size)
    )
    lines += ["st.global.%s [%%p3+%d], %%d%d;" % (word, 32 * size * i, i) for i in range(registers)]
    text = ptx("\n".join(lines), ", ".join(".param .u64 p%d" % i for i in range(4)))
    m = machine(**switches)
    at = [upload(m, f) for f in (fa, fb, fc)] + [upload(m, np.zeros_like(fc))]
    m.launch(m.load(text), "t", len(a), 32, np.array(at, np.uint64).tobytes())
    return unfragment(download(m, at[3], fc.size, fc.dtype).reshape(fc.shape), shape, dkind)


@pytest.mark.parametrize("shape,kind,dkind", CASES)
def test_every_element_of_a_and_b_lands_where_the_table_says(shape, kind, dkind):
    """One hot element of A (then B) per warp against a matrix of distinct codes: the product shows row and column."""
    m, n, k = dims(shape)
    codes_b = np.arange(1, k * n + 1, dtype=np.float64).reshape(k, n)
    codes_a = np.arange(1, m * k + 1, dtype=np.float64).reshape(m, k)
    hot = np.eye(m * k).reshape(m * k, m, k)
    got = run_mma(shape, kind, dkind, hot, np.broadcast_to(codes_b, (m * k, k, n)), np.zeros((m * k, m, n)))
    same(got, np.einsum("wmk,kn->wmn", hot, codes_b))
    hot = np.eye(k * n).reshape(k * n, k, n)
    got = run_mma(shape, kind, dkind, np.broadcast_to(codes_a, (k * n, m, k)), hot, np.zeros((k * n, m, n)))
    same(got, np.einsum("mk,wkn->wmn", codes_a, hot))


@pytest.mark.parametrize("shape,kind,dkind", CASES)
def test_every_element_of_c_lands_where_the_table_says(shape, kind, dkind):
    m, n, k = dims(shape)
    c = np.eye(m * n).reshape(m * n, m, n) * 3
    same(run_mma(shape, kind, dkind, np.zeros((m * n, m, k)), np.zeros((m * n, k, n)), c), c)


@pytest.mark.parametrize("shape,kind,dkind", CASES)
def test_products_of_small_integers_are_exact(shape, kind, dkind):
    m, n, k = dims(shape)
    rng = np.random.default_rng(8)
    a, b, c = (
        rng.integers(-8, 9, (20, m, k)).astype(float),
        rng.integers(-8, 9, (20, k, n)).astype(float),
        rng.integers(-50, 50, (20, m, n)).astype(float),
    )
    same(run_mma(shape, kind, dkind, a, b, c), a @ b + c + 0.0)


def test_products_are_exact_and_the_sum_is_rounded_once():
    a, b, c = np.zeros((3, 16, 16)), np.zeros((3, 16, 8)), np.zeros((3, 16, 8))
    a[:, 0, :3] = [[1, 2.0**-12, 0], [256.0, 1, -256.0], [np.inf, 1, 1]]
    b[:, :3, 0] = [[1, 2.0**-12, 0], [256.0, 2.0**-12, 256.0], [0, 1, 1]]
    c[0, 0, 0] = 2.0**-40
    got = run_mma("m16n8k16", "f16", "f32", a, b, c)
    assert got[0, 0, 0] == 1 + 2.0**-23  # 1 + 2^-24 + 2^-40 lies above the tie
    assert got[1, 0, 0] == 2.0**-12  # 2^16 cancels
    assert np.isnan(got[2, 0, 0])  # inf · 0


def test_tf32_ignores_the_low_bits():
    a, b, c = np.zeros((1, 16, 8)), np.zeros((1, 8, 8)), np.zeros((1, 16, 8))
    a[0, 0, 0], b[0, 0, 0] = bits32(0x3F801FFF)[0], 1.0
    assert run_mma("m16n8k8", "tf32", "f32", a, b, c)[0, 0, 0] == 1.0


def test_f64_is_a_chain_of_fused_multiply_adds():
    x = 1 + 2.0**-30
    a, b, c = np.zeros((1, 8, 4)), np.zeros((1, 4, 8)), np.zeros((1, 8, 8))
    a[0, 0, 0], b[0, 0, 0], c[0, 0, 0] = x, x, -(1 + 2.0**-29)
    assert run_mma("m8n8k4", "f64", "f64", a, b, c)[0, 0, 0] == 2.0**-60


@pytest.mark.parametrize(
    "text",
    (
        "mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32",
        "mma.sync.aligned.m16n8k16.row.col.f32.e4m3.e4m3.f32",
        "mma.sync.aligned.m16n8k16.row.row.f32.bf16.bf16.f32",
    ),
)
def test_other_mma_are_refused_by_name(text):
    with pytest.raises(PtxError, match="unknown instruction mma.sync"):
        evaluate(text + " {%d}, {%a}, {%a}, {%d};", {"a": ("b32", [1])}, {"d": "b32"})


def test_mma_with_missing_lanes():
    code = ".reg .pred %q; .reg .b32 %l; mov.u32 %l, %laneid; setp.eq.u32 %q, %l, 5; .reg .f32 %d<4>; @%q bra END; mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%d0,%d1,%d2,%d3}, {%a,%a}, {%a}, {%d0,%d1,%d2,%d3}; END: mov.b32 %e, %a;"
    with pytest.raises(Fault, match="missing lanes.*mma.*0xffffffdf"):
        evaluate(code, {"a": ("b32", np.zeros(32))}, {"e": "b32"})


def test_partial_groups_compute_only_their_warps():
    """Warp 1 skips the product; warps 0 and 2 are right, warp 1 keeps its registers."""
    code = """.reg .pred %q; .reg .b32 %w; mov.u32 %w, %warpid; setp.eq.u32 %q, %w, 1; mov.f32 %d, 0f40400000; mov.f32 %e, 0f40400000; mov.f32 %f, 0f40400000; mov.f32 %g, 0f40400000; @%q bra END;
              mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%d,%e,%f,%g}, {%a,%a}, {%a}, {%d,%e,%f,%g}; END:"""
    out = evaluate(code, {"a": ("b32", np.full(96, 0x3C003C00))}, dict.fromkeys("defg", "f32"))
    for name in "defg":
        same(out[name], np.repeat(np.float32([11, 3, 11]), 32))


# --- matrices in shared memory --------------------------------------------------------------------
def store_rows():
    """PTX: lane's 16-byte row of distinct 16-bit numbers (8·tid + column) into shared memory."""
    lines = [
        ".shared .align 16 .b8 s[512]; .reg .b32 %base, %row, %v, %w; mov.u32 %base, s; shl.b32 %row, %tid_, 4; add.u32 %row, %row, %base; shl.b32 %v, %tid_, 3;"
    ]
    for i in range(4):
        lines.append(
            "add.u32 %%w, %%v, %d; shl.b32 %%w, %%w, 16; add.u32 %%w, %%w, %%v; add.u32 %%w, %%w, %d; st.shared.b32 [%%row+%d], %%w;"
            % (2 * i + 1, 2 * i, 4 * i)
        )
    return "\n".join(lines) + "bar.sync 0;\n"


@pytest.mark.parametrize("count", (1, 2, 4))
@pytest.mark.parametrize("trans", ("", ".trans"))
def test_ldmatrix(count, trans):
    """Matrix i is the rows at the addresses of lanes 8i .. 8i+7, here in reverse order."""
    regs = ", ".join("%%d%d" % i for i in range(count))
    code = store_rows() + ".reg .b32 %%r; xor.b32 %%r, %%tid_, 31; shl.b32 %%r, %%r, 4; add.u32 %%r, %%r, %%base; ldmatrix.sync.aligned.m8n8.x%d%s.shared.b16 {%s}, [%%r];" % (
        count,
        trans,
        regs,
    )
    out = evaluate(code, {"a": ("b32", np.zeros(32))}, {"d%d" % i: "b32" for i in range(count)})
    out = out if isinstance(out, dict) else {"d0": out}
    for i in range(count):
        for lane in range(32):
            low, high = int(out["d%d" % i][lane]) & 0xFFFF, int(out["d%d" % i][lane]) >> 16
            for element, value in ((0, low), (1, high)):
                row, col = (
                    (lane // 4, 2 * (lane % 4) + element)
                    if not trans
                    else (2 * (lane % 4) + element, lane // 4)
                )
                assert value == 8 * (31 - (8 * i + row)) + col


@pytest.mark.parametrize("count", (1, 2, 4))
@pytest.mark.parametrize("trans", ("", ".trans"))
def test_stmatrix_undoes_ldmatrix(count, trans):
    regs = ", ".join("%%d%d" % i for i in range(count))
    code = (
        store_rows()
        + """.reg .b32 %%r; shl.b32 %%r, %%tid_, 4; add.u32 %%r, %%r, %%base; ldmatrix.sync.aligned.m8n8.x%d%s.shared.b16 {%s}, [%%r];
        bar.sync 0; mov.b32 %%w, 0; st.shared.v4.b32 [%%r], {%%w, %%w, %%w, %%w}; bar.sync 0; stmatrix.sync.aligned.m8n8.x%d%s.shared.b16 [%%r], {%s}; bar.sync 0;
        ld.shared.v4.b32 {%%e0, %%e1, %%e2, %%e3}, [%%r];"""
        % (count, trans, regs, count, trans, regs)
    )
    out = evaluate(
        code, {"d%d" % i: ("b32", np.zeros(32)) for i in range(count)}, {"e%d" % i: "b32" for i in range(4)}
    )
    for i in range(4):
        row = np.arange(32)
        expected = np.where(row < 8 * count, (8 * row + 2 * i) | (8 * row + 2 * i + 1) << 16, 0)
        same(out["e%d" % i], expected.astype(np.uint32))


def test_movmatrix_transposes():
    value = np.array(
        [(8 * (l // 4) + 2 * (l % 4)) | (8 * (l // 4) + 2 * (l % 4) + 1) << 16 for l in range(32)], np.uint32
    )
    got = evaluate("movmatrix.sync.aligned.m8n8.trans.b16 %d, %a;", {"a": ("b32", value)}, {"d": "b32"})
    same(
        got,
        np.array(
            [(8 * (2 * (l % 4)) + l // 4) | (8 * (2 * (l % 4) + 1) + l // 4) << 16 for l in range(32)],
            np.uint32,
        ),
    )


def test_ldmatrix_rows_must_be_aligned():
    with pytest.raises(Fault, match="misaligned"):
        evaluate(
            store_rows() + "add.u32 %base, %base, 8; ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%d}, [%base];",
            {"a": ("b32", np.zeros(32))},
            {"d": "b32"},
        )


def test_fragments_are_decoded_anew_when_lanes_or_registers_change():
    """Products in a loop that warps leave one by one, with A rewritten in between: each warp gets its own."""
    code = """.reg .pred %q; .reg .b32 %w, %i, %x; mov.u32 %w, %warpid; mov.u32 %i, 0; mov.b32 %x, %a; mov.f32 %d, 0f00000000; mov.f32 %e, %d; mov.f32 %f, %d; mov.f32 %g, %d;
              TOP: mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%d,%e,%f,%g}, {%x,%x}, {%a}, {%d,%e,%f,%g};
              mov.b32 %x, 0x40004000; mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%d,%e,%f,%g}, {%x,%x}, {%a}, {%d,%e,%f,%g};
              mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%d,%e,%f,%g}, {%x,%x}, {%a}, {%d,%e,%f,%g}; mov.b32 %x, %a;
              add.u32 %i, %i, 1; setp.lt.u32 %q, %i, %w; @%q bra TOP;"""
    out = evaluate(code, {"a": ("b32", np.full(128, 0x3C003C00))}, dict.fromkeys("defg", "f32"))
    for name in "defg":  # 8 + 16 + 16 a trip, max(1, warp) trips
        same(out[name], np.repeat(np.float32([40, 40, 80, 120]), 32))
