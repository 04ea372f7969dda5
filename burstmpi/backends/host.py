"""Compiled C on the CPU: the verbs of ``base.Backend`` over the kernels in raw_kernels/host.

Kernels exist for several instruction sets and are chosen at run time by what the CPU and the system offer;
BURSTMPI_ISA, or the argument ``isa``, forces one.  See docs/host.md.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path

import numpy as np

from ..checks import whole
from ..rules import Scores
from . import compile
from .base import Dims, Work, no_progress
from .compile import BuildError
from .numpy import NumpyBackend

__all__ = ["BuildError", "HostBackend", "ISAS", "available", "first_here", "missing", "threads_here"]

ABI = 6
TYPES = {"float64": 0, "float32": 1, "float16": 2, "bfloat16": 3}
PROGRESS = 250_000  # ns between two calls of a caller's progress: MPI needs one every 0.2 ms or so
IDLE = 20_000_000  # ns, where nobody waits for it and only signals are to be seen
GO_ON, STOP, CALM = range(3)  # what progress tells the kernels, see abi.h
MOST_THREADS = 1024  # of a rank, whatever it is told: each has scratch of its own
LONG_ROW = 2048  # keys that a query must see of a block for float32 to go by pieces, unless BURSTMPI_ISA=amx says so

# -ffp-contract: products become FMA wherever there is one.  No -ffast-math: infinities and NaN mean something here.
# -fno-fast-math takes back what $CC may bring.
BASE_FLAGS = ["-std=gnu11", "-O3", "-fPIC", "-shared", "-fno-fast-math", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"]

_AVX512 = ["-mavx512f", "-mavx512dq", "-mavx512bw", "-mavx512vl", "-mfma", "-mprefer-vector-width=512", "-DBURST_AVX512"]
_AMX = [*_AVX512, "-mamx-tile", "-mamx-bf16", "-mavx512bf16", "-DBURST_AMX"]

_DOT = [*_AVX512, "-mavx512bf16", "-DBURST_AMX", "-DBURST_DOT"]

_TILES = ("avx512f", "avx512dq", "avx512bw", "avx512vl", "avx2", "fma", "avx512_bf16", "amx_tile", "amx_bf16")

# name: what /proc/cpuinfo must list; the first that a CPU has is taken
ISAS = {
    "amx": _TILES,  # bfloat16 on AMX, and float32 as three bfloat16 pieces
    "amx-bf16": _TILES,  # only bfloat16 on AMX
    "avx512bf16": ("avx512f", "avx512dq", "avx512bw", "avx512vl", "avx2", "fma", "avx512_bf16"),  # bfloat16 by vdpbf16ps
    "avx512": ("avx512f", "avx512dq", "avx512bw", "avx512vl", "avx2", "fma"),
    "avx2": ("avx2", "fma"),
    "sve": ("sve",),  # of ARM, where its vectors have 256 or 512 bits; NEON's 128 are portable's
    "portable": (),
}


@cache
def sve_bytes() -> int:
    """Bytes of SVE's vectors, as the system has set them for this process; 0 where there are none."""
    if platform.machine() != "aarch64" or platform.system() != "Linux" or "sve" not in compile.cpuinfo().get("Features", "").split():
        return 0
    get_length, length = 51, 0xFFFF
    return max(0, ctypes.CDLL(None).prctl(get_length)) & length


def sve_flags(nbytes: int) -> list[str]:
    """Code for vectors of that length alone."""
    return ["-march=armv8.2-a+sve", f"-msve-vector-bits={8 * nbytes}", f"-DBURST_SVE={nbytes}"]


# (instruction set, type): the compiler's flags.  Types that are not listed go by their accumulator.
FLAGS = {
    ("amx", "bfloat16"): [*_AMX, "-DBURST_KEYS_FORWARD=256", "-DBURST_KEYS_BACKWARD=128"],
    ("amx", "float32"): [*_AMX, "-DBURST_PIECES=3", "-DBURST_KEYS_FORWARD=256", "-DBURST_KEYS_BACKWARD=256"],
    ("avx512bf16", "bfloat16"): [*_DOT, "-DBURST_KEYS_FORWARD=192", "-DBURST_KEYS_BACKWARD=96"],
    ("avx512", "float32"): _AVX512,
    ("avx512", "float64"): [*_AVX512, "-DBURST_DOUBLE"],
    ("avx2", "float32"): ["-mavx2", "-mfma", "-DBURST_AVX2"],
    ("avx2", "float64"): ["-mavx2", "-mfma", "-DBURST_AVX2", "-DBURST_DOUBLE"],
    ("sve", "float32"): sve_flags(sve_bytes()),
    ("sve", "float64"): [*sve_flags(sve_bytes()), "-DBURST_DOUBLE"],
    ("portable", "float32"): [],
    ("portable", "float64"): ["-DBURST_DOUBLE"],
}


