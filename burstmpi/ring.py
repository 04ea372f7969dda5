"""Messages between ranks: the only module that uses mpi4py, and it knows nothing of attention.

``Ring.travel`` moves parcels along a ``schedule.Way``.  In each step a rank posts its receive, then its send, then
computes, with a call of MPI between tiles (an MPI without a progress thread moves nothing otherwise), then waits:

    step s     ┌ receive into ``there`` ┐
               ├ send from ``here``     ┤ overlap
               └ visit(here)            ┘
               wait; swap here and there

Every wait watches a deadline.  One that runs over asks all ranks what they are doing (a *roll call*: ranks that
wait or compute answer, others do not), raises ``DeadlineError`` that says who waits for whom and who gave no sign,
and tells the others, so that they raise as well.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import pickle
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from mpi4py import MPI

from . import checks
from .transport import Lane, OnHost

__all__ = ["Cargo", "DeadlineError", "Partials", "PeerError", "Rehearsal", "Ring", "check_launcher"]

CARGO, PARTIAL, HOME, ROWS, NOTICE, REPLY = range(1, 7)  # tags
CHUNK = 1 << 30  # bytes of one message: counts of 2³¹ and more fail in some MPIs
SIGN = 1.0  # seconds that a roll call waits for answers
NOTICE_TEXT = 1000  # characters of an error that others are told: they receive it without a deadline, so it must leave at once
LISTEN = 0.1  # seconds between two looks for notices of other ranks while computing

# Requests that nobody waits for any more.  MPI may still read and write their memory, long after the object that
# started them is gone, and as late as in MPI_Finalize, which comes when modules have been cleared: so it is never given
# back.  Only calls that break off, and roll calls, leave anything here.
_orphans: list[_Pending] = []
ctypes.pythonapi.Py_IncRef(ctypes.py_object(_orphans))


class DeadlineError(TimeoutError):
    """A wait took longer than the deadline: the text says which rank waits in which step for whom."""


class PeerError(RuntimeError):
    """Another rank stopped in the middle of a call: the text says which, and why."""


@dataclass
class Cargo:
    """What travels: two buffers of bytes in rotation, and the size of each traveller's parcel.

    ``here`` holds this rank's own parcel at the start, where it travels at all, but for what is in ``lying``.

    runs : (start, stop) of each message in which a host sends a traveller's parcel, by traveller
    lying : runs of this rank's own parcel that are sent from where they lie, [nbytes] uint8, by their start
    """

    here: Lane
    there: Lane
    nbytes: list[int]
    runs: list[list[tuple[int, int]]]
    lying: dict[int, np.ndarray]


@dataclass
class Partials:
    """Gradients that follow the travellers home; buffers of bytes.

    fresh : being computed;  sent : on its way out;  arriving : on its way in;  home : this rank's own, coming back
    clear, add : called as clear(buffer, traveller) and add(target, source, traveller); done when they return, or in
        the order of the compute stream
    """

    fresh: Lane
    sent: Lane
    arriving: Lane
    home: Lane
    nbytes: list[int]
    clear: Callable
    add: Callable


@dataclass
class _Pending:
    """A request, or a journey of many, and what to say of it when it does not end."""

    request: MPI.Request | None
    text: str
    peer: int
    keep: object = None  # memory that must live as long as the request
    receives: bool = False
    journey: object = None  # transport.Journey

    def done(self) -> bool:
        return self.request.Test() if self.journey is None else self.journey.advance()

    def cancel(self) -> None:
        """Take a receive back."""
        for request in [self.request] if self.journey is None else self.journey.requests:
            if self.receives and request != MPI.REQUEST_NULL:
                request.Cancel()


def _advance(pending) -> bool:
    """Give all of them a chance to move on; tell whether all are through."""
    done = MPI.Request.Testall([p.request for p in pending if p.journey is None])
    for p in pending:
        if p.journey is not None:
            done = p.journey.advance() and done
    return done


class Ring:
    """A duplicate of the caller's communicator, with deadlines.

    Parameters
    ----------
    comm : an intracommunicator of mpi4py
    deadline : seconds that any wait may take, or None for ever

    Raises
    ------
    TypeError, ValueError
        No intracommunicator.
    RuntimeError
        The launcher started many worlds of one rank.
    """

    def __init__(self, comm, deadline=None):
        check_launcher(comm)
        self.deadline = deadline
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self.bytes_sent = self.messages = 0
        self.wait_seconds = self.compute_seconds = 0.0
        self.broken: BaseException | None = None
        self._doing = "construction"
        self._active: list[_Pending] = []
        self._heard = time.perf_counter()
        self.order: tuple[int, ...] | None = None  # ranks in the order of the ring, where it is not 0, 1, 2, ...
        self.transport = self.on_host = OnHost()  # of the call under way
        self.comm = None
        duplicate, request = comm.Idup()
        self._wait([_Pending(request, "all ranks to make their BurstAttention", -1, duplicate)])
        self.comm = duplicate

    def close(self) -> None:
        """Free the communicator; a broken one is left to MPI_Finalize, as its peers may never come."""
        if self.comm is not None and self.broken is None and not MPI.Is_finalized():
            self.comm.Free()
        self.comm = None

    def begin(self, doing: str) -> None:
        """Start the figures of a call anew."""
        self._doing = doing
        self.transport = self.on_host
        self.bytes_sent = self.messages = 0
        self.wait_seconds = self.compute_seconds = 0.0

    # ------------------------------------------------------------ agreement

    def agreed(self, common: dict, token: int, ready: bool, fine: bool) -> tuple[bool, bool]:
        """Ask all ranks, in one small reduction, whether they say the same.

        Returns
        -------
        known : every rank is fine, says the same ``common``, and holds the same token, above 0
        ready : every rank is ready
        """
        digest = hashlib.blake2b(repr(sorted((name, _said(value)) for name, value in common.items())).encode(), digest_size=7).digest()
        word = int.from_bytes(digest, "little")
        low = self.reduce(np.array([fine, word, -word, token, -token, ready], np.int64), MPI.MIN)
        return bool(low[0] and low[1] == -low[2] and low[3] == -low[4] and low[3] > 0), bool(low[5])

    def settle(self, common: dict, private, error: Exception | None):
        """Exchange what each rank has to say; raise alike on every rank where one erred or two differ.

        Returns
        -------
        The private parts of all ranks, in the order of ranks.
        """
        everyone = self._everyone(common, private, error)
        with self.alike(MemoryError, checks.KernelError):  # as told
            return _settled(everyone, self.size)

    @staticmethod
    @contextmanager
    def alike(*more):
        """Mark what is raised here, from what all ranks know, as what all of them raise: nobody waits for this one then.

        more : types beside TypeError and ValueError; a rank may run out of memory alone
        """
        try:
            yield
        except (TypeError, ValueError, *more) as error:
            error.alike = True
            raise

    def _everyone(self, common: dict, private, error: Exception | None) -> list:
        told = None if error is None else _as_told(error)
        said = {name: _said(value) for name, value in common.items()}  # a value need not be picklable
        return self.exchange((told, said, private))

    def meet(self, common: dict, private, error: Exception | None):
        """Begin as every call begins, with one small reduction, so that different calls are noticed; then settle."""
        self.agreed(common, 0, False, error is None)
        return self.settle(common, private, error)

    def reduce(self, vector, op=MPI.MAX):
        """Reduce a small vector over all ranks."""
        result = np.empty_like(vector)
        self._collect(self.comm.Iallreduce(vector, result, op), vector, result)
        return result

    def transpose(self, row):
        """Give entry j of this rank's row to rank j: [size] uint8."""
        column = np.empty_like(row)
        self._collect(self.comm.Ialltoall(row, column), row, column)
        return column

    def exchange(self, thing) -> list:
        """Gather a small picklable thing from all ranks on all ranks."""
        mine = np.frombuffer(pickle.dumps(thing), np.uint8)
        sizes = np.empty(self.size, np.int64)
        length = np.array([len(mine)], np.int64)
        self._collect(self.comm.Iallgather(length, sizes), length, sizes)
        starts = np.concatenate(([0], np.cumsum(sizes)))
        everything = np.empty(starts[-1], np.uint8)
        into = [everything, sizes.tolist(), starts[:-1].tolist(), MPI.BYTE]
        self._collect(self.comm.Iallgatherv(mine, into), mine, everything)
        return [pickle.loads(everything[a:b].tobytes()) for a, b in zip(starts[:-1], starts[1:])]

    def _collect(self, request, *keep):
        self._wait([_Pending(request, "all ranks to make the same call", -1, keep)])

    # ------------------------------------------------------------ whole arrays

    def gather_bytes(self, mine, sizes, root=None):
        """Yield every rank's bytes in turn, as uint8, on all ranks, or on root alone.

        The array that is yielded is valid until the next one is asked for.
        """
        room = np.empty(max(sizes, default=0), np.uint8) if root in (None, self.rank) else None
        for rank, size in enumerate(sizes):
            part = mine if rank == self.rank else room[:size] if room is not None else None
            if root is None:
                requests = [
                    _Pending(self.comm.Ibcast(part[a : a + CHUNK], rank), f"rows of rank {rank}", rank, part)
                    for a in range(0, size, CHUNK)
                ]
                self._wait(requests)
            elif rank != root and self.rank == root:
                self._wait(self._receive([part], rank, ROWS, f"rows of rank {rank}"))
            elif rank != root and self.rank == rank:
                self._wait(self._send([part], root, ROWS, f"rank {root} to take rows"))
            if part is not None:
                yield part

    def scatter_bytes(self, parts, mine, root):
        """Send ``parts(rank)``, uint8, from root to every rank's ``mine``."""
        if self.rank != root:
            self._wait(self._receive([mine], root, ROWS, f"rows from rank {root}"))
            return
        for rank in range(self.size):
            part = parts(rank)
            if rank == root:
                mine[:] = part
            else:
                self._wait(self._send([part], rank, ROWS, f"rank {rank} to take rows"))

    # ------------------------------------------------------------ the ring

    def travel(self, steps, cargo: Cargo, visit, partials: Partials | None = None, home_from=None) -> None:
        """Walk the steps: move parcels while ``visit`` computes.

        Parameters
        ----------
        steps : list of schedule.Step
        visit : called as visit(step, parcel, partial) in each step with ``compute``; may return a Launch
        home_from : the rank from which this rank's own partial comes back, or None
        """
        kind, carrier = self._doing, self.transport
        here, there = cargo.here, cargo.there
        outgoing: list[_Pending] = []
        coming_home: list[_Pending] = []
        if home_from is not None:
            nbytes = partials.nbytes[self.rank]
            coming_home = self._take("home in", partials.home, nbytes, home_from, HOME, "its own gradients")
        for step, after in zip(steps, [*steps[1:], None]):
            self._doing = f"step {step.index} of {kind}"
            moving = []
            if step.receive_from is not None:
                guest = step.next_guest
                nbytes, runs, text = cargo.nbytes[guest], cargo.runs[guest], f"the parcel of rank {guest}"
                moving += self._take("cargo in", there, nbytes, step.receive_from, CARGO, text, runs)
            if partials is not None and step.partial_from is not None:
                nbytes, text = partials.nbytes[step.guest], f"gradients of rank {step.guest}"
                moving += self._take("partial in", partials.arriving, nbytes, step.partial_from, PARTIAL, text)
            if step.send_to is not None:
                nbytes, runs, text = cargo.nbytes[step.guest], cargo.runs[step.guest], f"the parcel of rank {step.guest} to be taken"
                lying = cargo.lying if step.index == 0 else {}
                moving += self._give("cargo out", here, nbytes, step.send_to, CARGO, text, runs, lying)
            moving += outgoing
            self._active = moving + coming_home
            started = time.perf_counter()
            if step.compute:
                carrier.compute_reads(here)
                self.complete(visit(step, here.bytes, partials and partials.fresh.bytes))
                if step.index > 0 and after is not None and after.receive_from is not None:
                    carrier.computed(reads=[here])  # the next receive comes into it
            elif partials is not None and step.index == 1 and step.partial_to is not None:
                partials.clear(partials.fresh.bytes, step.guest)
            self.compute_seconds += time.perf_counter() - started
            self._wait(moving)
            if partials is not None and step.partial_to is not None:
                outgoing = self._pass_on(partials, step)
            here, there = there, here
        self._doing = f"the end of {kind}"
        self._active = outgoing + coming_home
        self._wait(self._active)
        self._active = []
        self._doing = kind

    def _pass_on(self, partials, step):
        """Add this rank's share to the partial that has arrived, and send it on."""
        started = time.perf_counter()
        carrier = self.transport
        if step.partial_from is None:
            carrier.computed(writes=[partials.fresh])
        elif step.compute:
            carrier.compute_reads(partials.arriving)
            partials.add(partials.fresh.bytes, partials.arriving.bytes, step.guest)
            carrier.computed(reads=[partials.arriving], writes=[partials.fresh])
        else:
            partials.fresh, partials.arriving = partials.arriving, partials.fresh
        self.compute_seconds += time.perf_counter() - started
        tag = HOME if step.partial_to == step.guest else PARTIAL
        text = f"gradients of rank {step.guest} to be taken"
        nbytes = partials.nbytes[step.guest]
        outgoing = self._give("partial out", partials.fresh, nbytes, step.partial_to, tag, text)
        # What was sent one step ago has been waited for: it is free to be computed into.
        partials.fresh, partials.sent = partials.sent, partials.fresh
        return outgoing

    def progress(self) -> bool:
        """Give MPI a chance to move messages: call it between tiles.  Tell whether all are through."""
        through = not self._active or _advance(self._active)
        now = time.perf_counter()
        if now - self._heard > LISTEN:
            self._listen(now)
        return through

    def complete(self, launch) -> None:
        """Let MPI move messages until launched work (None: there is none) is done, where later work might overtake it."""
        if launch is not None and not getattr(launch, "in_order", False):
            while not launch.done():
                self.progress()

    def _give(self, name, lane, nbytes, to, tag, text, runs=None, lying=()):
        """Send the first bytes of a lane, the way that the call's arrays want it: from a host in runs, where they are given."""
        if self.transport is self.on_host:
            runs = [(0, nbytes)] if runs is None else runs
            return self._send([lying[a] if a in lying else lane.bytes[a:b] for a, b in runs], to, tag, text)
        journey = self.transport.send(name, lane, nbytes, lambda piece: self.comm.Isend([piece, MPI.BYTE], to, tag))
        self.bytes_sent += nbytes
        self.messages += journey.messages
        journey.advance()
        return [_Pending(None, text, to, journey, journey=journey)]

    def _take(self, name, lane, nbytes, source, tag, text, runs=None):
        """Receive the first bytes of a lane, as ``_give`` sends them."""
        if self.transport is self.on_host:
            runs = [(0, nbytes)] if runs is None else runs
            return self._receive([lane.bytes[a:b] for a, b in runs], source, tag, text)
        post = lambda piece: self.comm.Irecv([piece, MPI.BYTE], source, tag)  # noqa: E731
        journey = self.transport.receive(name, lane, nbytes, post)
        journey.advance()
        return [_Pending(None, text, source, journey, True, journey)]

    @staticmethod
    def test(requests) -> bool:
        """Give MPI progress on some requests; tell whether all are complete."""
        return MPI.Request.Testall(requests)

    def _send(self, buffers, to, tag, text):
        pieces = _chunks(buffers)
        self.bytes_sent += sum(map(len, pieces))
        self.messages += len(pieces)
        return [_Pending(self.comm.Isend([p, MPI.BYTE], to, tag), text, to, p) for p in pieces]

    def _receive(self, buffers, source, tag, text):
        pieces = _chunks(buffers)
        return [_Pending(self.comm.Irecv([p, MPI.BYTE], source, tag), text, source, p, True) for p in pieces]

    # ------------------------------------------------------------ waiting

    def _wait(self, pending) -> None:
        """Complete requests, or raise when the deadline has passed or another rank has stopped."""
        began = time.perf_counter()
        waited = 0.0
        # Others wait for journeys of this rank that it does not wait for yet, as gradients that come home early.
        beside = [p for p in self._active if p.journey is not None and not any(p is other for other in pending)]
        try:
            while not _advance(pending):
                _advance(beside)
                # Spin, then yield, then sleep: with more ranks than cores the peer needs this core.
                time.sleep(0 if waited < 5e-3 else 2e-5)
                now = time.perf_counter()
                if any(p.journey is not None and p.journey.fenced for p in pending):
                    self.compute_seconds += now - began  # this rank's own GPU is not ready: nobody else is late
                    began = now
                waited = now - began
                if (waited > LISTEN or now - self._heard > LISTEN) and self.comm is not None:
                    self._listen(now)
                if self.deadline is not None and waited > self.deadline:
                    self._overdue(pending, waited)
        except BaseException:
            _orphans.extend(pending)
            raise
        self.wait_seconds += time.perf_counter() - began

    def _overdue(self, pending, waited) -> None:
        """Call the roll and raise."""
        late = [p for p in pending if not p.done()]
        if not late:
            return
        text = f"rank {self.rank} waited {waited:.1f} s (deadline {self.deadline} s) in {self._doing} for "
        text += "; ".join(p.text if p.peer < 0 else f"{p.text} (rank {p.peer})" for p in late[:3])
        if self.comm is not None and self.size > 1:
            text += ". " + self._roll_call(late)
        raise DeadlineError(text)

    def _roll_call(self, late) -> str:
        for rank in range(self.size):
            self._notify(rank, None)
        answers: dict[int, str] = {}
        until = time.perf_counter() + SIGN
        while time.perf_counter() < until and len(answers) < self.size - 1:
            self._listen(time.perf_counter())
            status = MPI.Status()
            while self.comm.Iprobe(MPI.ANY_SOURCE, REPLY, status):
                source = status.Get_source()
                answers[source] = self._read(status)
            time.sleep(1e-3)
        silent = [rank for rank in range(self.size) if rank != self.rank and rank not in answers]
        told = [f"No sign of {_ranks(silent)}"] if silent else ["All ranks answered"]
        told += [f"rank {rank} is in {answers[rank]}" for rank in sorted({p.peer for p in late} & set(answers))]
        return "; ".join(told)

    def _listen(self, now) -> None:
        """Answer roll calls; raise where another rank tells that it has stopped."""
        self._heard = now
        status = MPI.Status()
        while self.comm.Iprobe(MPI.ANY_SOURCE, NOTICE, status):
            source = status.Get_source()
            notice = self._read(status)
            if notice is None:
                self._post(source, self._doing, REPLY)
                continue
            kind, text = notice
            raise (DeadlineError if kind == "deadline" else PeerError)(text)

    def _read(self, status):
        room = np.empty(status.Get_count(MPI.BYTE), np.uint8)
        self.comm.Recv([room, MPI.BYTE], status.Get_source(), status.Get_tag())
        return pickle.loads(room.tobytes())

    def _notify(self, rank, thing) -> None:
        if rank != self.rank:
            self._post(rank, thing, NOTICE)

    def _post(self, rank, thing, tag) -> None:
        """Send a few bytes and wait for nobody."""
        data = np.frombuffer(pickle.dumps(thing), np.uint8)
        _orphans.append(_Pending(self.comm.Isend([data, MPI.BYTE], rank, tag), "", rank, data))

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this one stops in the middle of a call; nothing more can be sent here."""
        if self.broken is not None or self.comm is None:
            return
        self.broken = error
        relayed = isinstance(error, (DeadlineError, PeerError)) and not str(error).startswith(f"rank {self.rank} ")
        if not relayed:
            late = isinstance(error, DeadlineError)
            text = str(error) if late else f"rank {self.rank} stopped in {self._doing}: {type(error).__name__}: {_said(error, str)}"
            for rank in range(self.size):
                self._notify(rank, ("deadline" if late else "error", _clip(text, NOTICE_TEXT)))
        for pending in self._active:
            pending.cancel()
        _orphans.extend(self._active)
        self._active = []


class Rehearsal:
    """In the place of a Ring, for the rank itself: walks the steps of a call and moves nothing, so that a backend meets all
    that the call will ask of it."""

    def __init__(self, rank: int):
        self.rank, self.transport = rank, OnHost()

    def progress(self) -> bool:
        """Nothing is under way."""
        return True

    def complete(self, launch) -> None:
        """Nothing was launched."""

    def travel(self, steps, cargo: Cargo, visit, partials: Partials | None = None, home_from=None) -> None:
        """See ``Ring.travel``."""
        for step in steps:
            if step.compute:
                visit(step, cargo.here.bytes, partials and partials.fresh.bytes)
            elif partials is not None and step.index == 1 and step.partial_to is not None:
                partials.clear(partials.fresh.bytes, step.guest)
            if partials is not None and step.partial_to is not None and step.partial_from is not None and step.compute:
                partials.add(partials.fresh.bytes, partials.arriving.bytes, step.guest)


def _settled(everyone, size) -> list:
    """The private parts of what all ranks have said, or an error: the first one's own, or what they do not say alike."""
    errors = {rank: told for rank, (told, _, _) in enumerate(everyone) if told is not None}
    if errors:
        kind, text = errors[min(errors)]
        same = [rank for rank, told in errors.items() if told == (kind, text)]
        raise kind(text if len(same) == size else f"{_ranks(same)}: {text}")
    for name in dict.fromkeys(name for _, said, _ in everyone for name in said):
        values: dict[str, list[int]] = {}
        for rank, (_, theirs, _) in enumerate(everyone):
            values.setdefault(theirs.get(name, "nothing"), []).append(rank)
        if len(values) > 1:
            parts = ", ".join(f"{_clip(value)} on {_ranks(ranks)}" for value, ranks in values.items())
            raise ValueError(f"{name}: must be the same on all ranks, got {parts}")
    return [private for _, _, private in everyone]


