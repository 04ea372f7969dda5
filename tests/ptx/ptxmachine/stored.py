"""Parsed PTX, kept: the last few modules in memory, long ones also in the cache folder, so that ranks and runs share the work.

A file holds the parsed module with its programs, what they may write and their records for C, pickled; its name is a digest of the
PTX and of the code that made it.  Files are put in place whole, so that processes may do so at the same time.
"""

import gc
import hashlib
import os
import pickle
import sys
import zlib
from functools import cache

from . import binding, inlining, memory, ops_memory, ops_mma, parser, program, stretches, writes
from .nvrtc import cache_folder

KEPT = 3_000_000  # characters of PTX in memory
LONG = 20_000  # characters from which a file is worth it

_modules = {}  # text -> parsed module, the last one used at the end


def parsed(text):
    """Return the parsed module of PTX `text`, with `programs` by the name of a kernel; nobody changes either."""
    module = _modules.pop(text, None)
    if module is None:
        path = _path(text) if len(text) >= LONG else None
        module = _read(path)
        if module is None:
            module = _parse(text)
            _write(path, module)
    _modules[text] = module
    while sum(map(len, _modules)) > KEPT and len(_modules) > 1:
        del _modules[next(iter(_modules))]
    return module


def _parse(text):
    module = parser.parse(text)
    module.programs = {name: program.Program(module, kernel) for name, kernel in module.kernels.items()}
    if len(text) >= LONG:
        for kernel in module.programs.values():
            writes.written_parameters(kernel)
            kernel.register_plan = program.plan_registers(kernel)
            stretches.table_of(kernel)
    return module


@cache
def _maker():
    """A digest of the code whose result is kept."""
    core = stretches.core()
    digest = hashlib.sha256(sys.version.encode() + repr(core and core.operations).encode())
    for room in (parser, inlining, program, writes, binding, memory, ops_memory, ops_mma, stretches):
        with open(room.__file__, "rb") as file:
            digest.update(file.read())
    return digest.digest()


def _path(text):
    name = hashlib.sha256(_maker() + text.encode()).hexdigest()
    return os.path.join(cache_folder(), "parsed", name)


def _read(path):
    if path is None or not os.path.exists(path):
        return None
    collecting = gc.isenabled()
    gc.disable()  # nothing that is made here is garbage
    try:
        with open(path, "rb") as file:
            return pickle.loads(zlib.decompress(file.read()))
    except Exception:  # half a file, or one of other versions
        return None
    finally:
        if collecting:
            gc.enable()


def _write(path, module):
    if path is None:
        return
    mine = "%s.%d" % (path, os.getpid())
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(mine, "wb") as file:
            file.write(zlib.compress(pickle.dumps(module, 5), 1))
        os.replace(mine, path)
    except OSError:  # no cache, then
        pass
