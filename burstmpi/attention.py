"""BurstAttention: exact attention over a sequence that is cut across MPI ranks.

The only module that sees all parts: it checks and agrees, plans, cuts the workspace, and lets the ring carry
parcels past the backend's kernels.

    forward        Q stays, (K, V) travel
    backward "q"   K, V, dK, dV stay; (Q, dO, delta, lse) travel and dQ follows
    backward "kv"  Q, dO, delta, lse, dQ stay; (K, V) travel and (dK, dV) follow
"""

from __future__ import annotations

import os
import threading
import warnings
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from . import arrays as kinds
from . import backends, checks, placement
from .backends.base import Dims, Tally, Work
from .layout import check_explicit, place, placement_of
from .plan import Plan
from .ring import CHUNK, Cargo, Partials, Rehearsal, Ring, cuda_support, deadline_of, node_name
from .rows import gather as gather_rows
from .rows import shard as shard_rows
from .rules import Rules, Sight
from .transport import Direct, Staged
from .workspace import GpuWorkspace, Workspace

__all__ = ["BurstAttention", "Stats", "backward", "forward"]

STAGE = 4 << 20  # bytes of a chunk that is staged through pinned memory; BURSTMPI_STAGE_BYTES changes it
PLANS = 16  # plans that are kept: one for each combination of shapes


@dataclass(frozen=True)
class Stats:
    """Figures of one rank's last forward or backward."""

    call: str = ""  # "forward" or "backward"
    travels: str = ""  # "kv" or "q": what went round the ring
    backend: str = ""
    bytes_sent: int = 0  # counted where they are sent
    messages: int = 0
    compute_seconds: float = 0.0  # in kernels, progress calls included; of a GPU: launching, and waiting for it to be ready
    wait_seconds: float = 0.0  # for other ranks, the agreement before the call included
    tiles: int = 0  # pairs (query tile, key tile) of a head that were computed here, by all kernels of the call together
    tiles_skipped: int = 0  # pairs that a rule spared
    transport: str = ""  # "host", "direct" (device pointers to MPI) or "staged" (through pinned memory)
    transport_why: str = ""  # what decided it


