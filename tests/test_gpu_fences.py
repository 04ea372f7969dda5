"""Every mark, wait and question of the ring on GPUs is taken away once, and each time something is found to be wrong.

The list is not written by hand: a run of the scenario tells from which lines marks are set, waited for and asked for.
``FENCES`` spells it out, so that a new fence, or one that nobody needs any more, changes this file.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from foreign import Producer
from gpu_kit import attention, gpu, put, simulation
from support import collect, problem, shards, truth
from support import check as compare

from burstmpi.backends import gpu as room

pytestmark = pytest.mark.mpi

# (what, room and function that does it): the fences, by transport
BOTH = {
    ("mark", "gpu.call"),  # end of a call: the next one may be on another stream, or free the workspace
    ("wait", "gpu.call"),  # start of a call, for the end of the last one
    ("mark", "gpu.indices"),  # an index vector on its way
    ("ask", "gpu.indices"),  # before its pinned buffer is written again
    ("finish", "workspace._quiet"),  # before workspace and pinned buffers are freed
    ("ask", "gpu.borrow"),  # before arrays of another library are let go of
    ("mark", "attention._cargo"),  # a rank's own parcel is packed
    ("mark", "ring.travel"),  # a kernel has read the parcel that was here
    ("mark", "ring._pass_on"),  # a share has been added to gradients on their way
}
FENCES = {
    "direct": BOTH | {("ask", "_DirectJourney.advance")},  # before Isend and Irecv
    "staged": BOTH
    | {
        ("wait", "_Outbound.advance"),  # copy to the host after the writer
        ("mark", "_Outbound.advance"),  # copied to the host
        ("ask", "_Outbound.advance"),  # before Isend
        ("wait", "_Inbound.advance"),  # copy to the device after the reader
        ("mark", "_Inbound.advance"),  # copied to the device
        ("ask", "_Inbound.advance"),  # before Irecv into the slot again
        ("wait", "ring.travel"),  # kernel after the copy of its parcel
        ("wait", "ring._pass_on"),  # sum after the copy of what has arrived
        ("wait", "attention._backward_pass"),  # sum after the copy of what has come home
    },
}
THROUGH = ("to_host", "to_device", "hand_over", "_post", "compute_reads", "computed", "done", "lane", "ended")


def site(frame):
    """The function that set, waited or asked, past those that only pass it on."""
    while frame.f_code.co_name in THROUGH:
        frame = frame.f_back
    name = frame.f_code.co_name
    where = type(frame.f_locals["self"]).__name__ if name == "advance" else Path(frame.f_code.co_filename).stem
    return f"{where}.{name}"


class Fences:
    """Gpu and Mark with a spy that sees all fences and leaves one out."""

    def __init__(self, patch, removed=None):
        self.seen, self.removed = set(), removed
        real_mark, real_wait, real_finish, real_done = room.Gpu.mark, room.Gpu.wait, room.Gpu.finish, room.Mark.done

        def left_out(what, mark=True) -> bool:
            if mark is None:
                return False
            here = (what, site(sys._getframe(2)))
            self.seen.add(here)
            return here == removed

        def mark(gpu, stream):
            # An event that was never recorded counts as done, in CUDA and in the stand-in.
            return room.Mark(gpu.cupy.cuda.Event()) if left_out("mark") else real_mark(gpu, stream)

        patch.setattr(room.Gpu, "mark", mark)
        patch.setattr(room.Gpu, "wait", lambda gpu, s, m: None if left_out("wait", m) else real_wait(gpu, s, m))
        patch.setattr(room.Gpu, "finish", lambda gpu, m: None if left_out("finish", m) else real_finish(gpu, m))
        patch.setattr(room.Mark, "done", lambda m: True if left_out("ask") else real_done(m))


def scenario(comm, transport, layout="zigzag") -> None:
    """Calls one upon another with no synchronisation between, on two streams, then larger ones; checks all results."""
    cupy = gpu(polls=2)
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    for way in ("q", "kv"):
        with attention(comm, transport, stage=400, quick=True, layout=layout, causal=True, backward=way, deadline=5) as attn:
            problems, got = [], []
            for length in (2 * comm.size, 24 * comm.size):  # the larger one needs another workspace
                p = problem(length, batch=1, heads=2, kv_heads=2, d=8, dv=8, dtype="bfloat16")
                inputs = []
                for stream in streams:
                    with stream:
                        inputs.append(put(cupy, *shards(attn, p)))
                guests = [Producer(x) for x in put(cupy, *shards(attn, p)[:1] * 2)]  # queries of another library, on a third stream
                cupy.cuda.Stream.null.synchronize()
                results = []
                for stream, (_, k, v, _), guest in zip(streams, inputs, guests):
                    with stream:
                        results.append(attn.forward(guest, k, v))
                    guest.let_go()
                for i, (stream, (q, k, v, dout)) in enumerate(zip(streams, inputs)):
                    with stream:
                        results[i] += attn.backward(dout, q, k, v, *results[i])
                problems.append(p)
                got.append(results)
            for p, results in zip(problems, got):
                for stream, arrays in zip(streams, results):
                    whole = collect(attn, *(cupy.asnumpy(x, stream=stream) for x in arrays))
                    compare(whole, truth(p, {"causal": True}))


def verdict(comm, deed: Callable) -> str:
    """What goes wrong on any rank, or an empty text."""
    text = ""
    try:
        deed()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    return next(filter(None, comm.allgather(text)), "")


@pytest.mark.mpi(ranks=4)
@pytest.mark.parametrize("transport", FENCES)
def test_the_list_of_fences_is_complete(comm, transport, monkeypatch):
    simulation()
    fences = Fences(monkeypatch)
    scenario(comm, transport)
    seen = set().union(*comm.allgather(fences.seen))
    assert seen == FENCES[transport], sorted(seen ^ FENCES[transport])


@pytest.mark.mpi(ranks=4)
@pytest.mark.parametrize("transport, what, where", [(t, *fence) for t in FENCES for fence in sorted(FENCES[t])])
def test_every_fence_is_needed(comm, transport, what, where, monkeypatch):
    simulation()
    Fences(monkeypatch, (what, where))
    found = verdict(comm, lambda: scenario(comm, transport))
    gpu()
    assert found, f"nobody misses {what} in {where}"
    if comm.rank == 0:
        print(found)


@pytest.mark.mpi(ranks=2)
@pytest.mark.parametrize("transport", FENCES)
def test_streams_that_do_everything_at_once_hide_them(comm, transport, monkeypatch):
    """The same removals without laziness: nothing is found, that is what the lazy streams are for."""
    simulation()
    hidden = 0
    for fence in sorted(FENCES[transport]):
        with pytest.MonkeyPatch.context() as patch:
            Fences(patch, fence)
            patch.setenv("PTX_MACHINE_STREAMS", "eager")
            hidden += not verdict(comm, lambda: scenario(comm, transport))
    assert hidden == len(FENCES[transport])


