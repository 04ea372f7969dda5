"""What is wrong on one rank is refused on all of them, with the value, before anything is sent."""

import threading

import numpy as np
import pytest
from mpi4py import MPI
from support import check, problem, run, shards, truth

from burstmpi import BurstAttention

pytestmark = pytest.mark.mpi


def arrays(rows=4, dtype=np.float32):
    q = np.zeros((2, rows, 4, 8), dtype)
    k = np.zeros((2, rows, 2, 8), dtype)
    return {"q": q, "k": k, "v": np.zeros((2, rows, 2, 6), dtype)}


def shape(x, *new):
    return np.zeros(new, x.dtype)


WRONG_ARRAYS = [
    (lambda a: {"q": [[1.0]]}, TypeError, "q: must be a NumPy array, got list"),
    (lambda a: {"k": np.ma.array(a["k"])}, TypeError, "k: is a masked array, whose mask would be ignored"),
    (lambda a: {"q": a["q"][0]}, ValueError, r"q: must have 4 axes .*, got shape \(4, 4, 8\)"),
    (lambda a: {"q": a["q"].astype(int)}, TypeError, r"q: dtype must be one of .*int64"),
    (lambda a: {"q": a["q"].astype(">f4")}, TypeError, "q: dtype must be one of .*>f4"),
    (lambda a: {"q": a["q"].astype(complex)}, TypeError, "q: dtype must be one of .*complex128"),
    (lambda a: {"k": a["k"].astype(np.float64)}, TypeError, "k: dtype must be float32, got float64"),
    (lambda a: {"v": a["v"].astype(np.float16)}, TypeError, "v: dtype must be float32, got float16"),
    (lambda a: {"k": a["k"][:1]}, ValueError, "q, k, v: batch must be the same, got 2, 1, 2"),
    (lambda a: {"v": a["v"][:, :3]}, ValueError, "k, v: rows must be the same, got 4 and 3"),
    (lambda a: {"v": a["v"][:, :, :1]}, ValueError, "k, v: heads must be the same, got 2 and 1"),
    (lambda a: {"k": a["k"][..., :5]}, ValueError, "q, k: head_dim must be the same, got 8 and 5"),
    (lambda a: {"q": shape(a["q"], 2, 4, 3, 8)}, ValueError, "q, k: 2 key heads do not divide 3 query heads"),
    (lambda a: {"q": shape(a["q"], 2, 4, 0, 8)}, ValueError, "q: needs at least one head and one head dim"),
    (lambda a: {"v": a["v"][..., :0]}, ValueError, "v: needs at least one head and one head dim"),
    (lambda a: {"out": np.zeros((2, 4, 4, 5), np.float32)}, ValueError, r"out: shape must be \(2, 4, 4, 6\), got \(2, 4, 4, 5\)"),
    (lambda a: {"out": np.zeros((2, 4, 4, 6))}, TypeError, "out: dtype must be float32, got float64"),
    (lambda a: {"lse": np.zeros((2, 4, 4), np.float16)}, TypeError, "lse: dtype must be float32, got float16"),
    (lambda a: {"lse": np.zeros((2, 4, 4, 1), np.float32)}, ValueError, r"lse: must have 3 axes \(batch, heads, rows\)"),
    (lambda a: {"out": frozen(np.zeros((2, 4, 4, 6), np.float32))}, ValueError, "out: the buffer is read-only"),
    (lambda a: {"out": np.lib.stride_tricks.as_strided(np.zeros(1, np.float32), (2, 4, 4, 6), (0,) * 4)}, ValueError,
     "out: the buffer is a broadcast view"),
    (lambda a: {"out": np.lib.stride_tricks.as_strided(np.zeros(999, np.float32), (2, 4, 4, 6), (384, 64, 24, 4))}, ValueError,
     r"out: the buffer overlaps itself, got strides \(384, 64, 24, 4\)"),
    (lambda a: overlapping(a), ValueError, "out: the buffer shares memory with q"),
]  # fmt: skip


def frozen(x):
    x.flags.writeable = False
    return x


def overlapping(a):
    store = np.zeros((2, 4, 4, 8), np.float32)
    return {"q": store, "out": store[..., :6]}


@pytest.mark.parametrize("where", ["everywhere", "on one rank"])
@pytest.mark.parametrize("wrong, error, text", WRONG_ARRAYS, ids=[text[:40] for _, _, text in WRONG_ARRAYS])
def test_wrong_arrays(comm, wrong, error, text, where):
    bad = comm.size - 1
    with BurstAttention(comm, layout="contiguous") as attn:
        given = arrays()
        if where == "everywhere" or comm.rank == bad:
            given |= wrong(given)
        with pytest.raises(error, match=text) as caught:
            attn.forward(**given)
        assert caught.type is error
        if where == "on one rank" and comm.size > 1:
            assert str(caught.value).startswith(f"rank {bad}: ")
        # All ranks said the same, nothing was sent, and the object works on.
        assert len(set(comm.allgather(str(caught.value)))) == 1
        assert attn.stats.messages == 0
        attn.forward(**arrays())


