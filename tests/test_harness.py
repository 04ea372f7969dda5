"""The harness itself: small test files, each run by pytest on several ranks in a job of its own."""
import re
import shutil
import time
from pathlib import Path

import pytest
from launching import mpi_run, needs_environment

pytestmark = needs_environment
HERE = Path(__file__).parent


@pytest.fixture
def pytest_on(tmp_path):
    """Return a function that runs a test file's text on so many ranks."""
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers\n")
    for name in ("conftest.py", "mpi_harness.py"):
        shutil.copy(HERE / name, tmp_path)

    def run(ranks: int, text: str, *options, **changes):
        (tmp_path / "test_it.py").write_text("import pytest\n" + text)
        return mpi_run("-n", ranks, "-m", "pytest", "--only-mpi", "-p", "no:cacheprovider", "--color=no", *options,
                       cwd=tmp_path, PYTHONHASHSEED=0, **changes)

    return run


def closing_line(done) -> str:
    lines = [line for line in done.stdout.splitlines() if re.search(r"(passed|failed|skipped|errors?)\b.* in [\d.]+s", line)]
    assert len(lines) == 1, f"only rank 0 closes:\n{done.stdout}\n{done.stderr}"
    return lines[0]


def test_passing_tests_pass_and_others_are_left_out(pytest_on, tmp_path):
    done = pytest_on(3, """
@pytest.mark.mpi
def test_all(comm):
    assert comm.size == 3 and comm.allreduce(comm.rank) == 3

@pytest.mark.mpi(ranks=2)
def test_two(comm):
    assert comm.size == 2 and comm.allreduce(1) == 2

@pytest.mark.mpi(ranks=(1, 3))
def test_sizes(comm):
    assert comm.size in (1, 3)

@pytest.mark.mpi(min_size=4)
def test_more(comm):
    assert False

@pytest.mark.mpi(ranks=4)
def test_four(comm):
    assert False

def test_without_mpi():
    assert False
""", BURSTMPI_TEST_REPORT=tmp_path / "report")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed, 2 skipped, 1 deselected" in closing_line(done)
    assert (tmp_path / "report").read_text() == "4 0 2\n"


def test_each_asked_size_runs_in_one_world_of_a_run(pytest_on):
    text = """
@pytest.mark.mpi(ranks=(1, 2, 3, 8))
def test_asked(comm):
    pass

@pytest.mark.mpi
def test_plain(comm):
    pass

@pytest.mark.mpi(min_size=3)
def test_least(comm):
    pass
"""
    seen = {}
    for world in (1, 2, 4):
        done = pytest_on(world, text, "-v", BURSTMPI_TEST_WORLDS="0 1 2", BURSTMPI_TEST_EXTRA_WORLDS="4")
        seen[world] = sorted(re.findall(r"test_it.py::(\S+) (\w+)", done.stdout))
    skipped = ("test_asked[8ranks]", "SKIPPED")
    least = ("test_least", "SKIPPED")  # no full world has three ranks
    assert seen[1] == [("test_asked[1ranks]", "PASSED"), skipped, least, ("test_plain", "PASSED")]
    assert seen[2] == [("test_asked[2ranks]", "PASSED"), skipped, least, ("test_plain", "PASSED")]
    assert seen[4] == [("test_asked[3ranks]", "PASSED")]


def test_a_failing_rank_fails_all_and_shows_its_traceback(pytest_on, tmp_path):
    done = pytest_on(3, """
@pytest.mark.mpi
def test_one_rank(comm):
    print("words of rank", comm.rank)
    value = 40 + comm.rank
    assert value != 42, "the message"

@pytest.mark.mpi
def test_next(comm):
    comm.Barrier()
""", BURSTMPI_TEST_REPORT=tmp_path / "report")
    assert done.returncode == 1
    assert "1 failed, 1 passed" in closing_line(done)
    assert "FAILED test_it.py::test_one_rank - rank 2 of 3: AssertionError: the message" in done.stdout
    assert "assert value != 42" in done.stdout
    assert "words of rank 2" in done.stdout and "words of rank 0" not in done.stdout
    assert (tmp_path / "report").read_text() == "1 1 0\ntest_it.py::test_one_rank\n"


def test_all_phases_are_agreed(pytest_on):
    done = pytest_on(2, """
@pytest.fixture
def breaks_before(comm):
    assert comm.rank == 0, "before"

@pytest.fixture
def breaks_after(comm):
    yield
    assert comm.rank == 0, "after"

@pytest.mark.mpi
def test_setup(comm, breaks_before):
    comm.Barrier()   # rank 0 would wait here for ever

@pytest.mark.mpi
def test_teardown(comm, breaks_after):
    pass

@pytest.mark.mpi
def test_skip(comm):
    if comm.rank == 1:
        pytest.skip("not today")

@pytest.mark.mpi
@pytest.mark.xfail(strict=True, reason="known")
def test_known(comm):
    assert False
""", "-rs")
    assert done.returncode == 1
    line = closing_line(done)
    for part in ("1 passed", "1 skipped", "1 xfailed", "2 errors"):
        assert part in line
    assert "AssertionError: before" in done.stdout and "AssertionError: after" in done.stdout
    assert "not today (on rank 1)" in done.stdout


