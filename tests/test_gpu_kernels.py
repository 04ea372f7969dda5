"""The ring on GPUs with the library's own kernels, on the PTX machine or a GPU, against the float64 reference.

By default a few cases; `-m slow` has every rule with every layout on 1 to 4 ranks (220 cells, types, ways and transports dealt out
so that all pairs meet), every type, way and transport in four chosen pairs, and the full product (3520 cells, about 25 minutes of two cores).
"""

from contextlib import contextmanager
from itertools import product

import numpy as np
import pytest
from gpu_kit import attention, check, collect, gpu, put, run, simulation
from support import LAYOUTS, RULES, TYPES, layout_of, problem, rules, shards, truth

from burstmpi import KernelError
from burstmpi.backends.modules import Modules

WAYS = list(product(TYPES, ("q", "kv"), ("staged", "direct")))  # 16: types × what travels × transports
RANKS = (1, 2, 3, 4)


def with_kernels(comm, rule, layout, dtype, backward, transport, deterministic=False):
    """Forward and backward as small as can be: on the PTX machine a kernel takes a tenth of a second."""
    cupy = gpu()
    length = 7 * comm.size + 1
    p = problem(length, batch=1, heads=2, kv_heads=1, d=8, dv=8, dtype=dtype)
    options = rules(length, length, 2)[rule]
    more = {"layout": layout_of(layout, length, length, comm), "backward": backward, "deterministic": deterministic}
    with attention(comm, transport, stage=256, **options, **more) as attn, nothing_is_compiled_late():
        check(run(cupy, attn, p), truth(p, options, tensor_cores=True))
        assert (attn.stats.backend, attn.stats.transport, attn.stats.travels) == ("cuda", transport, backward)


@contextmanager
def nothing_is_compiled_late():
    """Every kernel has been made, on all ranks, before the first message of a call."""
    real = Modules.kernel

    def kernel(self, source, name, shared=0, **defines):
        before = len(self._kernels)
        made = real(self, source, name, shared, **defines)
        assert self.rehearsing or len(self._kernels) == before, f"{name} of {source}.cu was made in the middle of a call"
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Modules, "kernel", kernel)
        yield


@pytest.mark.mpi(ranks=(1, 2))
@pytest.mark.parametrize(
    "rule, layout, dtype, backward, transport",
    [
        ("causal", "zigzag", "float32", "q", "staged"),
        ("everything", "explicit", "bfloat16", "kv", "direct"),
        ("window", "contiguous", "float64", "kv", "staged"),
    ],
)
def test_kernels_in_the_ring(comm, rule, layout, dtype, backward, transport):
    with_kernels(comm, rule, layout, dtype, backward, transport)


@pytest.mark.mpi(ranks=(2, 3))
def test_keys_of_some_ranks_out_of_order(comm):
    """Ranks of odd number hold their keys in falling order: those alone are sorted, by whoever they visit."""
    cupy = gpu()
    length = 7 * comm.size
    p = problem(length, batch=1, heads=2, kv_heads=1, d=8, dv=8, dtype="bfloat16")
    positions = np.arange(comm.rank, length, comm.size)[:: -1 if comm.rank % 2 else 1]
    with attention(comm, "direct", causal=True, layout=positions) as attn, nothing_is_compiled_late():
        check(run(cupy, attn, p), truth(p, {"causal": True}, tensor_cores=True))


# ---------------------------------------------------------------- every rule with every layout


def way_of(rule, layout, ranks) -> tuple:
    """Type, what travels, transport, and whether dQ is deterministic, of one cell of rules × layouts × numbers of ranks.

    The twenty cells of a rule take consecutive ways; each rule starts three ways after the last one.
    """
    i, j, r = RULES.index(rule), LAYOUTS.index(layout), RANKS.index(ranks)
    return (*WAYS[(3 * i + 4 * j + r) % 16], (i + j + r) % 2 == 1)


def test_the_cells_meet_all_pairs():
    cells = [(rule, layout, ranks, *way_of(rule, layout, ranks)) for rule, layout, ranks in product(RULES, LAYOUTS, RANKS)]
    met = lambda pick: {pick(rule, layout, ranks, tuple(way), dq) for rule, layout, ranks, *way, dq in cells}  # noqa: E731
    both = (False, True)
    assert len(cells) == 220
    assert met(lambda rule, layout, ranks, way, dq: (rule, way)) == set(product(RULES, WAYS))
    assert met(lambda rule, layout, ranks, way, dq: (layout, way)) == set(product(LAYOUTS, WAYS))
    assert met(lambda rule, layout, ranks, way, dq: (ranks, way, dq)) == set(product(RANKS, WAYS, both))
    assert met(lambda rule, layout, ranks, way, dq: (rule, ranks, way[0])) == set(product(RULES, RANKS, TYPES))
    assert met(lambda rule, layout, ranks, way, dq: (rule, way[0], dq)) == set(product(RULES, TYPES, both))