@cache  # of NumPy: a call asks for it several times, and NumPy puts it together anew each time
def _name(dtype) -> str:
    return np.dtype(dtype).name


def variant(isa: str, dtype) -> tuple[str, str]:
    """Which key of ``FLAGS`` computes arrays of that type (or its name): AMX knows bfloat16 and, by pieces, float32."""
    name = dtype if isinstance(dtype, str) else _name(dtype)
    if isa in ("amx", "amx-bf16"):
        isa = "amx" if name == "bfloat16" or (name == "float32" and isa == "amx") else "avx512"
    if isa == "avx512bf16" and name != "bfloat16":
        isa = "avx512"
    return (isa, name) if (isa, name) in FLAGS else (isa, "float32")


def cpu_flags() -> frozenset:
    """Instruction sets that the CPU has and the system saves."""
    told = compile.cpuinfo()
    return frozenset(told.get("flags", told.get("Features", "")).split())  # of x86, of ARM


def cpu_vendor() -> str:
    """AuthenticAMD, GenuineIntel, ..."""
    return compile.cpuinfo().get("vendor_id", "")


def jump_flags() -> list[tuple[str, ...]]:
    """What to try, in order, so that no jump touches a 32-byte boundary: for GCC's assembler, for clang, nothing.

    Intel's CPUs from Skylake to Comet Lake decode such a jump anew each time (the JCC erratum), so that a loop's speed there depends on
    where it happens to lie.  Others get no flag.
    """
    info = compile.cpuinfo()
    models = ("78", "85", "94", "142", "158", "165", "166")
    if cpu_vendor() != "GenuineIntel" or info.get("cpu family") != "6" or info.get("model") not in models:
        return [()]
    option = "-mbranches-within-32B-boundaries"
    return [(f"-Wa,{option}",), (option,), ()]


@cache
def tiles_permitted() -> bool:
    """Ask the kernel for AMX's tile registers; each process must, before it touches them."""
    if platform.machine() != "x86_64" or platform.system() != "Linux":
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0


def missing(isa: str) -> list[str]:
    """What this CPU or system lacks for an instruction set of ``ISAS``."""
    lacks = sorted(set(ISAS[isa]) - cpu_flags())
    if ISAS[isa] is _TILES and not lacks and not tiles_permitted():
        lacks = ["permission for tile registers"]
    if isa == "sve" and not lacks and sve_bytes() not in (32, 64):
        lacks = [f"SVE vectors of 256 or 512 bits (they have {8 * sve_bytes()})"]
    return lacks


def available() -> list[str]:
    """Instruction sets that this CPU runs, the best guess first.

    vdpbf16ps runs as fast as an FMA on AMD's CPUs and at a quarter of that on Intel's, where it comes last.  So does SVE of 256 bits:
    cores that have it do twice as many of NEON's 128 in the same time.
    """
    slow = [] if cpu_vendor() == "AuthenticAMD" else ["avx512bf16"]
    slow += ["sve"] if sve_bytes() == 32 else []
    return [isa for isa in (*(x for x in ISAS if x not in slow), *slow) if not missing(isa)]


def threads_here() -> int:
    """Threads of this rank: OMP_NUM_THREADS, else its cores, shared with the node's other ranks where not bound.

    Cores are those of the job where Slurm tells them, and no more than a container's quota pays for.
    """
    if told := whole(os.environ.get("OMP_NUM_THREADS", "").split(",")[0]):
        return min(told, MOST_THREADS)
    node, mine = os.cpu_count() or 1, whole(os.environ.get("SLURM_CPUS_ON_NODE"))
    node = min(node, mine or node)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else node
    ranks = _ranks_here()
    cores = cores if cores < node else node // ranks
    return max(1, int(min(cores, _quota() / ranks)))


