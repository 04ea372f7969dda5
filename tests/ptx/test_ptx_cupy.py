"""The CuPy stand-in: arrays, modules, kernels, pinned memory, devices, and what it refuses."""

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from ptxmachine import cupy as standin
from ptxsupport import HERE

AXPY = r'extern "C" __global__ void axpy(float a, const float* x, float* y, int n) { int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) y[i] += a * x[i]; }'


def test_arrays_round_trip_every_type(cupy):
    for dtype in (
        np.float16,
        np.float32,
        np.float64,
        np.int8,
        np.int32,
        np.int64,
        np.uint16,
        np.bool_,
        ml_dtypes.bfloat16,
    ):
        x = (np.arange(24).reshape(2, 3, 4) % 7).astype(dtype)
        device = cupy.asarray(x)
        assert (
            device.shape == x.shape
            and device.dtype == x.dtype
            and device.nbytes == x.nbytes
            and device.strides == x.strides
        )
        assert (device.get() == x).all() and (cupy.asnumpy(device) == x).all()
    assert cupy.empty((0, 4)).get().shape == (0, 4)


def test_views_share_bytes(cupy):
    x = np.arange(60, dtype=np.float32).reshape(3, 4, 5)
    device = cupy.asarray(x)
    for view in (
        lambda a: a[1],
        lambda a: a[:, 1:3],
        lambda a: a[..., ::2],
        lambda a: a.transpose(2, 0, 1),
        lambda a: a.reshape(12, 5),
        lambda a: a.T,
        lambda a: a[2, 3, 4],
        lambda a: a[None, 0],
        lambda a: a[:, ::-1],
        lambda a: a.swapaxes(0, 1),
        lambda a: a.view(np.int32),
        lambda a: a.ravel(),
    ):
        assert (view(device).get() == view(x)).all() and view(device).shape == view(x).shape
        assert cupy.may_share_memory(view(device), device)
    device[1, 2:] = 0
    x[1, 2:] = 0
    device[0] = device[2]
    x[0] = x[2]
    assert (device.get() == x).all()
    assert (
        device[:, 1].flags.c_contiguous == x[:, 1].flags.c_contiguous
        and cupy.ascontiguousarray(device[:, 1]).flags.c_contiguous
    )
    assert (device.transpose(1, 0, 2).reshape(4, 15).get() == x.transpose(1, 0, 2).reshape(4, 15)).all()
    assert device.astype(np.float64).get().dtype == np.float64 and (device.copy().get() == x).all()
    cupy.copyto(device, cupy.zeros_like(device))
    assert not device.get().any()


def test_the_cuda_array_interface_is_taken_without_copy(cupy):
    class Foreign:
        def __init__(self, array):
            self.__cuda_array_interface__ = array.__cuda_array_interface__

    x = cupy.arange(12, dtype=np.float32).reshape(3, 4)
    other = cupy.asarray(Foreign(x[:, 1:]))
    assert other.data.ptr == x.data.ptr + 4 and other.strides == (16, 4)
    other.fill(5)
    assert (x.get()[:, 1:] == 5).all() and x.__dlpack_device__() == (2, 0)
    assert cupy.from_dlpack(x).data.ptr == x.data.ptr
    with pytest.raises(TypeError):
        cupy.from_dlpack([1, 2])


