"""How many blocks of threads of a kernel a multiprocessor holds: by arithmetic of our own, and by NVIDIA's cuda_occupancy.h."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "ptx")]

from burstmpi.backends.tiles import SHARED_LIMIT  # noqa: E402


@dataclass(frozen=True)
class Processor:
    """What a multiprocessor has, by the tables of the CUDA programming guide."""

    memory: int  # bytes of shared memory, what CUDA takes for itself included
    warps: int
    blocks: int
    reserved: int = 1024  # bytes of shared memory of each block that are CUDA's
    grain: int = 128  # shared memory is given out in pieces of so many bytes
    registers: int = 65536


PROCESSOR = {
    "75": Processor(64 << 10, 32, 16, 0, 256), "80": Processor(164 << 10, 64, 32), "86": Processor(100 << 10, 48, 16),
    "89": Processor(100 << 10, 48, 24), "90": Processor(228 << 10, 64, 32), "100": Processor(228 << 10, 64, 32),
    "120": Processor(100 << 10, 48, 24),
}  # fmt: skip


def occupancy(arch: str, registers: int, shared: int, warps: int) -> int:
    """Blocks of threads that a multiprocessor holds; registers of a thread, bytes of shared memory and warps of a block."""
    has = PROCESSOR[arch]
    of_a_warp = -(-registers * 32 // 256) * 256
    by_registers = has.registers // 4 // of_a_warp * 4 // warps  # each quarter holds whole warps
    by_memory = has.memory // max(1, -(-(shared + has.reserved) // has.grain) * has.grain)
    return min(by_registers, by_memory, has.warps // warps, has.blocks)


def missing() -> str | None:
    """Say what NVIDIA's arithmetic lacks here; None where all is there."""
    if shutil.which("g++") is None:
        return "g++ is missing"
    if header() is None:
        return "cuda_occupancy.h is missing (wheel nvidia-cuda-runtime)"
    return None


def header() -> Path | None:
    """The folder of cuda_occupancy.h: of the wheel whose NVRTC is in use."""
    from ptxmachine.nvrtc import default_toolkit

    toolkit = default_toolkit()
    folders = [Path(path) for path in toolkit.includes] if toolkit else []
    return next((path for path in folders if (path / "cuda_occupancy.h").exists()), None)


def by_nvidia(rows) -> list[int]:
    """The same for rows (arch, registers, shared, warps), by a C++ program around cuda_occupancy.h."""
    lines = []
    for arch, registers, shared, warps in rows:
        has = PROCESSOR[arch]
        device = (arch[:-1], arch[-1], 32 * has.warps, has.registers, has.memory, SHARED_LIMIT[arch], has.reserved)
        lines.append(" ".join(map(str, (*device, registers, shared, 32 * warps, 1))))
    with tempfile.TemporaryDirectory() as folder:
        program = f"{folder}/occupancy"
        source = str(ROOT / "benchmarks" / "occupancy.cpp")
        subprocess.run(["g++", "-O1", "-w", f"-I{header()}", source, "-o", program], check=True)
        told = subprocess.run([program], input="\n".join(lines), capture_output=True, text=True, check=True).stdout
    return [int(line) for line in told.split()]
