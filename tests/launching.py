"""Start mpi_run.sh from a test, with the environment in which the tests themselves run."""
import os
import signal
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "mpi_run.sh"

# A test that installs an environment unasked would surprise: mpi_run.sh names the one it runs in.
needs_environment = pytest.mark.skipif("BURSTMPI_VENV" not in os.environ, reason="started by ./mpi_run.sh test only")


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