def _ranks_here() -> int:
    """Ranks of this node, as the launcher tells: Open MPI, MPICH's and Intel's Hydra, MVAPICH, srun; 1 where none does."""
    for name in ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "MV2_COMM_WORLD_LOCAL_SIZE"):
        if told := whole(os.environ.get(name)):
            return told
    counts = []  # "2(x3),1": two tasks on each of three nodes, then one
    for part in os.environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        if found := re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part):
            counts += [int(found[1])] * int(found[2] or 1)
    node = whole(os.environ.get("SLURM_NODEID", "0"))
    return max(1, counts[node]) if node is not None and node < len(counts) else 1


def first_here() -> bool:
    """Tell whether this rank is the first of its node, by the launchers of ``_ranks_here``; True where none does."""
    names = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "MV2_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
    told = [number for name in names if (number := whole(os.environ.get(name))) is not None]
    return not told or told[0] == 0


def _quota(root=Path("/sys/fs/cgroup"), of=Path("/proc/self/cgroup")) -> float:
    """Cores that this process's groups (cgroup v2) may use at a time; infinite where none is limited."""
    least = float("inf")
    try:
        path = next(line[3:] for line in of.read_text().splitlines() if line.startswith("0::"))
        group = root / path.strip("/")
        for folder in (group, *group.parents):
            limit = folder / "cpu.max"
            if limit.exists():
                most, period = limit.read_text().split()
                least = least if most == "max" else min(least, int(most) / int(period))
            if folder == root:
                break
    except (OSError, StopIteration, ValueError):
        pass
    return least


def _sources() -> Path:
    """The kernels' folder: inside the package where it is installed, beside it in the repository."""
    package = Path(__file__).resolve().parent.parent
    for root in (package / "raw_kernels", package.parent / "raw_kernels"):
        if (root / "host" / "attend.c").exists():
            return root / "host"
    raise BuildError(f"{package}: raw_kernels/host/attend.c is missing; install burstmpi again")


# ---------------------------------------------------------------- the struct of abi.h


class _Array(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("step", ctypes.c_int64 * 4)]


class _Vector(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("step", ctypes.c_int64 * 3)]


_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int)
_ARRAYS = ("q", "k", "v", "out", "final", "dout", "dq", "dk", "dv", "final_dq", "final_dk", "final_dv")
_COUNTS = ("batch", "rows_q", "rows_k", "heads", "kv_heads", "d", "dim_v", "type", "first", "fresh_q", "fresh_kv", "threads")


class _Block(ctypes.Structure):
    _fields_ = [
        *((name, _Array) for name in _ARRAYS),
        ("lse", _Vector),
        ("delta", _Vector),
        *((name, ctypes.c_void_p) for name in ("at", "lo", "hi", "pos", "slopes")),
        ("scale", ctypes.c_double),
        ("softcap", ctypes.c_double),
        ("dout_factor", ctypes.c_double),
        *((name, ctypes.c_int64) for name in _COUNTS),
        ("scratch", ctypes.c_void_p),
        ("scratch_bytes", ctypes.c_int64),
        ("progress", _CALLBACK),
        ("interval_ns", ctypes.c_int64),
        ("tiles", ctypes.c_int64),
    ]


class _Library:
    """The kernels of one variant and direction, loaded."""

    def __init__(self, which: tuple[str, str], backward: bool, extra=()):
        direction = "backward" if backward else "forward"
        flags = [*BASE_FLAGS, *FLAGS[which], f"-DBURST_ONLY_{direction.upper()}", *extra]
        name = "-".join(("host", *which, direction))
        try:
            library = compile.load(name, _sources() / "attend.c", [*flags, "-fopenmp"])
        except compile.CompilerError:
            threads = ["-pthread", "-DBURST_PTHREADS"]  # a compiler without OpenMP
            library = compile.load(name, _sources() / "attend.c", [*flags, *threads])
        library.burst_abi.restype = ctypes.c_int64
        if library.burst_abi() != ABI * 1000 + ctypes.sizeof(_Block):
            raise BuildError(f"{name}: was built for another version of burstmpi; empty the cache folder")
        self.scratch_bytes = library.burst_scratch_bytes
        self.scratch_bytes.restype = ctypes.c_int64
        self.scratch_bytes.argtypes = [ctypes.POINTER(_Block), ctypes.c_int64]
        for verb in ("tame", "round", *(("attend_backward", "delta") if backward else ("attend",))):
            found = getattr(library, f"burst_{verb}")
            found.argtypes = [ctypes.POINTER(_Block)]
            setattr(self, verb, found)
        rows, keys = ctypes.c_int64(), ctypes.c_int64()
        library.burst_tile(ctypes.byref(rows), ctypes.byref(keys))
        self.tile_rows, self.tile_keys = rows.value, keys.value


