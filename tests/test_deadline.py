"""Nothing hangs: peers that never come, that are slow, and that stop in the middle of a call."""

import gc
import os
import re
import subprocess
import sys
import time

import numpy as np
import pytest
from launching import launch, not_under_mpi
from support import problem, shards

from burstmpi import BurstAttention, DeadlineError, PeerError
from burstmpi.ring import launched_tasks

SHORT = 1.5  # seconds: much longer than a call takes on a busy machine


def wait_for_all(comm):
    """A barrier that does not need the library."""
    comm.Barrier()


@pytest.mark.mpi(ranks=(2, 4))
def test_a_peer_that_never_calls(comm):
    absent = comm.size - 1
    attn = BurstAttention(comm, deadline=SHORT)
    q = np.zeros((1, 2, 1, 4))
    if comm.rank != absent:
        began = time.perf_counter()
        with pytest.raises(DeadlineError) as caught:
            attn.forward(q, q, q)
        assert time.perf_counter() - began < 10
        text = str(caught.value)
        assert f"in forward for all ranks to make the same call. No sign of rank {absent}" in text
        assert f"deadline {SHORT} s" in text and "waited" in text
        with pytest.raises(RuntimeError, match="BurstAttention: an earlier call was broken off .*; close it"):
            attn.forward(q, q, q)
    wait_for_all(comm)
    attn.close()


@pytest.mark.mpi(ranks=(2, 4))
def test_a_late_peer_writes_into_nobodys_memory(comm):
    """MPI may still complete a call that was broken off: what it writes must not land in arrays made since."""
    absent = comm.size - 1
    attn = BurstAttention(comm, deadline=SHORT)
    q = np.zeros((1, 2, 1, 4))
    fields = []
    if comm.rank != absent:
        with pytest.raises(DeadlineError):
            attn.forward(q, q, q)
        attn.close()
        attn = None
        gc.collect()
        fields = [np.full(6, 7, np.int64) for _ in range(200)]  # NumPy hands freed memory of this size out again
    wait_for_all(comm)
    if comm.rank == absent:
        with pytest.raises(DeadlineError):
            attn.forward(q, q, q)
    wait_for_all(comm)
    assert all((field == 7).all() for field in fields)


@pytest.mark.mpi(ranks=(2, 4))
def test_a_peer_that_makes_no_object(comm):
    absent = comm.size - 1
    if comm.rank != absent:
        with pytest.raises(DeadlineError, match="in construction for all ranks to make their BurstAttention"):
            BurstAttention(comm, deadline=SHORT)
    wait_for_all(comm)
    if comm.rank == absent:  # it comes after all, and finds the others gone
        with pytest.raises(DeadlineError, match=f"rank {absent} waited"):
            BurstAttention(comm, deadline=SHORT)
    wait_for_all(comm)


def hinder(attn, monkeypatch, verb, deed):
    """Do something else before a verb of the backend."""
    real = getattr(attn._backend, verb)

    def hindered(*args, **kwargs):
        deed()
        return real(*args, **kwargs)

    monkeypatch.setattr(attn._backend, verb, hindered)


@pytest.mark.mpi(ranks=(2, 4))
@pytest.mark.parametrize("call", ["forward", "backward"])
def test_a_slow_peer_in_a_step(comm, monkeypatch, call):
    """Parcels of half a megabyte, which no MPI sends before they are asked for: somebody must wait."""
    p = problem(64 * comm.size, heads=4, kv_heads=4, d=64, dv=64)
    attn = BurstAttention(comm, layout="contiguous", deadline=5)
    q, k, v, dout = shards(attn, p)
    out, lse = attn.forward(q, k, v)
    attn._ring.deadline = SHORT
    slow = comm.size - 1
    if comm.rank == slow:
        # Before its first message: what it has posted an MPI may carry without it.
        naps = iter([2 * SHORT + 3])
        hinder(attn, monkeypatch, "copy", lambda: time.sleep(next(naps, 0)))
    text = None  # a rank that needs nothing more of the slow one may finish
    try:
        attn.forward(q, k, v) if call == "forward" else attn.backward(dout, q, k, v, out, lse)
    except DeadlineError as error:
        text = str(error)
    texts = [t for t in comm.allgather(text) if t is not None]
    assert all(f"of {call} for " in t and "(rank " in t for t in texts), texts
    assert any(re.search(rf"in (step \d|the end) .*No sign of ranks? .*\b{slow}\b", t) for t in texts), texts
    with pytest.raises(RuntimeError if text else DeadlineError, match="waited"):  # all have heard of it by now
        attn.forward(q, k, v)
    attn.close()


def stop_rank_1(comm, attn, monkeypatch, error):
    """Raise in its kernel of backward, of which all ranks want gradients."""

    def stumble():
        raise error

    if comm.rank == 1:
        hinder(attn, monkeypatch, "attend_backward", stumble)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("backward", ["q", "kv"])
