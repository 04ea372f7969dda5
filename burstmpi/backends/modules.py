"""CUDA C of raw_kernels as kernels: compiled by NVRTC through CuPy at first use, one variant for each set of -D."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

__all__ = ["Modules", "folder", "headers_id", "options"]


@cache
def folder() -> Path:
    """The kernels' folder: inside the package where it is installed, beside it in the repository."""
    package = Path(__file__).resolve().parent.parent
    for root in (package / "raw_kernels", package.parent / "raw_kernels"):
        if (root / "block.cuh").exists():
            return root
    raise FileNotFoundError(f"{package}: raw_kernels/block.cuh is missing; install burstmpi again")


@cache
def headers_id() -> str:
    """A digest of all headers: CuPy's cache knows the source and the options, but not what they include."""
    digest = hashlib.sha256()
    for header in sorted([*folder().glob("*.cuh"), *folder().glob("*.h")]):
        digest.update(header.name.encode() + b"\0" + header.read_bytes())
    return digest.hexdigest()[:16]


def options(defines: dict) -> tuple[str, ...]:
    """The compiler's options of a variant."""
    told = tuple(f"-D{name}={value}" for name, value in defines.items())
    return ("-std=c++17", f"-I{folder()}", f"-DHEADERS_ID=0x{headers_id()}", *told)


class Modules:
    """The variants in use on one device."""

    def __init__(self, cupy):
        self._cupy = cupy
        self._kernels: dict[tuple, object] = {}

    def kernel(self, source: str, name: str, shared: int = 0, **defines):
        """Give the kernel of that name in raw_kernels/<source>.cu, compiled with these -D, or from memory."""
        key = (source, name, shared, tuple(defines.items()))
        if key not in self._kernels:
            code = (folder() / f"{source}.cu").read_text()
            kernel = self._cupy.RawModule(code=code, options=options(defines)).get_function(name)
            if shared > 48 << 10:
                kernel.max_dynamic_shared_size_bytes = shared
            self._kernels[key] = kernel
        return self._kernels[key]
