"""The ways to compute inside a rank, by name."""

from __future__ import annotations

import sys
import warnings

from .. import checks
from ..arrays import reason
from .base import Backend
from .host import BuildError, HostBackend, first_here
from .numpy import NumpyBackend
from .reference import ReferenceBackend

__all__ = ["BACKENDS", "NAMES", "BuildError", "choose", "instead", "on_gpu"]

BACKENDS = {"host": HostBackend, "numpy": NumpyBackend, "reference": ReferenceBackend}
NAMES = ("auto", *BACKENDS, "cuda")


def choose(name: str) -> Backend:
    """Make the backend of that name; "auto" takes the fastest for NumPy arrays on this machine.

    Raises
    ------
    ValueError
        An unknown name, or a backend that cannot be had here.
    """
    checks.choice("backend", name, NAMES)
    if name == "auto":
        try:
            return BACKENDS["host"]()
        except BuildError as error:
            return instead(error)
    if name == "cuda":
        return on_gpu(None, deterministic=False)
    try:
        return BACKENDS[name]()
    except BuildError as error:
        raise ValueError(f"backend: {name!r} cannot be used: {error}") from None


_TOLD: set[str] = set()  # causes that this process has warned of


def instead(error: BuildError) -> Backend:
    """Make the backend that serves where kernels cannot be built; warn of it once for a cause, on one rank of a node."""
    cause, newline, details = str(error).partition("\n")
    if cause not in _TOLD and first_here():
        text = f"burstmpi: compiled kernels are not available, NumPy serves, many times slower: {cause}"
        advice = 'or take backend="numpy", if this is meant'
        warnings.warn(f"{text}; {advice}{newline}{details}", RuntimeWarning, stacklevel=_callers_level())
        _TOLD.add(cause)
    return NumpyBackend()


def _callers_level() -> int:
    """Give warn's stacklevel, as the function that calls this one must pass it, for the line that called the package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").startswith("burstmpi."):
        level, frame = level + 1, frame.f_back
    return level


def on_gpu(device: int | None, *, deterministic: bool) -> Backend:
    """Make the CUDA backend of a device, None for the current one.

    Raises
    ------
    ValueError
        No CuPy, no usable device, or one that is too old: the reason in one line.
    """
    try:
        import cupy

        from .cuda import CudaBackend

        with cupy.cuda.Device(device):
            return CudaBackend(deterministic=deterministic)
    except Exception as error:
        raise ValueError(f"backend: 'cuda' cannot be used: {reason(error)}") from None
