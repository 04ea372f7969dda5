"""python -m burstmpi doctor: conclusions from facts, and the whole command under MPI."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from gpu_kit import environment, gpu, simulation

from burstmpi import doctor
from burstmpi.doctor import Facts, examine, report

GOOD = Facts(
    0, 2, "node1", 2, "SLURM_STEP_NUM_TASKS", "Open MPI 5.0.7", "4.1.0", 4, (0, 1, 2, 3), "avx512", "", "14.0.0", "A100",
    "sm_80", "0000:01:00.0", 13000, 13000, "", "", True, "MPIX_Query_cuda_support()",
)  # fmt: skip
OTHER = replace(GOOD, rank=1, cpus=(4, 5, 6, 7), bus="0000:02:00.0")


def findings(**changes):
    return examine([replace(GOOD, **changes), replace(OTHER, **changes)])


def test_a_good_job_has_nothing_to_tell():
    assert examine([GOOD, OTHER]) == []
    text, well = report([GOOD, OTHER])
    assert well and text.endswith("verdict: burstmpi works here, on CPUs and GPUs")
    for word in ("node1", "A100", "sm_80", "Open MPI 5.0.7", "cores 4-7", "CUDA-aware: yes (MPIX_Query_cuda_support())", "kernels compile"):
        assert word in text


@pytest.mark.parametrize(
    "changes, fatal, text, advice",
    [
        ({"threads": 8}, False, "node1: 2 ranks with 16 threads together on 8 cores", "OMP_NUM_THREADS=4"),
        ({"cpus": (0,), "threads": 1}, False, "2 ranks with 2 threads together on 1 cores", "fewer ranks"),
        ({"compile_error": "cc: not found"}, False, "no compiled host kernels: cc: not found", "install a C compiler"),
        ({"refused": "BURSTMPI_ISA: must be one of these, got 'mmx'"}, True, "^BURSTMPI_ISA: must be one of", "unset it"),
        (
            {"gpu": "", "gpu_error": "cudaErrorInsufficientDriver: CUDA driver version is insufficient"},
            False, "no GPU: cudaErrorInsufficientDriver", "driver is older than CuPy's CUDA",
        ),
        ({"gpu": "", "gpu_error": "CuPy cannot be imported: No module"}, False, "CuPy cannot be imported", "pip install"),
        ({"driver": 12040}, True, r"the driver \(CUDA 12.4\) is older than CuPy's toolkit \(13.0\)", "a newer driver"),
        ({"kernel_error": "NVRTC not found"}, True, "CUDA kernels do not compile: NVRTC not found", "ctk"),
        ({"bus": "0000:01:00.0"}, False, "share a GPU with another rank", "--gpus-per-task=1"),
        ({"aware": False, "evidence": "none"}, False, r"MPI is not CUDA-aware \(none\)", "right as it is"),
        ({"mpi4py": "3.1.6"}, True, "mpi4py 3.1.6 is older than 4.0.3", "pip install"),
        ({"wrong": ["the small call on the GPU is wrong: out is off by 3"]}, True, "out is off by 3", "report"),
    ],
)  # fmt: skip
def test_each_problem_is_told_with_what_to_do(changes, fatal, text, advice):
    (finding,) = findings(**changes)
    assert finding.fatal == fatal and advice in finding.advice
    assert re.search(text, finding.text)


def test_one_rank_without_a_gpu_among_others_is_a_problem():
    (finding,) = examine([GOOD, replace(OTHER, gpu="", gpu_error="GPU: this process sees none")])
    assert finding.fatal and finding.text == "rank 1: no GPU: GPU: this process sees none"


def test_singletons():
    (finding,) = examine([replace(GOOD, size=1)])
    assert finding.fatal and "started 2 tasks" in finding.text and "srun --mpi=pmix" in finding.advice


def test_usage():
    for arguments, code in ((["--help"], 0), ([], 2), (["surgeon"], 2)):
        run = subprocess.run([sys.executable, "-m", "burstmpi", *arguments], capture_output=True, text=True)
        assert run.returncode == code and "python -m burstmpi doctor" in run.stdout + run.stderr


def test_the_driver_of_one_rank_is_older():
    (finding,) = examine([GOOD, replace(OTHER, driver=12040)])
    assert finding.fatal and finding.text == "rank 1: the driver (CUDA 12.4) is older than CuPy's toolkit (13.0)"


def alone(tmp_path, **changes):
    """The whole command as one process that no launcher of MPI started: exit code and text."""
    (tmp_path / "cupy.py").write_text(
        "from types import SimpleNamespace\n"
        "__version__ = '14.0.0'\n"
        "class ndarray: pass\n"
        "def broken(*_):\n"
        "    raise RuntimeError('cudaErrorInsufficientDriver: CUDA driver version\\nis insufficient for CUDA runtime version')\n"
        "runtime = SimpleNamespace(driverGetVersion=lambda: 12040, runtimeGetVersion=lambda: 13000, getDeviceCount=broken, getDevice=broken)\n"
        "cuda = SimpleNamespace(runtime=runtime)\n"
    )
    strange = ("OMPI_", "PMI", "PRTE_", "SLURM_", "BURSTMPI_", "OMP_")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(strange)}
    root = str(Path(__file__).resolve().parent.parent)
    environ |= {"PYTHONPATH": os.pathsep.join([str(tmp_path), root]), "OMP_NUM_THREADS": "1"} | changes
    command = [sys.executable, "-m", "burstmpi", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=300)
    return done.returncode, done.stdout


def test_the_command_where_nearly_all_is_wrong(tmp_path):
    """Tasks of srun that do not find each other, more threads than cores, no compiler, a driver older than the toolkit."""
    code, text = alone(
        tmp_path, SLURM_STEP_NUM_TASKS="4", OMP_NUM_THREADS="1000", CC="/no/such/compiler", BURSTMPI_CACHE=str(tmp_path / "cache")
    )
    assert code == 1 and text.rstrip().endswith("verdict: not well, see the problems above")
    for told, advice in (
        ("PROBLEM: the launcher started 4 tasks (SLURM_STEP_NUM_TASKS), but MPI sees a world of 1 rank", "srun --mpi=pmix with Open MPI"),
        ("1 ranks with 1000 threads together on", "OMP_NUM_THREADS="),
        ("note: no compiled host kernels: CC='/no/such/compiler': no such compiler", "install a C compiler (cc)"),
        (
            "note: no GPU: GPU: cannot be used: cudaErrorInsufficientDriver: CUDA driver version is insufficient for CUDA runtime version",
            "the driver is older than CuPy's CUDA",
        ),
    ):
        assert told in text and advice in text.split(told)[1].split("\n")[1], text
    assert "forward and backward on 1 ranks by numpy, transport host" in text


def test_the_command_where_a_variable_is_wrong(tmp_path):
    """It is told as the user's own affair: once, and not as a wrong result that is to be reported."""
    code, text = alone(tmp_path, BURSTMPI_ISA="mmx")
    assert code == 1 and text.count("mmx") == 1 and "host kernels refused" in text
    assert "PROBLEM: BURSTMPI_ISA: must be one of" in text and "got 'mmx'\n    what to do: unset it" in text and "report it" not in text


