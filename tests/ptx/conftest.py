import os
import sys

import pytest

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))


@pytest.fixture
def cupy():
    """The CuPy stand-in with fresh devices of sm_80."""
    from ptxmachine import cupy

    cupy.reset(arch="80")
    yield cupy
    cupy.reset(arch="80")
