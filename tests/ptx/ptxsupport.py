"""Helpers of the tests: run one PTX instruction over many operand values, or a CUDA C kernel by name."""

import functools
import os
import struct

import numpy as np
from ptxmachine import cupy
from ptxmachine.machine import Machine
from ptxmachine.memory import GlobalMemory
from ptxmachine.nvrtc import default_toolkit

HERE = os.path.dirname(os.path.abspath(__file__))
DTYPES = {
    "u8": np.uint8,
    "s8": np.int8,
    "b8": np.uint8,
    "u16": np.uint16,
    "s16": np.int16,
    "b16": np.uint16,
    "u32": np.uint32,
    "s32": np.int32,
    "b32": np.uint32,
    "u64": np.uint64,
    "s64": np.int64,
    "b64": np.uint64,
    "f32": np.float32,
    "f64": np.float64,
    "f16": np.uint16,
    "bf16": np.uint16,
    "f16x2": np.uint32,
    "bf16x2": np.uint32,
    "pred": np.uint32,
}
OPTIONS = ("-ftz=true", "--device-as-default-execution-space", "-lineinfo")


def machine(**switches):
    return Machine(GlobalMemory(1 << 26), **switches)


def register(kind):
    if kind == "pred":
        return ".pred"
    if kind in ("f32", "f64"):
        return "." + kind
    return ".b%d" % max(16, 8 * np.dtype(DTYPES[kind]).itemsize)


def ptx(body, params="", directives="", target="sm_90", version="8.5", prologue=""):
    """Wrap instructions into a kernel `t`."""
    return ".version %s\n.target %s\n.address_size 64\n%s\n.visible .entry t(%s)%s\n{\n%s\nret;\n}\n" % (
        version,
        target,
        prologue,
        params,
        directives,
        body,
    )


def evaluate(code, inputs, outputs, target="sm_90", threads=None, prologue="", **switches):
    """Run `code` once a lane.  inputs {name: (type, values)}, outputs {name: type}; names are registers %name.

    Lane i takes value i of each input.  Returns {name: array}, or the array alone for one output.
    """
    arrays = {name: np.atleast_1d(np.asarray(values, DTYPES[kind])) for name, (kind, values) in inputs.items()}
    count = threads or max(len(a) for a in arrays.values())
    arrays = {name: np.ascontiguousarray(np.resize(a, count)) for name, a in arrays.items()}
    lines = [".reg .b64 %addr_, %base_; .reg .b32 %tid_, %word_; .reg .b64 %wide_;", "mov.u32 %tid_, %tid.x;"]
    for name, kind in [(n, inputs[n][0]) for n in inputs] + list(outputs.items()):
        declaration = ".reg %s %%%s;" % (register(kind), name)
        if declaration not in lines:
            lines.append(declaration)

    def place(name, kind):
        size = np.dtype(DTYPES[kind]).itemsize
        return [
            "ld.param.u64 %%base_, [p_%s];" % name,
            "mul.wide.u32 %%wide_, %%tid_, %d;" % size,
            "add.u64 %addr_, %base_, %wide_;",
        ]

    for name, (kind, _) in inputs.items():
        lines += place(name, kind)
        if kind == "pred":
            lines += ["ld.global.u32 %word_, [%addr_];", "setp.ne.u32 %%%s, %%word_, 0;" % name]
        else:
            lines.append("ld.global.%s %%%s, [%%addr_];" % (_memory_type(kind), name))
    lines.append(code)
    for name, kind in outputs.items():
        lines += place("out_" + name, kind)
        if kind == "pred":
            lines += ["selp.u32 %%word_, 1, 0, %%%s;" % name, "st.global.u32 [%addr_], %word_;"]
        else:
            lines.append("st.global.%s [%%addr_], %%%s;" % (_memory_type(kind), name))
    params = ", ".join(".param .u64 p_%s" % n for n in list(inputs) + ["out_" + n for n in outputs])
    text = ptx("\n".join(lines), params, target=target, prologue=prologue)
    m = machine(**switches)
    module = m.load(text)
    pointers, results = [], {}
    for name in inputs:
        pointers.append(upload(m, arrays[name]))
    for name, kind in outputs.items():
        results[name] = (m.memory.alloc(count * np.dtype(DTYPES[kind]).itemsize), kind)
        pointers.append(results[name][0])
    m.launch(module, "t", 1, count, struct.pack("<%dQ" % len(pointers), *pointers))
    out = {name: download(m, at, count, DTYPES[kind]) for name, (at, kind) in results.items()}
    out = {name: (value != 0) if outputs[name] == "pred" else value for name, value in out.items()}
    return out if len(out) > 1 else next(iter(out.values()))


def _memory_type(kind):
    return {"f16": "b16", "bf16": "b16", "f16x2": "b32", "bf16x2": "b32"}.get(kind, kind)


def upload(m, array):
    at = m.memory.alloc(array.nbytes)
    data, state = m.memory.span(at, array.nbytes)
    data[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    state[:] = 3
    return at


def download(m, at, count, dtype):
    return m.memory.span(at, count * np.dtype(dtype).itemsize)[0].copy().view(dtype)


def bits32(*values):
    """float32 values from bit patterns."""
    return np.array(values, np.uint32).view(np.float32)


def bits64(*values):
    return np.array(values, np.uint64).view(np.float64)


def half(*values):
    """f16 bit patterns of values."""
    return np.array(values, np.float16).view(np.uint16)


def bfloat(*values):
    """bf16 bit patterns of values that bf16 holds exactly."""
    bits = np.array(values, np.float32).view(np.uint32)
    assert not (bits & 0xFFFF).any(), "not a bf16 value"
    return (bits >> 16).astype(np.uint16)


def pair(low, high):
    """Pack 16-bit patterns."""
    return np.asarray(low, np.uint32) | np.asarray(high, np.uint32) << 16


def same(got, expected):
    """Assert equality to the bit (NaN = NaN of the same bits, -0 ≠ +0)."""
    got, expected = np.atleast_1d(got), np.atleast_1d(np.asarray(expected, np.asarray(got).dtype))
    kind = "u%d" % got.dtype.itemsize
    g, e = got.view(kind), np.ascontiguousarray(expected).view(kind)
    wrong = np.flatnonzero(g != e)
    assert not len(wrong), "at %d: got %r (0x%x), expected %r (0x%x)" % (
        wrong[0],
        got[wrong[0]],
        g[wrong[0]],
        expected[wrong[0]],
        e[wrong[0]],
    )


@functools.lru_cache(None)
def source(name):
    with open(os.path.join(HERE, "kernels", name)) as file:
        return file.read()


@functools.lru_cache(None)
def compiled(text, arch="80", options=(), name="kernel.cu"):
    return default_toolkit().compile(text, arch, OPTIONS + tuple(options), name)[0]


def launch(text, name, grid, block, args, shared=0, arch="80", options=(), limit=None, **switches):
    """Compile CUDA C and run it on a fresh stand-in; NumPy arrays in args are copied in and back."""
    sim = cupy.reset(arch=arch, memory=1 << 26, **switches)
    kernel = cupy.RawModule(code=text, options=tuple(options)).get_function(name)
    if limit or shared > 48 << 10:
        kernel.max_dynamic_shared_size_bytes = limit or shared
    device = [cupy.asarray(a) if isinstance(a, np.ndarray) else a for a in args]
    kernel(grid, block, tuple(device), shared_mem=shared)
    cupy.cuda.Device().synchronize()
    return [a.get() if isinstance(a, cupy.ndarray) else a for a in device], sim