def check_launcher(comm) -> None:
    """Refuse what is no intracommunicator, and a job of many worlds of one rank each."""
    if not isinstance(comm, MPI.Comm):
        raise TypeError(f"comm: must be a communicator of mpi4py, got {comm!r}")
    if comm == MPI.COMM_NULL:
        raise ValueError("comm: is COMM_NULL; ranks that are not members must not make a BurstAttention")
    if comm.Is_inter():
        raise ValueError("comm: is an intercommunicator; merge it first (Intercomm.Merge)")
    if MPI.COMM_WORLD.Get_size() > 1 or MPI.Comm.Compare(comm, MPI.COMM_SELF) == MPI.IDENT:
        return
    name, tasks = launched_tasks(os.environ)
    if tasks > 1 and os.environ.get("BURSTMPI_ALLOW_SINGLETONS") != "1":
        raise RuntimeError(
            f"comm: the launcher started {tasks} tasks ({name}={tasks}), but MPI sees a world of 1 rank. "
            "Launcher and MPI do not speak to each other: with Slurm and Open MPI use srun --mpi=pmix, with MPICH "
            "srun --mpi=pmi2, or the mpiexec that belongs to this MPI. "
            "For independent tasks on purpose pass MPI.COMM_SELF, or set BURSTMPI_ALLOW_SINGLETONS=1."
        )


