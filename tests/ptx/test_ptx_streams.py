"""Lazy streams: work happens when something waits for it, and a forgotten fence shows."""

import numpy as np
import pytest
from mini_backend import weighted_sum
from ptxmachine import cupy
from ptxmachine.faults import Fault

RNG = np.random.default_rng(4)
BLOCKS = [RNG.integers(-50, 50, 300).astype(np.float32) for _ in range(6)]
WEIGHTS = [1, 2, 4, 8, 16, 32]
EXPECTED = sum(w * b for w, b in zip(WEIGHTS, BLOCKS))  # small integers: exact in float32
# What the unharmed backend calls; each of these calls is removed once below.
CALLS = {"Event.record": 10, "Event.synchronize": 4, "Stream.wait_event": 10, "Stream.synchronize": 1}


def backend(**switches):
    sim = cupy.reset(arch="80", memory=1 << 26, **switches)
    return sim, lambda: weighted_sum(cupy, cupy.empty_pinned, BLOCKS, WEIGHTS)


def right(result):
    return np.isfinite(result).all() and (result == EXPECTED).all()


@pytest.mark.parametrize("streams", ("lazy", "eager"))
def test_the_unharmed_backend_is_right(streams):
    sim, run = backend(streams=streams)
    assert right(run())
    assert sim.calls == CALLS


@pytest.mark.parametrize("kind,number", [(kind, i) for kind, count in CALLS.items() for i in range(count)])
def test_every_removed_fence_fails(kind, number):
    sim, run = backend()
    sim.skips[kind] = {number}
    try:
        assert not right(run())
    except Fault as fault:
        assert fault.kind in ("stream race", "uninitialised read")
    assert sim.calls[kind] > number


@pytest.mark.parametrize("kind", CALLS)
def test_eager_streams_would_hide_them(kind):
    """The same removals with streams that do everything at once: nothing is found.  That is what laziness is for."""
    sim, run = backend(streams="eager")
    sim.skips[kind] = set(range(CALLS[kind]))
    assert right(run())


def test_laziness_alone_finds_the_fences_of_the_host():
    """Without the check of hazards: A and F are found by their wrong bytes."""
    for kind in ("Event.synchronize", "Stream.synchronize"):
        for number in range(CALLS[kind]):
            sim, run = backend(hazards=False)
            sim.skips[kind] = {number}
            assert not right(run())


# --- the rules one by one -------------------------------------------------------------------------
@pytest.fixture
def sim():
    return cupy.reset(arch="80", memory=1 << 26, host_reads=False, hazards=False)


def pinned(values):
    out = cupy.empty_pinned(len(values), np.float32)
    out[:] = values
    return out


def test_nothing_happens_before_a_synchronisation(sim):
    stream, out = cupy.cuda.Stream(non_blocking=True), pinned([0, 0])
    with stream:
        x = cupy.full(2, 7, np.float32)
        x.get(stream=stream, out=out, blocking=False)
    assert (out == 0).all() and len(sim.live) == 2
    stream.synchronize()
    assert (out == 7).all() and not sim.live


def test_a_copy_reads_pinned_memory_when_it_runs(sim):
    host, x = pinned([1, 2]), cupy.empty(2, np.float32)
    x.set(host, stream=cupy.cuda.Stream.null)
    host[:] = 9
    assert (x.get() == 9).all()  # the program should have waited
    x.set(np.float32([3, 4]))  # pageable memory is read at once
    assert (x.get() == [3, 4]).all()


def test_streams_do_not_see_each_other(sim):
    a, b = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    x = cupy.zeros(2, np.float32)
    cupy.cuda.Device().synchronize()
    with a:
        x.fill(5)
    assert (x.get(stream=b) == 0).all()  # old bytes
    b.wait_event(a.record())
    assert (x.get(stream=b) == 5).all()


def test_the_default_stream_waits_for_blocking_streams_and_they_for_it(sim):
    blocking, free = cupy.cuda.Stream(), cupy.cuda.Stream(non_blocking=True)
    x, y = cupy.zeros(2, np.float32), cupy.zeros(2, np.float32)
    cupy.cuda.Device().synchronize()
    with blocking:
        x.fill(1)
    with free:
        y.fill(1)
    assert (x.get() == 1).all() and (y.get() == 0).all()
    x.fill(2)
    y.fill(3)
    assert (x.get(stream=blocking) == 2).all()
    free.synchronize()
    assert (y.get(stream=free) == 1).all() or (y.get(stream=free) == 3).all()


