"""What ptxas made of a kernel: registers, stack, spills, and the hot path of its main loop, with no GPU.

    python benchmarks/sass.py forward --arch 80 --dtype bfloat16 --dim 64        # an entry of the table
    python benchmarks/sass.py forward --dim 128 --dump                           # and the instructions of the loop

A variant is compiled by NVRTC to a cubin, with the options that CuPy gives, and disassembled by nvdisasm (wheel
nvidia-cuda-nvdisasm).  The hot path is the cheapest way once round a loop that meets a given number of HMMA: branches
to rare code (a guard that fails, a last tile) are left out by that, as a GPU would.  "x" is the number of other
instructions per HMMA on it: what the tensor cores wait for.

For a kernel of one's own:  Cubin(code, arch, options).kernel("name").hot_path(hmma=256).x
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import functools
import heapq
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "ptx")]

from ptxmachine.nvrtc import CompileError, default_toolkit  # noqa: E402

ADDED = ("-ftz=true", "--device-as-default-execution-space")  # by CuPy, always

# One instruction of nvdisasm -c:        /*0a40*/              @P0 BRA `(.L_x_3) ;
INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;")
LABEL = re.compile(r"\s*(\.L_\w+):")
SECTION = re.compile(r"\s*\.section\s+\.text\.([\w$]+)")
TARGET = re.compile(r"`\((\.L_\w+)\)")


@functools.cache
def nvdisasm() -> str | None:
    """Path of nvdisasm: of the environment, of the wheel, of PATH; None where there is none."""
    told = os.environ.get("NVDISASM")
    folders = {sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"]}
    wheels = [str(found) for folder in folders for found in Path(folder, "nvidia").glob("*/bin/nvdisasm")]
    for path in (told, *wheels, shutil.which("nvdisasm"), "/usr/local/cuda/bin/nvdisasm"):
        if path and os.access(path, os.X_OK):
            return path
    return None


def opcode(text: str) -> str:
    """HMMA of "@P0 HMMA.16816.F32.BF16 R4, R8, R12, R4"."""
    return re.sub(r"^@!?U?P\w+\s+", "", text).split()[0].split(".")[0]


@dataclass
class Way:
    """Instructions once round a loop."""

    body: list[str]

    def count(self, *opcodes: str) -> int:
        return sum(opcode(text) in opcodes for text in self.body)

    @property
    def hmma(self) -> int:
        return self.count("HMMA", "DMMA", "IMMA")

    @property
    def nops(self) -> int:
        return self.count("NOP")

    @property
    def fillers(self) -> int:
        """Instructions that do nothing: NOP, and what has a predicate that is never true ("@!UPT UIADD3 URZ, URZ, URZ, URZ")."""
        return self.nops + sum(text.startswith(("@!PT ", "@!UPT ")) for text in self.body)

    @property
    def local(self) -> int:
        """Loads from and stores to local memory: spills, or arrays that the compiler could not keep in registers."""
        return self.count("LDL", "STL")

    @property
    def x(self) -> float:
        """Other instructions per HMMA."""
        return (len(self.body) - self.hmma) / max(1, self.hmma)

    @property
    def x_without_nops(self) -> float:
        return (len(self.body) - self.nops - self.hmma) / max(1, self.hmma)

    def mix(self) -> dict[str, int]:
        """Instructions by opcode, most frequent first."""
        return dict(collections.Counter(map(opcode, self.body)).most_common())


class Listing:
    """The SASS of one kernel, cut into basic blocks."""

    def __init__(self, name: str, lines: list[str], labels: dict[str, int], registers: int, stack: int, spills: int):
        self.name, self.lines = name, lines
        self.registers, self.stack, self.spills = registers, stack, spills  # of ptxas: numbers, bytes, bytes
        starts = {0, *labels.values()}
        starts |= {i + 1 for i, text in enumerate(lines) if opcode(text) in ("BRA", "CALL", "EXIT", "RET", "BRX", "KILL")}
        starts = sorted(s for s in starts if s < len(lines))
        self._end = dict(zip(starts, [*starts[1:], len(lines)]))
        self._next = {start: self._successors(start, labels) for start in starts}
        self._entry = self._reached()

    def _successors(self, start: int, labels: dict[str, int]) -> list[int]:
        end = self._end[start]
        text = self.lines[end - 1]
        kind, target = opcode(text), TARGET.search(text)
        after = [end] if end < len(self.lines) else []
        # "CALL.REL.NOINC `(.L_x_7)" is a jump; one to a function "`($__...)" comes back
        if kind in ("BRA", "CALL") and target:
            # "@P0 BRA `(L)", "BRA.U UP0, `(L)", "BRA.DIV ~URZ, `(L)" may fall through, "BRA `(L)" does not
            sure = not text.startswith("@") and "," not in text[: target.start()]
            return [labels[target.group(1)], *([] if sure else after)]
        if kind in ("EXIT", "RET", "KILL") and not text.startswith("@"):
            return []
        return after

    def _reached(self) -> dict[int, tuple[int, int]]:
        """Times of entry and of leave of a depth-first search: an edge to a block not yet left is a back edge."""
        times, clock = {}, 0
        stack = [(0, iter(self._next[0]))] if self._next else []
        entered = {0: 0}
        while stack:
            clock += 1
            block, rest = stack[-1]
            follow = next((b for b in rest if b not in entered), None)
            if follow is None:
                times[block] = (entered[block], clock)
                stack.pop()
            else:
                entered[follow] = clock
                stack.append((follow, iter(self._next[follow])))
        return times

    def _back(self, source: int, target: int) -> bool:
        a, b = self._entry[source], self._entry[target]
        return b[0] <= a[0] and a[1] <= b[1]

    def count(self, *opcodes: str) -> int:
        return sum(opcode(text) in opcodes for text in self.lines)

    def hot_path(self, hmma: int, *, least: dict[str, int] | None = None) -> Way | None:
        """The fewest instructions once round a loop with exactly so many HMMA; None where no loop has such a path.

        least : opcodes and how often they must be met, {"LDGSTS": 16}: tells a loop that loads from its last trip
        """
        least = least or {}
        blocks = self._entry
        cost = {b: self._end[b] - b for b in blocks}
        has = {b: Way(self.lines[b : self._end[b]]) for b in blocks}
        gain = {b: (has[b].hmma, *(has[b].count(name) for name in least)) for b in blocks}
        most = (hmma + 1, *least.values())  # no need to count further
        start = (0,) * len(most)
        add = lambda so_far, block: tuple(min(a + b, c) for a, b, c in zip(so_far, gain[block], most))  # noqa: E731
        heads = {t for b in blocks for t in self._next[b] if self._back(b, t)}
        best = None
        for head in sorted(heads):
            # Dijkstra over (block, what was met so far); back edges only to the head, so no block comes twice
            queue = [(cost[head], head, add(start, head), None)]
            seen = {}
            while queue:
                steps, block, met, before = heapq.heappop(queue)
                state = (block, met)
                if state in seen or met[0] > hmma or (best and steps >= best[0]):
                    continue
                seen[state] = before
                for target in self._next[block]:
                    if target == head and self._back(block, head):
                        if met == (hmma, *least.values()) and (best is None or steps < best[0]):
                            way, at = [], state
                            while at is not None:
                                way.append(at[0])
                                at = seen[at]
                            best = steps, way[::-1]
                    elif not self._back(block, target):
                        heapq.heappush(queue, (steps + cost[target], target, add(met, target), state))
        if best is None:
            return None
        return Way([text for b in best[1] for text in self.lines[b : self._end[b]]])


    def inner_loops(self, *opcodes: str) -> list[Way]:
        """Loops with no loop in them that hold such an instruction, in the order of the text: all of their instructions."""
        before = {block: [] for block in self._entry}
        for block in self._entry:
            for follow in self._next[block]:
                before[follow].append(block)
        loops = {}
        for block in self._entry:
            for head in self._next[block]:
                if self._back(block, head):  # all that leads to the jump back without passing the head
                    body, rest = loops.setdefault(head, {head}), [block]
                    while rest:
                        at = rest.pop()
                        if at not in body:
                            body.add(at)
                            rest += before[at]
        inner = [body for head, body in sorted(loops.items()) if not (body - {head}) & loops.keys()]
        ways = [Way([text for b in sorted(body) for text in self.lines[b : self._end[b]]]) for body in inner]
        return [way for way in ways if way.count(*opcodes)]


class Cubin:
    """CUDA C compiled for an architecture, as CuPy would.

    Parameters
    ----------
    code : CUDA C
    arch : "80"
    options : those of modules.options
    """

    def __init__(self, code: str, arch: str, options=(), name: str = "kernel.cu", toolkit=None):
        self.arch = arch
        start = time.process_time()  # of this process, all threads
        self.image, self.log = _compile(toolkit or default_toolkit(), code, arch, options, name)
        self.seconds = time.process_time() - start
        self._kernels = None

    def kernels(self) -> dict[str, Listing]:
        """All kernels by name."""
        if self._kernels is None:
            with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
                file.write(self.image)
                file.flush()
                run = subprocess.run([nvdisasm(), "-c", file.name], capture_output=True, text=True, check=True)
            self._kernels = _listings(run.stdout, self.log)
        return self._kernels

    def kernel(self, name: str) -> Listing:
        return self.kernels()[name]


def _compile(toolkit, code, arch, options, name):
    """A cubin and ptxas' report by nvrtcGetCUBIN."""
    lib, program = toolkit._lib, ctypes.c_void_p()
    told = [f"--gpu-architecture=sm_{arch}", *options, *ADDED, "--ptxas-options=-v"]
    told += ["-I" + path for path in toolkit.includes]
    toolkit._check(lib.nvrtcCreateProgram(ctypes.byref(program), code.encode(), name.encode(), 0, None, None))
    try:
        array = (ctypes.c_char_p * len(told))(*(text.encode() for text in told))
        failed = lib.nvrtcCompileProgram(program, len(told), array)
        log = toolkit._text(program, "nvrtcGetProgramLogSize", "nvrtcGetProgramLog")
        toolkit._check(failed, log)
        size = ctypes.c_size_t()
        toolkit._check(lib.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        image = ctypes.create_string_buffer(size.value)
        toolkit._check(lib.nvrtcGetCUBIN(program, image))
        return image.raw, log
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))


