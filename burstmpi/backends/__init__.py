"""The ways to compute inside a rank, by name."""

from __future__ import annotations

import warnings

from .. import checks
from .base import Backend
from .host import BuildError, HostBackend
from .numpy import NumpyBackend
from .reference import ReferenceBackend

__all__ = ["BACKENDS", "choose"]

BACKENDS = {"host": HostBackend, "numpy": NumpyBackend, "reference": ReferenceBackend}


def choose(name: str) -> Backend:
    """Make the backend of that name; "auto" takes the fastest for NumPy arrays on this machine.

    Raises
    ------
    ValueError
        An unknown name, or "host" where the kernels cannot be built.
    """
    checks.choice("backend", name, ("auto", *BACKENDS))
    if name == "auto":
        try:
            return HostBackend()
        except BuildError as error:
            text = f"burstmpi: compiled kernels are not available, NumPy serves, many times slower: {error}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
            return NumpyBackend()
    try:
        return BACKENDS[name]()
    except BuildError as error:
        raise ValueError(f"backend: {name!r} cannot be used: {error}") from None
