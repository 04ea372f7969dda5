"""The ways to compute inside a rank, by name."""

from __future__ import annotations

from .. import checks
from .base import Backend
from .numpy import NumpyBackend
from .reference import ReferenceBackend

__all__ = ["BACKENDS", "choose"]

BACKENDS = {"numpy": NumpyBackend, "reference": ReferenceBackend}


def choose(name: str) -> Backend:
    """Make the backend of that name; "auto" takes the fastest for NumPy arrays on this machine."""
    checks.choice("backend", name, ("auto", *BACKENDS))
    return BACKENDS["numpy" if name == "auto" else name]()
