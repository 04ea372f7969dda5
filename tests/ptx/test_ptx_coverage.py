"""Every instruction that the machine knows is named in a test of instructions."""

import glob
import os
import re

from ptxmachine import machine  # noqa: F401 (registers the instructions)
from ptxmachine.binding import BUILDERS
from ptxmachine.program import TERMINATORS
from ptxsupport import HERE

TESTS = "\n".join(
    open(path).read()
    for path in sorted(glob.glob(os.path.join(HERE, "test_*.py")))
    if not path.endswith("test_ptx_coverage.py")
)


def test_every_opcode_is_tested():
    known = set(BUILDERS) | TERMINATORS
    missing = [op for op in sorted(known) if not re.search(r"(?<![\w.])%s[.\s;]" % op, TESTS)]
    assert missing == []