@pytest.mark.parametrize("name, value", [("BURSTMPI_DEADLINE", "soon"), ("BURSTMPI_STAGE_BYTES", "-1"), ("BURSTMPI_CUDA_AWARE", "7")])
def test_the_command_where_another_variable_is_wrong(tmp_path, name, value):
    code, text = alone(tmp_path, **{name: value})
    assert code == 1 and f"PROBLEM: {name}: must be" in text and f"got '{value}'\n    what to do: unset it" in text and "report it" not in text


def test_threads_are_those_that_a_call_takes(monkeypatch):
    """Ranks that are not bound share the node's cores, and a container's quota is no news to it."""
    from burstmpi.backends import host

    for name in ("OMP_NUM_THREADS", "SLURM_CPUS_ON_NODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setattr(host, "_quota", lambda: float("inf"))
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "4")
    assert doctor.facts(doctor.MPI.COMM_SELF).threads == 2
    monkeypatch.setattr(host, "_quota", lambda: 4.5)
    assert doctor.facts(doctor.MPI.COMM_SELF).threads == 1


def test_the_command_where_only_the_driver_is_old(tmp_path):
    code, text = alone(tmp_path)
    assert code == 0 and "cudaErrorInsufficientDriver" in text and text.rstrip().endswith("verdict: burstmpi works here, on CPUs")


@pytest.mark.mpi
def test_on_cpus(comm, capsys, monkeypatch):
    """As on a machine without CuPy."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(doctor.MPI, "COMM_WORLD", comm)
    code = doctor.main()
    text = capsys.readouterr().out
    if comm.rank == 0:
        assert code == 0 and f"forward and backward on {comm.size} ranks by host, transport host" in text
        assert "CuPy cannot be imported" in text and text.rstrip().endswith("verdict: burstmpi works here, on CPUs")
    else:
        assert text == ""


@pytest.mark.mpi(ranks=(1, 2))
def test_on_gpus(comm, capsys, monkeypatch):
    """On the PTX machine, with its own kernels on one rank; on more ranks with quick ones."""
    simulation()
    gpu()
    from gpu_kit import quick_backend

    if comm.size > 1:
        monkeypatch.setattr("burstmpi.backends.cuda.CudaBackend", quick_backend())
    monkeypatch.setattr(doctor, "SHAPE", (1, 6, 1, 8))
    monkeypatch.setattr(doctor, "launched_tasks", lambda environ: ("", comm.size))  # the world may be larger
    monkeypatch.setattr(doctor.MPI, "COMM_WORLD", comm)
    with environment(BURSTMPI_CUDA_AWARE="0", BURSTMPI_ALLOW_SINGLETONS="1"):  # one rank of a larger world is none
        code = doctor.main()
    text = capsys.readouterr().out
    if comm.rank == 0:
        assert code == 0, text
        assert f"forward and backward on {comm.size} ranks by cuda, transport staged (MPI is not CUDA-aware: " in text
        assert "PTX machine sm_80" in text and "verdict: burstmpi works here, on CPUs and GPUs" in text
        assert ("share a GPU with another rank" in text) == (comm.size > 1)


@pytest.mark.mpi(ranks=(1, 2))
def test_a_wrong_result_is_noticed(comm, capsys, monkeypatch):
    from burstmpi.backends.host import HostBackend

    real = HostBackend.attend

    def off(self, q, k, v, out, lse, work, *, first, final=None):
        real(self, q, k, v, out, lse, work, first=first, final=final)
        out[...] += 1e-3 * (comm.rank == comm.size - 1)

    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setattr(HostBackend, "attend", off)
    monkeypatch.setattr(doctor.MPI, "COMM_WORLD", comm)
    assert doctor.main() == 1
    text = capsys.readouterr().out
    assert comm.rank > 0 or "PROBLEM: the small call on the CPU is wrong: out is off by" in text
