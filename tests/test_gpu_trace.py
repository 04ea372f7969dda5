"""What is enqueued on each stream, and what the host does between: compared with the schedule, entry by entry."""

import pytest
from gpu_kit import attention, gpu, put, simulation
from support import layout_of, problem, shards

pytestmark = pytest.mark.mpi(ranks=(1, 2, 3, 4))

STAGE = 600


def chunks(nbytes, copy):
    """A message through pinned memory: each chunk a copy and its mark."""
    sizes = [min(STAGE, nbytes - start) for start in range(0, nbytes, STAGE)]
    return [entry for size in sizes for entry in (f"copy {copy} {size}", "event")]


def index_vector(rows):
    return [f"copy H2D {4 * rows}", "event"] if rows else []


def expected_forward(plan, rank, staged):
    """What forward enqueues on the three streams, from the schedule alone."""
    steps, nbytes = plan.steps["kv"], plan.parcel_bytes["kv"]
    nothing = ["kernel clear", "kernel clear"] * (not any(step.compute for step in steps))  # out and lse of no block
    compute, out, into = nothing + index_vector(plan.where_q.rows[rank]) * 3, [], []
    if plan.ways["kv"].last[rank]:
        compute += ["kernel copy", "kernel copy", "event"]  # K and V into the parcel
    for step, after in zip(steps, [*steps[1:], None]):
        if step.compute:
            compute += [*index_vector(plan.where_k.rows[step.guest]), "kernel forward"]
            if step.index and after is not None and after.receive_from is not None:
                compute += ["event"]  # the next parcel may come into this one's place
        if staged and step.send_to is not None:
            out += chunks(nbytes[step.guest], "D2H")
        if staged and step.receive_from is not None:
            into += chunks(nbytes[step.next_guest], "H2D")
    return [*compute, "event"], out, into


def expected_host(steps):
    """Post, launch, poll; and swap, which leaves no trace but that the next step works on what came."""
    told = []
    for step in steps:
        told += [f"receive from {step.receive_from}"] if step.receive_from is not None else []
        told += [f"send to {step.send_to}"] if step.send_to is not None else []
        told += [f"launch on rows of {step.guest}"] if step.compute else []
        told += ["poll"]
    return [*told, "poll"]  # the end


def spy_on(monkeypatch, attn, plan, log):
    """Write down what the host does, in order."""
    ring = attn._ring
    take, give, wait, attend = ring._take, ring._give, ring._wait, plan.backend.attend
    guests = iter([step.guest for step in plan.steps["kv"] if step.compute])
    monkeypatch.setattr(ring, "_take", lambda *a: (log.append(f"receive from {a[3]}"), take(*a))[1])
    monkeypatch.setattr(ring, "_give", lambda *a: (log.append(f"send to {a[3]}"), give(*a))[1])
    monkeypatch.setattr(ring, "_wait", lambda pending: (log.append("poll"), wait(pending))[1])
    monkeypatch.setattr(
        plan.backend, "attend", lambda *a, **k: (log.append(f"launch on rows of {next(guests)}"), attend(*a, **k))[1]
    )


@pytest.mark.parametrize("transport", ["staged", "direct"])
@pytest.mark.parametrize("layout, options", [("zigzag", {"causal": True}), ("contiguous", {"window": (3, 3)}), ("explicit", {})])
def test_streams_follow_the_schedule(comm, layout, options, transport, monkeypatch):
    simulation()
    cupy = gpu()
    length = 9 * comm.size + 2
    p = problem(length, batch=1, heads=2, kv_heads=1, d=8, dv=8, dtype="float32")
    options = options | {"layout": layout_of(layout, length, length, comm)}
    with attention(comm, transport, stage=STAGE, quick=True, **options) as attn:
        q, k, v, _ = put(cupy, *shards(attn, p))
        out, lse = attn.forward(q, k, v)
        (plan,) = attn._plans.values()
        cupy.cuda.Device().synchronize()
        sim, log = simulation(), []
        sim.trace.clear()
        spy_on(monkeypatch, attn, plan, log)
        stream = plan.backend.gpu
        with cupy.cuda.Stream(non_blocking=True) as mine:
            attn.forward(q, k, v, out=out, lse=lse)
        mine.synchronize()
        assert log == ["poll", *expected_host(plan.steps["kv"])]  # the first one: all ranks agree on the call
        for name, expected in zip(
            (mine.name, stream.out.name, stream.into.name), expected_forward(plan, comm.rank, transport == "staged")
        ):
            for what in ("enqueue", "run"):
                assert [label for w, label, where in sim.trace if w == what and where == name] == expected, (name, what)