_LIBRARIES: dict[tuple, _Library] = {}


class _Team:
    """Threads that a call may have: OpenMP's do not follow a process into its child, which would wait for them for ever."""

    started = lost = False

    @classmethod
    def of(cls, threads: int) -> int:
        cls.started |= threads > 1
        return 1 if cls.lost else threads

    @classmethod
    def forking(cls) -> None:
        """Look for threads that other libraries may have started by OpenMP."""
        try:
            cls.started |= len(os.listdir("/proc/self/task")) > threading.active_count()
        except OSError:
            pass

    @classmethod
    def forked(cls) -> None:
        cls.lost |= cls.started


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_Team.forking, after_in_child=_Team.forked)


def _library(*key) -> _Library:
    if key not in _LIBRARIES:
        _LIBRARIES[key] = _Library(*key)
    return _LIBRARIES[key]


def _libraries(variants, backward, extra) -> list[_Library]:
    """Several at once: what is not in the cache is compiled side by side."""
    keys = [(which, backward, extra) for which in variants]
    if len(keys) == 1 or all(key in _LIBRARIES for key in keys):
        return [_library(*key) for key in keys]
    with ThreadPoolExecutor(len(keys)) as pool:
        return list(pool.map(lambda key: _library(*key), keys))


def _buildable(isas) -> tuple[str, tuple[str, ...]]:
    """The first of these instruction sets that the compiler knows, and which of ``jump_flags``.

    A compiler may be older than the CPU; and whether there is one at all must be known before the first call.  What was built before
    is taken first, as a compiler's refusal is not kept.
    """
    errors, ways = [], jump_flags()
    for isa in isas:
        probe = lambda jumps: (f"probe-{isa}", _sources() / "probe.c", [*BASE_FLAGS, *FLAGS[variant(isa, "bfloat16")], *jumps])  # noqa: B023, E731
        for jumps in sorted(ways, key=lambda jumps: len(ways) > 1 and not compile.is_built(*probe(jumps))):  # noqa: B023
            try:
                compile.load(*probe(jumps))
                return isa, jumps
            except BuildError as error:
                if not jumps:
                    errors.append(error)
    raise errors[0]


# ---------------------------------------------------------------- the backend


