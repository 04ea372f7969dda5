"""Turn C sources into a loaded library: the system's compiler at first use, a private cache afterwards.

    folder   = $BURSTMPI_CACHE, else $XDG_CACHE_HOME/burstmpi, else ~/.cache/burstmpi
    file     = <name>-<what>-<who>.so, owner only (0600), with a digest of its own content behind it
    what     = hash(source, headers of its folder, flags, CPU, libc)
    who      = hash(compiler's path, arguments, size and time)

A file appears by rename, so nobody ever sees half of one.  One process of a node compiles while the others wait for its
lock: in the cache, or in the node's temporary folder where the cache's file system has no flock.  Where neither has,
all compile and the last rename stays.

What could have been written or damaged by anybody else is not loaded: the folder and the file must belong to this user
and be writable by nobody else, and the digest must be right; what is loaded is the very file that was looked at.

A node without a compiler takes what any compiler has made of the same sources for the same CPU.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path

try:
    import fcntl
except ImportError:  # no such locks here
    fcntl = None

__all__ = ["BuildError", "CompilerError", "cache_folder", "compiler", "load"]

MAGIC = b"burstmpi"
NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
TRAILER = 32 + len(MAGIC)  # sha256 of all before it, then the magic


class BuildError(RuntimeError):
    """No library: the first line of the text says what is missing and what to do, the same for the same cause."""


class CompilerError(BuildError):
    """The compiler was run and failed: other flags may do."""


def compiler() -> list[str]:
    """Find the C compiler as a command: $CC, else cc, gcc or clang."""
    if wish := os.environ.get("CC"):
        try:
            words = shlex.split(wish)
        except ValueError as error:  # a quotation that does not end
            raise BuildError(f"CC={wish!r}: no command ({error}); set CC to a C compiler, or unset it") from None
        if not words or shutil.which(words[0]) is None:
            raise BuildError(f"CC={wish!r}: no such compiler; set CC to a C compiler, or unset it")
        return [shutil.which(words[0]), *words[1:]]
    for name in ("cc", "gcc", "clang"):
        if path := shutil.which(name):
            return [path]
    raise BuildError("no C compiler found (cc, gcc or clang); install one, or set CC to its path")


def cache_folder() -> Path:
    """Give the private folder for built libraries; make it where it is missing.

    Raises
    ------
    BuildError
        It cannot be made, or belongs to another user, or others may write to it.
    """
    shared = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = Path(os.environ.get("BURSTMPI_CACHE") or f"{shared}/burstmpi")
    try:
        folder = folder.expanduser()  # a RuntimeError where that user, or this one, has no home
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        state = folder.stat()
    except (OSError, RuntimeError) as error:
        raise BuildError(f"{folder}: no folder for compiled kernels ({error}); set BURSTMPI_CACHE to one") from None
    problem = _foreign(state)
    if problem:
        raise BuildError(f"{folder}: {problem}; set BURSTMPI_CACHE to a folder of your own (chmod 700)")
    return folder


def _foreign(state) -> str | None:
    """What is wrong with the owner or the rights of a file or folder, or None."""
    me = os.geteuid() if hasattr(os, "geteuid") else state.st_uid
    if state.st_uid != me:
        return f"belongs to user {state.st_uid}, not to {me}"
    if state.st_mode & 0o022:
        return f"others may write to it (mode {stat.S_IMODE(state.st_mode):o})"
    return None


def load(name: str, main: Path, flags: list[str]) -> ctypes.CDLL:
    """Compile ``main`` (and what it includes from its folder) with these flags, or take it from the cache.

    Raises
    ------
    BuildError
        No compiler, no folder, or the compiler's own words.
    """
    folder, what = cache_folder(), f"{name}-{_what(main, flags)}"
    try:
        command = compiler()
    except BuildError:
        for path in sorted(folder.glob(f"{what}-*.so")):
            if library := _loaded(path):
                return library
        raise
    path = _file(folder, what, command)
    if library := _loaded(path):
        return library
    try:
        with _alone(path):
            if library := _loaded(path):  # another process has built it while this one waited
                return library
            _build(command, flags, main, path)
    except OSError as error:
        raise BuildError(f"{folder}: cannot be written to ({error.strerror}); set BURSTMPI_CACHE to a folder that can") from None
    if library := _loaded(path):
        return library
    raise BuildError(f"{path}: is not what was written there; set BURSTMPI_CACHE to a folder of your own")


def is_built(name: str, main: Path, flags: list[str]) -> bool:
    """Whether ``load`` finds it in the cache; whether it is sound is seen when it is loaded."""
    try:
        return _file(cache_folder(), f"{name}-{_what(main, flags)}", compiler()).exists()
    except BuildError:
        return False


def _file(folder: Path, what: str, command) -> Path:
    return folder / f"{what}-{_who(command)}.so"


def _what(main: Path, flags) -> str:
    """Hash what decides the machine code; a source may include headers of its own folder alone."""
    digest = hashlib.sha256(repr((flags, cpu(), platform.libc_ver())).encode())
    for source in [main, *sorted(main.parent.glob("*.h"))]:
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:24]


def _who(command) -> str:
    state = os.stat(command[0])
    told = command, os.path.realpath(command[0]), state.st_size, state.st_mtime_ns
    return hashlib.sha256(repr(told).encode()).hexdigest()[:12]


@cache
def cpuinfo() -> dict:
    """The first CPU of /proc/cpuinfo; empty where there is no such file."""
    found = {}
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if not line.strip():
                    break
                name, _, value = line.partition(":")
                found.setdefault(name.strip(), value.strip())
    except OSError:
        pass
    return found


def cpu() -> tuple:
    """The kind of CPU: a compiler may be told, or tell itself, to make code for no other."""
    named = ("vendor_id", "cpu family", "model", "flags", "CPU implementer", "CPU part", "Features")
    found = cpuinfo()
    return platform.machine(), *(found.get(name) for name in named)


_LIBRARIES: dict[tuple[int, int], ctypes.CDLL] = {}  # by the device and number of their files, which stay open


def _loaded(path: Path) -> ctypes.CDLL | None:
    """The library of a cached file that is this user's own, whole and unchanged; None where there is no such file."""
    try:
        handle = os.open(path, os.O_RDONLY | NOFOLLOW)
    except OSError:
        return None
    if not _sound(handle):
        os.close(handle)
        return None
    state = os.fstat(handle)
    file = state.st_dev, state.st_ino
    if file in _LIBRARIES:
        os.close(handle)
        return _LIBRARIES[file]
    # By its number, and open from now on: by its path it might be another file by now.  Each in words of its own: somebody may close our
    # files, a number then comes twice, and by the same words the loader would give back the library that it knows.
    by_number = f"/proc/self/fd/{'./' * len(_LIBRARIES)}{handle}"
    try:
        _LIBRARIES[file] = ctypes.CDLL(by_number if os.path.exists(by_number) else str(path))
    except OSError as error:
        os.close(handle)
        raise BuildError(f"{path}: cannot be loaded; set BURSTMPI_CACHE to a folder that allows it\n{error}") from None
    return _LIBRARIES[file]