class BurstAttention:
    """Attention over the ranks of a communicator; plan once, then ``forward`` and ``backward``.

    All methods but ``positions`` are collective: every rank of ``comm`` calls them in the same order.  Threads want an object each.

    Parameters
    ----------
    comm : mpi4py intracommunicator
        Duplicated here; ``close()`` or a ``with`` block frees the duplicate.
    layout : "zigzag", "contiguous", "striped", or an int vector of this rank's global positions
        A pair (of queries, of keys) for cross-attention where they differ.  See ``burstmpi.layout``.
    causal : bool
        Query i sees keys j <= i.
    window : (left, right)
        Query i sees keys with -left <= j - i <= right; None on a side leaves it open.
    documents : boundaries 0 = b0 <= b1 <= ... = N
        Packed documents that do not see each other; a pair (of queries, of keys) for cross-attention.
        ``burstmpi.boundaries`` makes them from a document id per token.
    softcap : float
        s becomes softcap * tanh(s / softcap), after the scale.
    alibi_slopes : (heads,)
        Adds -slope * abs(i - j).
    scale : float
        Default head_dim ** -0.5.
    backward : "q", "kv" or "auto"
        What travels in backward; "auto" takes what sends fewer bytes for the shapes at hand.
    backend : "auto", "host", "numpy", "reference" or "cuda"
        Who computes inside a rank.  "auto" goes by the arrays of each call: CUDA for those on a GPU; for NumPy's
        compiled C kernels, or NumPy where there is no compiler.
    deterministic : bool
        Whether backward on a GPU gives the same bits each time: dQ by a kernel of its own in place of atomic sums.
        All else is deterministic anyway.
    deadline : float
        Seconds that a wait for other ranks may take before it raises ``DeadlineError``; None takes the environment's
        BURSTMPI_DEADLINE, and without that waits for ever.

    With Nk keys and Nq queries, i stands for i + (Nk - Nq): aligned at the end, in each document where documents are
    given.  All rules speak of global positions, so that they mean the same for every layout and number of ranks.

    Raises
    ------
    TypeError, ValueError
        On every rank alike: an option that is wrong on one rank, or that differs between ranks.
    RuntimeError
        The launcher started many worlds of one rank.
    DeadlineError
        Some rank made no BurstAttention in time.  ``comm`` is then one collective call out of step between the ranks;
        as with any MPI call that only some ranks make, nothing more can be done with it.

    Notes
    -----
    With s_ij as ``burstmpi.rules`` defines it, the sums running over the keys that query i sees,

        lse_i = ln Σ_j exp(s_ij),    out_i = Σ_j exp(s_ij - lse_i) v_j

    A row that sees nothing has out = 0, lse = -inf and gradient 0.
    """

    def __init__(
        self,
        comm,
        *,
        layout="zigzag",
        causal=False,
        window=None,
        documents=None,
        softcap=None,
        alibi_slopes=None,
        scale=None,
        backward="auto",
        backend="auto",
        deterministic=False,
        deadline=None,
    ):
        problem = wait = None
        try:
            wait = deadline_of(deadline)
        except Exception as error:
            problem = error
        self._ring = Ring(comm, wait)
        self._closed = False
        self._busy = threading.Lock()
        self._plans: dict[tuple, Plan] = {}
        self._planned = 0  # plans made so far, the same number on every rank
        self._host = None  # the backend of NumPy arrays
        self._spare = None  # that of calls whose kernels cannot be built
        self._unbuilt: set[str] = set()  # their types
        self._gpus: dict[int, backends.Backend] = {}  # those of devices
        self._spaces: dict[int, Workspace] = {}  # by id of the backend
        self._seated: set[int] = set()  # devices that ranks have compared
        self.stats = Stats()
        common, layouts, aware, stage = {}, ("zigzag", "zigzag"), (False, ""), STAGE
        with self._guard():  # an interruption is heard by the others
            try:
                if problem is not None:
                    raise problem
                self._rules = Rules(causal, window, documents, softcap, alibi_slopes, scale)
                self._backward = checks.choice("backward", backward, checks.WAYS)
                self._asked = checks.choice("backend", backend, backends.NAMES)
                self._deterministic = checks.flag("deterministic", deterministic)
                if backend == "cuda":
                    self._gpu()
                elif backend != "auto":
                    self._host = backends.choose(backend)
                stage = checks.stage_bytes(os.environ.get("BURSTMPI_STAGE_BYTES"), STAGE)
                aware = cuda_support(os.environ)
                layouts = checks.layout(layout)
                names = tuple(x if isinstance(x, str) else "explicit positions" for x in layouts)
                common = {
                    **self._rules.describe(),
                    "layout": names,
                    "backward": self._backward,
                    "backend": self._asked,  # what "auto" finds may differ: a node with no compiler computes in NumPy
                    "deterministic": self._deterministic,
                    "BURSTMPI_STAGE_BYTES": stage,
                    "deadline": wait,
                }
            except Exception as error:
                problem = error
        explicit = tuple(None if isinstance(x, str) else x for x in layouts)
        try:
            with self._guard():
                private = (explicit, node_name(os.environ), aware)
                everyone = self._ring.settle(common, private, problem)
                self._nodes = [node for _, node, _ in everyone]
                self._ring.order = placement.ring_order(self._nodes)
                self._stage, self._aware = stage, _agreed_support([aware for _, _, aware in everyone])
                with self._ring.alike():
                    self._layouts = tuple(
                        name if mine is None else check_explicit([theirs[side] for theirs, _, _ in everyone])
                        for side, (name, mine) in enumerate(zip(layouts, explicit))
                    )
        except (TypeError, ValueError, MemoryError, checks.KernelError):
            self.close()
            raise

    # ------------------------------------------------------------ life

    def close(self) -> None:
        """Free the communicator and the workspace; closing twice is harmless."""
        if not self._closed:
            self._closed = True
            broken = self._ring.broken
            self._ring.close()
            try:
                for space in self._spaces.values():
                    space.close()
            except Exception:
                if broken is None:  # else the device may have failed with the call
                    raise
            self._spaces.clear()
            self._plans.clear()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __repr__(self):
        state = "closed" if self._closed else f"rank {self._ring.rank} of {self._ring.size}"
        return f"<BurstAttention {state}, {self._asked}, {self._rules}>"

    # ------------------------------------------------------------ who computes

    @property
    def _backend(self):
        """The backend of NumPy arrays."""
        if self._host is None:
            self._host = backends.choose("auto")
        return self._host

    @_backend.setter
    def _backend(self, backend):
        self._host = backend

    def _gpu(self, device=None):
        """The backend of a device, None for the current one."""
        if device is None:
            device = kinds.current_device()
        if device not in self._gpus:
            self._gpus[device] = backends.on_gpu(device, deterministic=self._deterministic)
        return self._gpus[device]

    def _serving(self, device, name, dtype, ways):
        """The backend for arrays of a type on a device, None for the host; ``name`` is one of them, for messages.

        ways : whether backward, of the calls that will come
        """
        if device is None:
            if self._asked == "cuda":
                raise TypeError(f"{name}: must be on a GPU for backend='cuda', got a NumPy array")
            return self._able(self._backend, dtype, ways)
        if self._asked not in ("auto", "cuda"):
            raise TypeError(f"{name}: is on GPU {device}, but backend={self._asked!r} computes on the host")
        return self._gpu(device)

    def _able(self, backend, dtype, ways):
        """The backend of NumPy arrays once it has what these calls take; for "auto" NumPy's own where that cannot be had.

        A cache folder may hold the kernels of one type and not those of another, on a node with no compiler or with no room left.
        """
        try:
            if dtype.name not in self._unbuilt:
                for way in ways:
                    backend.prepare(dtype, way)
                return backend
        except backends.BuildError as error:
            if self._asked != "auto":
                raise ValueError(f"backend: {self._asked!r} cannot be used: {error}") from None
            self._unbuilt.add(dtype.name)
            self._spare = self._spare or backends.instead(error)
        return self._spare

    def _space(self, backend) -> Workspace:
        """The workspace for a backend."""
        if id(backend) not in self._spaces:
            self._spaces[id(backend)] = self._make_space(backend)
        return self._spaces[id(backend)]

    def _make_space(self, backend) -> Workspace:
        ring = self._ring
        if not hasattr(backend, "gpu"):
            return Workspace(backend, ring.on_host)
        aware, why = self._aware
        if aware:
            return GpuWorkspace(backend, Direct(backend.gpu, ring.test, CHUNK), why)
        return GpuWorkspace(backend, Staged(backend.gpu, ring.test, self._stage), why)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of pinned host memory that this rank holds now for GPUs, beside ``workspace_bytes`` of the device."""
        return sum(space.pinned_bytes for space in self._spaces.values())

    # ------------------------------------------------------------ rows

    def positions(self, length: int, *, side="queries") -> np.ndarray:
        """Tell which global positions this rank's rows have in a sequence of that length; not collective.

        Parameters
        ----------
        length : rows of all ranks together, cut as ``shard`` cuts them
        side : "queries" or "keys", where their layouts differ

        Returns
        -------
        (rows,) int32, in the order of this rank's rows
        """
        self._open()
        return place(self._side(side), checks.length(length), self._ring.size).positions(self._ring.rank).copy()

    def shard(self, x, *, axis=1, side="queries", root=None):
        """Take this rank's rows of a whole array.

        Parameters
        ----------
        x : array, whole, on every rank; with ``root`` on that rank alone, None elsewhere
        axis : the axis of rows (1 in q, k, v and out; 2 in lse)
        side : "queries" or "keys", where their layouts differ
        root : the rank that has the array, or None where all have it

        Returns
        -------
        This rank's rows, a new C-contiguous array
        """
        common = {"call": "shard", "side": checks.plain(side), "axis": checks.plain(axis), "root": checks.plain(root)}
        with self._start("shard") as ring, self._guard():
            return shard_rows(ring, lambda: self._side(side), x, axis, root, common)

    def gather(self, x, *, axis=1, side="queries", root=None):
        """Put the ranks' rows together into the whole array, the inverse of ``shard``.

        Parameters
        ----------
        x : array, this rank's rows
        axis, side : as in ``shard``
        root : the rank that gets the array (others get None), or None: all get it
        """
        common = {"call": "gather", "side": checks.plain(side), "axis": checks.plain(axis), "root": checks.plain(root)}
        with self._start("gather") as ring, self._guard():
            return gather_rows(ring, lambda: self._side(side), x, axis, root, common)

    def _side(self, side):
        return self._layouts[("queries", "keys").index(checks.choice("side", side, ("queries", "keys")))]

    # ------------------------------------------------------------ forward

    def forward(self, q, k, v, *, out=None, lse=None):
        """Compute attention of this rank's queries over the keys of all ranks.

        Parameters
        ----------
        q : (batch, rows_q, heads, d)
        k : (batch, rows_k, kv_heads, d), kv_heads divides heads
        v : (batch, rows_k, kv_heads, dv)
            One dtype for the three: float64, float32, float16 or bfloat16 (ml_dtypes).  Any strides.
        out, lse : buffers for the results

        Returns
        -------
        out : (batch, rows_q, heads, dv), of q's dtype
        lse : (batch, heads, rows_q), natural log; float64 for float64, else float32

        Raises
        ------
        TypeError, ValueError, MemoryError, KernelError
            On every rank alike, before anything is sent.
        DeadlineError, PeerError
            Another rank did not come, or stopped; this object can only be closed then.
        RuntimeError
            The object is closed, an earlier call was broken off, or another call of it is under way.
        """
        arrays, results = {"q": q, "k": k, "v": v}, {"out": out, "lse": lse}
        with self._start("forward") as ring:
            plan, space = self._agree("forward", arrays, results)
            tally = Tally()
            with self._guard(), plan.backend.call():
                self._forward(ring, plan, space, arrays, results, tally)
                self._count("forward", "kv", plan, tally, space)
        return results["out"], results["lse"]

    def _forward(self, ring, plan, space, arrays, results, tally) -> None:
        """Forward itself, over a Ring or a Rehearsal."""
        backend = plan.backend
        (q, k, v), out, lse = arrays.values(), results["out"], results["lse"]
        room = plan.room("forward").views(backend, space.arena)
        state = room.get("out", out)
        steps = plan.steps["kv"]
        busy = [step.index for step in steps if step.compute]
        if not busy:
            ring.complete(backend.clear(out))
            ring.complete(backend.clear(lse, -np.inf))
        at, lo, hi = plan.intervals(ring.rank, room, ring.progress)

        def visit(step, parcel, _):
            keys, values = (k, v) if step.index == 0 else plan.open(parcel, "kv", step.guest)
            pos = plan.key_positions(step.guest, room, ring.progress)
            sight = Sight(at, lo, hi, pos, plan.where_k.ascending[step.guest])
            work = Work(sight, plan.scores, room["scratch"], ring.progress, tally)
            last = step.index == busy[-1] and state is not out
            first = step.index == busy[0]
            return backend.attend(q, keys, values, state, lse, work, first=first, final=out if last else None)

        ring.travel(steps, self._cargo(ring, plan, "kv", room, (k, v)), visit)

    # ------------------------------------------------------------ backward

    def backward(self, dout, q, k, v, out, lse, *, dq=None, dk=None, dv=None):
        """Differentiate ``forward``: from the gradient of out to those of q, k and v.

        Parameters
        ----------
        dout : (batch, rows_q, heads, dv), of q's dtype
        q, k, v, out, lse : what ``forward`` took and returned
        dq, dk, dv : buffers for the results

        Returns
        -------
        dq, dk, dv : shaped and typed as q, k, v; summed in float32 (float64 for float64) and rounded once

        Raises
        ------
        As ``forward``.

        Notes
        -----
            delta_i = Σ_c dout_ic out_ic,   P_ij = exp(s_ij - lse_i),   dS_ij = P_ij (dout_i . v_j - delta_i)
            dv_j = Σ_i P_ij dout_i,   dq_i = scale Σ_j dS_ij k_j,   dk_j = scale Σ_i dS_ij q_i

        (with a softcap, dS has the factor 1 - tanh² too).
        """
        arrays, results = {"q": q, "k": k, "v": v, "dout": dout, "out": out, "lse": lse}, {"dq": dq, "dk": dk, "dv": dv}
        with self._start("backward") as ring:
            plan, space = self._agree("backward", arrays, results)
            tally = Tally()
            with self._guard(), plan.backend.call():
                self._backward_pass(ring, plan, space, arrays, results, tally)
                self._count("backward", plan.travels, plan, tally, space)
        return results["dq"], results["dk"], results["dv"]

    def _backward_pass(self, ring, plan, space, arrays, results, tally) -> None:
        """Backward itself, over a Ring or a Rehearsal."""
        backend, travels = plan.backend, plan.travels
        q, k, v, dout, out, lse = arrays.values()
        room = plan.room("backward").views(backend, space.arena)
        sums = {name: room.get(name, result) for name, result in results.items()}
        delta = room["delta"]
        ring.complete(backend.delta(dout, out, delta))
        steps = plan.steps[travels]
        following, staying = (("dq",), ("dk", "dv")) if travels == "q" else (("dk", "dv"), ("dq",))
        # The first block that is computed overwrites a sum; where there is none, the sum is 0.
        untouched = () if steps[0].compute else following
        untouched += () if any(step.compute for step in steps) else staying
        for name in untouched:
            ring.complete(backend.clear(sums[name]))
        way = plan.ways[travels]
        home = way.host_of_last_step(ring.rank) if way.last[ring.rank] else None
        final = _Final(sums, results, steps, following if home is None else (), staying) if backend.rounds_sums else None
        visit = (self._visit_q if travels == "q" else self._visit_kv)(
            ring, plan, room, sums, (dout, q, k, v, lse, delta), steps, tally, final
        )
        cargo = self._cargo(ring, plan, travels, room, (q, dout, delta, lse) if travels == "q" else (k, v))
        partials = self._partials(ring, plan, travels, room)
        ring.travel(steps, cargo, visit, partials, home)
        if home is not None:
            ring.transport.compute_reads(partials.home)
            came = plan.open_partial(room["home"], travels, ring.rank)
            for name, share in zip(following, came):
                ring.complete(backend.add(sums[name], share))
        for name, result in results.items():
            if sums[name] is not result and not (final and final.covers(name)):
                ring.complete(backend.copy(result, sums[name]))

    def _visit_q(self, ring, plan, room, sums, arrays, steps, tally, final):
        """Queries come by; dK and dV stay, the visitor's dQ is made afresh and travels on."""
        dout, q, k, v, lse, delta = arrays
        backend = plan.backend
        first = next((step.index for step in steps if step.compute), None)
        pos = plan.key_positions(ring.rank, room, ring.progress)

        def visit(step, parcel, partial):
            guest = step.guest
            if step.index == 0:
                their, dq = (q, dout, delta, lse), sums["dq"]
            else:
                their = plan.open(parcel, "q", guest)
                (dq,) = plan.open_partial(partial, "q", guest)
            sight = Sight(*plan.intervals(guest, room, ring.progress), pos)
            work = Work(sight, plan.scores, room["scratch"], ring.progress, tally)
            rows_q, rows_dout, rows_delta, rows_lse = their
            return backend.attend_backward(
                rows_dout, rows_q, k, v, rows_lse, rows_delta, dq, sums["dk"], sums["dv"], work,
                fresh_q=True, fresh_kv=step.index == first, **(final.of(step) if final else {}),
            )  # fmt: skip

        return visit

    def _visit_kv(self, ring, plan, room, sums, arrays, steps, tally, final):
        """Keys come by; dQ stays, the visitor's dK and dV are made afresh and travel on."""
        dout, q, k, v, lse, delta = arrays
        backend = plan.backend
        first = next((step.index for step in steps if step.compute), None)
        at, lo, hi = plan.intervals(ring.rank, room, ring.progress)

        def visit(step, parcel, partial):
            guest = step.guest
            if step.index == 0:
                keys, values, dk, dv = k, v, sums["dk"], sums["dv"]
            else:
                keys, values = plan.open(parcel, "kv", guest)
                dk, dv = plan.open_partial(partial, "kv", guest)
            sight = Sight(at, lo, hi, plan.key_positions(guest, room, ring.progress))
            work = Work(sight, plan.scores, room["scratch"], ring.progress, tally)
            return backend.attend_backward(
                dout, q, keys, values, lse, delta, sums["dq"], dk, dv, work,
                fresh_q=step.index == first, fresh_kv=True, **(final.of(step) if final else {}),
            )  # fmt: skip

        return visit

    # ------------------------------------------------------------ parts of a call

    def _open(self) -> None:
        if self._closed:
            raise RuntimeError("BurstAttention: is closed")
        if self._ring.broken is not None:
            raise RuntimeError(
                f"BurstAttention: an earlier call was broken off ({self._ring.broken}); close it and make a new one"
            )

    @contextmanager
    def _start(self, doing):
        """One call at a time, as calls share the workspace and their messages: give the Ring, or raise."""
        if not self._busy.acquire(blocking=False):
            raise RuntimeError(
                f"BurstAttention: {doing} called during another call, by another thread or by a signal's handler; give each thread an object"
            )
        try:
            self._open()
            self._ring.begin(doing)
            yield self._ring
        finally:
            self._busy.release()

    @contextmanager
    def _guard(self):
        """Tell the other ranks when this one leaves a part of a call by an exception that they do not raise as well (``Ring.alike``)."""
        try:
            yield
        except BaseException as error:
            if not getattr(error, "alike", False):
                self._ring.fail(error)
            raise

    def _agree(self, call, arrays, results) -> tuple[Plan, Workspace]:
        """Check this rank's arrays, ask the others, and find or make the plan; allocate and compile what is missing.

        Arrays of a GPU come back in ``arrays`` as CuPy's; missing ``results`` are made.
        """
        given = {name: x for name, x in (arrays | results).items() if x is not None}
        with self._guard():
            plan, ready = self._meet({"call": call}, lambda: self._check(arrays, results), call, (arrays, results))
            space = self._space(plan.backend)
            space.borrow([x for name, x in (arrays | results).items() if name in given and x is not given[name]])
            if not ready:
                self._reserve(space, plan, call, arrays, results)
        self._ring.transport = space.transport
        return plan, space

    def _meet(self, common, look, call=None, arrays=()) -> tuple[Plan, bool]:
        """Ask the others what they say, and find or make the plan for it; collective, under ``_guard``.

        Parameters
        ----------
        look : gives (Dims, (rows of queries, rows of keys), Backend) of this rank, or raises what is wrong
        call : the call for which the workspace is wanted, or None
        arrays : its arrays and results, by name

        Returns
        -------
        plan, and whether every rank knew it and has the workspace already
        """
        problem, dims, rows, backend, key = None, None, (0, 0), None, None
        try:
            dims, rows, backend = look()
            key = (dims, rows, id(backend))
            common |= dims.describe() | {"arrays": "on a GPU" if hasattr(backend, "gpu") else "on the host"}
        except Exception as error:  # whatever it is, the other ranks must hear of it
            problem = error
        plan = self._plans.pop(key, None)
        if plan is not None:
            self._plans[key] = plan  # the last one used is the last one dropped
        fits = plan is not None and (call is None or self._space(backend).fits(plan, call, *arrays))
        known, ready = self._ring.agreed(common, plan.number if plan else 0, fits, problem is None)
        if not known:
            plan = self._plan(common, dims, rows, backend, key, problem)
        return plan, known and ready

    def _check(self, arrays, results):
        """Look at this rank's arrays: (Dims, (rows of queries, rows of keys), Backend), or raise."""
        device = _adopt(arrays, results)
        for name in ("q", "k", "v"):
            checks.array(name, arrays[name])
        q, k, v = (arrays[name] for name in ("q", "k", "v"))
        checks.shapes(q.shape, k.shape, v.shape)
        dtype = checks.element_type("q", q.dtype)
        checks.array("k", k, dtype=dtype)
        checks.array("v", v, dtype=dtype)
        dims = self._dims(q.shape, k.shape, v.shape, dtype, device is not None)
        shape_out, shape_lse = (*q.shape[:3], v.shape[3]), (q.shape[0], q.shape[2], q.shape[1])
        if "dout" in arrays:
            checks.array("dout", arrays["dout"], shape_out, dtype)
            checks.array("out", arrays["out"], shape_out, dtype)
            checks.array("lse", arrays["lse"], shape_lse, dims.accumulator, ndim=3)
        shapes = {"out": shape_out, "lse": shape_lse, "dq": q.shape, "dk": k.shape, "dv": v.shape}
        apart = list(arrays.items())
        for name, buffer in results.items():
            if buffer is not None:
                kind = dims.accumulator if name == "lse" else dtype
                checks.result(name, buffer, shapes[name], kind, apart)
                apart.append((name, buffer))
        if device is not None:
            for name, x in apart:
                if name != "lse":
                    kinds.check_layout(name, x)
        backend = self._serving(device, "q", dims.dtype, ["dout" in arrays])
        with backend.on():  # here, so that a rank that has no memory for them is heard by all
            for name in results:
                if results[name] is None:
                    results[name] = backend.empty(shapes[name], dims.accumulator if name == "lse" else dtype)
        return dims, (q.shape[1], k.shape[1]), backend

    def _dims(self, q, k, v, dtype, on_gpu) -> Dims:
        checks.heads_of_slopes(self._rules.alibi_slopes, q[2])
        if on_gpu:
            checks.head_dim_on_gpu("q, k", q[3])
            checks.head_dim_on_gpu("v", v[3])
        return Dims(q[0], q[2], k[2], q[3], v[3], dtype, checks.accumulator(dtype))

    def _plan(self, common, dims, rows, backend, key, problem) -> Plan:
        """Make a plan together: collective; raises alike on every rank."""
        ring = self._ring
        seat = backend.gpu.device.pci_bus_id if hasattr(backend, "gpu") else None
        everyone = ring.settle(common, (rows, seat), problem)
        if seat is not None and id(backend) not in self._seated:
            self._seated.add(id(backend))
            shared = placement.sharing(list(zip(self._nodes, (seat for _, seat in everyone))), ring.rank)
            if shared:
                warnings.warn(shared, RuntimeWarning, stacklevel=5)
        with ring.alike():
            where_q = placement_of(self._layouts[0], [q for (q, _), _ in everyone], "queries")
            where_k = placement_of(self._layouts[1], [k for (_, k), _ in everyone], "keys")
            self._rules.check_lengths(where_q.length, where_k.length)
        self._planned += 1
        with backend.on():
            plan = Plan(self._planned, dims, self._rules, where_q, where_k, ring, backend, self._backward)
        self._plans.pop(key, None)
        while len(self._plans) >= PLANS:
            self._plans.pop(next(iter(self._plans)))
        self._plans[key] = plan
        return plan

    def _reserve(self, space, plan, call, arrays, results) -> None:
        """Make room, and the kernels of a GPU, on all ranks or on none."""
        problem = None
        body = self._forward if call == "forward" else self._backward_pass
        try:
            space.reserve(plan, call)
            space.rehearse(plan, call, arrays, results, lambda: body(Rehearsal(plan.rank), plan, space, arrays, results, Tally()))
        except Exception as error:  # whatever it is, the other ranks must hear of it
            problem = error
        self._ring.settle({}, None, problem)

    def workspace_bytes(self, q, k, v, dtype, *, backward=True, gpu=None) -> int:
        """Tell the bytes that this rank will hold as workspace for calls of these shapes; collective.

        Parameters
        ----------
        q, k, v : this rank's shapes, as tuples
        dtype : of the three
        backward : whether ``backward`` will be called too
        gpu : whether the arrays will be on a GPU, the current device; None: where backend="cuda"

        Returns
        -------
        Exactly what is held from the first of the larger calls on, and reused: a first backward after a forward
        allocates anew, as it needs more.  Results (out, lse, dq, dk, dv) are not
        among it: they are the caller's, new ones or given buffers.  On a GPU these are bytes of the device, and
        ``pinned_bytes`` tells those of the host beside them.
        """
        def look():
            checks.flag("backward", backward)
            there = self._asked == "cuda" if gpu is None else checks.flag("gpu", gpu)
            checks.shapes(q, k, v)
            dims = self._dims(q, k, v, checks.element_type("dtype", dtype), there)
            ways = [False, True] if backward else [False]
            return dims, (q[1], k[1]), self._serving(kinds.current_device() if there else None, "gpu", dims.dtype, ways)

        with self._start("workspace_bytes"), self._guard():
            plan, _ = self._meet({"call": "workspace_bytes", "backward": checks.plain(backward)}, look)
        nbytes = max(plan.nbytes("forward"), plan.nbytes("backward") if backward else 0)
        return nbytes + (plan.backend.slack if nbytes else 0)

    def _cargo(self, ring, plan, travels, room, mine) -> Cargo:
        """Pack this rank's own parcel, where it travels, but for what can be sent from where it lies."""
        carrier = ring.transport
        here, lying = carrier.lane(room["here"]), {}
        if plan.ways[travels].last[ring.rank]:
            for (start, target), source in zip(plan.open_own(room["here"], travels), mine):
                if plan.as_it_lies(source):
                    lying[start] = source.reshape(-1).view(np.uint8)
                else:
                    ring.complete(plan.backend.copy(target, source))
            carrier.computed(writes=[here])
        return Cargo(here, carrier.lane(room["there"]), plan.parcel_bytes[travels], plan.parcel_runs[travels], lying)

    def _partials(self, ring, plan, travels, room) -> Partials:
        backend, lane = plan.backend, ring.transport.lane

        def each(verb, *buffers, traveller):
            for arrays in zip(*(plan.open_partial(b, travels, traveller) for b in buffers)):
                ring.complete(verb(*arrays))

        return Partials(
            lane(room["fresh"]), lane(room["sent"]), lane(room["arriving"]), lane(room["home"]),
            plan.partial_bytes[travels],
            clear=lambda buffer, traveller: each(backend.clear, buffer, traveller=traveller),
            add=lambda target, source, traveller: each(backend.add, target, source, traveller=traveller),
        )  # fmt: skip

    def _count(self, call, travels, plan, tally, space) -> None:
        ring = self._ring
        on_gpu = hasattr(plan.backend, "gpu")  # which does not tell what its kernels do: what they will do is known
        tiles, every = plan.tile_pairs(call) if on_gpu else (tally.tiles, plan.all_tiles[travels])
        self.stats = Stats(
            call, travels, plan.backend.name, ring.bytes_sent, ring.messages, ring.compute_seconds, ring.wait_seconds,
            tiles, every - tiles, space.transport.name, space.why,
        )  # fmt: skip


