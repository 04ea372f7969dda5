"""Exact attention over sequences that are cut across MPI ranks: forward and backward, no framework."""

from .attention import BurstAttention, Stats, backward, forward
from .checks import KernelError
from .merge import merge
from .placement import use_gpu
from .ring import DeadlineError, PeerError
from .rules import boundaries

__all__ = [
    "BurstAttention", "DeadlineError", "KernelError", "PeerError", "Stats",
    "backward", "boundaries", "forward", "merge", "use_gpu",
]  # fmt: skip
__version__ = "0.1.0"
