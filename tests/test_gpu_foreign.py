"""Arrays of other libraries on the device: taken with no copy by real DLPack capsules and by __cuda_array_interface__."""

import gc
import sys

import foreign
import ml_dtypes
import numpy as np
import pytest
from foreign import CPU, MANAGED, PINNED, ROCM, LikeNumba, OldProducer, Producer
from gpu_kit import attention, check, collect, gpu, put, simulation
from support import TYPES, problem, shards, truth

from burstmpi import arrays, dlpack

ON_RANKS = pytest.mark.mpi(ranks=(1, 2, 3, 4))
KINDS = [Producer, OldProducer, LikeNumba]


def small(dtype="float32", length=16):
    return problem(length, batch=1, heads=2, kv_heads=2, d=8, dv=8, dtype=dtype)


# ---------------------------------------------------------------- capsules of NumPy and PyTorch: what others really make


def opened(capsule):
    tensor, owner, flags = dlpack._open(capsule)
    facts = (
        tensor.data + tensor.byte_offset, tuple(tensor.shape[: tensor.ndim]),
        tuple(tensor.strides[: tensor.ndim]) if tensor.strides else None, dlpack._dtype(tensor.dtype), tensor.device.type, flags,
    )  # fmt: skip
    return facts, owner


@pytest.mark.parametrize("version", [None, (1, 0)])
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, np.int32, np.uint8, np.bool_, np.complex64])
def test_numpys_own_capsules(dtype, version):
    x = np.zeros((4, 6, 8), dtype)[1:, ::2]
    before = sys.getrefcount(x)
    capsule = x.__dlpack__(max_version=version)
    facts, owner = opened(capsule)
    strides = tuple(step // x.itemsize for step in x.strides)
    assert facts == (x.ctypes.data, x.shape, strides, x.dtype, CPU, 0)
    assert sys.getrefcount(x) > before
    del owner, capsule
    assert sys.getrefcount(x) == before  # NumPy's deleter was called, once


def test_numpys_read_only_flag():
    x = np.zeros(3)
    x.flags.writeable = False
    facts, _ = opened(x.__dlpack__(max_version=(1, 0)))
    assert facts[-1] & dlpack.READ_ONLY


@pytest.mark.peer
@pytest.mark.parametrize("version", [None, (1, 0)])
@pytest.mark.parametrize("name", TYPES)
def test_pytorchs_own_capsules(name, version):
    import torch

    x = torch.zeros((4, 6, 8), dtype=getattr(torch, name))[:, 1::2]
    (address, shape, strides, dtype, place, _), owner = opened(x.__dlpack__(max_version=version))
    assert (address, shape, dtype.name, place) == (x.data_ptr(), tuple(x.shape), name, CPU) and strides == x.stride()
    del owner


def test_what_is_no_capsule():
    capsule = np.zeros(3).__dlpack__()
    opened(capsule)
    for thing in (capsule, 7):  # used up; no capsule at all
        with pytest.raises(TypeError, match="gave no capsule of a tensor, or a used one"):
            dlpack._open(thing)


# ---------------------------------------------------------------- on the device


@ON_RANKS
@pytest.mark.parametrize(  # __cuda_array_interface__ has no name for bfloat16
    "kind, dtype", [(kind, dtype) for kind in KINDS for dtype in ("float32", "bfloat16") if (kind, dtype) != (LikeNumba, "bfloat16")]
)
def test_taken_without_a_copy(comm, kind, dtype):
    """Views of a fused array that is made on the producer's stream, results into its buffers; each capsule is given back once."""
    simulation()
    cupy = gpu()
    p = small(dtype)
    with attention(comm, quick=True, causal=True, backward="kv") as attn:
        q, k, v, dout = shards(attn, p)
        theirs, ours = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
        with theirs:  # the copies to the device are pending while the arrays are handed over
            (fused, dout) = put(cupy, np.stack([q, k, v], axis=2), dout)
        with ours:
            grads = cupy.empty(fused.shape, fused.dtype)
        inputs = [kind(x, stream=theirs) for x in (*(fused[:, :, i] for i in range(3)), dout)]
        buffers = [kind(grads[:, :, i], stream=ours) for i in range(3)]
        sim = simulation()
        allocated = sum(what == "alloc" for what, _, _ in sim.trace)
        with ours:
            out, lse = attn.forward(*inputs[:3])
            got = attn.backward(inputs[3], *inputs[:3], out, lse, dq=buffers[0], dk=buffers[1], dv=buffers[2])
        assert [g.data.ptr for g in got] == [grads[:, :, i].data.ptr for i in range(3)]
        assert [g.strides for g in got] == [grads[:, :, i].strides for i in range(3)]
        assert not [label for what, label, _ in sim.trace if label.startswith(("copy D2D", "copy %d" % inputs[0].array.nbytes))]
        made = sum(what == "alloc" for what, _, _ in sim.trace) - allocated
        assert made <= 4  # out, lse, and the workspaces of forward and backward
        if kind is not LikeNumba:
            told = [asked["stream"] for x in (*inputs, *buffers) for asked in x.asked]
            assert set(told) == {ours.ptr}  # CuPy's current stream, for whom the producer has waited
            asked = {"stream": ours.ptr, "max_version": (1, 0), "copy": False}
            assert inputs[0].asked[0] == (asked if kind is Producer else {"stream": ours.ptr})
        whole = collect(attn, *(cupy.asnumpy(x, stream=ours) for x in (out, lse, *got)))
        check(whole, truth(p, {"causal": True}))
        del got
        counts = [len(x.asked) for x in (*inputs, *buffers)] if kind is not LikeNumba else []
    gc.collect()
    assert [x.deleted for x in (*inputs, *buffers)] == counts if counts else True


@ON_RANKS
@pytest.mark.parametrize("kind", KINDS)
def test_a_temporary_lives_until_the_kernels_are_done(comm, kind):
    """The caller lets go of its array at once; the library that owns it knows nothing of our stream and would use it again."""
    simulation()
    cupy = gpu()
    p = small()
    with attention(comm, quick=True) as attn:
        mine = shards(attn, p)
        stream = cupy.cuda.Stream(non_blocking=True)

        made = [kind(x) for x in put(cupy, *mine[:3])]  # memory of another stream than ours
        cupy.cuda.Device().synchronize()
        with stream:
            out, lse = attn.forward(*made)
        pending = comm.size == 1  # with nobody to send to nothing has run yet
        for producer in made:
            producer.let_go()
        owners = [x for x in made if kind is not LikeNumba]
        if pending:
            assert all(x.deleted == 0 for x in owners)
        del made, producer
        gc.collect()
        again = put(cupy, *mine[:3])
        cupy.cuda.Device().synchronize()
        with stream:
            attn.forward(*again)  # what is done is let go of
        gc.collect()
        assert all(x.deleted == 1 for x in owners)
        cupy.cuda.Device().synchronize()


def hand_in(comm, wrap, kind, text, which="k", **switches):
    """Something is refused on every rank alike, by name, and the object works on."""
    cupy = gpu(**switches)
    p = small()
    with attention(comm, quick=True, deadline=10) as attn:
        q, k, v, _ = put(cupy, *shards(attn, p))
        given = {"q": q, "k": k, "v": v}
        options = {"out": wrap(cupy.empty(q.shape, q.dtype))} if which == "out" else {}
        if which != "out":
            given[which] = wrap(given[which])
        with pytest.raises(kind, match=text):
            attn.forward(*given.values(), **options)
        gc.collect()
        wrapped = options["out"] if options else given[which]
        assert not isinstance(wrapped, Producer) or wrapped.deleted == len(wrapped.asked)  # each capsule is given back
        attn.forward(q, k, v)


REFUSED = {
    "a tensor of the host among CuPy's": (lambda x: Producer(x, place=(CPU, 0)), TypeError, "q, k: q is on GPU 0, k is a Producer of DLPack device type 1"),
    "pinned memory": (lambda x: Producer(x, place=(PINNED, 0)), TypeError, "q, k: q is on GPU 0, k is a Producer of DLPack device type 3"),
    "ROCm": (lambda x: Producer(x, place=(ROCM, 0)), TypeError, "q, k: q is on GPU 0, k is a Producer of DLPack device type 10"),
    "another device": (lambda x: Producer(x, place=(foreign.CUDA, 1)), ValueError, "q, k: q is on GPU 0, k is on GPU 1"),
    "a type that does not fit": (lambda x: Producer(x, code=0), TypeError, "k: dtype must be float32, got int32"),
    "bfloat16 that does not fit": (
        lambda x: Producer(x.astype(ml_dtypes.bfloat16)), TypeError, "k: dtype must be float32, got bfloat16"),
    "a type of the future": (
        lambda x: Producer(x, code=17, bits=4), TypeError,
        "k: CuPy cannot take this Producer: DLPack type code 17 with 4 bits and 1 lanes is not known"),
    "vectors": (lambda x: Producer(x, lanes=4), TypeError, "DLPack type code 2 with 32 bits and 4 lanes is not known"),
    "a version of the future": (
        lambda x: Producer(x, major=2), TypeError, "k: CuPy cannot take this Producer: DLPack 2.0 is newer than 1.x"),
}  # fmt: skip


@ON_RANKS
@pytest.mark.parametrize("name", REFUSED)
def test_refused(comm, name):
    simulation()
    wrap, kind, text = REFUSED[name]
    hand_in(comm, wrap, kind, text, **({"devices": 2} if name == "another device" else {}))


@ON_RANKS
@pytest.mark.parametrize("kind", [Producer, LikeNumba])
def test_a_result_is_not_written_where_it_may_not_be(comm, kind):
    simulation()
    hand_in(comm, lambda x: kind(x, read_only=True), ValueError, "out: the buffer is read-only", which="out")


@ON_RANKS
def test_what_may_not_be_written_may_be_read(comm):
    """As JAX's arrays are; and managed memory is on every device."""
    simulation()
    cupy = gpu()
    p = small()
    with attention(comm, quick=True) as attn:
        q, k, v, _ = put(cupy, *shards(attn, p))
        out, lse = attn.forward(Producer(q, read_only=True), Producer(k, place=(MANAGED, 0)), LikeNumba(v, read_only=True))
        want, _ = attn.forward(q, k, v)
        assert (cupy.asnumpy(out) == cupy.asnumpy(want)).all()


@ON_RANKS
def test_a_producer_that_refuses(comm):
    """PyTorch does where a tensor requires a gradient: its words arrive."""
    simulation()

    class Refusing(Producer):
        def __dlpack__(self, **options):
            raise BufferError("Can't export tensors that require gradient, use tensor.detach()")

    text = r"k: CuPy cannot take this Refusing: Can't export tensors that require gradient, use tensor.detach\(\)"
    hand_in(comm, Refusing, TypeError, text)


@ON_RANKS
def test_shard_and_gather(comm):
    simulation()
    cupy = gpu()
    whole = np.arange(2 * 23 * 3, dtype=np.float32).reshape(2, 23, 3)
    with attention(comm, layout="zigzag") as attn:
        (there,) = put(cupy, whole)
        mine = attn.shard(Producer(there))
        assert (cupy.asnumpy(mine) == whole[:, attn.positions(23)]).all()
        assert (cupy.asnumpy(attn.gather(LikeNumba(mine))) == whole).all()


def test_the_default_stream_is_called_one():
    """0 is ambiguous in DLPack; CuPy's default stream has the address 0."""
    simulation()
    cupy = gpu()
    producer = Producer(cupy.zeros((2, 8), np.float32))
    taken = arrays.adopt("q", producer)
    assert producer.asked[0]["stream"] == 1 and taken.data.ptr == producer.array.data.ptr
    del taken
    gc.collect()
    assert producer.deleted == 1
