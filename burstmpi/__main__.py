"""python -m burstmpi doctor"""

from __future__ import annotations

import sys

USAGE = """usage: python -m burstmpi doctor

doctor   what this job runs on, whether it computes rightly, and what to do where it does not; under mpirun or srun
"""


def main(arguments) -> int:
    """Do what the command line says."""
    if arguments == ["doctor"]:
        from .doctor import main as doctor

        return doctor()
    help_wanted = arguments in (["-h"], ["--help"], ["help"])
    print(USAGE, end="", file=sys.stdout if help_wanted else sys.stderr)
    return 0 if help_wanted else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
