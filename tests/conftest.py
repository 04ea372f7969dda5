"""Markers, options and fixtures of all tests. What happens under MPI is in mpi_harness.py.

    @pytest.mark.mpi                       runs on every world of the run: 1, 2, 3, 4 and 7 ranks
    @pytest.mark.mpi(min_size=2)           not on smaller worlds
    @pytest.mark.mpi(ranks=3)              on exactly 3 ranks: `comm` holds the first 3 ranks of some world, and
    @pytest.mark.mpi(ranks=(2, 4, 8))      the test is not called on the others

    def test_something(comm): ...          comm: a communicator of this test's own
"""
import importlib.util
import os
from functools import cache

import pytest
from mpi_harness import Ranks, Report

try:
    import hypothesis
except ImportError:  # tests that need it say so themselves
    hypothesis = None

# On some virtual machines PyTorch's AMX code ends in an illegal instruction: the peer does without it.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

if hypothesis is not None:
    # The examples follow from the test's source alone: the same on every rank, and in every run.
    # Without deadlines and the check of the drawing time nothing depends on the clock.
    # A failing example is not shrunk under MPI: each try may cost a deadline of the ranks that wait.
    repeatable = dict(
        derandomize=True, database=None, deadline=None, report_multiple_bugs=False,
        suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture],
    )
    hypothesis.settings.register_profile("pure", **repeatable)
    hypothesis.settings.register_profile(
        "mpi", phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate], **repeatable)
    hypothesis.settings.register_profile("search", deadline=None)  # new examples in each run, without MPI


def under_mpi(config) -> bool:
    return config.getoption("--with-mpi") or config.getoption("--only-mpi")


@pytest.hookimpl(trylast=True)  # when the reporter for the terminal is there
def pytest_configure(config):
    if hypothesis is not None and not config.getoption("--hypothesis-profile", None):
        hypothesis.settings.load_profile("mpi" if under_mpi(config) else "pure")
    if under_mpi(config):
        config.pluginmanager.register(Ranks(config), "ranks")
    ranks = config.pluginmanager.get_plugin("ranks")
    path = os.environ.get("BURSTMPI_TEST_REPORT")
    worker = hasattr(config, "workerinput")  # of several that share the tests without MPI; the first process reports
    if path and not worker and (ranks is None or ranks.rank == 0):
        config.pluginmanager.register(Report(path), "report")


def pytest_generate_tests(metafunc):
    mark = metafunc.definition.get_closest_marker("mpi")
    if mark is None:
        return
    if mark.args or set(mark.kwargs) - {"min_size", "ranks"}:
        raise ValueError(f"mark mpi: min_size= and ranks= are possible, not {mark.args} {mark.kwargs}")
    ranks = mark.kwargs.get("ranks")
    if ranks is not None:
        ranks = (ranks,) if isinstance(ranks, int) else tuple(ranks)
        metafunc.parametrize("comm", ranks, indirect=True, ids=[f"{n}ranks" for n in ranks])


def worlds(name: str) -> list[int]:
    return [int(word) for word in os.environ.get(name, "").split() if word != "0"]


def runs_here(item, size: int) -> bool:
    """Return whether this world is the one, among those of the run, in which an MPI test is called.

    A test that no world can serve stays, and is skipped with the reason.
    """
    full, extra = worlds("BURSTMPI_TEST_WORLDS"), worlds("BURSTMPI_TEST_EXTRA_WORLDS")
    asked = item.callspec.params.get("comm") if hasattr(item, "callspec") else None
    if asked is not None:
        serving = [world for world in full + extra if world >= asked]
        return size == min(serving) if serving else size not in extra
    if size in extra:
        return False
    least = item.get_closest_marker("mpi").kwargs.get("min_size", 1)
    return size >= least or not any(world >= least for world in full)


@cache
def names_mpi(path) -> bool:
    return "mark.mpi" in path.read_text()


def pytest_ignore_collect(collection_path, config):
    """With --only-mpi, a file without a test for MPI is not even imported: all ranks would do that, on few cores."""
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    return True if config.getoption("--only-mpi") and is_test and not names_mpi(collection_path) else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    ranks = config.pluginmanager.get_plugin("ranks")
    kept, left = [], []
    for item in items:
        if item.get_closest_marker("mpi") is None:
            wanted = not config.getoption("--only-mpi")
        else:
            if not names_mpi(item.path):  # else ranks would leave its file out, and nobody would know
                raise ValueError(f"{item.path.name}: a test has the mark mpi, and the file does not name it")
            wanted = ranks is not None and runs_here(item, ranks.size)
        (kept if wanted else left).append(item)
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = kept


def pytest_runtest_setup(item):
    if item.get_closest_marker("peer") and importlib.util.find_spec("torch") is None:
        pytest.skip("PyTorch is missing: ./mpi_run.sh test --peer installs it")


@pytest.fixture
def comm(request):
    """A communicator of this test's own: all ranks, or as many as the test asks for (COMM_NULL on the rest)."""
    ranks = request.config.pluginmanager.get_plugin("ranks")
    if ranks is None:
        pytest.skip("needs MPI: ./mpi_run.sh test")
    asked = getattr(request, "param", None)
    if asked is not None and asked > ranks.size:
        pytest.skip(f"asks for {asked} ranks, this world has {ranks.size}")
    yield from ranks.communicator(asked)