@pytest.mark.parametrize(
    "call,error",
    [
        (lambda c, x: np.asarray(x), TypeError),
        (lambda c, x: np.add(x, 1), TypeError),
        (lambda c, x: x.__setitem__(0, np.zeros(3)), TypeError),
        (lambda c, x: x[[0, 1]], TypeError),
        (lambda c, x: x.set([1, 2]), TypeError),
        (lambda c, x: x.set(np.zeros(3, np.float64)), TypeError),
        (lambda c, x: x.set(np.zeros(4, np.float32)), ValueError),
        (lambda c, x: c.empty((2, -1)), ValueError),
        (lambda c, x: x.get(out=np.zeros(4, np.float32)), ValueError),
        (lambda c, x: x.get(out=np.zeros(3, np.float32), blocking=False), ValueError),
        (lambda c, x: x.set(np.zeros(3, np.float32), stream=c.cuda.Stream()), ValueError),
        (lambda c, x: c.cuda.Device(1), c_error := standin.cuda.runtime.CUDARuntimeError),
        (
            lambda c, x: c.cuda.runtime.memcpyAsync(
                x.data.ptr, np.zeros(3, np.float32).ctypes.data, 12, c.cuda.runtime.memcpyHostToDevice, 0
            ),
            ValueError,
        ),
        (lambda c, x: c.cuda.runtime.memcpyAsync(x.data.ptr, x.data.ptr, 4, 9, 0), c_error),
        (lambda c, x: c.cuda.runtime.free(12345), c_error),
        (lambda c, x: c.cuda.Stream().wait_event(3), TypeError),
        (lambda c, x: c.cuda.Stream(ptds=True), ValueError),
    ],
)
def test_refused(cupy, call, error):
    with pytest.raises(error):
        call(cupy, cupy.zeros(3, np.float32))


def test_out_of_memory_tells_the_bytes():
    cupy = standin
    cupy.reset(arch="80", memory=1 << 20)
    keep = cupy.empty(500_000, np.uint8)
    with pytest.raises(
        cupy.cuda.memory.OutOfMemoryError, match="allocating 600000 bytes .allocated so far: 500000 bytes"
    ):
        cupy.empty(600_000, np.uint8)
    assert (
        cupy.cuda.Device().mem_info == ((1 << 20) - 500_000, 1 << 20)
        and cupy.cuda.runtime.memGetInfo()[0] == (1 << 20) - 500_000
    )
    del keep
    assert cupy.get_default_memory_pool().used_bytes() == 0


# --- kernels --------------------------------------------------------------------------------------
def test_raw_module_and_raw_kernel(cupy):
    x, y = cupy.arange(1000, dtype=np.float32), cupy.zeros(1000, np.float32)
    for kernel in (cupy.RawModule(code=AXPY).get_function("axpy"), cupy.RawKernel(AXPY, "axpy")):
        kernel((4,), (256,), (np.float32(2), x, y, np.int32(1000)))
        kernel((4,), (256,), (np.float32(1), x.data, y, 1000))
    assert (y.get() == 6 * np.arange(1000)).all()


def test_templates_by_name_expression(cupy):
    code = "template <typename T, int N> __global__ void scale(T* x) { x[threadIdx.x] *= N; }"
    module = cupy.RawModule(code=code, name_expressions=("scale<float, 3>", "scale<int, 5>"))
    x, y = cupy.full(32, 2, np.float32), cupy.full(32, 2, np.int32)
    module.get_function("scale<float, 3>")((1,), (32,), (x,))
    module.get_function("scale<int, 5>")((1,), (32,), (y,))
    assert (x.get() == 6).all() and (y.get() == 10).all()


def test_structs_and_globals(cupy):
    code = 'struct Args { float* x; int n; float a; };\n__device__ float bias[2] = {1, 2};\nextern "C" __global__ void k(Args g) { if (threadIdx.x < g.n) g.x[threadIdx.x] = g.a + bias[threadIdx.x & 1]; }'
    module = cupy.RawModule(code=code)
    x = cupy.zeros(32, np.float32)
    args = np.zeros((), [("x", np.uint64), ("n", np.int32), ("a", np.float32)])
    args["x"], args["n"], args["a"] = x.data.ptr, 20, 0.5
    module.get_function("k")((1,), (32,), (args,))
    assert (x.get()[:20] == np.where(np.arange(20) % 2, 2.5, 1.5)).all() and not x.get()[20:].any()
    assert module.get_global("bias").mem.size == 8


