import os
import sys

import pytest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: long sweeps, not in the default run")


def pytest_collection_modifyitems(config, items):
    """Leave out this folder's slow tests unless they are asked for."""
    if "slow" in (config.getoption("-m") or ""):
        return
    for item in items:
        if "slow" in item.keywords and str(item.path).startswith(HERE + os.sep):
            item.add_marker(pytest.mark.skip(reason="slow: ask for it with -m slow"))


@pytest.fixture
def cupy():
    """The CuPy stand-in with fresh devices of sm_80."""
    from ptxmachine import cupy

    cupy.reset(arch="80")
    yield cupy
    cupy.reset(arch="80")
