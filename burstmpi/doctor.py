"""``python -m burstmpi doctor``: what this job runs on, whether it computes rightly, and what to do where it does not.

    mpirun -n 4 python -m burstmpi doctor          srun --mpi=pmix python -m burstmpi doctor

Each rank gathers facts; rank 0 prints them and a verdict.  ``examine`` draws the conclusions from the facts alone.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import asdict, dataclass, field

import numpy as np

from . import checks, placement
from .arrays import reason
from .backends import BuildError, HostBackend, reference
from .backends.host import threads_here
from .ring import MPI, cuda_support, deadline_of, launched_tasks, library, node_name

__all__ = ["Facts", "Finding", "examine", "facts", "main"]

SHAPE = (1, 24, 2, 32)  # batch, rows of a rank, heads, head dim of the check


@dataclass
class Facts:
    """What one rank knows of itself; an empty text where there is nothing to tell."""

    rank: int = 0
    size: int = 1
    host: str = ""
    tasks: int = 1  # that the launcher says it started
    tasks_from: str = ""
    mpi: str = ""
    mpi4py: str = ""
    threads: int = 1  # that a kernel of the CPU will use
    cpus: tuple = ()  # that this process may run on
    compiled: str = ""  # instruction set of the host kernels
    compile_error: str = ""
    cupy: str = ""  # version
    gpu: str = ""  # name
    arch: str = ""
    bus: str = ""
    driver: int = 0
    runtime: int = 0
    gpu_error: str = ""
    kernel_error: str = ""  # of the CUDA kernels' compiler
    aware: bool = False
    evidence: str = ""
    refused: str = ""  # an environment variable with which calls on the CPU raise
    wrong: list = field(default_factory=list)  # what the small calls got wrong, by backend
    right: list = field(default_factory=list)  # (backend, transport, why) of small calls that were right


@dataclass(frozen=True)
class Finding:
    """Something worth telling: whether it must be repaired, what it is, what to do."""

    fatal: bool
    text: str
    advice: str


# ---------------------------------------------------------------- facts


def facts(comm) -> Facts:
    """Look at this rank."""
    name, tasks = launched_tasks(os.environ)
    mpi, mpi4py = library()
    told = Facts(comm.Get_rank(), comm.Get_size(), node_name(os.environ), tasks, name, mpi, mpi4py)
    told.cpus = tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else tuple(range(os.cpu_count() or 1))
    told.threads = threads_here()
    try:
        told.compiled = HostBackend().isa
    except BuildError as error:
        told.compile_error = reason(error)
    except ValueError as error:
        told.refused = reason(error)
    try:
        told.aware, told.evidence = cuda_support(os.environ)
        checks.stage_bytes(os.environ.get("BURSTMPI_STAGE_BYTES"), 1)
        deadline_of(None)
    except ValueError as error:
        told.refused = told.refused or reason(error)
    _look_at_gpu(told)
    return told


def _look_at_gpu(told) -> None:
    try:
        import cupy
    except Exception as error:
        told.gpu_error = f"CuPy cannot be imported: {reason(error)}"
        return
    told.cupy = cupy.__version__
    runtime = cupy.cuda.runtime
    try:
        told.driver, told.runtime = runtime.driverGetVersion(), runtime.runtimeGetVersion()
        placement.use_gpu()
        device = cupy.cuda.Device()
        properties = runtime.getDeviceProperties(device.id)
        name = properties["name"]
        told.gpu = name.decode() if isinstance(name, bytes) else str(name)
        told.arch, told.bus = f"sm_{device.compute_capability}", device.pci_bus_id
    except Exception as error:
        told.gpu_error = reason(error)
        return
    try:
        from .backends.cuda import CudaBackend

        CudaBackend()._modules.kernel("survey", "survey_keys")
    except Exception as error:
        told.kernel_error = reason(error)


# ---------------------------------------------------------------- a small call that is checked


def check(comm, cupy=None) -> tuple[str, tuple]:
    """Run forward and backward on all ranks; tell what is wrong, and who computed.

    The allowed error is three times that of NumPy on one rank, in the same type and on the same numbers.
    """
    from .attention import BurstAttention

    batch, rows, heads, d = SHAPE
    rng = np.random.default_rng(1)
    whole = [rng.standard_normal((batch, rows * comm.Get_size(), heads, d), np.float32) for _ in range(4)]
    true = reference.forward(*whole[:3], causal=True)
    true += reference.backward(whole[3], *whole[:3], *true, causal=True)
    with BurstAttention(MPI.COMM_SELF, causal=True, backend="numpy") as one:
        out, lse = one.forward(*whole[:3])
        near = (out, lse, *one.backward(whole[3], *whole[:3], out, lse))
    with warnings.catch_warnings(), BurstAttention(comm, causal=True, deadline=120) as attn:
        warnings.simplefilter("ignore")
        mine = [attn.shard(x) for x in whole]
        if cupy is not None:
            mine = [cupy.asarray(x) for x in mine]
        out, lse = attn.forward(*mine[:3])
        got = (out, lse, *attn.backward(mine[3], *mine[:3], out, lse))
        got = [attn.gather(x, axis=2 if i == 1 else 1) for i, x in enumerate(got)]
        stats = attn.stats
    wrong = []
    for name, true_x, near_x, x in zip(("out", "lse", "dq", "dk", "dv"), true, near, got):
        x = x if cupy is None else cupy.asnumpy(x)
        error = np.abs(x - true_x).max()
        allowed = 3 * np.abs(near_x - true_x).max() + np.abs(true_x).max() * np.finfo(np.float32).eps
        if not error <= allowed:
            wrong.append(f"{name} is off by {error:.2g}, {allowed:.2g} is allowed")
    return "; ".join(wrong), (stats.backend, stats.transport, stats.transport_why)


# ---------------------------------------------------------------- conclusions


def examine(everyone: list[Facts]) -> list[Finding]:
    """Draw conclusions from the facts of all ranks."""
    found: list[Finding] = []

    def tell(fatal, ranks, text, advice):
        if ranks:
            who = "" if len(ranks) == len(everyone) else f"rank{'s' * (len(ranks) > 1)} {_list(ranks)}: "
            found.append(Finding(fatal, who + text, advice))

    def tell_each(fatal, told, text, advice):
        """One finding for each different text that ranks tell, in the order of texts; ``advice`` may depend on it."""
        for words in sorted({words for f in everyone for words in told(f)}):
            what = advice(words) if callable(advice) else advice
            serious = fatal(words) if callable(fatal) else fatal
            tell(serious, ranks_where(lambda f: words in told(f)), text + words, what)

    ranks_where = lambda test: [f.rank for f in everyone if test(f)]  # noqa: E731
    some = lambda words: [words] if words else []  # noqa: E731
    first = everyone[0]
    if first.size == 1 and first.tasks > 1:
        tell(
            True, [first.rank],
            f"the launcher started {first.tasks} tasks ({first.tasks_from}), but MPI sees a world of 1 rank",
            "launcher and MPI do not speak to each other: srun --mpi=pmix with Open MPI, srun --mpi=pmi2 with MPICH, or "
            "the mpiexec that belongs to this MPI",
        )  # fmt: skip
    if len({f.mpi for f in everyone}) > 1:
        tell(True, [f.rank for f in everyone], f"ranks have different MPIs: {sorted({f.mpi for f in everyone})}", "use one MPI")
    if tuple(int("".join(filter(str.isdigit, x)) or 0) for x in first.mpi4py.split(".")[:3]) < (4, 0, 3):
        tell(True, [f.rank for f in everyone], f"mpi4py {first.mpi4py} is older than 4.0.3", "pip install -U mpi4py")
    for host in sorted({f.host for f in everyone}):
        here = [f for f in everyone if f.host == host]
        cpus, threads = set().union(*(f.cpus for f in here)), sum(f.threads for f in here)
        if threads > len(cpus):
            tell(
                False, [f.rank for f in here],
                f"{host}: {len(here)} ranks with {threads} threads together on {len(cpus)} cores",
                f"fewer ranks, or OMP_NUM_THREADS={max(1, len(cpus) // len(here))}; with mpirun --bind-to core, with "
                "srun --cpus-per-task",
            )  # fmt: skip
    tell_each(
        False, lambda f: some(f.compile_error), "no compiled host kernels: ",
        "do as it says, or install a C compiler (cc); until then NumPy computes on the CPU, many times slower",
    )  # fmt: skip
    tell_each(True, lambda f: some(f.refused), "", "unset it, or give it a value that it may have here")
    with_gpu = ranks_where(lambda f: f.gpu)
    tell_each(
        lambda words: bool(with_gpu) and "cannot be imported" not in words,
        lambda f: [] if f.gpu else some(f.gpu_error), "no GPU: ", _advice_without_gpu,
    )  # fmt: skip
    for driver, toolkit in sorted({(f.driver, f.runtime) for f in everyone if f.gpu and f.driver // 1000 < f.runtime // 1000}):
        tell(
            True, ranks_where(lambda f: f.gpu and (f.driver, f.runtime) == (driver, toolkit)),
            f"the driver (CUDA {_version(driver)}) is older than CuPy's toolkit ({_version(toolkit)})",
            "a newer driver, or the CuPy wheel of the driver's CUDA (cupy-cuda12x)",
        )  # fmt: skip
    tell_each(
        True, lambda f: some(f.kernel_error), "CUDA kernels do not compile: ",
        "CuPy needs NVRTC and CUDA's headers: pip install 'cupy-cuda13x[ctk]', or the site's CUDA module",
    )  # fmt: skip
    seats = [(f.host, f.bus or f"none of rank {f.rank}") for f in everyone]
    sharing = [f.rank for f in everyone if f.gpu and placement.sharing(seats, f.rank)]
    tell(False, sharing, "share a GPU with another rank", "one GPU a rank: srun --gpus-per-task=1, or fewer ranks a node")
    if with_gpu and not all(f.aware for f in everyone):
        tell(
            False, ranks_where(lambda f: not f.aware), f"MPI is not CUDA-aware ({first.evidence}): messages are staged "
            "through pinned memory", "right as it is; an MPI that is built with CUDA or UCX with CUDA saves the copies "
            "(BURSTMPI_CUDA_AWARE=1 where it does not say so itself)",
        )  # fmt: skip
    tell_each(True, lambda f: f.wrong, "", "please report it, with all that is printed here")
    return found


def _advice_without_gpu(words: str) -> str:
    if "cannot be imported" in words:
        return "pip install burstmpi[cuda], if this job should use GPUs"
    if "nsufficient" in words:
        return (
            "the driver is older than CuPy's CUDA: a newer driver, or a CuPy for an older CUDA (cupy-cuda12x); on a "
            "machine without a GPU there is nothing to do"
        )
    return "ask for GPUs (srun --gpus-per-task=1), look at nvidia-smi and CUDA_VISIBLE_DEVICES"


def _list(ranks) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


# ---------------------------------------------------------------- the command


def report(everyone: list[Facts]) -> tuple[str, bool]:
    """The whole text, and whether all is well."""
    lines = [f"burstmpi doctor: {len(everyone)} rank{'s' * (len(everyone) > 1)}, {everyone[0].mpi}, mpi4py {everyone[0].mpi4py}"]
    for f in everyone:
        gpu = f"{f.gpu} ({f.arch}, {f.bus})" if f.gpu else "no GPU"
        cores = ",".join(checks.spans(f.cpus)) or "unknown"
        lines.append(
            f"  rank {f.rank}: {f.host}, {f.mpi}, cores {cores}, {f.threads} threads, host kernels "
            f"{f.compiled or ('refused' if f.refused else 'missing')}, {gpu}, CUDA-aware: {'yes' if f.aware else 'no'} ({f.evidence})"
        )
        if f.gpu:
            state = "compile" if not f.kernel_error else "do not compile"
            lines.append(f"    CuPy {f.cupy}, driver {_version(f.driver)}, CUDA {_version(f.runtime)}, kernels {state}")
    for backend, transport, why in sorted({r for f in everyone for r in map(tuple, f.right)}):
        lines.append(f"  forward and backward on {len(everyone)} ranks by {backend}, transport {transport} ({why}): right")
    findings = examine(everyone)
    for finding in findings:
        lines.append(f"{'PROBLEM' if finding.fatal else 'note'}: {finding.text}\n    what to do: {finding.advice}")
    well = not any(finding.fatal for finding in findings)
    on = "on CPUs and GPUs" if all(f.gpu for f in everyone) else "on CPUs"
    lines.append(f"verdict: burstmpi works here, {on}" if well else "verdict: not well, see the problems above")
    return "\n".join(lines), well


def main() -> int:
    """Print the report on rank 0; 0 where all is well."""
    comm = MPI.COMM_WORLD
    mine = facts(comm)
    singletons = mine.size == 1 and mine.tasks > 1
    everyone, modules = comm.allgather(mine), []
    if not any(f.refused for f in everyone):  # that call would raise what is told already
        modules.append(None)
    if all(f.gpu and not f.kernel_error for f in everyone):
        import cupy

        modules.append(cupy)
    for module in modules:
        name = "CPU" if module is None else "GPU"
        try:
            wrong, who = check(MPI.COMM_SELF if singletons else comm, module)
        except Exception as error:
            wrong, who = f"{type(error).__name__}: {reason(error)}", None
        if wrong:
            mine.wrong.append(f"the small call on the {name} is wrong: {wrong}")
        else:
            mine.right.append(who)
    everyone = [Facts(**told) for told in comm.allgather(asdict(mine))]
    text, well = report(everyone)
    if mine.rank == 0:
        print(text, flush=True)
    return 0 if well else 1