@pytest.mark.parametrize(
    "args,match",
    [
        ((np.float32(1), np.zeros(3, np.float32), "y", 3), "NumPy array is not on the device"),
        ((1.0, "x", "y", 3), "'float' has 8 bytes, the kernel's parameter 4"),
        ((np.float64(1), "x", "y", 3), "8 bytes"),
        ((np.float32(1), "x", "y", np.int64(3)), "8 bytes"),
        ((np.float32(1), "x", "y"), "4 arguments expected, got 3"),
        ((np.float32(1), "x", "y", 2**40), "does not fit 4 bytes"),
        ((np.float32(1), "x", "y", "3"), "Unsupported type"),
        ((3, "x", "y", 3), "for a parameter of type"),
        (("x", "x", "y", 3), "an array for a parameter of 4 bytes"),
        ((np.float32(1), "x", "y", np.float32(3)), "for a parameter of type"),
    ],
)
def test_wrong_arguments(cupy, args, match):
    arrays = {"x": cupy.zeros(3, np.float32), "y": cupy.zeros(3, np.float32)}
    kernel = cupy.RawKernel(AXPY, "axpy")
    with pytest.raises(TypeError, match=match):
        kernel((1,), (32,), tuple(arrays[a] if isinstance(a, str) and a in arrays else a for a in args))


SHARED = 'extern "C" __global__ void %s k(float* x) { extern __shared__ float d[]; __shared__ float s[256]; s[threadIdx.x] = 1; d[threadIdx.x] = s[threadIdx.x]; x[threadIdx.x] = d[threadIdx.x]; }'


@pytest.mark.parametrize("arch,optin", (("75", 64), ("80", 163), ("86", 99), ("90", 227), ("120", 99)))
def test_shared_memory_limits(arch, optin):
    cupy = standin
    cupy.reset(arch=arch, memory=1 << 26)
    assert (
        cupy.cuda.Device().attributes["MaxSharedMemoryPerBlockOptin"] == optin << 10
        and cupy.cuda.Device().compute_capability == arch
    )
    kernel, x = cupy.RawKernel(SHARED % "", "k"), cupy.zeros(32, np.float32)
    assert kernel.shared_size_bytes == 1024 and kernel.attributes["max_dynamic_shared_size_bytes"] == 47 << 10
    kernel((1,), (32,), (x,), shared_mem=47 << 10)
    with pytest.raises(cupy.cuda.driver.CUDADriverError, match="max_dynamic_shared_size_bytes"):
        kernel((1,), (32,), (x,), shared_mem=(47 << 10) + 4)
    kernel.max_dynamic_shared_size_bytes = (optin - 1) << 10
    kernel((1,), (32,), (x,), shared_mem=(optin - 1) << 10)
    assert (x.get() == 1).all()
    with pytest.raises(cupy.cuda.driver.CUDADriverError, match="at most"):
        kernel.max_dynamic_shared_size_bytes = optin << 10
    with pytest.raises(cupy.cuda.driver.CUDADriverError):
        kernel((1,), (32,), (x,), shared_mem=optin << 10)


def test_thread_and_grid_limits(cupy):
    kernel, x = cupy.RawKernel(SHARED % "__launch_bounds__(64)", "k"), cupy.zeros(64, np.float32)
    for grid, block in (((1,), (65,)), ((0,), (32,)), ((1, 65536), (32,)), ((1,), (1, 1, 65)), ((1,), (0,))):
        with pytest.raises(cupy.cuda.driver.CUDADriverError, match="invalid argument"):
            kernel(grid, block, (x,), shared_mem=1024)
    with pytest.raises(TypeError):
        kernel((1.5,), (32,), (x,))


def test_compile_errors_and_missing_kernels(cupy):
    with pytest.raises(standin.cuda.compiler.CompileException, match='identifier "oops" is undefined'):
        cupy.RawModule(code='extern "C" __global__ void k(float* x) { oops; }').get_function("k")
    with pytest.raises(cupy.cuda.driver.CUDADriverError, match="not found.*axpy"):
        cupy.RawModule(code=AXPY).get_function("other")
    for bad in ({"options": "-O3"}, {"options": ["-O3"]}, {"options": (3,)}, {}, {"code": AXPY, "path": "x"}):
        with pytest.raises(TypeError):
            cupy.RawModule(**({"code": AXPY} if "options" in bad else {}), **bad)
    with pytest.raises(ValueError, match="architecture is the device's"):
        cupy.RawModule(code=AXPY, options=("-arch=sm_90",))


