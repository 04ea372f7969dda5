"""Who stands where: ranks of one node side by side in the ring, one GPU a rank."""

from __future__ import annotations

import os

from .arrays import reason
from .checks import whole

__all__ = ["LOCAL_RANK", "device_of", "local_rank", "ring_order", "sharing", "use_gpu"]

# What launchers tell a process of its number on the node, the innermost launcher first: Open MPI, MPICH and Intel MPI,
# MVAPICH, PALS, Slurm.
LOCAL_RANK = (
    "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "MV2_COMM_WORLD_LOCAL_RANK", "PALS_LOCAL_RANKID", "SLURM_LOCALID",
)  # fmt: skip


def ring_order(nodes) -> tuple[int, ...] | None:
    """Sort ranks by node, nodes in the order of their first ranks, so that a ring crosses the network once a node.

    Parameters
    ----------
    nodes : the name of each rank's node

    Returns
    -------
    The rank at each place of the ring; None where that is 0, 1, 2, ...
    """
    first: dict = {}
    for rank, node in enumerate(nodes):
        first.setdefault(node, rank)
    order = tuple(sorted(range(len(nodes)), key=lambda rank: (first[nodes[rank]], rank)))
    return None if order == tuple(range(len(nodes))) else order


def local_rank(environ) -> int | None:
    """This process' number on its node, as its launcher tells it; under mpirun inside Slurm mpirun's word counts."""
    for name in LOCAL_RANK:
        if (told := whole(environ.get(name))) is not None:
            return told
    return None


def device_of(local: int, count: int) -> int:
    """The device of a local rank among those that it can see: all of them, or the ones that a launcher bound to it.

    Raises
    ------
    RuntimeError
        There is none.
    """
    if count < 1:
        raise RuntimeError("GPU: this process sees none (CUDA_VISIBLE_DEVICES, or the job asked for no GPU)")
    return local % count


def use_gpu() -> int:
    """Make a GPU of this node the current device, by the rank's number on the node; returns the device's number.

    To be called once, before the first array is made on a GPU.  CUDA_VISIBLE_DEVICES and a launcher's binding hold: a
    rank that sees one GPU takes that one.  More ranks than GPUs share them in turn.  Collective over COMM_WORLD where
    the launcher does not tell the number on the node.

    Raises
    ------
    RuntimeError
        No CuPy or no usable GPU: the reason in one line.
    """
    local = local_rank(os.environ)
    if local is None:
        from .ring import local_rank_by_mpi

        local = local_rank_by_mpi()
    try:
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:
        raise RuntimeError(f"GPU: cannot be used: {reason(error)}") from None
    device = device_of(local, count)
    cupy.cuda.Device(device).use()
    return device


def sharing(seats, rank: int) -> str:
    """Tell which other ranks have this rank's GPU, as a sentence; empty where it has it alone.

    Parameters
    ----------
    seats : (node, bus id of the GPU) of each rank
    """
    others = [other for other, seat in enumerate(seats) if seat == seats[rank] and other != rank]
    if not others:
        return ""
    names = ", ".join(map(str, others[:8])) + (", ..." if len(others) > 8 else "")
    node, bus = seats[rank]
    return (
        f"burstmpi: rank {rank} shares GPU {bus} of {node} with rank{'s' * (len(others) > 1)} {names}: each gets a part "
        "of its time; call burstmpi.use_gpu() before the first array, or let the launcher bind one GPU a rank"
    )
