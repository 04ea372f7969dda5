"""RawModule and RawKernel: NVRTC to PTX, PTX to the machine, with the checks of CuPy, CUDA and a little more."""

import hashlib
import os
import struct

import numpy as np

from ..faults import LaunchError
from ..nvrtc import CompileError, cache_folder, default_toolkit
from ..program import TYPES
from ..writes import written_parameters
from .array import ndarray
from .errors import CompileException, CUDADriverError
from .memory import MemoryPointer, allocation_of
from .state import ARCHITECTURES, simulation

ADDED = ("-ftz=true", "--device-as-default-execution-space", "-lineinfo")
_compiled = {}


def _headers(options):
    """Return a digest of all headers below the -I folders: the compiler's result depends on them."""
    digest = hashlib.sha256()
    for option in options:
        folder = (
            option[2:].strip()
            if option.startswith("-I")
            else option.partition("=")[2] if option.startswith("--include-path") else None
        )
        if folder and os.path.isdir(folder):
            for root, _, names in sorted(os.walk(folder)):
                for name in sorted(names):
                    if name.endswith((".h", ".cuh", ".hpp", ".inl")):
                        with open(os.path.join(root, name), "rb") as file:
                            digest.update(name.encode() + b"\0" + file.read())
    return digest.hexdigest()


def compile_ptx(source, options, arch, names=(), file_name="kernel.cu"):
    """Compile (or take from memory, or from the cache folder) and return (ptx, lowered names)."""
    toolkit = default_toolkit()
    key = hashlib.sha256(
        repr(
            (source, tuple(options), arch, tuple(names), toolkit.version, _headers(options), file_name)
        ).encode()
    ).hexdigest()
    if key not in _compiled:
        path = os.path.join(cache_folder(), "ptx", key + ".ptx")
        if os.path.exists(path) and not names:
            with open(path) as file:
                _compiled[key] = file.read(), {}
        else:
            try:
                ptx, lowered, _ = toolkit.compile(source, arch, (*options, *ADDED), file_name, names)
            except CompileError as error:
                raise CompileException(error.log or str(error), source, file_name, options) from None
            _compiled[key] = ptx, lowered
            if not names:
                try:
                    os.makedirs(os.path.dirname(path), exist_ok=True)
                    with open("%s.%d" % (path, os.getpid()), "w") as file:
                        file.write(ptx)
                    os.replace("%s.%d" % (path, os.getpid()), path)
                except OSError:  # no cache, then
                    pass
    return _compiled[key]


class RawModule:
    """CUDA C (or PTX by `path`) that becomes kernels."""

    def __init__(
        self,
        code=None,
        *,
        path=None,
        options=(),
        backend="nvrtc",
        translate_cucomplex=False,
        enable_cooperative_groups=False,
        name_expressions=None,
        jitify=None
    ):
        if (code is None) == (path is None):
            raise TypeError("Exactly one of `code` and `path` keyword arguments must be given.")
        if backend != "nvrtc" or jitify or translate_cucomplex or enable_cooperative_groups:
            raise ValueError(
                "only backend='nvrtc' without jitify, cucomplex and cooperative launch is supported"
            )
        if not isinstance(options, tuple):
            raise TypeError("options: a tuple of strings expected, got %r" % (options,))
        for option in options:
            if not isinstance(option, str):
                raise TypeError("options: a string expected, got %r" % (option,))
            if "-arch" in option or "gpu-architecture" in option:
                raise ValueError("options: %r: the architecture is the device's" % option)
        if path is not None:
            with open(path) as file:
                code = file.read()
        self.code, self.options, self.is_ptx = code, options, path is not None
        self.name_expressions = tuple(name_expressions or ())
        self._modules, self._kernels, self._lowered, self.file_path = {}, {}, {}, path

    def compile(self, log_stream=None):
        self._load()

    def _load(self):
        sim = simulation()
        key = (id(sim), sim.device)
        if key not in self._modules:
            if self.is_ptx:
                ptx = self.code
            else:
                ptx, self._lowered = compile_ptx(self.code, self.options, sim.arch, self.name_expressions)
            module = sim.machine.load(ptx)
            need = "".join(c for c in (module.target or "sm_0") if c.isdigit())
            if int(need) > int(sim.arch):
                raise CUDADriverError(
                    "CUDA_ERROR_NO_BINARY_FOR_GPU", "code for sm_%s on a device of sm_%s" % (need, sim.arch)
                )
            self._modules = {key: module}
        return self._modules[key]

    def get_function(self, name):
        """Return the RawKernel `name` (or of a name expression)."""
        module = self._load()
        name = self._lowered.get(name, name)
        if name not in module.parsed.kernels:
            raise CUDADriverError(
                "CUDA_ERROR_NOT_FOUND",
                "named symbol not found: %r; kernels are %s" % (name, sorted(module.parsed.kernels)),
            )
        _check_static(module.program(name))
        if name not in self._kernels:
            kernel = RawKernel.__new__(RawKernel)
            kernel._setup(self, name)
            self._kernels[name] = kernel
        return self._kernels[name]

    def get_global(self, name):
        """Return a MemoryPointer to a module variable."""
        from .memory import UnownedMemory

        module = self._load()
        if name not in module.addresses:
            raise CUDADriverError("CUDA_ERROR_NOT_FOUND", "named symbol not found: %r" % name)
        return MemoryPointer(UnownedMemory(module.addresses[name], module.parsed.variables[name].size, self), 0)