def test_headers_are_part_of_the_cache_key(cupy, tmp_path):
    header = tmp_path / "value.cuh"
    x = cupy.zeros(1, np.int32)
    for value in (3, 4):
        header.write_text("#define VALUE %d\n" % value)
        cupy.RawModule(
            code='#include "value.cuh"\nextern "C" __global__ void k(int* x) { x[0] = VALUE; }',
            options=("-I%s" % tmp_path,),
        ).get_function("k")((1,), (1,), (x,))
        assert x.get()[0] == value


def test_arrays_of_another_device_are_refused():
    cupy = standin
    cupy.reset(arch="80", memory=1 << 24, devices=2)
    x = cupy.zeros(3, np.float32)
    with cupy.cuda.Device(1):
        y = cupy.zeros(3, np.float32)
        assert y.device.id == 1 and cupy.cuda.runtime.getDevice() == 1
        with pytest.raises(ValueError, match="array of device 0 in a launch on device 1"):
            cupy.RawKernel(AXPY, "axpy")((1,), (32,), (np.float32(1), x, y, 3))
        with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="array of device 0"):
            x.fill(3)


def test_pinned_memory(cupy):
    memory = cupy.cuda.alloc_pinned_memory(64)
    host = np.frombuffer(memory, np.float32, 16)
    host[:] = np.arange(16)
    x, out = cupy.zeros(16, np.float32), cupy.empty_pinned((4, 4), np.float32)
    stream = cupy.cuda.Stream()
    cupy.cuda.runtime.memcpyAsync(x.data.ptr, host.ctypes.data, 64, cupy.cuda.runtime.memcpyHostToDevice, 0)
    x.reshape(4, 4).get(stream=stream, out=out, blocking=False)
    stream.synchronize()
    assert (out.ravel() == np.arange(16)).all() and memory.size() == 64
    assert (cupy.zeros_pinned(3, np.int32) == 0).all()


def test_blocking_copies_and_foreign_streams(cupy):
    host, x, back = np.arange(8, dtype=np.float32), cupy.empty(8, np.float32), np.zeros(8, np.float32)
    runtime = cupy.cuda.runtime
    runtime.memcpy(x.data.ptr, host.ctypes.data, 32, runtime.memcpyHostToDevice)
    runtime.memcpy(back.ctypes.data, x.data.ptr, 32, runtime.memcpyDeviceToHost)
    assert (back == host).all()
    stream = cupy.cuda.Stream()
    assert (
        cupy.cuda.ExternalStream(stream.ptr) is stream and cupy.cuda.ExternalStream(0) is cupy.cuda.Stream.null
    )
    with pytest.raises(runtime.CUDARuntimeError, match="is not known"):
        cupy.cuda.ExternalStream(0x123)
    x.data.memset_async(0, 16, stream)
    out = cupy.empty_pinned(8, np.float32)
    x.data.copy_to_host_async(out.ctypes.data, 32, stream)
    y = cupy.empty(8, np.float32)
    y.data.copy_from_device_async(x.data, 32, stream)
    stream.synchronize()
    assert (y.get() == np.where(np.arange(8) < 4, 0, host)).all() and (out == y.get()).all()
    x.data.copy_to_host_async(out.ctypes.data, 32, stream)
    del out
    with pytest.raises(ValueError, match="freed in flight"):
        stream.synchronize()


def test_memory_comes_back_for_ever():
    cupy = standin
    cupy.reset(arch="80", memory=1 << 24)
    keep = cupy.full(1000, 7, np.uint8)
    for i in range(60):  # fifteen times the device
        x = cupy.full(1 << 22, i, np.uint8)
        assert x.get()[0] == i
        del x
    assert (keep.get() == 7).all() and cupy.cuda.Device().mem_info[0] == (1 << 24) - 1000