@pytest.mark.slow
@pytest.mark.mpi(ranks=RANKS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rule", RULES)
def test_kernels_with_every_rule_and_layout(comm, rule, layout):
    with_kernels(comm, rule, layout, *way_of(rule, layout, comm.size))


@pytest.mark.slow
@pytest.mark.mpi(ranks=RANKS)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("transport", ["staged", "direct"])
@pytest.mark.parametrize("backward", ["q", "kv"])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("rule, layout", [("causal", "zigzag"), ("everything", "explicit"), ("documents", "striped"), ("window", "mixed")])
def test_kernels_in_the_ring_with_every_type(comm, rule, layout, dtype, backward, transport, deterministic):
    with_kernels(comm, rule, layout, dtype, backward, transport, deterministic)


@pytest.mark.slow
@pytest.mark.mpi(ranks=RANKS)
@pytest.mark.parametrize("dtype, backward, transport", WAYS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rule", RULES)
def test_kernels_in_the_full_product(comm, rule, layout, dtype, backward, transport):
    """rules × layouts × types × ways × transports, on each number of ranks."""
    with_kernels(comm, rule, layout, dtype, backward, transport)


@pytest.mark.slow
@pytest.mark.mpi(ranks=2)
@pytest.mark.parametrize("backward", ["q", "kv"])
def test_deterministic_means_the_same_bits(comm, backward):
    """Blocks of threads in another order on the PTX machine: atomic sums would notice, deterministic ones do not."""
    simulation()
    p = problem(2 * 40, batch=1, heads=1, kv_heads=1, d=8, dv=8, dtype="float32")
    got = []
    for order in ("forward", "reverse"):
        cupy = gpu(**({} if order == "forward" else {"order": order}))
        with attention(comm, backward=backward, deterministic=True) as attn:
            got.append(run(cupy, attn, p))
    for name in got[0]:
        assert got[0][name].tobytes() == got[1][name].tobytes(), name


# ---------------------------------------------------------------- a compiler that fails


@pytest.mark.mpi(ranks=(1, 2))
@pytest.mark.parametrize("call", ["forward", "backward"])
def test_a_kernel_that_cannot_be_compiled_on_one_rank(comm, call, monkeypatch):
    """All ranks raise the same before anything is sent or launched, forward asks for no kernel of backward, and a later call works."""
    simulation()
    cupy = gpu()
    p = problem(7 * comm.size, batch=1, heads=1, kv_heads=1, d=8, dv=8, dtype="float32")
    bad = comm.size - 1
    real = cupy.RawModule.get_function

    def broken(module, name):
        if comm.rank == bad and name == call:
            log = 'kernel.cu(3): catastrophic error: cannot open source file "cuda_fp16.h"\n  #include <cuda_fp16.h>\n1 catastrophic error'
            raise cupy.cuda.compiler.CompileException(log, "", "kernel.cu", ())
        return real(module, name)

    monkeypatch.setattr(cupy.RawModule, "get_function", broken)
    text = (
        rf"GPU: kernel {call} of wide_{call}.cu cannot be made: CompileException: "
        r'kernel.cu\(3\): catastrophic error: cannot open source file "cuda_fp16.h"$'
    )
    with attention(comm, causal=True, deadline=60) as attn:
        q, k, v, dout = put(cupy, *shards(attn, p))

        def refused(deed):
            simulation().trace.clear()
            with pytest.raises(KernelError, match=text) as raised:
                deed()
            assert str(raised.value).startswith("GPU" if comm.size == 1 else f"rank {bad}: GPU")
            assert attn._ring.bytes_sent == attn._ring.messages == 0
            assert not [label for what, label, _ in simulation().trace if what != "alloc" and "free" not in label]

        if call == "forward":
            for _ in range(2):  # the second time too
                refused(lambda: attn.forward(q, k, v))
            monkeypatch.undo()
        out, lse = attn.forward(q, k, v)
        cupy.cuda.Device().synchronize()
        if call == "backward":
            refused(lambda: attn.backward(dout, q, k, v, out, lse))
            monkeypatch.undo()
        grads = attn.backward(dout, q, k, v, out, lse)
        check(collect(attn, *(cupy.asnumpy(x) for x in (out, lse, *grads))), truth(p, {"causal": True}))