class HostBackend(NumpyBackend):
    """The verbs of ``base.Backend`` in C; memory and plain copies are NumPy's.

    Parameters
    ----------
    isa : a key of ``ISAS``; None takes BURSTMPI_ISA, else the first that this CPU has
    threads : None takes ``threads_here()``
    extra_flags : for the compiler (sanitizers, tile sizes)

    Raises
    ------
    ValueError
        An instruction set that does not exist or that this CPU lacks.
    BuildError
        The kernels cannot be built or loaded.
    """

    name = "host"
    rounds_sums = True

    def __init__(self, isa: str | None = None, threads: int | None = None, extra_flags=()):
        isa = isa or os.environ.get("BURSTMPI_ISA")
        self._forced = bool(isa)
        if isa and isa not in ISAS:
            raise ValueError(f"BURSTMPI_ISA: must be one of {', '.join(ISAS)}, got {isa!r}")
        if isa and missing(isa):
            raise ValueError(f"BURSTMPI_ISA: this CPU has no {', '.join(missing(isa))}, so {isa!r} cannot run")
        self.isa, jumps = _buildable([isa] if isa else available())
        self.threads, self._extra = threads or threads_here(), (*jumps, *extra_flags)

    def _variants(self, dtype) -> list[tuple[str, str]]:
        """The kernels for arrays of that type, then those for short rows and for numbers that the first cannot split."""
        which = variant(self.isa, dtype)
        return [which, ("avx512", "float32")] if which == ("amx", "float32") else [which]

    def _of(self, dtype, backward: bool) -> list[_Library]:
        """The libraries of ``_variants``.

        Each direction is compiled when it is first asked for: a first call waits for its own alone.
        """
        return _libraries(self._variants(dtype), bool(backward), self._extra)

    def prepare(self, dtype, backward: bool) -> None:
        """Compile or load the libraries."""
        self._of(dtype, backward)

    def _unit(self, dtype) -> _Library:
        """Whose tiles are counted, and who rounds: the last variant, in either direction, so that none is compiled for it."""
        which = self._variants(dtype)[-1]
        ready = [x for key in ((which, way, self._extra) for way in (False, True)) if (x := _LIBRARIES.get(key))]
        return ready[0] if ready else self._of(dtype, backward=False)[-1]

    # ------------------------------------------------------------ sizes

    def scratch_bytes(self, dims: Dims, scores: Scores, rows_q: int, rows_k: int, backward: bool) -> int:
        """What the kernels cut their tiles from, all threads together: told by the code that cuts it."""
        block = _Block(rows_q=rows_q, rows_k=rows_k)
        _sizes(block, dims)
        most = 0
        for threads in {self.threads, 1}:  # one in a forked process, which has larger groups then
            block.threads = threads
            most = max(most, *(library.scratch_bytes(block, backward) for library in self._of(dims.dtype, backward)))
        return most

    def tile_count(self, dims: Dims, positions_q, positions_k) -> int:
        """Pairs of a panel of queries and a tile of keys, over batch and heads."""
        library = self._unit(dims.dtype)
        panels, tiles = -(-len(positions_q) // library.tile_rows), -(-len(positions_k) // library.tile_keys)
        return dims.batch * dims.heads * panels * tiles

    # ------------------------------------------------------------ verbs

    def delta(self, dout, out, delta) -> None:
        """delta_i = Σ_c dout_ic out_ic."""
        batch, rows, heads, width = dout.shape
        block = _Block(batch=batch, rows_q=rows, heads=heads, dim_v=width, type=TYPES[_name(dout.dtype)], threads=_Team.of(self.threads))
        block.dout, block.final, block.delta = _array(dout), _array(out), _vector(delta)
        self._of(dout.dtype, backward=True)[0].delta(block)

    def copy(self, target, source) -> None:
        """target[...] = source, rounded once: sums to the caller's type by all threads."""
        if _name(target.dtype) not in ("float16", "bfloat16") or _name(source.dtype) != "float32" or target.ndim != 4:
            return super().copy(target, source)
        batch, rows, heads, width = target.shape
        block = _Block(batch=batch, rows_q=rows, heads=heads, dim_v=width, type=TYPES[_name(target.dtype)], threads=_Team.of(self.threads))
        block.out, block.final = _array(source), _array(target)
        self._unit(target.dtype).round(block)

    def attend(self, q, k, v, out, lse, work: Work, *, first, final=None) -> None:
        """(out, lse) ← (out, lse) ⊕ attend(q, k, v); see ``base.Backend.attend``."""
        if not q.size or not k.shape[1]:
            return self._attend_nothing(out, lse, first, final)
        block = self._block(q, k, v, lse, work)
        block.first = first
        block.out = _array(out)
        if final is not None:
            block.final = _array(final)
        self._run("attend", block, q.dtype, work)

    def _attend_nothing(self, out, lse, first, final) -> None:
        if first:
            self.clear(out)
            self.clear(lse, -np.inf)
        if final is not None:
            self.copy(final, out)

    def attend_backward(self, dout, q, k, v, lse, delta, dq, dk, dv, work: Work, *, fresh_q, fresh_kv, final=(None, None, None)) -> None:
        """Add a block's share to dq, dk, dv; see ``base.Backend.attend_backward``."""
        if not q.size or not k.shape[1]:
            for fresh, total, rounded in zip((fresh_q, fresh_kv, fresh_kv), (dq, dk, dv), final):
                if fresh:
                    self.clear(total)
                if rounded is not None:
                    self.copy(rounded, total)
            return
        block = self._block(q, k, v, lse, work)
        block.fresh_q, block.fresh_kv = fresh_q, fresh_kv
        block.dout, block.delta = _array(dout), _vector(delta)
        block.dq, block.dk, block.dv = _array(dq), _array(dk), _array(dv)
        for name, rounded in zip(("final_dq", "final_dk", "final_dv"), final):
            if rounded is not None:
                setattr(block, name, _array(rounded))
        self._run("attend_backward", block, q.dtype, work)

    def _block(self, q, k, v, lse, work: Work) -> _Block:
        sight, scores = work.sight, work.scores
        block = _Block(threads=_Team.of(self.threads), rows_q=q.shape[1], rows_k=k.shape[1], scale=scores.scale, dout_factor=1.0)
        _sizes(block, Dims(q.shape[0], q.shape[2], k.shape[2], q.shape[3], v.shape[3], q.dtype, lse.dtype))
        block.q, block.k, block.v, block.lse = _array(q), _array(k), _array(v), _vector(lse)
        keep = block.keep = []  # arrays must outlive the call
        for name in ("at", "lo", "hi", "pos"):
            keep.append(np.ascontiguousarray(getattr(sight, name), np.int32))
            setattr(block, name, keep[-1].ctypes.data)
        if scores.softcap is not None:
            block.softcap = scores.softcap
        if scores.slopes is not None:
            keep.append(np.array(scores.slopes, np.float64))
            block.slopes = keep[-1].ctypes.data
        block.scratch, block.scratch_bytes = work.scratch.ctypes.data, work.scratch.nbytes
        return block

    def _run(self, verb: str, block: _Block, dtype, work: Work) -> None:
        """Call a kernel; what ``progress`` raises, or a signal's handler meanwhile, stops it and is raised here."""
        raised = []

        def words():
            """What to tell the kernel, each time it asks.  All of it is inside ``try``, so that a signal between two words is, too."""
            word = GO_ON
            while True:
                try:
                    yield word
                    if not raised:
                        word = CALM if work.progress() else GO_ON
                except GeneratorExit:
                    return
                except BaseException as error:  # KeyboardInterrupt as well: C code cannot be unwound
                    raised.append(error)
                    word = STOP

        told = words()
        next(told)
        block.progress = _CALLBACK(partial(next, told))
        block.interval_ns = IDLE if work.progress is no_progress else PROGRESS
        first, *others = self._of(dtype, verb == "attend_backward")
        pieces = not others or ((self._forced or _keys_seen(work.sight) >= LONG_ROW) and first.tame(block))
        library = first if pieces else others[0]
        status = getattr(library, verb)(block)
        unit = others[-1] if others else first  # as ``_unit``'s, whose tiles are those of either direction
        work.tally.tiles += block.tiles if library is unit else _tiles_of(block, library, unit)
        if raised:
            raise raised[0]
        if status:
            raise ValueError(f"scratch: {work.scratch.nbytes} bytes are too few for this block")


def _tiles_of(block: _Block, library: _Library, unit: _Library) -> int:
    """Tiles that a kernel has computed, in tiles of another: its share of all, rounded up."""
    pairs = lambda x: -(-block.rows_q // x.tile_rows) * -(-block.rows_k // x.tile_keys)  # noqa: E731
    return -(-block.tiles * pairs(unit) // pairs(library))


def _keys_seen(sight) -> float:
    """Keys of a block that one of its queries sees, on average: the same in forward and in backward, which must round alike."""
    low, high = int(sight.pos.min()), int(sight.pos.max()) + 1
    seen = np.minimum(sight.hi, high).astype(np.int64) - np.maximum(sight.lo, low)
    return float(np.maximum(seen, 0).mean()) * len(sight.pos) / (high - low)


def _sizes(block: _Block, dims: Dims) -> None:
    block.batch, block.heads, block.kv_heads = dims.batch, dims.heads, dims.kv_heads
    block.d, block.dim_v, block.type = dims.d, dims.dv, TYPES[_name(dims.dtype)]


def _array(x) -> _Array:
    return _Array(x.ctypes.data, x.strides)


def _vector(x) -> _Vector:
    return _Vector(x.ctypes.data, x.strides)