class RawKernel:
    """A kernel: `kernel(grid, block, args, shared_mem=0)`."""

    def __init__(
        self,
        code,
        name,
        options=(),
        backend="nvrtc",
        translate_cucomplex=False,
        *,
        enable_cooperative_groups=False,
        jitify=False
    ):
        module = RawModule(
            code=code,
            options=options,
            backend=backend,
            translate_cucomplex=translate_cucomplex,
            enable_cooperative_groups=enable_cooperative_groups,
            jitify=jitify,
        )
        self._setup(module, name)

    def _setup(self, module, name):
        self._module, self.name, self._limit = module, name, None

    @property
    def _program(self):
        return self._module._load().program(self.name)

    @property
    def attributes(self):
        return {
            "max_threads_per_block": self.max_threads_per_block,
            "shared_size_bytes": self.shared_size_bytes,
            "const_size_bytes": 0,
            "local_size_bytes": self.local_size_bytes,
            "max_dynamic_shared_size_bytes": self.max_dynamic_shared_size_bytes,
        }

    @property
    def max_threads_per_block(self):
        return self._program.function.max_threads or 1024

    @property
    def shared_size_bytes(self):
        return self._program.static_shared

    @property
    def local_size_bytes(self):
        return self._program.local_bytes

    @property
    def max_dynamic_shared_size_bytes(self):
        return (48 << 10) - self.shared_size_bytes if self._limit is None else self._limit

    @max_dynamic_shared_size_bytes.setter
    def max_dynamic_shared_size_bytes(self, size):
        room = ARCHITECTURES[simulation().arch][0] - self.shared_size_bytes
        if not 0 <= size <= room:
            raise CUDADriverError(
                "CUDA_ERROR_INVALID_VALUE",
                "invalid argument: %d bytes of dynamic shared memory, at most %d on sm_%s"
                % (size, room, simulation().arch),
            )
        self._limit = int(size)

    def compile(self, log_stream=None):
        self._module._load()

    def __call__(self, grid, block, args, *, shared_mem=0):
        """Enqueue a launch on the current stream."""
        from .streams import get_current_stream

        sim = simulation()
        sim.check_alive()
        module, program = self._module._load(), self._program
        _check_static(program)
        grid, block = _dims(grid, "grid"), _dims(block, "block")
        if shared_mem > self.max_dynamic_shared_size_bytes or shared_mem < 0:
            raise CUDADriverError(
                "CUDA_ERROR_INVALID_VALUE",
                "invalid argument: kernel %s asks for %d bytes of dynamic shared memory, %d allowed"
                " (max_dynamic_shared_size_bytes)"
                % (self.name, shared_mem, self.max_dynamic_shared_size_bytes),
            )
        threads = block[0] * block[1] * block[2]
        if threads > self.max_threads_per_block or min(block) < 1 or block[2] > 64:
            raise CUDADriverError(
                "CUDA_ERROR_INVALID_VALUE",
                "invalid argument: block %s of kernel %s, at most %d threads"
                % (block, self.name, self.max_threads_per_block),
            )
        if min(grid) < 1 or grid[0] > 2**31 - 1 or max(grid[1:]) > 65535:
            raise CUDADriverError(
                "CUDA_ERROR_INVALID_VALUE", "invalid argument: grid %s of kernel %s" % (grid, self.name)
            )
        stream = get_current_stream()
        params, touches = pack_arguments(program, args, stream.device_id)
        machine, name = sim.machine, self.name

        def action():
            try:
                machine.launch(module, name, grid, block, params, shared_mem)
            except LaunchError as error:
                raise CUDADriverError("CUDA_ERROR_INVALID_VALUE", str(error)) from None

        sim.enqueue(stream, "kernel %s" % name, action, touches)