def _sound(handle: int) -> bool:
    """Whether an open file is this user's own, whole and unchanged."""
    state = os.fstat(handle)
    if not stat.S_ISREG(state.st_mode) or _foreign(state):
        return False
    with os.fdopen(handle, "rb", closefd=False) as file:
        content = file.read()
    body, digest, magic = content[:-TRAILER], content[-TRAILER : -len(MAGIC)], content[-len(MAGIC) :]
    return magic == MAGIC and hashlib.sha256(body).digest() == digest


@contextmanager
def _alone(path: Path):
    """Let one process of this node at a time in, or all where no file can be locked, which is only slower."""
    with ExitStack() as files:
        if not _locked(files, path.with_suffix(".lock")):
            with suppress(OSError):  # a folder of all users: another one may have made that file, or a link
                name = f"burstmpi-{path.parent.stat().st_uid}-{path.stem}.lock"
                _locked(files, Path(tempfile.gettempdir(), name))
        yield


def _locked(files: ExitStack, path: Path) -> bool:
    """Wait for the lock of a file, until ``files`` are closed; False where there are no locks or it is not this user's own."""
    file = files.enter_context(open(os.open(path, os.O_RDWR | os.O_CREAT | NOFOLLOW, 0o600), "wb"))
    state = os.fstat(file.fileno())
    if fcntl is None or not stat.S_ISREG(state.st_mode) or _foreign(state):
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError:
        return False
    files.callback(fcntl.flock, file, fcntl.LOCK_UN)  # closing alone would leave it with a process that was forked meanwhile
    return True


def _build(command, flags, main: Path, path: Path) -> None:
    """Compile into a private folder, seal, and move into place."""
    words, advice = [*command, *flags, str(main)], "install a C compiler that does, or set CC to one"
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".build-") as work:
        target = Path(work) / path.name
        try:
            done = subprocess.run([*words, "-o", str(target), "-lm"], capture_output=True, text=True, errors="replace", timeout=600, stdin=subprocess.DEVNULL)
        except subprocess.TimeoutExpired:
            raise BuildError(f"{command[0]}: does not compile {main.name} in 600 s; {advice}") from None
        except OSError as error:
            raise BuildError(f"{command[0]}: cannot be run ({error}); install a C compiler, or set CC to one") from None
        if done.returncode or not target.exists():
            told = f"{shlex.join(words)}\n{done.stderr[-2000:]}".strip()
            raise CompilerError(f"{command[0]}: does not compile {main.name} (exit code {done.returncode}); {advice}\n{told}")
        with open(target, "ab") as file:
            body = target.read_bytes()
            file.write(hashlib.sha256(body).digest() + MAGIC)
        os.chmod(target, 0o600)
        os.replace(target, path)