def launched_tasks(environ) -> tuple[str, int]:
    """Tell how many tasks the launcher says that it started, and which variable says so.

    The innermost launcher decides: under mpirun inside Slurm the step's tasks are mpirun's daemons.  SLURM_NTASKS does
    not count at all: it is the allocation's, and a batch script that runs python without srun is one process.
    """
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"):
        if (told := checks.whole(environ.get(name))) is not None:
            return name, told
    return "", 1


def cuda_support(environ) -> tuple[bool, str]:
    """Tell whether this MPI takes device pointers, and what says so.

    Raises
    ------
    ValueError
        BURSTMPI_CUDA_AWARE is neither 0 nor 1.
    """
    said = environ.get("BURSTMPI_CUDA_AWARE", "")
    if said:
        if said not in ("0", "1"):
            raise ValueError(f"BURSTMPI_CUDA_AWARE: must be 0 or 1, got {said!r}")
        return said == "1", f"BURSTMPI_CUDA_AWARE={said}"
    for library in (MPI.__file__, None):
        try:
            return bool(ctypes.CDLL(library).MPIX_Query_cuda_support()), "MPIX_Query_cuda_support()"
        except (OSError, AttributeError):  # not loadable, or no such function
            pass
    info = MPI.COMM_WORLD.Get_info()
    kinds = info.get("mpi_memory_alloc_kinds") or ""
    info.Free()
    if "cuda" in kinds:
        return True, f"mpi_memory_alloc_kinds={kinds}"
    return False, f"mpi_memory_alloc_kinds={kinds}" if kinds else "this MPI says nothing of CUDA"


