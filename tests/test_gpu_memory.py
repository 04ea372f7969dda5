"""Memory and messages on GPUs: exact workspace, nothing allocated twice, out of memory on all ranks, bytes sent."""

from types import SimpleNamespace

import numpy as np
import pytest
from gpu_kit import REAL, attention, gpu, put, simulation
from support import TYPES, problem, shards

from burstmpi import ring

pytestmark = pytest.mark.mpi(ranks=(1, 2, 3, 4))


def allocated(sim):
    return [int(label.split()[0]) for what, label, _ in sim.trace if what == "alloc"]


@pytest.mark.parametrize("transport", ["staged", "direct"])
@pytest.mark.parametrize("backward", ["q", "kv"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_workspace_bytes_is_exact(comm, dtype, backward, transport):
    simulation()
    cupy = gpu()
    p = problem(16 * comm.size, batch=1, heads=2, kv_heads=1, d=8, dv=8, dtype=dtype)
    with attention(comm, transport, stage=512, quick=True, backward=backward) as attn:
        q, k, v, dout = put(cupy, *shards(attn, p))
        sim, used = simulation(), lambda: simulation().used[0]
        inference = attn.workspace_bytes(q.shape, k.shape, v.shape, dtype, backward=False, gpu=True)
        training = attn.workspace_bytes(q.shape, k.shape, v.shape, dtype, gpu=True)
        before = used()
        out, lse = attn.forward(q, k, v)
        assert used() - before == inference + out.nbytes + lse.nbytes
        grads = attn.backward(dout, q, k, v, out, lse)
        assert used() - before == training + out.nbytes + lse.nbytes + sum(g.nbytes for g in grads)
        assert sum(sim.pinned.values()) == attn.pinned_bytes
        if transport == "staged" and comm.size > 1:
            assert attn.pinned_bytes > 2 * 4 * 16  # slots beside the index vectors


@pytest.mark.parametrize("transport", ["staged", "direct"])
@pytest.mark.parametrize("backward", ["q", "kv"])
def test_a_second_call_allocates_nothing(comm, backward, transport):
    simulation()
    cupy = gpu()
    p = problem(16 * comm.size, batch=1, heads=2, kv_heads=1, d=8, dv=8, dtype="bfloat16")
    with attention(comm, transport, stage=512, quick=True, backward=backward, causal=True) as attn:
        q, k, v, dout = put(cupy, *shards(attn, p))
        out, lse = attn.forward(q, k, v)
        dq, dk, dv = attn.backward(dout, q, k, v, out, lse)
        sim = simulation()
        counts, pinned = len(allocated(sim)), dict(sim.pinned)
        assert counts
        for _ in range(2):
            attn.forward(q, k, v, out=out, lse=lse)
            attn.backward(dout, q, k, v, out, lse, dq=dq, dk=dk, dv=dv)
        assert len(allocated(sim)) == counts and sim.pinned == pinned


@pytest.mark.parametrize("what", ["workspace", "result", "pinned"])
def test_out_of_memory_is_raised_on_every_rank(comm, what, monkeypatch):
    """One rank's GPU is too small: all raise the same, with the bytes asked for and free, and nothing was sent."""
    simulation()
    poor = comm.size - 1
    memory = {"workspace": 83_500, "result": 66_000}.get(what)
    cupy = gpu(**({"memory": memory} if memory and comm.rank == poor else {}))
    p = problem(64 * comm.size, batch=1, heads=4, kv_heads=4, d=16, dv=16, dtype="float32")
    with attention(comm, quick=True, deadline=10) as attn:
        q, k, v, _ = put(cupy, *shards(attn, p))
        wanted = comm.bcast(attn.workspace_bytes(q.shape, k.shape, v.shape, "float32", backward=False, gpu=True), root=poor)
        text = {
            "workspace": rf"workspace: {wanted} bytes could not be allocated \(GPU 0: \d+ of 83500 bytes are free; Out of memory",
            "result": r"a result of shape \(1, 64, 4, 16\): GPU 0: 464 of 66000 bytes are free; Out of memory allocating 16384 bytes",
            "pinned": r"pinned host memory: cudaErrorMemoryAllocation: no more",
        }[what]
        if what == "pinned" and comm.rank == poor:

            def none_left(nbytes):
                raise RuntimeError("cudaErrorMemoryAllocation: no more")

            monkeypatch.setattr(cupy.cuda, "alloc_pinned_memory", none_left)
        with pytest.raises(MemoryError, match=text) as raised:
            attn.forward(q, k, v)
        assert comm.size == 1 or str(raised.value).startswith(f"rank {poor}: ")
        assert attn._ring.bytes_sent == 0
        monkeypatch.undo()
        if what != "pinned":
            simulation().memory_bytes = 1 << 29
        attn.forward(q, k, v)  # and the object works on


@pytest.mark.mpi(ranks=(2, 4))
@pytest.mark.parametrize("transport", ["staged", "direct"])
@pytest.mark.parametrize("dtype", TYPES)
def test_bytes_equal_the_formulas(comm, dtype, transport):
    cupy = gpu()
    rows, size, heads, d = 16, comm.size, 4, 32
    p = problem(rows * size, batch=2, heads=heads, kv_heads=heads, d=d, dv=d, dtype=dtype)
    item, wide = TYPES[dtype].itemsize, 8 if dtype == "float64" else 4
    tensor, vector, share = 2 * heads * rows * size * d, 2 * heads * rows * size, (size - 1) / size
    for way, expected in (
        ("q", (2 * item + wide) * tensor + 2 * wide * vector),  # Q, dO and dQ, delta and lse
        ("kv", (2 * item + 2 * wide) * tensor),  # K, V, dK, dV
    ):
        with attention(comm, transport, stage=3000, quick=True, backward=way) as attn:
            q, k, v, dout = put(cupy, *shards(attn, p))
            out, lse = attn.forward(q, k, v)
            assert attn.stats.bytes_sent == 2 * item * share * tensor
            attn.backward(dout, q, k, v, out, lse)
            assert attn.stats.bytes_sent == expected * share
            if transport == "staged":
                assert attn.stats.messages > 2 * (size - 1)  # chunks
            else:
                assert attn.stats.messages == 2 * (size - 1)


@pytest.mark.mpi(ranks=2)
def test_a_large_parcel_in_many_chunks(comm):
    """Chunks that do not divide the parcel; each slot is used many times."""
    from gpu_kit import check, run, truth

    cupy = gpu()
    p = problem(40, batch=1, heads=2, kv_heads=2, d=8, dv=8, dtype="float32")
    for stage in (1000, 7, 1 << 20):
        with attention(comm, "staged", stage=stage, quick=True) as attn:
            check(run(cupy, attn, p), truth(p, {}))


def test_stage_bytes_must_be_a_number(comm, monkeypatch):
    from burstmpi import BurstAttention

    monkeypatch.setenv("BURSTMPI_STAGE_BYTES", "4MB")
    with pytest.raises(ValueError, match="BURSTMPI_STAGE_BYTES: must be a number of bytes below .*, got '4MB'"):
        BurstAttention(comm)
    monkeypatch.setenv("BURSTMPI_STAGE_BYTES", str(1000 + comm.rank))
    if comm.size > 1:
        with pytest.raises(ValueError, match="BURSTMPI_STAGE_BYTES: must be the same on all ranks, got 1000 on rank 0"):
            BurstAttention(comm)


def test_the_override_of_cuda_awareness(comm, monkeypatch):
    from burstmpi import BurstAttention

    monkeypatch.setenv("BURSTMPI_CUDA_AWARE", "yes")
    with pytest.raises(ValueError, match="BURSTMPI_CUDA_AWARE: must be 0 or 1, got 'yes'"):
        BurstAttention(comm)
    monkeypatch.setenv("BURSTMPI_CUDA_AWARE", "1")
    with BurstAttention(comm) as attn:
        assert attn._aware == (True, "MPI is CUDA-aware: BURSTMPI_CUDA_AWARE=1")
    if comm.rank == comm.size - 1:
        monkeypatch.setenv("BURSTMPI_CUDA_AWARE", "0")
    with BurstAttention(comm) as attn:  # one that is not is enough
        where = "" if comm.size == 1 else f" on rank {comm.size - 1}"
        assert attn._aware == (False, f"MPI is not CUDA-aware{where}: BURSTMPI_CUDA_AWARE=0")


def told(monkeypatch, query, kinds):
    """What ``cuda_support`` makes of a library whose query answers so (None: there is none) and of MPI's memory kinds."""
    def library(_):
        return SimpleNamespace() if query is None else SimpleNamespace(MPIX_Query_cuda_support=lambda: query)

    info = SimpleNamespace(get=lambda key: kinds if key == "mpi_memory_alloc_kinds" else None, Free=lambda: None)
    world = SimpleNamespace(Get_info=lambda: info)
    monkeypatch.setattr(ring, "ctypes", SimpleNamespace(CDLL=library))
    monkeypatch.setattr(ring, "MPI", SimpleNamespace(__file__="libmpi.so", COMM_WORLD=world))
    return ring.cuda_support({})


@pytest.mark.mpi(ranks=1)
@pytest.mark.parametrize(
    "query, kinds, answer",
    [
        (1, None, (True, "MPIX_Query_cuda_support()")),
        (0, "system,cuda:device", (False, "MPIX_Query_cuda_support()")),  # the library's own word counts
        (None, "system,mpi,cuda:host:device", (True, "mpi_memory_alloc_kinds=system,mpi,cuda:host:device")),
        (None, "system,mpi", (False, "mpi_memory_alloc_kinds=system,mpi")),
        (None, None, (False, "this MPI says nothing of CUDA")),
    ],
)
def test_what_the_library_says_of_itself(comm, query, kinds, answer, monkeypatch):
    assert told(monkeypatch, query, kinds) == answer


def test_staged_unless_told(comm, monkeypatch):
    """The MPI at hand is not CUDA-aware: nothing but host memory gets to it, and stats say why."""
    if REAL:
        pytest.skip("this MPI may be CUDA-aware")
    cupy = gpu()
    monkeypatch.delenv("BURSTMPI_CUDA_AWARE", raising=False)
    p = problem(8 * comm.size, batch=1, heads=1, kv_heads=1, d=8, dv=8, dtype="float32")
    with attention(comm, "as it is", quick=True) as attn:
        handed, real = [], attn._ring.comm

        class Spy:
            def __getattr__(self, name):
                return getattr(real, name)

            def Isend(self, message, to, tag):
                handed.append(type(message[0]))
                return real.Isend(message, to, tag)

            def Irecv(self, message, source, tag):
                handed.append(type(message[0]))
                return real.Irecv(message, source, tag)

        attn._ring.comm = Spy()
        q, k, v, dout = put(cupy, *shards(attn, p))
        out, lse = attn.forward(q, k, v)
        attn.backward(dout, q, k, v, out, lse)
        attn._ring.comm = real
        assert attn.stats.transport == "staged" and attn.stats.transport_why.startswith("MPI is not CUDA-aware: ")
        assert set(handed) == ({np.ndarray} if comm.size > 1 else set())
