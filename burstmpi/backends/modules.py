"""CUDA C of raw_kernels as kernels: compiled by NVRTC through CuPy at first use, one variant for each set of -D."""

from __future__ import annotations

import hashlib
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from ..checks import KernelError

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
    """The variants in use on one device.

    rehearsing : kernels are compiled and loaded, but what is given out launches nothing
    compiled : modules so far
    """

    def __init__(self, cupy):
        self._cupy = cupy
        self._modules: dict[tuple, object] = {}
        self._kernels: dict[tuple, object] = {}
        self.rehearsing = False

    @property
    def compiled(self) -> int:
        return len(self._modules)

    def kernel(self, source: str, name: str, shared: int = 0, **defines):
        """Give the kernel of that name in raw_kernels/<source>.cu, compiled with these -D, or from memory.

        Raises
        ------
        KernelError
            The compiler's or the driver's reason in one line.
        """
        variant = (source, tuple(defines.items()))
        key = (*variant, name, shared)
        if key not in self._kernels:
            try:
                if variant not in self._modules:
                    code = (folder() / f"{source}.cu").read_text()
                    self._modules[variant] = self._cupy.RawModule(code=code, options=options(defines))
                kernel = self._modules[variant].get_function(name)
                if shared > 48 << 10:
                    kernel.max_dynamic_shared_size_bytes = shared
            except Exception as error:  # the compiler's, the driver's, or that one of them is missing
                self._modules.pop(variant, None)
                raise KernelError(f"GPU: kernel {name} of {source}.cu cannot be made: {_brief(error)}") from error
            self._kernels[key] = kernel
        return _launch_nothing if self.rehearsing else self._kernels[key]

    @contextmanager
    def rehearsal(self):
        """Compile what is asked for, and launch nothing."""
        self.rehearsing = True
        try:
            yield
        finally:
            self.rehearsing = False


def _launch_nothing(grid, block, arguments, **more) -> None:
    """In the place of a kernel."""


def _brief(error) -> str:
    """The first line of a compiler's log that tells of an error, or all of a short text, with the kind of exception."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = next((line for line in lines if "error" in line.lower()), " ".join(lines))
    return f"{type(error).__name__}: {told[:400]}"