def test_an_event_that_was_never_recorded_counts_as_done(sim):
    a, b, event, x = (
        cupy.cuda.Stream(non_blocking=True),
        cupy.cuda.Stream(non_blocking=True),
        cupy.cuda.Event(),
        cupy.zeros(1, np.float32),
    )
    cupy.cuda.Device().synchronize()
    with a:
        x.fill(1)
    assert event.done
    event.synchronize()
    b.wait_event(event)
    assert x.get(stream=b)[0] == 0


def test_an_event_marks_the_point_of_its_record(sim):
    a, event = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Event()
    x = cupy.zeros(1, np.float32)
    cupy.cuda.Device().synchronize()
    with a:
        x.fill(1)
        event.record()
        x.fill(2)
    event.synchronize()
    assert sim.machine.memory.span(x.data.ptr, 4)[0].view(np.float32)[0] == 1
    a.synchronize()
    assert x.get()[0] == 2


def test_polls_answer_not_yet_and_then_do_the_work(sim):
    a, event, x = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Event(), cupy.zeros(1, np.float32)
    cupy.cuda.Device().synchronize()
    with a:
        x.fill(1)
        event.record()
    assert [event.done for _ in range(4)] == [False, False, True, True]
    with a:
        x.fill(2)
    assert [a.done for _ in range(3)] == [False, False, True]


def test_host_functions_run_in_order(sim):
    seen, stream = [], cupy.cuda.Stream(non_blocking=True)
    stream.launch_host_func(seen.append, 1)
    stream.add_callback(lambda s, status, arg: seen.append(arg), 2)
    assert seen == []
    stream.synchronize()
    assert seen == [1, 2]


def test_an_event_belongs_to_its_device():
    cupy.reset(arch="80", memory=1 << 26, devices=2)
    event = cupy.cuda.Event()
    with cupy.cuda.Device(1):
        with pytest.raises(
            cupy.cuda.runtime.CUDARuntimeError, match="event of device 0 recorded on .* of device 1"
        ):
            event.record()
        other = cupy.cuda.Stream()
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="stream 1 of device 1 used on device 0"):
        other.use()
    other.wait_event(event)  # waiting across devices is allowed


def test_memory_freed_in_flight_is_an_error(sim):
    a, x = cupy.cuda.Stream(non_blocking=True), cupy.zeros(4, np.float32)
    cupy.cuda.Device().synchronize()
    with a:
        x.fill(1)
    del x  # allocated on the default stream, used on another
    with pytest.raises(RuntimeError, match="freed while still in use by fill 16 on stream 1"):
        a.synchronize()


def test_memory_freed_in_its_own_stream_is_fine(sim):
    a = cupy.cuda.Stream(non_blocking=True)
    with a:
        x = cupy.zeros(4, np.float32)
        x.fill(1)
        del x
    a.synchronize()
    assert cupy.get_default_memory_pool().used_bytes() == 0


def test_plain_cuda_malloc_is_never_freed_in_flight(sim):
    with cupy.cuda.using_allocator(None):
        x = cupy.zeros(4, np.float32)
        del x
        with pytest.raises(RuntimeError, match="freed while still in use"):
            cupy.cuda.Device().synchronize()


def test_a_fault_is_sticky(sim):
    kernel = cupy.RawModule(
        code='extern "C" __global__ void k(float* x) { x[64 + threadIdx.x] = 1; }'
    ).get_function("k")
    x = cupy.zeros(64, np.float32)
    kernel((1,), (32,), (x,))  # asynchronous: nothing happens yet
    with pytest.raises(Fault, match="out of bounds"):
        cupy.cuda.Device().synchronize()
    with pytest.raises(Fault, match="out of bounds"):
        x.get()


def test_the_trace_tells_the_order(sim):
    a = cupy.cuda.Stream(non_blocking=True)
    with a:
        x = cupy.zeros(1, np.float32)
        event = a.record()
    event.synchronize()
    assert [entry for entry in sim.trace if entry[0] != "alloc"] == [
        ("enqueue", "fill 4", "stream 1"),
        ("enqueue", "event", "stream 1"),
        ("run", "fill 4", "stream 1"),
        ("run", "event", "stream 1"),
    ]
    del x