def test_a_peer_that_stops_in_the_middle(comm, monkeypatch, backward):
    """The others hear of it at once: here no deadline is near."""
    p = problem(8 * comm.size)
    attn = BurstAttention(comm, layout="contiguous", backward=backward, deadline=50)
    q, k, v, dout = shards(attn, p)
    out, lse = attn.forward(q, k, v)
    stop_rank_1(comm, attn, monkeypatch, FloatingPointError("sparks in the kernel"))
    began = time.perf_counter()
    with pytest.raises(FloatingPointError if comm.rank == 1 else PeerError) as caught:
        attn.backward(dout, q, k, v, out, lse)
    assert time.perf_counter() - began < 20
    if comm.rank != 1:
        assert "rank 1 stopped in step 0 of backward: FloatingPointError: sparks in the kernel" in str(caught.value)
    with pytest.raises(RuntimeError, match="an earlier call was broken off"):
        attn.forward(q, k, v)
    attn.close()
    wait_for_all(comm)


@pytest.mark.mpi(min_size=2)
def test_a_rank_without_memory(comm, monkeypatch):
    """All ranks raise alike, nothing is sent, and the object works on."""
    with BurstAttention(comm, layout="contiguous") as attn:
        q, lse = np.zeros((1, 2, 1, 4)), np.zeros((1, 1, 2))
        if comm.rank == 0:

            def no_memory(nbytes):
                raise MemoryError("the shop is sold out")

            monkeypatch.setattr(attn._backend, "allocate", no_memory)
        with pytest.raises(MemoryError, match=r"rank 0: workspace: \d+ bytes could not be allocated \(the shop is sold out\)"):
            attn.forward(q, q, q, out=np.zeros_like(q), lse=lse)
        monkeypatch.undo()
        attn.forward(q, q, q)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("call", ["forward", "gather", "shard"])
def test_a_rank_without_memory_for_results(comm, monkeypatch, call):
    """The others hear of it, with no deadline near."""
    attn = BurstAttention(comm, layout="contiguous", deadline=50)
    x = np.zeros((1, 2, 1, 4))
    use = {
        "forward": lambda: attn.forward(x, x, x),
        "gather": lambda: attn.gather(x),
        "shard": lambda: attn.shard(x, root=1),
    }[call]
    use()
    if comm.rank == 0:
        empty = np.empty

        def no_memory(shape, dtype=float):
            if np.ndim(shape) and len(shape) == 4:
                raise MemoryError("the shop is sold out")
            return empty(shape, dtype)

        monkeypatch.setattr("burstmpi.attention.np.empty", no_memory)
        monkeypatch.setattr(attn._backend, "empty", no_memory)  # of forward's results
    began = time.perf_counter()
    try:
        use()
    except (MemoryError, PeerError) as error:
        told = f"{type(error).__name__}: {error}"
    else:
        told = "done"  # a rank that needed nothing of rank 0
    monkeypatch.undo()
    assert time.perf_counter() - began < 20
    told = comm.allgather(told)
    if call == "forward":  # results are made before anything is sent, and all ranks say the same
        assert set(told) == {"MemoryError: rank 0: the shop is sold out"}
        attn.close()
        return
    assert told[0] == "MemoryError: the shop is sold out"
    heard = f"PeerError: rank 0 stopped in {call}: {told[0]}"
    assert all(t == heard for t in told[1:]) if call != "shard" else set(told[1:]) <= {heard, "done"}
    attn.close()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("error", [MemoryError("no room for a plan"), KeyboardInterrupt()], ids=["memory", "Ctrl-C"])
@pytest.mark.parametrize("where", ["plan", "look", "reserve"])
def test_a_rank_that_stops_while_a_call_is_prepared(comm, monkeypatch, where, error):
    """In the middle of what ranks do together before the first message: whatever it is, the others hear of it."""
    attn = BurstAttention(comm, layout="contiguous", deadline=50)
    q = np.zeros((1, 2, 1, 4))
    if comm.rank == 1:

        def stop(*_, **__):
            raise error

        if where == "plan":
            monkeypatch.setattr(type(attn._rules), "intervals", stop)
        elif where == "look":
            monkeypatch.setattr(attn, "_check", stop)
        else:
            monkeypatch.setattr(attn, "_space", stop)
    began = time.perf_counter()
    with pytest.raises((type(error), PeerError)) as caught:
        attn.forward(q, q, q)
    assert time.perf_counter() - began < 20
    alike = isinstance(error, MemoryError) and where == "look"  # heard by all before anything else
    assert isinstance(caught.value, type(error) if comm.rank == 1 or alike else PeerError)
    monkeypatch.undo()
    if alike:
        attn.forward(q, q, q)
    else:
        with pytest.raises(RuntimeError, match="an earlier call was broken off"):
            attn.forward(q, q, q)
    attn.close()
    wait_for_all(comm)


