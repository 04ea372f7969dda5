"""Building and caching the kernels: one compile for many processes, and nothing loaded that somebody else may have written."""

from __future__ import annotations

import itertools
import os
import platform
import re
import signal
import stat
import subprocess
import sys
import time
import warnings
from pathlib import Path

import host_kit as kit
import numpy as np
import pytest

from burstmpi import backends
from burstmpi.backends import compile, host
from burstmpi.backends.base import Dims
from burstmpi.rules import Rules

HERE = Path(__file__).resolve().parent

needs_compiler = pytest.mark.skipif(not any(map(compile.shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and no library kept from earlier tests."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("BURSTMPI_CACHE", str(folder))
    monkeypatch.setattr(host, "_LIBRARIES", {})
    return folder


@pytest.fixture(autouse=True)
def untold(monkeypatch):
    """A first rank of a node that has warned of nothing yet."""
    monkeypatch.setattr(backends, "_TOLD", set())
    for name in ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "MV2_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "kernels" / "host"
    folder.mkdir(parents=True)
    (folder / "answer.h").write_text("#define ANSWER 42\n")
    (folder / "answer.c").write_text('#include "answer.h"\nint answer(void) { return ANSWER; }\n')
    return folder / "answer.c"


@pytest.fixture
def builds(monkeypatch):
    """Counts runs of the compiler."""
    runs, real = [], subprocess.run
    monkeypatch.setattr(compile.subprocess, "run", lambda *a, **k: runs.append(a) or real(*a, **k))
    return runs


FLAGS = ["-shared", "-fPIC", "-O1"]


@needs_compiler
def test_built_once_and_private(cache, source, builds):
    assert compile.load("answer", source, FLAGS).answer() == 42
    assert compile.load("answer", source, FLAGS).answer() == 42
    assert len(builds) == 1
    (library,) = cache.glob("*.so")
    assert stat.S_IMODE(library.stat().st_mode) == 0o600 and stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert not list(cache.glob(".build-*"))


@needs_compiler
def test_sources_headers_flags_and_compiler_are_in_the_key(cache, source, builds, tmp_path, monkeypatch):
    compile.load("answer", source, FLAGS)
    compile.load("answer", source, [*FLAGS, "-DX"])
    (source.parent / "answer.h").write_text("#define ANSWER 43\n")
    assert compile.load("answer", source, FLAGS).answer() == 43
    wrapper = tmp_path / "mycc"
    wrapper.write_text(f'#!/bin/sh\nexec {compile.compiler()[0]} "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("CC", f"{wrapper} -g0")
    compile.load("answer", source, FLAGS)
    assert builds[-1][0][:2] == [str(wrapper), "-g0"]
    assert len(builds) == 4 == len(list(cache.glob("*.so")))


@needs_compiler
def test_headers_of_cuda_are_not_in_the_key(cache, source, builds):
    compile.load("answer", source, FLAGS)
    (source.parent.parent / "scores.h").write_text("#define CUDA\n")
    compile.load("answer", source, FLAGS)
    assert len(builds) == 1


def test_sources_include_headers_of_their_own_folder_alone():
    """Others are not in the key, so that a change of theirs would not be compiled."""
    folder = host._sources()
    for path in (*folder.glob("*.c"), *folder.glob("*.h")):
        for name in re.findall(r'^\s*#\s*include\s*"(.*)"', path.read_text(), flags=re.M):
            assert "/" not in name and (folder / name).exists(), f"{path.name} includes {name}"


def spoil_flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def spoil_cut(path):
    path.write_bytes(path.read_bytes()[:1000])


def spoil_rights(path):
    path.chmod(0o666)


def spoil_link(path):
    other = path.with_suffix(".else")
    path.rename(other)
    path.symlink_to(other)


def spoil_plain(path):
    """A library that works, but that this code did not seal."""
    path.write_bytes(path.read_bytes()[: -compile.TRAILER])


def sound(path):
    with open(path, "rb") as file:
        return compile._sound(file.fileno()) and not path.is_symlink()


@needs_compiler
@pytest.mark.parametrize("spoil", [spoil_flip, spoil_cut, spoil_rights, spoil_link, spoil_plain])
def test_a_damaged_or_planted_file_is_not_loaded(cache, source, builds, spoil):
    compile.load("answer", source, FLAGS)
    (path,) = cache.glob("*.so")
    os.replace(path, path.with_suffix(".old"))  # what is loaded must not be written to
    path.write_bytes(path.with_suffix(".old").read_bytes())
    path.chmod(0o600)
    assert sound(path)
    spoil(path)
    assert not sound(path)
    assert compile.load("answer", source, FLAGS).answer() == 42
    assert len(builds) == 2 and sound(path)


@needs_compiler
def test_what_is_loaded_is_what_was_looked_at(cache, source, tmp_path, monkeypatch):
    """Whoever may rename in a folder above could put another file there between the look and the load."""
    compile.load("answer", source, FLAGS)
    (path,) = cache.glob("*.so")
    (tmp_path / "evil.c").write_text("int answer(void) { return 13; }\n")
    subprocess.run([*compile.compiler(), *FLAGS, str(tmp_path / "evil.c"), "-o", str(tmp_path / "evil.so")], check=True)
    os.replace(path, tmp_path / "good.so")
    path.write_bytes((tmp_path / "good.so").read_bytes())  # a file that is not loaded yet
    path.chmod(0o600)
    real = compile._sound
    monkeypatch.setattr(compile, "_sound", lambda handle: real(handle) and not os.replace(tmp_path / "evil.so", path))
    assert compile._loaded(path).answer() == 42
    assert b"burstmpi" not in path.read_bytes()  # it was replaced


@needs_compiler
@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="no /proc")
def test_a_number_that_comes_twice_is_no_other_library(cache, source):
    """Programs that daemonise close all files: the next library is opened under the number of one that is loaded."""
    compile.load("answer", source, FLAGS)
    (library,) = cache.glob("*.so")
    (number,) = (n for n in os.listdir("/proc/self/fd") if os.path.realpath(f"/proc/self/fd/{n}") == str(library.resolve()))
    os.close(int(number))
    (source.parent / "answer.h").write_text("#define ANSWER 43\n")
    assert compile.load("answer", source, FLAGS).answer() == 43


FAST = """
import sys, host_kit as kit, numpy as np
from burstmpi.backends import host
q, k, v, dout = kit.arrays(np.random.default_rng(0), 1, 100, 130, 2, 1, 24, 40, "float32")
out, lse = kit.forward(host.HostBackend(sys.argv[1]), q, k, v, causal=True)
true = kit.exact(dout, q, k, v, causal=True)
assert np.abs(out - true[0]).max() < 1e-5 and np.abs(lse - true[1]).max() < 1e-5
assert np.float64(1e-310) * 1.0 != 0
"""


@needs_compiler
@pytest.mark.parametrize("more", ["-ffast-math", "-Ofast"])
def test_a_compiler_that_is_told_to_be_fast_is_told_otherwise(more, cache):
    """It would take 2^x to pieces, and its start-up code makes the whole process flush subnormals."""
    isa = next(x for x in ("avx2", "portable") if not host.missing(x))
    environ = {**os.environ, "CC": f"{compile.compiler()[0]} {more}"}
    done = subprocess.run([sys.executable, "-c", FAST, isa], env=environ, cwd=HERE, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@needs_compiler
@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="no /proc")
def test_a_library_keeps_one_file_open_however_often_it_is_asked_for():
    host.HostBackend()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        host.HostBackend()
    assert len(os.listdir("/proc/self/fd")) == before


@needs_compiler
def test_a_node_without_a_compiler_takes_what_another_built(cache, source, builds, monkeypatch):
    compile.load("answer", source, FLAGS)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    assert compile.load("answer", source, FLAGS).answer() == 42
    monkeypatch.setattr(compile, "cpu", lambda: ("another",))  # a compiler may have made code for its own CPU only
    with pytest.raises(compile.BuildError, match="no C compiler"):
        compile.load("answer", source, FLAGS)
    assert len(builds) == 1


@needs_compiler
def test_the_cpu_is_in_the_key(cache, source, builds, monkeypatch):
    compile.load("answer", source, FLAGS)
    monkeypatch.setattr(compile, "cpuinfo", lambda: {"flags": "sse2"})
    compile.load("answer", source, FLAGS)
    assert len(builds) == 2 == len(list(cache.glob("*.so")))


@needs_compiler
@pytest.mark.parametrize("where", ["lock", "folder", "rename"])
def test_a_cache_that_cannot_be_written_to_means_numpy(cache, monkeypatch, where):
    """Read-only, full, over quota: whenever it comes."""
    full = OSError(28, "No space left on device")
    real = os.open

    def refuse(*a, **k):
        raise full

    if where == "lock":
        monkeypatch.setattr(compile.os, "open", lambda path, flags, *a, **k: refuse() if flags & os.O_CREAT else real(path, flags, *a, **k))
    elif where == "folder":
        monkeypatch.setattr(compile.tempfile, "TemporaryDirectory", refuse)
    else:
        monkeypatch.setattr(compile.os, "replace", refuse)
    with pytest.warns(RuntimeWarning, match="No space left.*set BURSTMPI_CACHE") as told:
        assert backends.choose("auto").name == "numpy"
    assert len(told) == 1


@needs_compiler
def test_a_file_of_another_user_is_not_loaded(cache, source, builds, monkeypatch):
    compile.load("answer", source, FLAGS)
    (path,) = cache.glob("*.so")
    assert compile._loaded(path)
    real, before = os.fstat, path.stat().st_ino

    def fstat(handle):
        state = list(real(handle))
        state[stat.ST_UID] += state[stat.ST_INO] == before
        return os.stat_result(state)

    with monkeypatch.context() as patched:
        patched.setattr(compile.os, "fstat", fstat)
        assert not compile._loaded(path)
        assert compile.load("answer", source, FLAGS).answer() == 42
    assert len(builds) == 2 and path.stat().st_ino != before and compile._loaded(path)


def test_a_folder_that_others_may_write_to_is_refused(cache):
    cache.mkdir()
    cache.chmod(0o777)
    with pytest.raises(compile.BuildError, match="others may write to it .mode 777.*BURSTMPI_CACHE"):
        compile.cache_folder()


def test_a_folder_of_another_user_is_refused(cache, monkeypatch):
    cache.mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    with pytest.raises(compile.BuildError, match="belongs to user .* not to 4242"):
        compile.cache_folder()


def test_no_compiler_means_numpy_and_one_warning(cache, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    with pytest.warns(RuntimeWarning, match="no C compiler found.*install one") as told:
        assert backends.choose("auto").name == "numpy"
    assert len(told) == 1
    with pytest.raises(ValueError, match="backend: 'host' cannot be used: no C compiler"):
        backends.choose("host")


def test_a_cache_that_cannot_be_made_means_numpy(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BURSTMPI_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(host, "_LIBRARIES", {})
    with pytest.warns(RuntimeWarning, match="set BURSTMPI_CACHE"):
        assert backends.choose("auto").name == "numpy"


@pytest.mark.parametrize("wish", ["", "~no-such-user/kernels"], ids=["of-nobody", "of-an-unknown-user"])
def test_no_home_folder_means_numpy(monkeypatch, wish):
    """A container may run a user that has no line in /etc/passwd, and no HOME."""
    import pwd

    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("BURSTMPI_CACHE", wish)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])
    monkeypatch.setattr(host, "_LIBRARIES", {})
    with pytest.warns(RuntimeWarning, match="~.*no folder for compiled kernels .*home.*set BURSTMPI_CACHE") as told:
        assert backends.choose("auto").name == "numpy"
    assert len(told) == 1
    with pytest.raises(ValueError, match="backend: 'host' cannot be used: ~"):
        backends.choose("host")


def script(path, text):
    path.write_text(text)
    path.chmod(0o755)
    return str(path)


def hide_compilers(monkeypatch, folder):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)


def make_slow(monkeypatch, folder):
    def run(words, **_):
        raise subprocess.TimeoutExpired(words, 600)

    monkeypatch.setenv("CC", script(folder / "slow", "#!/bin/sh\n"))
    monkeypatch.setattr(compile.subprocess, "run", run)


def fill(monkeypatch, folder):
    numbers = itertools.count()

    def full(**where):
        raise OSError(28, "No space left on device", f"{where['dir']}/.build-{next(numbers)}")

    monkeypatch.setattr(compile.tempfile, "TemporaryDirectory", full)


def refuse_to_load(monkeypatch, folder):
    numbers = itertools.count()

    def load(path):
        raise OSError(f"/proc/self/fd/{next(numbers)}: failed to map segment from shared object")

    monkeypatch.setattr(compile.ctypes, "CDLL", load)


def lose_sources(monkeypatch, folder):
    monkeypatch.setattr(host, "__file__", str(folder / "burstmpi" / "backends" / "host.py"))


CAUSES = {
    "none": (hide_compilers, "no C compiler found .*; install one, or set CC"),
    "missing": (lambda m, f: m.setenv("CC", "/no/such -O2"), "CC='/no/such -O2': no such compiler; set CC to a C compiler"),
    "half a quotation": (lambda m, f: m.setenv("CC", "'cc"), "CC=.*: no command .*; set CC to a C compiler"),
    "failing": (
        lambda m, f: m.setenv("CC", script(f / "bad", "#!/bin/sh\necho $$ >&2\nexit 3\n")),
        r"bad: does not compile probe.c \(exit code 3\); install a C compiler that does, or set CC",
    ),
    "no program": (lambda m, f: m.setenv("CC", script(f / "text", "\x7fELF")), "text: cannot be run .*; install a C compiler"),
    "slow": (make_slow, "slow: does not compile probe.c in 600 s; install a C compiler"),
    "no folder": (lambda m, f: m.setenv("BURSTMPI_CACHE", "/dev/null/x"), "no folder for compiled kernels .*; set BURSTMPI_CACHE"),
    "no room": (fill, r"cannot be written to \(No space left on device\); set BURSTMPI_CACHE"),
    "not to be loaded": (refuse_to_load, "cannot be loaded; set BURSTMPI_CACHE"),
    "no sources": (lose_sources, "attend.c is missing; install burstmpi again"),
}


@needs_compiler
@pytest.mark.parametrize("cause", CAUSES)
def test_each_cause_is_told_once_with_what_to_do(cache, tmp_path, monkeypatch, cause):
    """Whatever differs from time to time, as the name of a temporary folder, and whatever Python's filters are."""
    arrange, text = CAUSES[cause]
    arrange(monkeypatch, tmp_path)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert [backends.choose("auto").name for _ in range(5)] == ["numpy"] * 5
    (warning,) = told
    assert re.search(f'NumPy serves, many times slower: .*{text}.*; or take backend="numpy", if this is meant', str(warning.message))


def test_another_cause_is_told_as_well(cache, monkeypatch):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for cc in ("/no/such", "/nor/this", "/no/such"):
            monkeypatch.setenv("CC", cc)
            backends.choose("auto")
    assert [re.search("CC='(.*)'", str(x.message))[1] for x in told] == ["/no/such", "/nor/this"]


@pytest.mark.parametrize("environ", [{"OMPI_COMM_WORLD_LOCAL_RANK": "1"}, {"MPI_LOCALRANKID": "3"}, {"MV2_COMM_WORLD_LOCAL_RANK": "1"}, {"SLURM_LOCALID": "7"}])
def test_the_first_rank_of_a_node_warns_for_all(cache, monkeypatch, environ):
    ((name, _),) = environ.items()
    monkeypatch.setenv("CC", "/no/such")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monkeypatch.setenv(name, environ[name])
        assert backends.choose("auto").name == "numpy"
    monkeypatch.setenv(name, "0")
    monkeypatch.setenv("SLURM_LOCALID", "0" if name == "SLURM_LOCALID" else "5")  # of a step in which mpirun starts ranks of its own
    with pytest.warns(RuntimeWarning, match="NumPy serves"):
        assert backends.choose("auto").name == "numpy"


@needs_compiler
def test_a_compiler_may_write_what_it_likes(cache, source, tmp_path, monkeypatch):
    """Bytes that are no UTF-8, as in another language."""
    good = compile.compiler()[0]
    monkeypatch.setenv("CC", script(tmp_path / "cc", f"#!/bin/sh\nprintf '\\377 warnung\\n' >&2; exec {good} \"$@\"\n"))
    assert compile.load("x", source, ["-shared", "-fPIC"]).answer() == 42
    source.write_text("no C")
    with pytest.raises(compile.CompilerError, match="warnung"):
        compile.load("x", source, ["-shared", "-fPIC"])


@needs_compiler
@pytest.mark.skipif(compile.fcntl is None or not hasattr(os, "fork"), reason="no locks, or no fork")
def test_a_forked_process_keeps_no_lock(cache):
    """Another thread may fork while this one compiles, and what it forks may live for ever."""
    cache.mkdir()
    with compile._alone(cache / "x.so"):
        child = os.fork()
        if not child:
            time.sleep(60)
            os._exit(0)
    try:
        with open(cache / "x.lock", "wb") as file:
            compile.fcntl.flock(file, compile.fcntl.LOCK_EX | compile.fcntl.LOCK_NB)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@needs_compiler
def test_a_compiler_that_fails_says_why(cache, source):
    source.write_text("int answer(void) { return; nonsense }\n")
    with pytest.raises(compile.BuildError, match="nonsense"):
        compile.load("answer", source, FLAGS)


def test_unknown_or_missing_instruction_sets_are_refused(monkeypatch):
    with pytest.raises(ValueError, match="must be one of .*'mmx'"):
        host.HostBackend("mmx")
    monkeypatch.setenv("BURSTMPI_ISA", "avx512")
    monkeypatch.setattr(host, "cpu_flags", lambda: frozenset({"sse2", "avx2", "fma"}))
    with pytest.raises(ValueError, match="this CPU has no avx512"):
        host.HostBackend()
    monkeypatch.delenv("BURSTMPI_ISA")
    assert host.available() == ["avx2", "portable"]


def test_tile_registers_need_the_systems_permission(monkeypatch):
    monkeypatch.setattr(host, "cpu_flags", lambda: frozenset(host.ISAS["amx"]))
    monkeypatch.setattr(host, "tiles_permitted", lambda: True)
    assert host.available()[:2] == ["amx", "amx-bf16"]
    monkeypatch.setattr(host, "tiles_permitted", lambda: False)
    assert host.missing("amx") == ["permission for tile registers"] and not {"amx", "amx-bf16"} & set(host.available())
    with pytest.raises(ValueError, match="no permission for tile registers, so 'amx' cannot run"):
        host.HostBackend("amx")


@pytest.mark.parametrize("nbytes, there", [(16, ["portable"]), (32, ["portable", "sve"]), (64, ["sve", "portable"]), (256, ["portable"])])
def test_arms_vectors_are_taken_where_they_are_longer_than_neons(monkeypatch, nbytes, there):
    monkeypatch.setattr(compile, "cpuinfo", lambda: {"Features": "fp asimd sve", "CPU implementer": "0x46"})
    monkeypatch.setattr(host, "sve_bytes", lambda: nbytes)
    assert host.available() == there
    assert host.variant("sve", "bfloat16") == ("sve", "float32") and host.variant("sve", "float64") == ("sve", "float64")


@needs_compiler
def test_the_environment_forces_an_instruction_set(monkeypatch):
    for isa in host.available():
        monkeypatch.setenv("BURSTMPI_ISA", isa)
        made = host.HostBackend(threads=1)
        assert made.isa == isa and made._variants(np.dtype(np.float64)) == [host.variant(isa, "float64")]


def test_vdpbf16ps_is_the_default_only_where_it_is_fast(monkeypatch):
    monkeypatch.setattr(host, "cpu_flags", lambda: frozenset(host.ISAS["avx512bf16"]))
    monkeypatch.setattr(host, "cpu_vendor", lambda: "AuthenticAMD")
    assert host.available() == ["avx512bf16", "avx512", "avx2", "portable"]
    monkeypatch.setattr(host, "cpu_vendor", lambda: "GenuineIntel")
    assert host.available() == ["avx512", "avx2", "portable", "avx512bf16"]


def compile_with(folder, option):
    """Whether the compiler takes an option."""
    words = [*compile.compiler(), option, "-x", "c", "-c", "-", "-o", str(folder.parent / "empty.o")]
    return subprocess.run(words, input="int x;", text=True, capture_output=True).returncode == 0


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="an option of x86 assemblers")
def test_jumps_are_padded_where_the_cpu_wants_it(cache, monkeypatch):
    """Skylake gets a flag that the compiler knows, with other machine code and the same bits; no other CPU gets one."""
    skylake = {**compile.cpuinfo(), "vendor_id": "GenuineIntel", "cpu family": "6", "model": "85"}
    q, k, v, _ = kit.arrays(np.random.default_rng(0), 1, 30, 40, 2, 1, 8, 8, "float32")
    outs, codes = [], []
    if not any(compile_with(cache, option) for option in ("-Wa,-mbranches-within-32B-boundaries", "-mbranches-within-32B-boundaries")):
        pytest.skip("neither GCC's assembler nor clang here knows the option")
    for cpu in ({**skylake, "model": "106"}, {**skylake, "vendor_id": "AuthenticAMD"}, skylake):
        monkeypatch.setattr(compile, "cpuinfo", lambda cpu=cpu: cpu)
        monkeypatch.setattr(host, "_LIBRARIES", {})
        backend = host.HostBackend("portable", threads=1, extra_flags=("-O1",))
        assert any("32B" in flag for flag in backend._extra) == (cpu is skylake)
        outs.append(kit.forward(backend, q, k, v, causal=True)[0].tobytes())
        codes.append(max(cache.glob("host-*.so"), key=lambda path: path.stat().st_mtime_ns).read_bytes())
    assert len(set(outs)) == 1 and codes[0] == codes[1] != codes[2]


@needs_compiler
def test_a_compiler_that_cannot_pad_jumps_builds_all_the_same(cache, builds, monkeypatch):
    """And the next process does not ask it again."""
    monkeypatch.setattr(host, "jump_flags", lambda: [("-Wa,--no-such-flag",), ("--no-such-flag",), ()])
    assert host.HostBackend("portable")._extra == () and len(builds) == 3
    assert host.HostBackend("portable")._extra == () and len(builds) == 3


# A file system that cannot lock, as Lustre often: put before a program that has imported ``compile``, and a folder.
NO_FLOCK = """
import os
real = compile.fcntl.flock

def flock(file, how):
    if os.readlink(f"/proc/self/fd/{file.fileno()}").startswith(FOLDER):
        raise OSError(38, "Function not implemented")
    real(file, how)

compile.fcntl.flock = flock
"""


@needs_compiler
@pytest.mark.parametrize("locks, processes", [("cache", 64), ("temporary", 16)])
def test_many_processes_and_one_compile(cache, source, tmp_path, locks, processes):
    """Whether the cache's file system has locks or only the node's temporary folder."""
    if locks == "temporary" and not os.path.isdir("/proc/self/fd"):
        pytest.skip("no /proc")
    log = tmp_path / "log"
    wrapper = tmp_path / "mycc"
    wrapper.write_text(f'#!/bin/sh\necho run >> {log}\nsleep 1\nexec {compile.compiler()[0]} "$@"\n')
    wrapper.chmod(0o755)
    program = tmp_path / "one.py"
    program.write_text(
        "import importlib.util, pathlib, sys\n"
        f"spec = importlib.util.spec_from_file_location('compile', {compile.__file__!r})\n"
        "compile = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(compile)\n"
        + NO_FLOCK.replace("FOLDER", repr(str(cache))) * (locks == "temporary")
        + f"print(compile.load('answer', pathlib.Path({str(source)!r}), {FLAGS!r}).answer())\n"
    )
    (tmp_path / "tmp").mkdir()
    environ = {**os.environ, "CC": str(wrapper), "TMPDIR": str(tmp_path / "tmp")}
    ranks = [subprocess.Popen([sys.executable, str(program)], env=environ, stdout=subprocess.PIPE) for _ in range(processes)]
    assert [rank.communicate(timeout=120)[0].strip() for rank in ranks] == [b"42"] * processes
    assert log.read_text().split() == ["run"]
    assert len(list(cache.glob("*.so"))) == 1
    left = [(path.name.split("-")[:2], stat.S_IMODE(path.stat().st_mode)) for path in (tmp_path / "tmp").iterdir()]
    assert left == [(["burstmpi", str(os.geteuid())], 0o600)] * (locks == "temporary")


@needs_compiler
@pytest.mark.skipif(compile.fcntl is None, reason="no locks")
@pytest.mark.parametrize("planted", ["a link", "another user's", "a pipe"])
def test_a_lock_that_another_user_has_planted_is_not_waited_for(cache, source, tmp_path, builds, monkeypatch, planted):
    """Whoever can take a lock could keep all of us waiting."""
    real, asked = os.fstat, []
    monkeypatch.setattr(compile.tempfile, "tempdir", str(tmp_path))
    target = tmp_path / "target"
    target.write_text("untouched")
    lock = tmp_path / f"burstmpi-{os.geteuid()}-{compile._file(cache, f'answer-{compile._what(source, FLAGS)}', compile.compiler()).stem}.lock"
    if planted == "a link":
        lock.symlink_to(target)
    elif planted == "a pipe":
        os.mkfifo(lock, 0o600)
    else:
        lock.touch(0o666)

    def flock(file, how):
        asked.append(real(file.fileno()).st_ino)
        raise OSError(38, "Function not implemented")

    def fstat(handle):
        state = list(real(handle))
        state[stat.ST_UID] += planted == "another user's" and state[stat.ST_INO] == lock.stat().st_ino
        return os.stat_result(state)

    monkeypatch.setattr(compile.fcntl, "flock", flock)
    monkeypatch.setattr(compile.os, "fstat", fstat)
    assert compile.load("answer", source, FLAGS).answer() == 42
    assert asked == [path.stat().st_ino for path in cache.glob("*.lock")] and len(builds) == 1
    assert target.read_text() == "untouched"


EIGHTH = """
import sys
import numpy as np
sys.path.insert(0, {here!r})
import host_kit as kit
from burstmpi.backends.host import HostBackend
q, k, v, _ = kit.arrays(np.random.default_rng(0), 1, 30, 40, 2, 1, 8, 8, "float32")
out, lse = kit.forward(HostBackend("portable", threads=1), q, k, v, causal=True)
print(np.abs(out - kit.exact(q, q, k, v, causal=True)[0]).max() < 1e-5, out.tobytes().hex())
"""


@needs_compiler
def test_eight_processes_and_one_compile_of_the_kernels(cache, tmp_path):
    """The real ones, without optimizing: the question is who compiles."""
    log, wrapper, program = tmp_path / "log", tmp_path / "mycc", tmp_path / "eighth.py"
    wrapper.write_text(f'#!/bin/sh\nfor x in "$@"; do case $x in *.c) basename $x >> {log};; esac; done\nexec {compile.compiler()[0]} "$@" -O0\n')
    wrapper.chmod(0o755)
    program.write_text(EIGHTH.format(here=str(HERE)))
    environ = {**os.environ, "CC": str(wrapper), "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    ranks = [subprocess.Popen([sys.executable, str(program)], env=environ, stdout=subprocess.PIPE, text=True) for _ in range(8)]
    told = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert len(set(told)) == 1 and told[0].startswith("True ")
    assert sorted(log.read_text().split()) == ["attend.c", "probe.c"] and len(list(cache.glob("*.so"))) == 2


@needs_compiler
def test_a_compiler_without_openmp_builds_with_posix_threads(cache, tmp_path, builds, monkeypatch):
    refuse = 'for x in "$@"; do case $x in -fopenmp) echo no OpenMP >&2; exit 1;; esac; done\n'
    monkeypatch.setenv("CC", script(tmp_path / "mycc", f'#!/bin/sh\n{refuse}exec {compile.compiler()[0]} "$@" -O0\n'))
    q, k, v, _ = kit.arrays(np.random.default_rng(0), 1, 30, 40, 2, 1, 8, 8, "float32")
    out, _ = kit.forward(host.HostBackend("portable", threads=2), q, k, v)
    assert np.abs(out - kit.exact(q, q, k, v)[0]).max() < 1e-5
    assert ["-DBURST_PTHREADS" in run[0] for run in builds] == [False, False, True]  # the probe, then the kernels twice


@needs_compiler
@pytest.mark.parametrize("backward", [False, True])
def test_a_direction_is_compiled_when_it_is_asked_for(cache, backward):
    """Counting tiles, which both have alike, asks for none."""
    made = host.HostBackend("portable", threads=1, extra_flags=("-O0",))
    dims = Dims(1, 1, 1, 8, 8, np.dtype(np.float32), np.dtype(np.float32))
    assert made.scratch_bytes(dims, Rules().scores(8), 30, 40, backward) > 0
    assert made.tile_count(dims, range(30), range(40)) > 0
    assert len(list(cache.glob(f"host-*-{'backward' if backward else 'forward'}-*.so"))) == 1 and len(list(cache.glob("host-*.so"))) == 1


SANITIZED = """
import sys
import numpy as np
sys.path.insert(0, {here!r})
import host_kit as kit
rng = np.random.default_rng(0)
backend = kit.backend_of({isa!r}, threads=3, extra_flags={flags!r})
cases = [(130, 201, 4, 2, 40, 24, dict(causal=True)), (1, 700, 2, 1, 3, 65, dict()), (97, 31, 2, 2, 64, 64, dict(window=(9, 4), softcap=5.0)),
         (300, 300, 2, 2, 33, 1, dict(alibi_slopes=(0.5, 0.1), documents=(0, 150, 300)))]
for dtype in {dtypes!r}:
    for rows_q, rows_k, heads, kv_heads, d, dv, options in cases:
        q, k, v, dout = kit.arrays(rng, 1, rows_q, rows_k, heads, kv_heads, d, dv, dtype)
        k[:, 3] = np.nan
        cuts = (rows_k // 2,)
        out, lse = kit.forward(backend, q, k, v, cuts=cuts, **options)
        for total, like in zip(kit.backward(backend, dout, q, k, v, out, lse, cuts=cuts, **options), (q, k, v)):
            backend.copy(np.empty_like(like), total)
        kit.rounded_gradients(backend, dout, q, k, v, out, lse, rows_q // 3, rows_k // 2, "within", **options)
print("finished")
"""


# The fastest and the plainest here; the others by -m slow, as each takes half a minute.
@needs_compiler
@pytest.mark.parametrize("isa", kit.isas(slow=("amx-bf16", "avx512", "avx2")))
def test_sanitizers_report_nothing(isa, tmp_path):
    kit.flags_for(isa)  # skips what cannot run
    found = subprocess.run([*compile.compiler(), "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    if not os.path.isabs(found):
        pytest.skip("this compiler has no libasan")
    flags = ("-fsanitize=address,undefined", "-fno-sanitize=alignment", "-fno-sanitize-recover=undefined", "-O1", "-g", "-DBURST_GUARD")
    dtypes = {"amx": ["bfloat16", "float32"], "amx-bf16": ["bfloat16"], "avx512bf16": ["bfloat16"], "portable": ["float32", "float16", "float64"]}.get(isa, ["float32", "float16", "float64"])
    program = tmp_path / "sanitized.py"
    program.write_text(SANITIZED.format(here=str(HERE), isa=isa, flags=flags, dtypes=dtypes))
    environ = {
        **os.environ, "BURSTMPI_CACHE": str(tmp_path / "cache"), "LD_PRELOAD": found,
        "ASAN_OPTIONS": "detect_leaks=0", "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONMALLOC": "malloc",
    }  # fmt: skip
    done = subprocess.run([sys.executable, str(program)], env=environ, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and done.stdout == "finished\n", done.stderr[-3000:]


def test_the_struct_is_that_of_the_header():
    """Field by field, in the order of abi.h."""
    text = (host._sources() / "abi.h").read_text()
    body = re.sub(r"/\*.*?\*/", "", text[text.index("typedef struct {\n    burst_array q") :], flags=re.S)
    names = []
    for line in body[body.index("{") + 1 : body.index("} burst_block")].split(";"):
        line = re.sub(r"\(\*(\w+)\)\(void\)", r"\1", line.strip())
        line = re.sub(r"^(const )?\w+ ", "", line)
        names += [name.strip(" *") for name in line.split(",") if name.strip()]
    assert names == [name for name, _ in host._Block._fields_]


def test_nothing_is_computed_from_empty_blocks():
    backend = host.HostBackend(threads=1)
    from host_kit import Work
    from burstmpi.rules import Rules, Sight

    empty = np.zeros(0, np.int32)
    work = Work(Sight(empty, empty, empty, np.arange(5, dtype=np.int32)), Rules().scores(4), np.zeros(0, np.uint8))
    q, k = np.zeros((1, 0, 2, 4), np.float32), np.ones((1, 5, 2, 4), np.float32)
    lse = np.zeros((1, 2, 0), np.float32)
    backend.attend(q, k, k, q.copy(), lse, work, first=True)
    dk = np.full(k.shape, np.nan, np.float32)
    backend.attend_backward(q, q, k, k, lse, lse, q.copy(), dk, dk, work, fresh_q=True, fresh_kv=True)
    assert (dk == 0).all()
    q, k = np.ones((1, 3, 2, 4), np.float32), np.zeros((1, 0, 2, 4), np.float32)
    rows = np.zeros(3, np.int32)
    work = Work(Sight(rows, rows, rows, empty), Rules().scores(4), np.zeros(0, np.uint8))
    out, lse = np.full(q.shape, np.nan, np.float32), np.full((1, 2, 3), np.nan, np.float32)
    final = np.full(q.shape, np.nan, np.float32)
    backend.attend(q, k, k, out, lse, work, first=True, final=final)
    assert (final == 0).all() and np.isneginf(lse).all()


@needs_compiler
@pytest.mark.parametrize("other", ["", "clang"], ids=["cc", "clang"])
@pytest.mark.parametrize("which", list(host.FLAGS), ids="-".join)
def test_no_variant_has_a_warning(which, other):
    wanted = {"portable": compile.platform.machine(), "sve": "aarch64"}.get(which[0], "x86_64")
    if compile.platform.machine() != wanted:
        pytest.skip(f"{which[0]} is of {wanted}")  # the compiler is asked, not the CPU
    if other and compile.shutil.which(other) is None:
        pytest.skip(f"no {other}")
    source = host._sources() / "attend.c"
    flags = [flag for flag in (*host.BASE_FLAGS, *host.FLAGS[which]) if flag not in ("-O3", "-shared")]
    threads = ["-pthread", "-DBURST_PTHREADS"] if other else ["-fopenmp"]  # clang's OpenMP is a package of its own
    command = [*([other] if other else compile.compiler()), *flags, "-Wall", "-Wextra", "-Werror", *threads, "-fsyntax-only", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
