"""Faults sown into working kernels, one at a time: every one is reported, and the unharmed kernels report nothing.

A dropped barrier or wait and a bound that reaches one too far must be reported by the machine itself.  A bound one too
short leaves work undone: the machine reports what nobody wrote, else the comparison with float64 does.
"""

import re

import numpy as np
import pytest
from ptxmachine import cupy
from ptxmachine.faults import Fault
from ptxsupport import source

MATMUL, ATTENTION = source("matmul.cu"), source("attention_small.cu")


def run_matmul(text, m, n, k, **switches):
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((m, k)).astype(np.float32), rng.standard_normal((k, n)).astype(np.float32)
    sim = cupy.reset(arch="80", memory=1 << 26, **switches)
    out = cupy.empty((m, n), np.float32)
    kernel = cupy.RawModule(code=text).get_function("matmul")
    kernel((-(-n // 16), -(-m // 16)), (16, 16), (cupy.asarray(a), cupy.asarray(b), out, m, n, k))
    got = out.get()
    bound = 2 * k * 2.0**-24 * (np.abs(a) @ np.abs(b))  # k roundings of float32, twice over
    return np.isfinite(got).all() and (np.abs(got - a.astype(float) @ b) <= bound).all(), sim


def run_attention(text, len_q, len_k, **switches):
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((n, 32)).astype(np.float32) for n in (len_q, len_k, len_k))
    sim = cupy.reset(arch="80", memory=1 << 26, **switches)
    out = cupy.empty((len_q, 32), np.float32)
    kernel = cupy.RawModule(code=text).get_function("attention")
    scale = 32**-0.5
    kernel(
        (-(-len_q // 32),),
        (128,),
        (
            *(cupy.asarray(x) for x in (q, k, v)),
            out,
            cupy.arange(-(-len_k // 32), dtype=np.int32),
            -(-len_k // 32),
            len_q,
            len_k,
            np.float32(scale * np.log2(np.e)),
        ),
    )
    got = out.get()

    def naive(dtype):
        s = (q.astype(dtype) @ k.astype(dtype).T) * dtype(scale)
        p = np.exp(s - s.max(1, keepdims=True))
        return (p / p.sum(1, keepdims=True)) @ v.astype(dtype)

    error = np.abs(got - naive(np.float64)).max()
    return np.isfinite(got).all() and error <= 3 * np.abs(naive(np.float32) - naive(np.float64)).max(), sim


def code_only(text):
    """Hide the marks in comments."""
    return re.sub(r"^//.*$", "//", text, flags=re.M)


CASES = {
    "matmul": (MATMUL, run_matmul, [(35, 37, 48), (32, 16, 16)]),
    "attention": (ATTENTION, run_attention, [(40, 70), (33, 20), (32, 64)]),
}
DROPS = [
    (name, "drop", pattern, i)
    for name, (text, _, _) in CASES.items()
    for pattern in (r"__syncthreads\(\);", r"WAIT\(\d\);")
    for i in range(len(re.findall(pattern, text)))
]
STAGES = [
    (name, "one stage less", r"WAIT\((\d)\);", i)
    for name, (text, _, _) in CASES.items()
    for i in range(len(re.findall(r"WAIT\(\d\);", text)))
]
BOUNDS = [
    (name, shift, r"/\*bound\*/", i)
    for name, (text, _, _) in CASES.items()
    for shift in ("+1", "-1")
    for i in range(code_only(text).count("/*bound*/"))
]


def mutate(text, what, pattern, number):
    """Return the text with the `number`-th match of the pattern changed."""
    match = list(re.finditer(pattern, text))[number]
    if what == "drop":
        new = ";"
    elif what == "one stage less":
        new = "WAIT(%d);" % (int(match.group(1)) + 1)
    else:
        new = "%s + " % what.replace("+", "")
    return text[: match.start()] + new + text[match.end() :]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mode", ("late", "early"))
def test_unharmed_kernels_report_nothing(name, mode):
    text, run, shapes = CASES[name]
    for shape in shapes:
        assert run(text, *shape, cp_async=mode)[0]
        assert run(text, *shape, cp_async=mode, order="reverse")[0]


def caught_by(name, text):
    """Return the Fault of the first shape that gives one, else "result" if a result is wrong, else None."""
    _, run, shapes = CASES[name]
    wrong = None
    for shape in shapes:
        try:
            if not run(text, *shape)[0]:
                wrong = "result"
        except Fault as fault:
            return fault
    return wrong


@pytest.mark.parametrize("name,what,pattern,number", DROPS + STAGES)
def test_dropped_barriers_and_waits_are_reported(name, what, pattern, number):
    text = mutate(code_only(CASES[name][0]), what, pattern, number)
    fault = caught_by(name, text)
    assert isinstance(fault, Fault) and fault.kind == "race", fault
    assert fault.kernel == name and fault.source[1] > 0 and fault.block is not None and fault.line > 0


@pytest.mark.parametrize("name,what,pattern,number", BOUNDS)
def test_shifted_bounds_are_reported(name, what, pattern, number):
    text = mutate(code_only(CASES[name][0]), what, pattern, number)
    fault = caught_by(name, text)
    assert fault is not None
    mask = (
        "len_k ?"
        in text[text.find(" + ", list(re.finditer(pattern, code_only(CASES[name][0])))[number].start()) :][:14]
    )
    if what == "+1" and not mask:  # a mask is arithmetic: only the result can tell
        assert isinstance(fault, Fault), fault


def test_a_report_names_everything():
    text = mutate(code_only(MATMUL), "drop", r"__syncthreads\(\);", 0)
    fault = caught_by("matmul", text)
    line = next(i for i, row in enumerate(text.split("\n"), 1) if "fmaf(" in row)
    assert fault.source == ("kernel.cu", line) and fault.opcode.startswith("ld.shared")
    for part in (
        "race",
        "kernel matmul",
        "PTX line",
        "CUDA C kernel.cu:%d" % line,
        "block (",
        "warp",
        "lane",
        "thread (",
    ):
        assert part in str(fault)


def test_checks_off_find_only_the_wrong_result():
    text = mutate(code_only(ATTENTION), "drop", r"WAIT\(\d\);", 0)
    assert not run_attention(text, 40, 70, check=False)[0]
    assert not run_attention(text, 40, 70, check=False)[1].machine.check


# --- the tensor-core attention too ----------------------------------------------------------------
MMA = source("attention_mma.cu")
MMA_DROPS = [
    (pattern, i)
    for pattern in (r"__syncthreads\(\);", r'asm volatile\("cp\.async\.wait_group 0;"\);')
    for i in range(len(re.findall(pattern, MMA)))
]


def test_the_list_of_the_tensor_core_kernel_is_whole():
    assert len(MMA_DROPS) == 5


@pytest.mark.parametrize("pattern,number", MMA_DROPS)
def test_faults_in_the_tensor_core_attention(pattern, number):
    """Three barriers and two waits of kernels/attention_mma.cu, dropped one at a time."""
    import ml_dtypes

    text = mutate(code_only(MMA), "drop", pattern, number)
    cupy.reset(arch="80", memory=1 << 26)
    q = cupy.asarray(np.random.default_rng(0).standard_normal((1, 130, 128)).astype(ml_dtypes.bfloat16))
    out, lse = cupy.empty((1, 130, 128), np.float32), cupy.empty((1, 130), np.float32)
    kernel = cupy.RawModule(code=text).get_function("attention")
    kernel.max_dynamic_shared_size_bytes = 65536
    kernel((2, 1), (128,), (q, q, q, out, lse, 130, 130, np.float32(0.1)), shared_mem=65536)
    with pytest.raises(Fault, match="race"):
        cupy.cuda.Device().synchronize()