@pytest.mark.mpi(min_size=2)
def test_a_rank_without_memory_in_construction(comm, monkeypatch):
    """Looking at explicit positions takes memory on every rank by itself."""
    if comm.rank == 1:

        def no_memory(positions):
            raise MemoryError("the shop is sold out")

        monkeypatch.setattr("burstmpi.attention.check_explicit", no_memory)
    began = time.perf_counter()
    try:  # a rank that has heard all it wants of the others is done
        attn = BurstAttention(comm, layout=np.arange(comm.rank, 3 * comm.size, comm.size), deadline=50)
        q = np.zeros((1, 3, 1, 4))
        attn.forward(q, q, q)
        told = "done"
    except (MemoryError, PeerError) as error:
        told = f"{type(error).__name__}: {error}"
    assert time.perf_counter() - began < 20
    heard = "PeerError: rank 1 stopped in construction: MemoryError: the shop is sold out"
    assert told == ("MemoryError: the shop is sold out" if comm.rank == 1 else heard)
    wait_for_all(comm)


@pytest.mark.mpi(min_size=2)
def test_a_long_error_is_told_in_short(comm, monkeypatch):
    """It is received without a deadline, so it must leave at once."""
    attn = BurstAttention(comm, layout="contiguous", backward="q", deadline=50)
    q = np.zeros((1, 2, 1, 4))
    out, lse = attn.forward(q, q, q)
    stop_rank_1(comm, attn, monkeypatch, ValueError("x" * 200_000))
    with pytest.raises(ValueError if comm.rank == 1 else PeerError) as caught:
        attn.backward(q, q, q, q, out, lse)
    assert comm.rank == 1 or len(str(caught.value)) <= 1000
    attn.close()
    wait_for_all(comm)


LATE = """
import sys, time
from mpi4py import MPI
import numpy as np
from burstmpi import BurstAttention, DeadlineError

comm = MPI.COMM_WORLD
x = np.ones((1, 3000, 4, 64), np.float32)
attn = BurstAttention(comm, layout="contiguous", backend="numpy", deadline=1)
if comm.rank == 1:
    real = attn._backend.attend
    attn._backend.attend = lambda *some, **more: (time.sleep(3), real(*some, **more))
try:
    attn.forward(x, x, x)
except (DeadlineError, RuntimeError) as error:
    sys.stdout.write(f"{type(error).__name__}\\n")
{end}
"""


@not_under_mpi
@pytest.mark.parametrize("end", ["attn.close()", "del attn", "MPI.Finalize(); attn.close()"])
def test_a_job_ends_well_after_a_call_that_was_broken_off(tmp_path, end):
    """What MPI still moves as late as in MPI_Finalize must have its memory."""
    (tmp_path / "late.py").write_text(LATE.replace("{end}", end))
    job = launch(3, tmp_path / "late.py")
    assert job.returncode == 0 and "Error" in job.stdout, job.stderr


# ---------------------------------------------------------------- launchers


@pytest.mark.parametrize(
    "environ, expected",
    [
        ({}, ("", 1)),
        ({"PMI_SIZE": "4"}, ("PMI_SIZE", 4)),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, ("OMPI_COMM_WORLD_SIZE", 2)),
        ({"SLURM_STEP_NUM_TASKS": "3", "SLURM_NTASKS": "3"}, ("SLURM_STEP_NUM_TASKS", 3)),
        ({"SLURM_NTASKS": "8"}, ("", 1)),  # a batch script that runs python itself, with no srun
        ({"OMPI_COMM_WORLD_SIZE": "1", "SLURM_STEP_NUM_TASKS": "3"}, ("OMPI_COMM_WORLD_SIZE", 1)),  # mpirun in Slurm
        ({"PMI_SIZE": "1", "SLURM_STEP_NUM_TASKS": "3"}, ("PMI_SIZE", 1)),  # MPICH's mpiexec in Slurm
        ({"PMI_SIZE": "many"}, ("", 1)),
    ],
)
def test_launched_tasks(environ, expected):
    assert launched_tasks(environ) == expected


MAKE = "from mpi4py import MPI; import burstmpi; burstmpi.BurstAttention(MPI.COMM_{}).close(); print('made')"


@pytest.mark.parametrize(
    "comm_name, extra, made", [("WORLD", {}, False), ("SELF", {}, True), ("WORLD", {"BURSTMPI_ALLOW_SINGLETONS": "1"}, True)]
)
def test_many_worlds_of_one_rank_are_noticed(comm_name, extra, made):
    """A process that some launcher started as one of four, while its MPI knows of no other."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_COMM", "PMI"))}
    done = subprocess.run(
        [sys.executable, "-c", MAKE.format(comm_name)],
        env=environ | {"SLURM_STEP_NUM_TASKS": "4"} | extra,
        capture_output=True,
        text=True,
        timeout=60,
    )
    if made:
        assert done.stdout.strip() == "made", done.stderr
    else:
        assert "the launcher started 4 tasks (SLURM_STEP_NUM_TASKS=4), but MPI sees a world of 1 rank" in done.stderr
        assert "srun --mpi=pmix" in done.stderr and done.returncode != 0