def test_install_makes_import_cupy_work_and_processes_are_independent():
    """As under mpirun: every process has its own devices."""
    program = (
        "import sys; sys.path.insert(0, %r); from ptxmachine import cupy as s; s.install(); import cupy, cupy.cuda.runtime as r, cupyx; x = cupy.full(3, int(sys.argv[1])); print(x.get().sum(), r.getDeviceCount(), cupyx.zeros_pinned(2).sum(), cupy.get_array_module(x) is cupy)"
        % HERE
    )
    runs = [
        subprocess.Popen([sys.executable, "-c", program, str(rank)], stdout=subprocess.PIPE, text=True)
        for rank in range(3)
    ]
    assert [run.communicate(timeout=60)[0].split() for run in runs] == [
        [str(3 * rank), "1", "0.0", "True"] for rank in range(3)
    ]


def test_every_name_exists_in_the_real_cupy():
    """Run where CuPy is installed: no name here that CuPy has not."""
    program = """
import sys
try:
    import cupy, cupyx
except ImportError:
    sys.exit(77)
real, real_x = cupy, cupyx
sys.path.insert(0, %r)
from ptxmachine import cupy as s
own = {"reset", "simulation", "install", "uninstall", "array", "module", "state", "streams", "copies", "errors", "memory", "runtime", "sys", "types", "empty_pinned", "zeros_pinned"}
missing = [n for n in dir(s) if not n.startswith("_") and n not in own and not hasattr(real, n)]
pairs = [(s.cuda, real.cuda), (s.cuda.runtime, real.cuda.runtime), (s.ndarray, real.ndarray), (s.RawModule, real.RawModule), (s.RawKernel, real.RawKernel),
         (s.cuda.Stream, real.cuda.Stream), (s.cuda.Event, real.cuda.Event), (s.cuda.Device, real.cuda.Device), (s.cuda.MemoryPool, real.cuda.MemoryPool)]
helpers = {"types", "copies", "simulation", "Device", "Stream", "Memory", "default_stream", "stream_of", "alloc_pinned_memory", "errors", "name", "non_blocking", "device_id"}
for ours, theirs in pairs:
    missing += ["%%s.%%s" %% (ours.__name__, n) for n in vars(ours) if not n.startswith("_") and n not in helpers and not hasattr(theirs, n)]
missing += [n for n in ("empty_pinned", "zeros_pinned") if not hasattr(real_x, n)]
print(missing)
""" % HERE
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    if run.returncode == 77:
        pytest.skip("CuPy is not installed")
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "[]"


def test_static_shared_memory_above_48_kb_is_refused(cupy):
    """As by ptxas, on every architecture and whatever the attribute says."""
    text = 'extern "C" __global__ void k(int* x) { __shared__ int s[%d]; s[threadIdx.x] = 1; x[0] = s[threadIdx.x]; }'
    for arch in ("75", "90"):
        standin.reset(arch=arch)
        cupy.RawModule(code=text % 12288).get_function("k")((1,), (1,), (cupy.zeros(1, cupy.int32),))
        with pytest.raises(cupy.cuda.driver.CUDADriverError, match="too much shared data"):
            cupy.RawModule(code=text % 12289).get_function("k")


@pytest.mark.parametrize("bad", [np.array([None]), np.array(["a"]), np.arange(3, dtype=">f4")])
def test_dtypes_that_no_kernel_reads_are_refused(cupy, bad):
    with pytest.raises(ValueError, match="Unsupported dtype"):
        cupy.asarray(bad)


def test_struct_by_value_is_an_array(cupy):
    """CuPy takes a struct as an array of no dimension; it knows no scalars of structured types."""
    kernel = cupy.RawModule(
        code='struct P { int a; double b; }; extern "C" __global__ void t(const P p, double* x) { *x = p.a * p.b; }'
    ).get_function("t")
    value = np.zeros((), np.dtype([("a", np.int32), ("b", np.float64)], align=True))
    value["a"], value["b"] = 3, 0.5
    x = cupy.zeros(1, np.float64)
    kernel((1,), (1,), (value, x))
    assert x.get()[0] == 1.5
    with pytest.raises(TypeError, match="struct"):
        kernel((1,), (1,), (value[()], x))