def _listings(text: str, log: str) -> dict[str, Listing]:
    """Kernels of nvdisasm's text and of ptxas' report."""
    told = {}
    for part in re.split(r"Compiling entry function '", log)[1:]:
        number = lambda what: int((re.search(r"(\d+) " + what, part) or [0, 0])[1])  # noqa: B023, E731
        spills = number("bytes spill stores") + number("bytes spill loads")
        told[part.split("'")[0]] = number("registers"), number("bytes stack frame"), spills
    found, name = {}, None
    for line in text.split("\n"):
        if section := SECTION.match(line):
            name = section.group(1)
            found[name] = [], {}
        elif name and (label := LABEL.match(line)):
            found[name][1][label.group(1)] = len(found[name][0])
        elif name and (instruction := INSTRUCTION.match(line)):
            found[name][0].append(instruction.group(1))
    return {name: Listing(name, *parts, *told.get(name, (0, 0, 0))) for name, parts in found.items()}


def compiled(kernel, arch: str, **defines) -> Cubin:
    """The cubin of an entry of burstmpi.backends.tiles."""
    from burstmpi.backends import modules

    options = modules.options({**kernel.defines, "BURST_SOFTCAP": 0, "BURST_ALIBI": 0, **defines})
    return Cubin((modules.folder() / f"{kernel.source}.cu").read_text(), arch, options)


