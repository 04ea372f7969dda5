"""Start mpi_run.sh, or an MPI job of its own, from a test."""
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "mpi_run.sh"
SECONDS = 60  # more than the slowest job takes on a busy machine; a hang fails

# A test that installs an environment unasked would surprise: mpi_run.sh names the one it runs in.
needs_environment = pytest.mark.skipif("BURSTMPI_VENV" not in os.environ, reason="started by ./mpi_run.sh test only")

not_under_mpi = pytest.mark.skipif(
    any(int(os.environ.get(name) or 1) > 1 for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")),
    reason="starts MPI jobs of its own: run it with plain pytest, not under mpirun",
)


def clean_environment(**changes) -> dict:
    """Return the variables of this process without those of a launcher, of a scheduler and of this test run.

    A change to None removes a variable.
    """
    ours = ("BURSTMPI_TEST_", "BURSTMPI_DEADLINE", "BURSTMPI_LAUNCHER", "OMPI_", "PMI", "PRTE_", "SLURM_", "PBS_",
            "OMP_NUM", "OPENBLAS_NUM", "MKL_NUM")
    env = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    env.update(changes)
    return {name: str(value) for name, value in env.items() if value is not None}


def mpi_run(*arguments, timeout=60, cwd=None, **changes) -> subprocess.CompletedProcess:
    """Run mpi_run.sh to its end and return its exit code and texts.

    Open MPI's launcher itself now and then dies of a segmentation fault while it ends a job with a failed rank (a rank
    that dies so is told as 139): what it says then is not the script's word, and the job is run once more.
    """
    for last in (False, True):
        done = subprocess.run([SCRIPT, *map(str, arguments)], env=clean_environment(**changes), cwd=cwd, text=True,
                              stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout)
        if last or done.returncode != -signal.SIGSEGV:
            return done


def launcher() -> str:
    """The mpirun that belongs to this Python, or the one in PATH."""
    beside = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    for name in ("mpirun", "mpiexec"):
        if path := shutil.which(name, path=beside):
            return path
    pytest.skip("no mpirun or mpiexec beside this Python or in PATH")


def launch(ranks: int, script, *options) -> subprocess.CompletedProcess:
    """Run a script on so many ranks; returns exit code, stdout and stderr."""
    # A job inside a job confuses launchers: drop what an outer one has left.
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PMIX_", "PMI_", "OMPI_COMM_WORLD"))}
    paths = [str(ROOT), env.get("PYTHONPATH")]
    env |= {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "OMPI_MCA_osc": "^ucx",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "BURSTMPI_DEADLINE": "30",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONIOENCODING": "utf-8",
    }
    command = [launcher(), "-n", str(ranks), sys.executable, "-m", "mpi4py", str(script), *map(str, options)]
    job = subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, encoding="utf-8"
    )
    try:
        stdout, stderr = job.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        job.send_signal(signal.SIGTERM)  # the launcher then ends its ranks
        try:
            stdout, stderr = job.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            job.kill()
            stdout, stderr = job.communicate()
        pytest.fail(f"{' '.join(command)} took more than {SECONDS} s\n{stdout}\n{stderr}")
    return subprocess.CompletedProcess(command, job.returncode, stdout, stderr)