def node_name(environ) -> str:
    """The name of this rank's node; BURSTMPI_NODE where containers or tests want another one."""
    return environ.get("BURSTMPI_NODE") or MPI.Get_processor_name()


def local_rank_by_mpi() -> int:
    """This rank's number among those of COMM_WORLD on the same node; collective."""
    node = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    try:
        return node.Get_rank()
    finally:
        node.Free()


def library() -> tuple[str, str]:
    """The MPI library and its version, and mpi4py's."""
    import mpi4py

    name, version = MPI.get_vendor()
    return f"{name} {'.'.join(map(str, version))}", mpi4py.__version__


def deadline_of(value):
    """The caller's deadline, or BURSTMPI_DEADLINE, or None."""
    if value is None and os.environ.get("BURSTMPI_DEADLINE"):
        try:
            value = float(os.environ["BURSTMPI_DEADLINE"])
        except ValueError:
            raise ValueError(f"BURSTMPI_DEADLINE: must be seconds, got {os.environ['BURSTMPI_DEADLINE']!r}") from None
        return checks.positive("BURSTMPI_DEADLINE", value)
    return checks.positive("deadline", value)


def _chunks(buffers):
    return [buffer[a : a + CHUNK] for buffer in buffers for a in range(0, len(buffer), CHUNK)]


def _ranks(ranks) -> str:
    """[0, 1, 2, 5] → "ranks 0-2, 5"."""
    runs = checks.spans(ranks)
    text = ", ".join(runs[:8]) + (", ..." if len(runs) > 8 else "")
    return ("rank " if len(ranks) == 1 else "ranks ") + text


def _as_told(error):
    """An exception as (type, text): a type that any rank can make from a text alone."""
    for kind in (TypeError, ValueError, MemoryError, checks.KernelError):
        if type(error) is kind:
            return kind, str(error)
    return ValueError, f"{type(error).__name__}: {error}"


def _said(value, how=repr) -> str:
    """A value for comparison and messages: on no rank may this raise."""
    try:
        return how(value)
    except Exception as error:
        return f"{type(value).__name__} ({type(error).__name__} in its {how.__name__})"


def _clip(text: str, width: int = 80) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."
