"""Backends that launch: the ring polls, and nothing is read, sent or returned before the work is done."""

import pytest
from support import check, problem, run, truth

from burstmpi import BurstAttention
from burstmpi.backends.numpy import NumpyBackend

pytestmark = pytest.mark.mpi

VERBS = ("copy", "clear", "add", "delta", "attend", "attend_backward")


class Later:
    """Work that happens only when it has been asked after a few times."""

    def __init__(self, work):
        self.work, self.asked, self.finished = work, 0, False

    def done(self):
        self.asked += 1
        if self.asked == 3:
            self.work()
            self.finished = True
        return self.finished


class LazyBackend(NumpyBackend):
    """NumPy's verbs, none of which has happened when it returns."""

    name = "lazy"

    def __init__(self):
        self.launched = []

    def __getattribute__(self, name):
        verb = super().__getattribute__(name)
        if name not in VERBS:
            return verb

        def launch(*args, **kwargs):
            self.launched.append(Later(lambda: verb(*args, **kwargs)))
            return self.launched[-1]

        return launch


@pytest.mark.parametrize("backward", ["q", "kv"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout, options", [("zigzag", {"causal": True}), ("contiguous", {"window": (3, 3)})])
def test_lazy_backend(comm, layout, options, dtype, backward):
    p = problem(30, dtype=dtype)
    with BurstAttention(comm, layout=layout, backward=backward, **options) as attn:
        attn._backend = lazy = LazyBackend()
        check(run(attn, p), truth(p, options))
    assert lazy.launched and all(work.finished for work in lazy.launched)


def test_backends_may_differ_between_ranks(comm, monkeypatch):
    """A node without a compiler: "auto" is NumPy there and compiled C elsewhere, and the parcels are the same."""
    if comm.rank == 0:
        monkeypatch.setattr("burstmpi.backends.choose", lambda name: NumpyBackend())
    for dtype in ("float32", "bfloat16"):
        p = problem(30, dtype=dtype)
        with BurstAttention(comm, causal=True) as attn:
            check(run(attn, p), truth(p, {"causal": True}))
            assert comm.rank > 0 or attn.stats.backend == "numpy"