def main():
    from burstmpi.backends import tiles

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("kernel", help="forward, backward or backward_queries: a function of burstmpi.backends.tiles")
    parser.add_argument("--arch", default="80")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--dim-v", type=int)
    parser.add_argument("--entry", help="name of the kernel in its file; default: as the table's function")
    parser.add_argument("--hmma", type=int, help="of a trip of the main loop; default: the largest number that has a path")
    parser.add_argument("--least", type=int, default=0, help="LDGSTS that a trip must have: tells it from a last one")
    parser.add_argument("-D", dest="defines", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--dump", action="store_true", help="print the hot path")
    args = parser.parse_args()
    kernel = getattr(tiles, args.kernel)(args.arch, args.dtype, args.dim, args.dim_v or args.dim)
    try:
        cubin = compiled(kernel, args.arch, **dict(text.split("=") for text in args.defines))
    except CompileError as error:
        sys.exit(str(error))
    listing = cubin.kernel(args.entry or args.kernel)
    print(f"{listing.name} sm_{args.arch}: {listing.registers} registers, {listing.stack} bytes of stack, "
          f"{listing.spills} of spills, {len(listing.lines)} instructions, {cubin.seconds:.1f} s to compile")  # fmt: skip
    counts = [args.hmma] if args.hmma else range(listing.count("HMMA"), 0, -1)
    path = next((found for n in counts if (found := listing.hot_path(n, least={"LDGSTS": args.least}))), None)
    if path is None:
        sys.exit("no loop with that number of HMMA")
    if args.dump:
        print("\n".join(path.body))
    print(f"hot path: {len(path.body)} instructions, {path.hmma} HMMA, x {path.x:.3f}, {path.nops} NOP "
          f"(x without {path.x_without_nops:.3f}), {path.local} LDL/STL")  # fmt: skip
    print(path.mix())


if __name__ == "__main__":
    main()