def _check_static(program):
    """Refuse static shared memory above 48 KB, as ptxas does on every architecture: more must be dynamic."""
    if program.static_shared > 48 << 10:
        raise CUDADriverError(
            "CUDA_ERROR_INVALID_PTX",
            "ptxas: entry function %s uses too much shared data (0x%x bytes, 0x%x max)"
            % (program.name, program.static_shared, 48 << 10),
        )


def _dims(value, name):
    if isinstance(value, (int, np.integer)):
        value = (value,)
    if (
        not isinstance(value, tuple)
        or not 1 <= len(value) <= 3
        or not all(isinstance(n, (int, np.integer)) for n in value)
    ):
        raise TypeError("%s: a tuple of one to three integers expected, got %r" % (name, value))
    return tuple(int(n) for n in value) + (1,) * (3 - len(value))


def pack_arguments(program, args, device):
    """Return (parameter bytes, allocations) of the call's arguments; refuse what does not fit the kernel."""
    name, params = program.name, program.function.params
    if not isinstance(args, (tuple, list)) or len(args) != len(params):
        raise TypeError(
            "kernel %s: %d arguments expected, got %s"
            % (name, len(params), len(args) if isinstance(args, (tuple, list)) else args)
        )
    out, touches = bytearray(program.function.param_bytes), []
    written = written_parameters(program)
    for i, (arg, param) in enumerate(zip(args, params)):
        where = "kernel %s, argument %d" % (name, i)
        if isinstance(arg, (ndarray, MemoryPointer)):
            pointer = arg.data if isinstance(arg, ndarray) else arg
            if pointer.device_id != device:
                raise ValueError(
                    "%s: array of device %d in a launch on device %d" % (where, pointer.device_id, device)
                )
            data = struct.pack("<Q", pointer.ptr)
            span = arg._raw().span() if isinstance(arg, ndarray) else _whole(pointer.ptr)
            touches.append((*span, written is None or (i, 0) in written or (i, None) in written))
            if param.size != 8:
                raise TypeError("%s: an array for a parameter of %d bytes" % (where, param.size))
        elif arg is None:
            data = struct.pack("<Q", 0)
        elif isinstance(arg, np.ndarray) and (arg.ndim or arg.dtype.names is None):
            raise TypeError("Unsupported type %s (%s): a NumPy array is not on the device" % (type(arg), where))
        elif isinstance(arg, np.void):
            raise TypeError("Unsupported type %s (%s): a struct goes as an array, not as its scalar" % (type(arg), where))
        elif isinstance(arg, (np.generic, np.ndarray)):
            data = arg.tobytes()
            for at in range(0, len(data) - 7, 8):  # pointers inside of a struct, or as a number
                span = _whole(struct.unpack_from("<Q", data, at)[0])
                if span[1] > span[0]:
                    touches.append((*span, written is None or (i, at) in written or (i, None) in written))
        elif isinstance(arg, bool):
            data = struct.pack("<?", arg)
        elif isinstance(arg, int):
            bits = 8 * param.size
            if param.size > 8 or not -(1 << bits - 1) <= arg < 1 << bits:
                raise TypeError("%s: %d does not fit %d bytes" % (where, arg, param.size))
            data = (arg & (1 << bits) - 1).to_bytes(param.size, "little")
        elif isinstance(arg, float):
            data = struct.pack("<d", arg)
        else:
            raise TypeError("Unsupported type %s (%s)" % (type(arg), where))
        if len(data) != param.size:
            raise TypeError(
                "%s: %r has %d bytes, the kernel's parameter %d"
                % (where, type(arg).__name__, len(data), param.size)
            )
        kind = getattr(param, "kind", None)
        if (
            kind in ("f32", "f64")
            and isinstance(arg, (int, np.integer))
            or kind in INTEGER_KINDS
            and isinstance(arg, (float, np.floating))
        ):
            raise TypeError("%s: %r for a parameter of type .%s" % (where, type(arg).__name__, kind))
        out[param.offset : param.offset + param.size] = data
    return bytes(out), touches


def _whole(ptr):
    """Return the span of the array that was laid there by hand, or of the allocation that a pointer points into."""
    if ptr in simulation().parts:
        return (ptr, ptr + simulation().parts[ptr])
    found = allocation_of(ptr)
    return (found[0], found[0] + found[1]) if found else (ptr, ptr)


INTEGER_KINDS = {kind for kind in TYPES if kind[0] in "us"}
