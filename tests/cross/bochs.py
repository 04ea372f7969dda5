"""Run a static x86-64 Linux program on an emulated CPU with AVX-512 and AMX: Bochs, with machine.c for a ROM.

    python tests/cross/bochs.py --get FOLDER       # Debian's packages, unpacked there by this machine's own apt; 200 MB, no root
    BURSTMPI_BOCHS=FOLDER python tests/cross/bochs.py PROGRAM INPUT OUTPUT

The program has one thread and two files: the input, to be read once, and the output.  Its exit status is passed on.
"""

from __future__ import annotations

import argparse
import os
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

SUITE = "trixie"  # Bochs 3.0: 2.7 has no AMX, and in Debian's 3.1 a 64-bit idiv is wrong
PACKAGES = ("bochs", "bochs-term", "ncurses-base")
KEYS = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
HERE = Path(__file__).resolve().parent
MEGABYTES = 1024
PAGE = 4096
SECONDS = 540  # less than callers wait: Bochs would outlive them
CONFIGURATION = """
config_interface: textconfig
display_library: term
cpu: model=sapphire_rapids, ips=100000000, reset_on_triple_fault=0
memory: guest={megabytes}, host={megabytes}
romimage: file={work}/rom
vgaromimage: file={root}/usr/share/bochs/VGABIOS-lgpl-latest
ata0-master: type=disk, path={work}/disk, mode=flat
parport1: enabled=1, file={work}/results
port_e9_hack: enabled=1
clock: sync=none
log: {work}/log
panic: action=fatal
error: action=report
info: action=report
debug: action=ignore
"""


def get(root: Path) -> None:
    """Unpack Bochs and all it needs, libc too, from the mirror that this machine takes its Debian packages from."""
    words = ["apt-get", "indextargets", "--format", "$(LABEL)|$(REPO_URI)", "Created-By: Packages"]
    known = [line.split("|") for line in subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()]
    mirrors = [uri for label, uri in known if label == "Debian"]
    if not mirrors:
        raise SystemExit("apt: no source of Debian's packages is known here; apt-get update may help")
    signed = f"[signed-by={KEYS}] " if KEYS.exists() else ""
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        for name in ("lists/partial", "cache/archives/partial"):
            (work / name).mkdir(parents=True)
        (work / "status").touch()
        (work / "list").write_text(f"deb {signed}{mirrors[0]} {SUITE} main\n")
        places = {"Etc::sourcelist": "list", "Etc::sourceparts": "none", "State::lists": "lists", "State::status": "status", "Cache": "cache",
                  "Cache::archives": "cache/archives"}  # fmt: skip
        apt = ["apt-get", "-qq", *(f"-oDir::{name}={work / place}" for name, place in places.items()), "-oAPT::Sandbox::User="]
        subprocess.run([*apt, "update"], check=True)
        subprocess.run([*apt, "install", "--download-only", "--no-install-recommends", "--yes", *PACKAGES], check=True)
        for package in sorted((work / "cache/archives").glob("*.deb")):
            subprocess.run(["dpkg-deb", "-x", str(package), str(root)], check=True)


def rom(to: Path) -> None:
    """Compile machine.c: 64 KiB that end at 4 GiB, with the reset vector 16 bytes before."""
    flags = ["-O2", "-ffreestanding", "-nostdlib", "-static", "-no-pie", "-fpie", "-mgeneral-regs-only", "-mno-red-zone", "-fno-stack-protector",
             "-fcf-protection=none", "-fno-asynchronous-unwind-tables", "-fno-tree-loop-distribute-patterns"]  # fmt: skip
    places = ",".join(["-Wl,--build-id=none", "--oformat=binary", "-Ttext=0xffff1000", "--section-start=.boot=0xffff0000",
                       "--section-start=.reset=0xfffffff0", "-e0"])  # fmt: skip
    subprocess.run(["gcc", *flags, places, str(HERE / "machine.c"), "-o", str(to)], check=True)