@pytest.mark.parametrize(
    "name, wrong, error, text",
    [
        ("dout", lambda x: x[..., :3], ValueError, r"dout: shape must be \(2, .*, 4, 6\), got \(2, .*, 4, 3\)"),
        ("out", lambda x: x.astype(np.float64), TypeError, "out: dtype must be float32, got float64"),
        ("lse", lambda x: x.swapaxes(1, 2), ValueError, r"lse: shape must be \(2, 4, .*\)"),
        ("lse", lambda x: x.astype(np.float64), TypeError, "lse: dtype must be float32, got float64"),
        ("dout", lambda x: None, TypeError, "dout: must be a NumPy array, got NoneType"),
    ],
)
def test_wrong_arrays_of_backward(comm, name, wrong, error, text):
    p = problem(5 * comm.size, dtype="float32")
    with BurstAttention(comm, layout="contiguous") as attn:
        q, k, v, dout = shards(attn, p)
        out, lse = attn.forward(q, k, v)
        given = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "lse": lse}
        broken = {name: wrong(given[name])} if comm.rank == 0 else {}
        with pytest.raises(error, match=text):
            attn.backward(**(given | broken))
        with pytest.raises(ValueError, match="dk: the buffer shares memory with dq"):
            store = np.empty_like(q)
            attn.backward(**given, dq=store, dk=store[:, :, :2])
        attn.backward(**given)


class Broken:
    """What looks like an array and raises something of its own."""

    def __array__(self, *_, **__):
        raise KeyError("no array here")


@pytest.mark.parametrize(
    "options, error, text",
    [
        ({"causal": "yes"}, TypeError, "causal: must be True or False, got 'yes'"),
        ({"scale": float("nan")}, ValueError, "scale: must be finite and above 0, got nan"),
        ({"layout": "zigzig"}, ValueError, "layout: must be one of 'contiguous', 'zigzag', 'striped', got 'zigzig'"),
        ({"layout": None}, TypeError, "layout: must be one of .*, got None"),
        ({"layout": np.array([0.5])}, TypeError, "layout: must be whole numbers, got float64"),
        ({"layout": np.array([-1])}, ValueError, "layout: positions must be 0 or more, got -1"),
        ({"layout": ["zigzag", "striped"]}, TypeError, r"layout: a pair is a tuple .*, got \['zigzag', 'striped'\]"),
        ({"layout": 3}, ValueError, "layout: must be a vector, got 3"),
        ({"documents": [[0, 1], 2]}, TypeError, "documents: must be a vector of whole numbers, got"),
        ({"layout": np.zeros((2, 2), int)}, ValueError, r"layout: must be a vector, got shape \(2, 2\)"),
        ({"backward": "qkv"}, ValueError, "backward: must be one of 'auto', 'q', 'kv', got 'qkv'"),
        ({"backend": "fast"}, ValueError, "backend: must be one of 'auto', .*, got 'fast'"),
        ({"scale": 10**400}, ValueError, "scale: must be finite and above 0, got a number beyond float64"),
        ({"deadline": 10**400}, ValueError, "deadline: must be finite and above 0, got a number beyond float64"),
        ({"alibi_slopes": [10**400]}, ValueError, "alibi_slopes: must be finite, got a number beyond float64"),
        ({"layout": Broken()}, ValueError, "KeyError: 'no array here'"),
        ({"deadline": 0}, ValueError, "deadline: must be finite and above 0, got 0.0"),
        ({"deadline": "soon"}, TypeError, "deadline: must be a number or None, got 'soon'"),
    ],
)
@pytest.mark.parametrize("where", ["everywhere", "on one rank"])
def test_wrong_options(comm, options, error, text, where):
    mine = options if where == "everywhere" or comm.rank == 0 else {}
    with pytest.raises(error, match=text) as caught:
        BurstAttention(comm, **mine)
    assert len(set(comm.allgather(str(caught.value)))) == 1
    if where == "on one rank" and comm.size > 1:
        assert str(caught.value).startswith("rank 0: ")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "name, first, others",
    [
        ("causal", True, False),
        ("window", (2, None), (3, None)),
        ("documents", [0, 4], None),
        ("softcap", 1.0, 2.0),
        ("alibi_slopes", [1.0], [0.5]),
        ("scale", 1.0, None),
        ("layout", "striped", "zigzag"),
        ("backward", "q", "kv"),
        ("backend", "numpy", "reference"),
        ("deadline", 30.0, 31.0),
    ],
)
def test_options_that_differ(comm, name, first, others):
    with pytest.raises(ValueError, match=f"{name}: must be the same on all ranks, got .* on rank 0, .* on rank") as caught:
        BurstAttention(comm, **{name: first if comm.rank == 0 else others})
    assert len(set(comm.allgather(str(caught.value)))) == 1


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "change, text",
    [
        (lambda a: {name: np.concatenate([x, x]) for name, x in a.items()}, "batch: must be the same on all ranks, got 4 on rank 0, 2 on"),
        (lambda a: {name: x.astype(np.float16) for name, x in a.items()}, "dtype: must be the same on all ranks, got 'float16' on rank 0"),
        (lambda a: {"v": np.zeros((2, 4, 2, 7), np.float32)}, "dv: must be the same on all ranks, got 7 on rank 0, 6 on"),
        (lambda a: {"q": np.zeros((2, 4, 8, 8), np.float32)}, "heads: must be the same on all ranks, got 8 on rank 0, 4 on"),
    ],
)  # fmt: skip
def test_shapes_that_differ(comm, change, text):
    with BurstAttention(comm, layout="contiguous") as attn:
        given = arrays()
        with pytest.raises(ValueError, match=text) as caught:
            attn.forward(**(given | (change(given) if comm.rank == 0 else {})))
        assert len(set(comm.allgather(str(caught.value)))) == 1
        attn.forward(**given)