def test_messages_left_by_a_failed_test_do_not_reach_the_next(pytest_on):
    done = pytest_on(2, """
import numpy as np

@pytest.mark.mpi
def test_leaves_a_message(comm):
    if comm.rank == 0:
        comm.Isend(np.array([1.0]), dest=1, tag=7)
    assert comm.rank == 0

@pytest.mark.mpi
def test_gets_its_own(comm):
    received = np.zeros(1)
    if comm.rank == 0:
        comm.Send(np.array([2.0]), dest=1, tag=7)
    else:
        comm.Recv(received, source=0, tag=7)
        assert received[0] == 2.0
""")
    assert done.returncode == 1
    assert "1 failed, 1 passed" in closing_line(done)


def test_a_hang_ends_with_the_stacks(pytest_on):
    began = time.monotonic()
    done = pytest_on(3, """
def waits_for_ever(comm):
    comm.Barrier()

@pytest.mark.mpi
def test_hang(comm):
    if comm.rank > 0:
        waits_for_ever(comm)
""", BURSTMPI_TEST_WATCHDOG=4)
    assert done.returncode != 0
    assert time.monotonic() - began < 45
    for rank in range(3):
        assert f"rank {rank} of 3: test_it.py::test_hang hangs, 4 s are over" in done.stderr
    assert done.stderr.count("in waits_for_ever") == 2


def test_a_hang_that_keeps_the_interpreter_ends(pytest_on):
    done = pytest_on(2, """
import re

@pytest.mark.mpi
def test_busy(comm):
    if comm.rank == 1:
        re.match("(a+)+b", "a" * 60)   # one call into C that holds the interpreter
""", BURSTMPI_TEST_WATCHDOG=3)
    assert done.returncode != 0
    assert "rank 0 of 2: test_it.py::test_busy hangs" in done.stderr


def test_an_error_of_collection_on_one_rank_ends_the_run(pytest_on):
    done = pytest_on(2, """
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 1:
    raise ImportError("only here")

@pytest.mark.mpi
def test_never(comm):
    pass
""", BURSTMPI_TEST_WATCHDOG=20)
    assert done.returncode != 0
    assert "only here" in done.stdout
    assert "hangs" not in done.stderr


def test_different_tests_on_the_ranks_are_refused(pytest_on):
    done = pytest_on(2, """
from mpi4py import MPI

@pytest.mark.mpi
@pytest.mark.parametrize("x", range(1 + MPI.COMM_WORLD.rank))
def test_some(comm, x):
    pass
""")
    assert done.returncode != 0
    assert "the ranks collected different tests: [1, 2]" in done.stdout


HYPOTHESIS = "from hypothesis import assume, given, settings, strategies as st\n"


def test_hypothesis_draws_the_same_on_all_ranks(pytest_on, tmp_path):
    done = pytest_on(3, HYPOTHESIS + """
seen = []

@pytest.mark.mpi
@settings(max_examples=60)
@given(st.lists(st.floats()), st.sets(st.text(max_size=3)), st.data())
def test_same(comm, xs, words, data):
    more = data.draw(st.integers(0, 10**9))
    assume(more % 3)
    every = comm.allgather(repr((xs, sorted(words), more)))
    assert len(set(every)) == 1
    seen.append(more)

@pytest.mark.mpi
def test_there_were_many(comm):
    assert len(seen) >= 60 and len(set(seen)) > 20
""")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in closing_line(done)


def test_hypothesis_failure_on_one_rank_is_agreed(pytest_on):
    done = pytest_on(3, HYPOTHESIS + """
@pytest.mark.mpi
@given(st.integers(0, 1000))
def test_one_rank(comm, n):
    comm.Barrier()                     # the ranks stay in step
    assert comm.rank != 1 or n < 100, "too many"

@pytest.mark.mpi
@given(st.integers())
def test_next(comm, n):
    comm.Barrier()
""", BURSTMPI_TEST_WATCHDOG=25)
    assert done.returncode == 1
    assert "1 failed, 1 passed" in closing_line(done)
    assert "on rank 1: AssertionError: too many" in done.stdout
    assert "on rank 0:" not in done.stdout
    assert re.search(r"test_one_rank\([^)]*\bn=\d{3}", done.stdout), "the failing example is named"


def test_hypothesis_examples_that_differ_are_noticed(pytest_on):
    done = pytest_on(2, HYPOTHESIS + """
from mpi4py import MPI

@pytest.mark.mpi
@given(st.just(MPI.COMM_WORLD.rank))
def test_differs(comm, x):
    comm.Barrier()
""")
    assert done.returncode == 1
    assert "rank 1 drew [('x', 1)], but rank 0 drew [('x', 0)]" in done.stdout
