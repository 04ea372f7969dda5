"""The ways to compute inside a rank, by name."""

from __future__ import annotations

import warnings

from .. import checks
from ..arrays import reason
from .base import Backend
from .host import BuildError, HostBackend
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
            return instead(error, stacklevel=3)
    if name == "cuda":
        return on_gpu(None, deterministic=False)
    try:
        return BACKENDS[name]()
    except BuildError as error:
        raise ValueError(f"backend: {name!r} cannot be used: {error}") from None


def instead(error: BuildError, stacklevel: int) -> Backend:
    """Make the backend that serves where kernels cannot be built, and warn of it."""
    text = f"burstmpi: compiled kernels are not available, NumPy serves, many times slower: {error}"
    warnings.warn(text, RuntimeWarning, stacklevel=stacklevel)
    return NumpyBackend()


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