@pytest.mark.mpi(min_size=2)
def test_calls_that_differ(comm):
    with BurstAttention(comm, layout="contiguous") as attn:
        given = arrays()
        out, lse = attn.forward(**given)
        with pytest.raises(ValueError, match="call: must be the same on all ranks, got 'backward' on rank 0, 'forward' on"):
            if comm.rank == 0:
                attn.backward(out, **given, out=out, lse=lse)
            else:
                attn.forward(**given)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("layout", ["zigzag", "striped"])
def test_rows_that_contradict_the_layout(comm, layout):
    with BurstAttention(comm, layout=layout) as attn:
        rows = 9 if comm.rank == comm.size - 1 else 4
        with pytest.raises(ValueError, match=f"queries: {layout} over {comm.size} ranks of .* rows puts .* rows on rank"):
            attn.forward(**arrays(rows))
        attn.forward(**arrays(4))


def test_explicit_positions_that_do_not_fit(comm):
    positions = np.arange(3) + 3 * comm.rank
    with pytest.raises(ValueError, match="layout: "):
        BurstAttention(comm, layout=positions + (comm.rank == 0))
    with BurstAttention(comm, layout=positions) as attn:
        with pytest.raises(ValueError, match="queries: the layout's explicit vector puts 3 rows on rank 0, it has 4"):
            attn.forward(**arrays(4))
        attn.forward(**arrays(3))


def test_documents_that_do_not_fit(comm):
    with BurstAttention(comm, layout="contiguous", documents=[0, 3]) as attn:
        with pytest.raises(ValueError, match=f"boundaries of the queries end at 3, but there are {4 * comm.size} queries"):
            attn.forward(**arrays(4))


def test_slopes_that_do_not_fit(comm):
    with BurstAttention(comm, alibi_slopes=[1.0, 2.0]) as attn:
        with pytest.raises(ValueError, match="alibi_slopes: 2 slopes for 4 query heads"):
            attn.forward(**arrays(4))


def test_closed(comm):
    attn = BurstAttention(comm)
    attn.close()
    attn.close()
    for use in (
        lambda: attn.forward(**arrays()),
        lambda: attn.shard(np.zeros((1, 2, 3, 4))),
        lambda: attn.gather(np.zeros((1, 2, 3, 4))),
        lambda: attn.positions(4),
        lambda: attn.workspace_bytes((1, 1, 1, 1), (1, 1, 1, 1), (1, 1, 1, 1), "float32"),
    ):
        with pytest.raises(RuntimeError, match="BurstAttention: is closed"):
            use()
    assert "closed" in repr(attn)


def test_wrong_communicators(comm):
    with pytest.raises(TypeError, match="comm: must be a communicator of mpi4py, got 3"):
        BurstAttention(3)
    with pytest.raises(ValueError, match="comm: is COMM_NULL"):
        BurstAttention(MPI.COMM_NULL)


@pytest.mark.mpi(min_size=2)
def test_intercommunicators_are_refused(comm):
    half = comm.Split(comm.rank % 2)
    inter = half.Create_intercomm(0, comm, 1 - comm.rank % 2)
    with pytest.raises(ValueError, match="comm: is an intercommunicator"):
        BurstAttention(inter)
    inter.Free()
    half.Free()