def image(program: bytes, given: bytes) -> bytes:
    """The disk: sector 0 as machine.c wants it, then memory from the program's first page on: program, stack, input."""
    entry, table = struct.unpack_from("<QQ", program, 24)
    size, count = struct.unpack_from("<HH", program, 54)
    parts = [struct.unpack_from("<IIQQQQQQ", program, table + i * size) for i in range(count)]
    parts = [(at, start, in_file, in_memory) for kind, _, at, start, _, in_file, in_memory, _ in parts if kind == 1]
    load = min(start for _, start, *_ in parts) // PAGE * PAGE
    up = lambda n: -(-n // PAGE) * PAGE  # noqa: E731
    top = up(max(start + in_memory for _, start, _, in_memory in parts))
    memory = bytearray(top - load)
    for at, start, in_file, _ in parts:
        memory[start - load : start - load + in_file] = program[at : at + in_file]
    words = b"program\0input\0output\0" + bytes(range(16))
    stack = top + (1 << 20)
    names, random = (stack + 1024 + i for i in (0, 8, 14)), stack + 1024 + 21
    auxiliary = {3: load + table, 4: size, 5: count, 6: PAGE, 9: entry, 25: random, 0: 0}
    start = struct.pack("<4Q", 3, *names) + bytes(16) + b"".join(struct.pack("<QQ", *pair) for pair in auxiliary.items())
    memory += bytes(1 << 20) + start.ljust(1024, b"\0") + words
    memory += bytes(-len(memory) % PAGE)
    where = load + len(memory)
    memory += given + bytes(-len(given) % PAGE)
    heap, end = load + len(memory), MEGABYTES << 20
    disk = struct.pack("<8Q", load, len(memory), entry, stack, where, len(given), heap, end).ljust(512, b"\0") + memory
    return disk + bytes(-len(disk) % (512 * 16 * 63))


def started(root: Path, name: str) -> list[str]:
    """The command of a program of that folder, by its own libraries."""
    libraries = root / "usr/lib/x86_64-linux-gnu"
    return [str(libraries / "ld-linux-x86-64.so.2"), "--library-path", str(libraries), str(root / "usr/bin" / name)]


def run(root: Path, program: Path, given: Path, got: Path) -> int:
    """Write what the program writes; returns its exit status.

    Raises
    ------
    RuntimeError
        The machine ended before the program did: its last words.
    """
    root = root.resolve()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        rom(work / "rom")
        (work / "disk").write_bytes(image(program.read_bytes(), given.read_bytes()))
        (work / "bochsrc").write_text(CONFIGURATION.format(work=work, root=root, megabytes=MEGABYTES))
        environ = {**os.environ, "TERM": "dumb", "TERMINFO": str(root / "usr/share/terminfo"), "BXSHARE": str(root / "usr/share/bochs"),
                   "LTDL_LIBRARY_PATH": str(root / "usr/lib/x86_64-linux-gnu/bochs/plugins")}  # fmt: skip
        words = [*started(root, "bochs-bin"), "-q", "-f", str(work / "bochsrc")]
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, env=environ, timeout=SECONDS)
        log = (work / "log").read_text(errors="replace") if (work / "log").exists() else ""
        results = (work / "results").read_bytes() if (work / "results").exists() else b""
        if "shutdown requested" not in log or len(results) < 8:
            raise RuntimeError(f"{program}: the machine stopped\n{log[-4000:]}\n{done.stdout[-2000:].decode(errors='replace')}")
        got.write_bytes(results[:-8])
        return struct.unpack("<q", results[-8:])[0]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--get", metavar="FOLDER", type=Path)
    parser.add_argument("files", metavar="PROGRAM INPUT OUTPUT", nargs="*", type=Path)
    told = parser.parse_args()
    if told.get:
        get(told.get)
    elif len(told.files) == 3 and "BURSTMPI_BOCHS" in os.environ:
        sys.exit(run(Path(os.environ["BURSTMPI_BOCHS"]), *told.files))
    else:
        parser.error("three files and BURSTMPI_BOCHS, or --get")