def expected_backward(plan, rank, staged, narrow):
    """What backward enqueues on the three streams, from the schedule alone; each message is one chunk.

    narrow : whether sums are of another type than the results
    """
    travels = plan.travels
    steps, cargo, partial = plan.steps[travels], plan.parcel_bytes[travels], plan.partial_bytes[travels]
    following, staying = (1, 2) if travels == "q" else (2, 1)  # arrays of gradients
    rows_q, rows_k = plan.where_q.rows, plan.where_k.rows
    once = lambda nbytes, copy: [f"copy {copy} {nbytes}", "event"] if staged and nbytes else []  # noqa: E731
    untouched = following * (not steps[0].compute) + staying * (not any(step.compute for step in steps))
    compute, out, into = ["kernel delta"] + ["kernel clear"] * untouched, [], []
    compute += index_vector(rows_k[rank]) if travels == "q" else index_vector(rows_q[rank]) * 3
    own = plan.ways[travels].last[rank]
    if own:
        compute += ["kernel copy"] * (4 if travels == "q" else 2) + ["event"]
        into += once(partial[rank], "H2D")  # its gradients come home
    for step, after in zip(steps, [*steps[1:], None]):
        if step.receive_from is not None:
            into += once(cargo[step.next_guest], "H2D")
        if step.partial_from is not None:
            into += once(partial[step.guest], "H2D")
        if step.send_to is not None:
            out += once(cargo[step.guest], "D2H")
        if step.compute:
            compute += index_vector(rows_q[step.guest]) * 3 if travels == "q" else index_vector(rows_k[step.guest])
            compute += ["kernel backward"]
            if step.index and after is not None and after.receive_from is not None:
                compute += ["event"]
        elif step.index == 1 and step.partial_to is not None:
            compute += ["kernel clear"] * following
        if step.partial_to is not None:  # this rank's share goes with what has come
            if step.partial_from is not None and step.compute:
                compute += ["kernel add"] * following
            if step.partial_from is None or step.compute:
                compute += ["event"]
            out += once(partial[step.guest], "D2H")
    compute += ["kernel add"] * (following * bool(own)) + ["kernel copy"] * (3 * narrow)
    return [*compute, "event"], out, sorted(into)


@pytest.mark.parametrize("transport", ["staged", "direct"])
@pytest.mark.parametrize("backward", ["q", "kv"])
@pytest.mark.parametrize(
    "layout, options, dtype",
    [("zigzag", {"causal": True}, "bfloat16"), ("contiguous", {"window": (3, 3)}, "float32"), ("explicit", {}, "float32")],
)
def test_streams_follow_the_schedule_in_backward(comm, layout, options, dtype, backward, transport):
    simulation()
    cupy = gpu()
    length = 9 * comm.size + 2
    p = problem(length, batch=1, heads=2, kv_heads=1, d=8, dv=8, dtype=dtype)
    options = options | {"layout": layout_of(layout, length, length, comm), "backward": backward}
    with attention(comm, transport, quick=True, **options) as attn:
        q, k, v, dout = put(cupy, *shards(attn, p))
        out, lse = attn.forward(q, k, v)
        grads = dict(zip(("dq", "dk", "dv"), attn.backward(dout, q, k, v, out, lse)))
        (plan,) = attn._plans.values()
        cupy.cuda.Device().synchronize()
        sim = simulation()
        sim.trace.clear()
        stream = plan.backend.gpu
        with cupy.cuda.Stream(non_blocking=True) as mine:
            attn.backward(dout, q, k, v, out, lse, **grads)
        mine.synchronize()
        expected = expected_backward(plan, comm.rank, transport == "staged", dtype != "float32")
        for name, listed in zip((mine.name, stream.out.name, stream.into.name), expected):
            for what in ("enqueue", "run"):
                found = [label for w, label, where in sim.trace if w == what and where == name]
                # parcels, partials and what comes home land as they arrive
                assert (sorted(found) if name == stream.into.name else found) == listed, (name, what)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("transport", ["staged", "direct"])
def test_messages_move_while_a_kernel_is_under_way(comm, transport, monkeypatch):
    """MPI is asked again and again while a kernel is in the queue, and a message comes through before it has ended."""
    simulation()
    cupy = gpu(polls=5)
    p = problem(16 * comm.size, batch=1, heads=2, kv_heads=1, d=8, dv=8, dtype="float32")
    with attention(comm, transport, quick=True) as attn:
        q, k, v, _ = put(cupy, *shards(attn, p))
        sim, seen = simulation(), []
        real = attn._ring.test

        def test(requests):
            done = real(requests)
            seen.append((any(op.label == "kernel forward" for op in sim.live.values()), done and bool(requests)))
            return done

        monkeypatch.setattr(attn._ring, "test", test)
        attn.forward(q, k, v)
    assert any(busy and done for busy, done in seen)
