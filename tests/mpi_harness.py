"""Run pytest on all ranks of an MPI job as if it were one process.

Every rank runs the same tests in the same order. After each phase of a test (setup, call, teardown) the ranks
agree on its outcome, so that none of them goes on alone:

    failed on any rank   → failed on all, and the report shows the tracebacks with their ranks
    skipped on any rank  → skipped on all
    else                 → passed

Only rank 0 prints. A watchdog ends a job that hangs. The harness speaks on communicators of its own.
"""
import faulthandler
import functools
import hashlib
import os
import re
import sys
import threading
import time
import traceback
from pathlib import Path

import pytest

# A hang ends within a minute: one test, all its phases together, may take this long.
WATCHDOG_SECONDS = float(os.environ.get("BURSTMPI_TEST_WATCHDOG", 45))
BLOCKED_SECONDS = 12  # so much later where the interpreter itself is blocked
TRACEBACKS_SHOWN = 3  # different ones per failure


class RankFailure(AssertionError):
    """A hypothesis example failed on a rank; raised on every rank alike."""


def without_addresses(text: str) -> str:
    return re.sub(r"\b0x[0-9a-f]+", "", text)


class Watchdog:
    """End this process, with its stack on stderr, when a piece of work takes too long.

    The thread in Python says which rank and which test; where the interpreter itself is blocked, faulthandler's
    thread in C does the same without these words, a little later.
    """

    def __init__(self, name: str, stderr: int):
        self.name, self.stderr = name, stderr
        self.task, self.deadline = None, float("inf")
        self.changed = threading.Condition()
        self.watched = threading.get_ident()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def start(self, task: str) -> None:
        faulthandler.dump_traceback_later(WATCHDOG_SECONDS + BLOCKED_SECONDS, exit=True, file=self.stderr)
        self._set(task, time.monotonic() + WATCHDOG_SECONDS)

    def stop(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        self._set(None, float("inf"))

    def _set(self, task, deadline) -> None:
        with self.changed:
            self.task, self.deadline = task, deadline
            self.changed.notify()

    def _watch(self) -> None:
        with self.changed:
            while (left := self.deadline - time.monotonic()) > 0:
                self.changed.wait(min(left, 1e6))
            os.write(self.stderr, f"\n{self.name}: {self.task} hangs, {WATCHDOG_SECONDS:g} s are over\n".encode())
            calls = traceback.extract_stack(sys._current_frames()[self.watched], limit=20)  # the innermost ones
            ours = [call for call in calls if not {"pluggy", "_pytest"} & set(Path(call.filename).parts)]
            os.write(self.stderr, f"{self.name} is at\n{''.join(traceback.format_list(ours))}".encode())
            time.sleep(2)  # the other ranks write theirs before the launcher ends them
            os._exit(1)


class Ranks:
    """The pytest plugin of one rank."""

    def __init__(self, config):
        from mpi4py import MPI

        self.null, self.undefined = MPI.COMM_NULL, MPI.UNDEFINED
        self.comm = MPI.COMM_WORLD.Dup()  # of the harness alone: a failed test leaves nothing on it
        self.rank, self.size = self.comm.rank, self.comm.size
        self.members = self.comm  # the ranks of the harness that take part in this test
        self.failed = False  # this test, in any phase so far
        self.collect_errors = []
        self.watchdog = Watchdog(f"rank {self.rank} of {self.size}", os.dup(2))
        self.watchdog.start("collecting the tests")
        self.vendor = "{} {}.{}.{}".format(MPI.get_vendor()[0], *MPI.get_vendor()[1])
        if self.rank > 0:
            config.get_terminal_writer()._file = open(os.devnull, "w")
        for plugin in config.pluginmanager.get_plugins():
            if type(plugin).__name__ == "MPIPlugin":
                plugin._is_testing_mpi = False  # only its long closing section depends on this

    def pytest_report_header(self):
        return f"{self.size} ranks of {self.vendor}"

    # --- speaking with the other ranks

    def gather(self, payload, comm=None) -> list:
        """Return the payload of every rank, in rank order.

        Waits with short sleeps, so that ranks that are ready leave the cores to those that are not.
        """
        comm = comm or self.comm
        request, pause = comm.Ibarrier(), 0.0
        while not request.Test():
            time.sleep(pause)
            pause = min(pause + 2e-5, 2e-3)
        return comm.allgather(payload)

    # --- collection: the same tests everywhere

    def pytest_collectreport(self, report):
        if report.failed:
            self.collect_errors.append(report.longreprtext)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session):
        names = "\n".join(item.nodeid for item in session.items)
        answers = self.gather((hashlib.sha256(names.encode()).hexdigest(), len(session.items), self.collect_errors))
        self.watchdog.stop()
        if any(errors for _, _, errors in answers):
            for rank, (_, _, errors) in enumerate(answers):
                if errors and errors != answers[0][2]:
                    session.config.get_terminal_writer().line(f"rank {rank}:\n" + "\n".join(errors))
            raise session.Interrupted("errors during collection")
        if len({digest for digest, _, _ in answers}) > 1:
            raise session.Interrupted(f"the ranks collected different tests: {[count for _, count, _ in answers]}")

    def pytest_itemcollected(self, item):
        handle = getattr(getattr(item, "obj", None), "hypothesis", None)
        if handle is not None and not getattr(handle.inner_test, "is_agreed", False):
            handle.inner_test = self._agreed_examples(handle.inner_test, set(getattr(handle, "_given_kwargs", ())))

    # --- one test

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        self.failed = False
        self.watchdog.start(item.nodeid)
        try:
            return (yield)
        finally:
            self.watchdog.stop()

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem):
        if pyfuncitem.funcargs.get("comm") == self.null:
            return True  # this rank is not among those that the test asked for
        return None

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        captured = "".join(f"\n--- {title} ---\n{text}" for title, text in report.sections)
        answers = self.gather({
            "place": (report.nodeid, report.when),
            "outcome": report.outcome,
            "text": report.longreprtext + captured if report.failed else "",
            "crash": crash.message.split("\n")[0] if (crash := getattr(report.longrepr, "reprcrash", None)) else "",
            "skip": report.longrepr if report.skipped else None,
            "wasxfail": getattr(report, "wasxfail", None),
            "stop": call.stop,
        })
        places = {answer["place"] for answer in answers}
        if len(places) > 1:
            raise RuntimeError(f"the ranks are in different tests: {sorted(places)}")
        return self._agree(report, answers)

    def _agree(self, report, answers):
        outcomes = [answer["outcome"] for answer in answers]
        if "failed" in outcomes:
            self.failed = True
            report.outcome = "failed"
            report.longrepr = self._tracebacks(answers)
            report.sections = []
            report.__dict__.pop("wasxfail", None)
        elif "skipped" in outcomes:
            first = outcomes.index("skipped")
            answer = answers[first]
            report.outcome = "skipped"
            report.longrepr = answer["skip"]
            if answer["wasxfail"] is not None:
                report.wasxfail = answer["wasxfail"]
            elif isinstance(answer["skip"], tuple) and "passed" in outcomes:
                path, line, reason = answer["skip"]
                report.longrepr = (path, line, f"{reason} (on rank {first})")
        return report

    def _tracebacks(self, answers) -> str:
        """Return the tracebacks of the failing ranks, the earliest first, equal ones once."""
        groups = {}  # traceback without addresses of objects: (ranks, traceback)
        failing = [rank for rank, answer in enumerate(answers) if answer["outcome"] == "failed"]
        for rank in sorted(failing, key=lambda rank: answers[rank]["stop"]):
            text = answers[rank]["text"]
            groups.setdefault(without_addresses(text), ([], rank, text))[0].append(rank)
        parts = []
        for ranks, first, text in groups.values():
            names = ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, sorted(ranks)))
            parts.append(f"{names} of {self.size}: {answers[first]['crash']}\n")
            if len(parts) <= TRACEBACKS_SHOWN:
                parts[-1] += text + "\n"
        return "\n".join(parts)

    # --- hypothesis: the ranks walk through the same examples, in step

    def _agreed_examples(self, inner, drawn_names: set):
        """Return the inner test such that each example has one outcome on all ranks.

        Without this a rank that fails would replay its example while the others go on to the next.
        """
        from hypothesis.errors import StopTest, UnsatisfiedAssumption

        @functools.wraps(inner)
        def test(*args, **kwargs):
            __tracebackhide__ = True
            drawn = repr(sorted((k, v) for k, v in kwargs.items() if k in drawn_names))
            examples = self.gather(without_addresses(drawn), self.members)
            different = [rank for rank, example in enumerate(examples) if example != examples[0]]

            outcome, text, error = "passed", "", None
            if not different:
                try:
                    inner(*args, **kwargs)
                except (StopTest, UnsatisfiedAssumption, pytest.skip.Exception) as exception:
                    outcome, error = "left", exception
                except (KeyboardInterrupt, SystemExit):
                    raise
                except BaseException as exception:
                    outcome, text = "failed", f"{type(exception).__name__}: {exception}\n{traceback.format_exc()}"
            answers = self.gather((outcome, text), self.members)

            # One line raises for every rank: hypothesis tells failures apart by where they were raised.
            message = ""
            if different:
                message = f"rank {different[0]} drew {examples[different[0]]}, but rank 0 drew {examples[0]}"
            elif any(outcome == "failed" for outcome, _ in answers):
                message = "\n".join(f"on rank {rank}: {text}" for rank, (_, text) in enumerate(answers) if text)
            elif len({outcome for outcome, _ in answers}) > 1:
                message = f"some ranks rejected the example, others did not: {[outcome for outcome, _ in answers]}"
            if message:
                raise RankFailure(message)
            if error is not None:
                raise error

        test.is_agreed = True
        return test

    # --- communicators for the tests

    def communicator(self, ranks):
        """Yield a fresh communicator of the first so many ranks (all if None), COMM_NULL on the others."""
        if ranks is None:
            comm, self.members = self.comm.Dup(), self.comm
        else:
            color = 0 if self.rank < ranks else self.undefined
            comm, self.members = self.comm.Split(color), self.comm.Split(color)
        yield comm
        if not self.failed:  # after a failure messages may be under way on it: leave it alone
            if comm != self.null:
                comm.Free()
            if self.members not in (self.null, self.comm):
                self.members.Free()
        self.members = self.comm

    # --- the end: rank 0 has printed before any rank leaves

    def pytest_sessionfinish(self, session):
        if self.rank > 0 and session.exitstatus == pytest.ExitCode.TESTS_FAILED:
            session.exitstatus = pytest.ExitCode.OK  # rank 0 tells it

    def pytest_unconfigure(self):
        sys.stdout.flush()
        self.watchdog.start("ending the run")
        self.gather(None)
        self.watchdog.stop()
        if self.rank == 0:
            time.sleep(0.1)  # the launcher passes the last lines on


class Report:
    """Write what mpi_run.sh sums up: one line `passed failed skipped`, then the names of the failed tests."""

    def __init__(self, path: str):
        self.path = path
        self.outcomes = {}  # name of the test: its outcome

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.outcomes[report.nodeid] = "failed"
        elif report.skipped or report.when == "call":
            self.outcomes.setdefault(report.nodeid, report.outcome)

    def pytest_collectreport(self, report):
        if not report.passed:
            self.outcomes[report.nodeid] = report.outcome

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self):
        outcomes = list(self.outcomes.values())
        with open(self.path, "w") as file:
            print(*(outcomes.count(name) for name in ("passed", "failed", "skipped")), file=file)
            for name, outcome in self.outcomes.items():
                if outcome == "failed":
                    print(name, file=file)