# --- hazards between streams ----------------------------------------------------------------------
COPY = 'extern "C" __global__ void k(const float* x, float* y) { y[threadIdx.x] = x[threadIdx.x]; }'


@pytest.fixture
def two():
    """Two streams, three arrays, all quiet."""
    cupy.reset(arch="80", memory=1 << 26)
    arrays = [cupy.zeros(64, np.float32) for _ in range(3)]
    cupy.cuda.Device().synchronize()
    return (
        cupy.cuda.Stream(non_blocking=True),
        cupy.cuda.Stream(non_blocking=True),
        *arrays,
        cupy.RawModule(code=COPY).get_function("k"),
    )


def test_two_streams_may_read_one_buffer(two):
    a, b, x, y, z, kernel = two
    with a:
        kernel((1,), (64,), (x, y))
    with b:
        kernel((1,), (64,), (x, z))  # const in the PTX sense: no store through x
        x.get(stream=b)


@pytest.mark.parametrize("first,second", [("xy", "yz"), ("xy", "zy"), ("xy", "zx")])
def test_conflicting_kernels_need_an_event(two, first, second):
    a, b, x, y, z, kernel = two
    names = {"x": x, "y": y, "z": z}
    for fenced in (True, False):
        with a:
            kernel((1,), (64,), tuple(names[n] for n in first))
        if fenced:
            b.wait_event(a.record())
            with b:
                kernel((1,), (64,), tuple(names[n] for n in second))
            b.synchronize()
        else:
            with b, pytest.raises(Fault, match="stream race.*kernel k on stream 1 and kernel k on stream 2"):
                kernel((1,), (64,), tuple(names[n] for n in second))


def test_parts_of_one_buffer_are_separate(two):
    a, b, x, y, z, kernel = two
    both = cupy.zeros(128, np.float32)
    cupy.cuda.Device().synchronize()
    with a:
        kernel((1,), (64,), (x, both[:64]))
    with b:
        kernel((1,), (64,), (x, both[64:]))
        with pytest.raises(Fault, match="stream race"):
            kernel((1,), (64,), (x, both[32:96]))


def test_pointers_in_structs_and_numbers_count_too(two):
    a, b, x, y, z, _ = two
    code = 'struct P { int n; const float* x; float* y; };\nextern "C" __global__ void k(P p) { if (threadIdx.x < p.n) p.y[threadIdx.x] = p.x[threadIdx.x]; }'
    kernel = cupy.RawModule(code=code).get_function("k")

    def args(source, target):
        out = np.zeros((), [("n", np.int64), ("x", np.uint64), ("y", np.uint64)])
        out["n"], out["x"], out["y"] = 64, source.data.ptr, target.data.ptr
        return out

    with a:
        kernel((1,), (64,), (args(x, y),))
    with b:
        kernel((1,), (64,), (args(x, z),))
        with pytest.raises(Fault, match="stream race"):
            kernel((1,), (64,), (args(z, x),))


@pytest.mark.parametrize(
    "params,body,written",
    [
        ("const float* a, float* b, int n", "b[n] = a[n];", {1}),
        ("float* a, float* b, int n", "float* p = n > 3 ? a : b; p[threadIdx.x] = 1;", {0, 1}),
        ("float* a, float* b, int n", "for (int i = 0; i < n; i++, b += 4) atomicAdd(b, a[i]);", {1}),
        ("int* a, float* b, int n", "b[a[n]] = 1;", {1}),
        ("float** a, float* b, int n", "a[n][0] = b[n];", None),
        ("const float* a, float* b, int n", "float t[4]; t[n] = a[0]; if (t[n & 3] > 5) b[0] = 1;", {1}),
    ],
)
def test_what_a_kernel_writes_is_read_off_its_code(params, body, written):
    from ptxmachine.cupy.module import written_parameters

    cupy.reset(arch="80", memory=1 << 24)
    module = cupy.RawModule(code='extern "C" __global__ void k(%s) { %s }' % (params, body))
    module.get_function("k")
    found = written_parameters(module._load().program("k"))
    assert (found if found is None else {i for i, _ in found} & {0, 1}) == written


def test_pinned_memory_is_part_of_it(two):
    a, b, x, y, _, _ = two
    host = pinned(np.zeros(64))
    x.get(stream=a, out=host, blocking=False)
    with pytest.raises(Fault, match="stream race"):
        y.set(host, stream=b)
    b.wait_event(a.record())
    y.set(host, stream=b)