def _adopt(arrays, results) -> int | None:
    """Take arrays of GPUs as CuPy's, in place; tell their device."""
    everything = {**arrays, **results}
    device = kinds.adopt_all(everything, results)
    for some in (arrays, results):
        some |= {name: everything[name] for name in some}
    return device


def _agreed_support(told) -> tuple[bool, str]:
    """Whether the MPI of every rank takes device pointers, and why (not)."""
    for rank, (aware, why) in enumerate(told):
        if not aware:
            everywhere = not any(aware for aware, _ in told)
            return False, f"MPI is not CUDA-aware{'' if everywhere else f' on rank {rank}'}: {why}"
    return True, f"MPI is CUDA-aware: {told[0][1]}"


class _Final:
    """Which results a step's kernel writes itself, rounded, as nothing is added to their sums any more.

    alone : gradients of what would travel, where this rank's stays: the first step's block is all of their sum
    staying : gradients that all blocks are added to
    """

    def __init__(self, sums, results, steps, alone, staying):
        computed = [step.index for step in steps if step.compute]
        self._results = {name: result for name, result in results.items() if sums[name] is not result}
        self._at = {name: 0 for name in alone if 0 in computed} | {name: computed[-1] for name in staying if computed}

    def covers(self, name) -> bool:
        return name in self._at

    def of(self, step) -> dict:
        """The argument of ``attend_backward``."""
        return {"final": tuple(self._results.get(name) if self._at.get(name) == step.index else None for name in ("dq", "dk", "dv"))}


def forward(comm, q, k, v, *, out=None, lse=None, **options):
    """Compute attention once; see ``BurstAttention`` for the options and ``BurstAttention.forward`` for the rest.

    Each call duplicates and frees a communicator: many calls want a ``BurstAttention``.
    """
    with BurstAttention(comm, **options) as attn:
        return attn.forward(q, k, v, out=out, lse=lse)


def backward(comm, dout, q, k, v, out, lse, *, dq=None, dk=None, dv=None, **options):
    """Differentiate ``forward`` once; the options must be those of the forward call.

    The option ``backward="q"`` or ``"kv"`` says what travels.
    """
    with BurstAttention(comm, **options) as attn:
        return attn.backward(dout, q, k, v, out, lse, dq=dq, dk=dk, dv=dv)