@pytest.mark.parametrize(
    "call, error, text",
    [
        (lambda a: a.shard([1, 2]), TypeError, "x: must be a NumPy array, got list"),
        (lambda a: a.shard(np.zeros(3)), ValueError, "axis: x has 1 axes, got axis 1"),
        (lambda a: a.shard(np.zeros((1, 2)), side="values"), ValueError, "side: must be one of 'queries', 'keys', got 'values'"),
        (lambda a: a.positions(2.5), TypeError, "length: must be a whole number, got 2.5"),
        (lambda a: a.positions(-3), ValueError, "length: must be from 0 to .*, got -3"),
        (lambda a: a.positions(2**33), ValueError, "length: must be from 0 to .*, got 8589934592"),
        (lambda a: a.gather(np.array([[None]])), TypeError, "x: arrays of Python objects cannot be sent"),
        (lambda a: a.gather(np.zeros((2, 2), "V0")), TypeError, "x: elements of no bytes cannot be sent"),
        (lambda a: a.gather(np.zeros((2, 2)), axis=10**5000), ValueError, "axis: |digits"),
        (lambda a: a.gather(np.zeros((1, 2)), root=99), ValueError, "root: must be a rank below .* got 99"),
        (lambda a: a.shard(np.zeros((1, 2)), root=-1), ValueError, "root: must be a rank below .* got -1"),
        (lambda a: a.shard(np.zeros((1, 2)), root=True), ValueError, "root: must be a rank below .* got True"),
        (lambda a: a.positions(-1), ValueError, "length: must be from 0 to .*, got -1"),
        (lambda a: a.positions(2.5), TypeError, "length: must be a whole number, got 2.5"),
        (lambda a: a.positions(2**40), ValueError, "length: must be from 0 to"),
    ],
)  # fmt: skip
def test_wrong_moves(comm, call, error, text):
    with BurstAttention(comm) as attn, pytest.raises(error, match=text):
        call(attn)


@pytest.mark.parametrize("name, value", [("root", np.arange(2)), ("root", threading.Lock()), ("axis", iter([]))])
def test_values_on_one_rank_that_cannot_be_compared_or_pickled(comm, name, value):
    with BurstAttention(comm, layout="contiguous") as attn:
        with pytest.raises(ValueError, match=f"{name}: .*, got ") as caught:
            attn.shard(np.zeros((2, 3)), **({name: value} if comm.rank == comm.size - 1 else {}))
        assert len(set(comm.allgather(str(caught.value)))) == 1
        attn.gather(np.zeros((2, 3)))


@pytest.mark.mpi(min_size=2)
def test_byte_orders_that_differ(comm):
    with BurstAttention(comm) as attn:
        with pytest.raises(ValueError, match="dtype: must be the same on all ranks, got '>f4' on rank 0, 'float32' on"):
            attn.gather(np.ones((1, 2), ">f4" if comm.rank == 0 else "<f4"))


def test_wrong_workspace_questions(comm):
    with BurstAttention(comm) as attn:
        with pytest.raises(ValueError, match="k: must have 4 axes"):
            attn.workspace_bytes((1, 2, 3, 4), (1, 2, 3), (1, 2, 3, 4), "float32")
        with pytest.raises(TypeError, match="dtype: dtype must be one of .*int32"):
            attn.workspace_bytes((1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4), "int32")
        with pytest.raises(TypeError, match="dtype: dtype must be one of .*'float31'"):
            attn.workspace_bytes((1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4), "float31")
        with pytest.raises(TypeError, match="q: must be a shape .*, got ndarray"):
            attn.workspace_bytes(np.zeros((1, 2, 3, 4)), (1, 2, 3, 4), (1, 2, 3, 4), "float32")
        with pytest.raises(ValueError, match="q: a shape is four whole numbers"):
            attn.workspace_bytes((1, -2, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4), "float32")


def test_deadline_of_the_environment(comm, monkeypatch):
    monkeypatch.setenv("BURSTMPI_DEADLINE", "never")
    with pytest.raises(ValueError, match="BURSTMPI_DEADLINE: must be seconds, got 'never'"):
        BurstAttention(comm)
    monkeypatch.setenv("BURSTMPI_DEADLINE", "-3")
    with pytest.raises(ValueError, match="BURSTMPI_DEADLINE: must be finite and above 0, got -3"):
        BurstAttention(comm)


def test_an_object_works_after_errors(comm):
    p = problem(11, dtype="float32")
    with BurstAttention(comm, causal=True) as attn:
        with pytest.raises(TypeError):
            attn.forward(None, None, None)
        with pytest.raises(ValueError):
            attn.forward(*(np.zeros((1, 2, 3), np.float32),) * 3)
        check(run(attn, p), truth(p, {"causal": True}))
