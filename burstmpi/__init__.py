"""Exact attention over sequences that are cut across MPI ranks: forward and backward, no framework."""

from .attention import BurstAttention, Stats, backward, forward
from .merge import merge
from .ring import DeadlineError, PeerError
from .rules import boundaries

__all__ = ["BurstAttention", "DeadlineError", "PeerError", "Stats", "backward", "boundaries", "forward", "merge"]
__version__ = "0.1.0"
