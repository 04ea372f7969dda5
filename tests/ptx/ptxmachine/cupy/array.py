"""cupy.ndarray: shape, strides and a pointer; the bytes live in the machine's memory and move in stream order."""

import numpy as np

from ..memory import GLOBAL_BASE, WRITTEN
from . import copies
from .errors import CUDARuntimeError
from .memory import MemoryPointer, UnownedMemory, alloc, is_pinned
from .state import simulation


def _strides(shape, itemsize, order="C"):
    strides, step = [], itemsize
    axes = reversed(shape) if order == "C" else shape
    for extent in axes:
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides)) if order == "C" else tuple(strides)


def _shape(shape):
    shape = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
    if any(int(n) < 0 for n in shape):
        raise ValueError("shape: %s has a negative extent" % (shape,))
    return tuple(int(n) for n in shape)


class Flags:
    def __init__(self, c, f, owner):
        self.c_contiguous, self.f_contiguous, self.owndata, self.forc = c, f, owner, c or f

    def __getitem__(self, name):
        return getattr(self, {"C": "c_contiguous", "F": "f_contiguous", "O": "owndata"}.get(name, name.lower()))


class Elements:
    """Where the elements of an array lie, for work that runs later."""

    def __init__(self, ptr, shape, strides, dtype):
        self.ptr, self.shape, self.strides, self.dtype = ptr, shape, strides, dtype
        self.size = int(np.prod(shape, dtype=np.int64))

    def span(self):
        """Return the bytes [start, end) from the first to the last element."""
        low, high = 0, self.dtype.itemsize
        for n, step in zip(self.shape, self.strides):
            low, high = low + min(0, (n - 1) * step), high + max(0, (n - 1) * step)
        return (self.ptr + low, self.ptr + high) if self.size else (self.ptr, self.ptr)

    def view(self, array="data"):
        """Return the bytes (or their state) as a strided NumPy view; refuse freed memory."""
        memory = simulation().machine.memory
        if not self.size:
            return np.empty(self.shape, self.dtype if array == "data" else np.uint8)
        start, end = self.span()
        memory.span(start, end - start)
        if array == "data":
            return np.ndarray(self.shape, self.dtype, memory.data, self.ptr - GLOBAL_BASE, self.strides)
        return np.ndarray(
            self.shape + (self.dtype.itemsize,),
            np.uint8,
            memory.state,
            self.ptr - GLOBAL_BASE,
            self.strides + (1,),
        )


class ndarray:
    """An array in device memory."""

    __array_priority__ = 100
    __array_ufunc__ = None  # NumPy functions refuse it, as CuPy's arrays refuse conversion

    def __init__(self, shape, dtype=float, memptr=None, strides=None, order="C"):
        self.shape, self.dtype = _shape(shape), np.dtype(dtype)
        if self.dtype.hasobject or self.dtype.kind in "SUMm" or not self.dtype.isnative:
            raise ValueError("Unsupported dtype %s" % self.dtype)
        self.strides = (
            tuple(strides) if strides is not None else _strides(self.shape, self.dtype.itemsize, order)
        )
        self.base = None
        self.data = memptr if memptr is not None else alloc(self.nbytes)
        self._owner = memptr is None
        if memptr is not None and strides is None:  # an array laid into memory by hand: a part of its own
            simulation().parts[memptr.ptr] = self.nbytes

    # --- facts ------------------------------------------------------------------------------------
    @property
    def ndim(self):
        return len(self.shape)

    @property
    def size(self):
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def itemsize(self):
        return self.dtype.itemsize

    @property
    def nbytes(self):
        return self.size * self.itemsize

    @property
    def flags(self):
        dims = [(n, s) for n, s in zip(self.shape, self.strides) if n != 1]
        plain = tuple(n for n, _ in dims)
        steps = tuple(s for _, s in dims)
        empty = self.size == 0
        return Flags(
            empty or steps == _strides(plain, self.itemsize),
            empty or steps == _strides(plain, self.itemsize, "F"),
            self._owner,
        )

    @property
    def device(self):
        return self.data.device

    @property
    def T(self):
        return self.transpose()

    def __len__(self):
        if not self.shape:
            raise TypeError("len() of unsized object")
        return self.shape[0]

    def __repr__(self):
        return "<device array %s %s at 0x%x>" % (self.shape, self.dtype, self.data.ptr)

    @property
    def __cuda_array_interface__(self):
        from .streams import get_current_stream

        stream = get_current_stream(self.data.device_id)
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "descr": self.dtype.descr,
            "version": 3,
            "data": (self.data.ptr if self.size else 0, False),
            "strides": None if self.flags.c_contiguous else self.strides,
            "stream": stream.ptr or 1,
        }

    def __dlpack_device__(self):
        return 2, self.data.device_id

    def __array__(self, *args, **kwargs):
        raise TypeError(
            "Implicit conversion to a NumPy array is not allowed. Please use `.get()` to construct a NumPy array explicitly."
        )

    def __bool__(self):
        return bool(self.get().reshape(()))

    def __float__(self):
        return float(self.get().reshape(()))

    def __int__(self):
        return int(self.get().reshape(()))

    def item(self):
        return self.get().item()

    def tolist(self):
        return self.get().tolist()

    # --- views ------------------------------------------------------------------------------------
    def _raw(self):
        """Return where the elements lie, without keeping the memory alive: pending work does not own it."""
        return Elements(self.data.ptr, self.shape, self.strides, self.dtype)

    def _like(self, view):
        """Return the device array for a NumPy view of a shadow of this array (see _shadow)."""
        offset = view.__array_interface__["data"][0] - self._shadow_base
        out = ndarray(view.shape, view.dtype, self.data + offset, view.strides)
        out.base = self if self.base is None else self.base
        return out

    def _shadow(self):
        """Return a NumPy array of the same shape and strides over memory that is never touched."""
        memory = simulation().machine.memory
        shadow = np.ndarray(self.shape, self.dtype, memory.data, self.data.ptr - GLOBAL_BASE, self.strides)
        self._shadow_base = memory.data.__array_interface__["data"][0] + self.data.ptr - GLOBAL_BASE
        return shadow

    def __getitem__(self, index):
        parts = index if isinstance(index, tuple) else (index,)
        for part in parts:
            if not (part is None or part is Ellipsis or isinstance(part, (int, np.integer, slice))):
                raise TypeError("index: only integers, slices, None and ... are supported, got %r" % (part,))
        if not any(p is Ellipsis for p in parts):
            parts = (*parts, Ellipsis)  # integers alone must give a view, not a scalar
        return self._like(self._shadow()[parts])

    def reshape(self, *shape, order="C"):
        shape = shape[0] if len(shape) == 1 and not isinstance(shape[0], (int, np.integer)) else shape
        shadow = self._shadow()
        out = shadow.reshape(shape, order=order) if self.flags.c_contiguous or not self.size else shadow.view()
        if not self.flags.c_contiguous and self.size:
            try:
                out = np.reshape(shadow, shape, copy=False)
            except (ValueError, TypeError):
                return self.copy().reshape(shape)
        return self._like(out) if self.size else ndarray(out.shape, self.dtype, self.data)

    def ravel(self, order="C"):
        return self.reshape(-1)

    def transpose(self, *axes):
        axes = axes[0] if len(axes) == 1 and not isinstance(axes[0], (int, np.integer)) else axes
        return self._like(self._shadow().transpose(axes or None))

    def swapaxes(self, a, b):
        return self._like(self._shadow().swapaxes(a, b))

    def squeeze(self, axis=None):
        return self._like(self._shadow().squeeze(axis))

    def view(self, dtype=None):
        return self._like(self._shadow().view(dtype) if dtype is not None else self._shadow())

    # --- work in stream order ---------------------------------------------------------------------
    def _enqueue(self, label, action, reads=(), writes=(), stream=None):
        """Enqueue work; `reads` and `writes` are device arrays or byte spans (start, end) of pinned memory."""
        from .streams import get_current_stream

        stream = get_current_stream() if stream is None else stream
        touches = []
        for items, writing in ((reads, False), (writes, True)):
            for item in items:
                if isinstance(item, ndarray):
                    if item.data.device_id != stream.device_id:
                        raise CUDARuntimeError(
                            "cudaErrorInvalidDevice",
                            "array of device %d used on %s of device %d"
                            % (item.data.device_id, stream.name, stream.device_id),
                        )
                    item = item._raw().span()
                touches.append((*item, writing))
        simulation().enqueue(stream, label, action, touches)

    def fill(self, value):
        """Set all elements, in the order of the current stream."""
        value, raw = np.asarray(value).astype(self.dtype), self._raw()

        def action():
            raw.view()[...] = value
            raw.view("state")[...] |= WRITTEN

        self._enqueue("fill %d" % self.nbytes, action, writes=(self,))

    def _assign(self, source):
        """Copy (with cast and broadcast) another device array into this one."""
        np.broadcast_to(np.empty(source.shape, np.uint8), self.shape)
        to, of = self._raw(), source._raw()

        def action():
            if not to.size:
                return
            data = of.view().astype(to.dtype)
            written = (of.view("state") & WRITTEN).all(-1)
            to.view()[...] = data
            state = to.view("state")
            state[...] = np.where(
                np.broadcast_to(written, to.shape)[..., None], state | WRITTEN, state & ~np.uint8(WRITTEN)
            )

        self._enqueue("copy %d" % self.nbytes, action, (source,), (self,))

    def __setitem__(self, index, value):
        target = self[index]
        if isinstance(value, ndarray):
            target._assign(value)
        elif isinstance(value, np.ndarray) and value.ndim:
            raise TypeError("Unsupported type %s" % type(value))
        else:
            target.fill(value)

    def copy(self, order="C"):
        out = ndarray(self.shape, self.dtype, order=order)
        out._assign(self)
        return out

    def astype(self, dtype, order="K", casting=None, subok=None, copy=True):
        if not copy and np.dtype(dtype) == self.dtype:
            return self
        out = ndarray(self.shape, dtype)
        out._assign(self)
        return out

    def get(self, stream=None, order="C", out=None, blocking=True):
        """Copy to the host; blocking=False needs pinned `out` and is done when the stream is."""
        from .streams import get_current_stream

        stream = get_current_stream() if stream is None else stream
        if out is not None and (
            not isinstance(out, np.ndarray) or out.shape != self.shape or out.dtype != self.dtype
        ):
            raise ValueError("out: NumPy array of shape %s and dtype %s expected" % (self.shape, self.dtype))
        result = np.empty(self.shape, self.dtype, order=order if order in "CF" else "C") if out is None else out
        if not blocking:
            if not result.flags.forc or (result.nbytes and not is_pinned(result.ctypes.data, result.nbytes)):
                raise ValueError("get(blocking=False): out is not pinned host memory")

        raw = self._raw()

        def action():
            if raw.size:
                copies.check_written(raw.view("state"), "copy to the host")
                result[...] = raw.view()

        host = (result.ctypes.data, result.ctypes.data + result.nbytes)
        self._enqueue("copy D2H %d" % self.nbytes, action, (self,), (host,), stream)
        if blocking:
            simulation().finish_stream(stream)
        return result

    def set(self, arr, stream=None):
        """Copy from the host.  Pageable memory is read at once; with `stream`, memory must be pinned."""
        from .streams import get_current_stream

        if not isinstance(arr, np.ndarray):
            raise TypeError("Only numpy.ndarray can be set to cupy.ndarray")
        if arr.dtype != self.dtype:
            raise TypeError("%s array cannot be set to %s array" % (arr.dtype, self.dtype))
        if arr.shape != self.shape:
            raise ValueError("Shape mismatch. Old shape: %s, new shape: %s" % (self.shape, arr.shape))
        pinned = arr.flags.forc and is_pinned(arr.ctypes.data, arr.nbytes)
        if stream is not None and not pinned and arr.nbytes:
            raise ValueError(
                "set(stream=...): host memory is not pinned: an asynchronous copy would block or race"
            )
        source, raw = arr if pinned else arr.copy(), self._raw()

        def action():
            if raw.size:
                raw.view()[...] = source
                raw.view("state")[...] |= WRITTEN

        host = (source.ctypes.data, source.ctypes.data + source.nbytes)
        self._enqueue("copy H2D %d" % self.nbytes, action, (host,), (self,), stream or get_current_stream())


# --- making arrays --------------------------------------------------------------------------------
def empty(shape, dtype=float, order="C"):
    return ndarray(shape, dtype, order=order)


def zeros(shape, dtype=float, order="C"):
    return full(shape, 0, dtype)


def ones(shape, dtype=float):
    return full(shape, 1, dtype)


def full(shape, fill_value, dtype=None):
    out = ndarray(shape, np.asarray(fill_value).dtype if dtype is None else dtype)
    out.fill(fill_value)
    return out


def empty_like(a, dtype=None, shape=None):
    return ndarray(a.shape if shape is None else shape, dtype or a.dtype)


def zeros_like(a, dtype=None, shape=None):
    return zeros(a.shape if shape is None else shape, dtype or a.dtype)


def full_like(a, fill_value, dtype=None):
    return full(a.shape, fill_value, dtype or a.dtype)


def arange(*args, dtype=None):
    return asarray(np.arange(*args, dtype=dtype))


def array(obj, dtype=None, copy=True, order="K"):
    """Make a device array of a NumPy array, nested list, device array or anything with __cuda_array_interface__."""
    if isinstance(obj, ndarray):
        return obj.astype(dtype or obj.dtype, copy=copy)
    if hasattr(obj, "__cuda_array_interface__"):
        wrapped = _wrap(obj)
        return wrapped.astype(dtype or wrapped.dtype, copy=copy)
    host = np.asarray(obj, dtype)
    out = ndarray(host.shape, host.dtype)
    out.set(np.ascontiguousarray(host).reshape(host.shape))
    return out


def asarray(a, dtype=None, order=None):
    return array(a, dtype, copy=False)


def ascontiguousarray(a, dtype=None):
    out = asarray(a, dtype)
    return out if out.flags.c_contiguous else out.copy()


def _wrap(obj):
    """Take an array by its __cuda_array_interface__ with no copy."""
    from .streams import stream_of

    facts = obj.__cuda_array_interface__
    if facts.get("stream") is not None:  # the producer's work there comes first; CuPy waits on the host
        if facts["stream"] == 0:
            raise ValueError("__cuda_array_interface__: stream 0 is ambiguous and disallowed")
        stream_of(facts["stream"]).synchronize()
    shape, dtype = tuple(facts["shape"]), np.dtype(facts["typestr"])
    if hasattr(obj, "dtype") and np.dtype(obj.dtype).itemsize == dtype.itemsize and dtype.kind == "V":
        dtype = np.dtype(obj.dtype)
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    device = getattr(getattr(obj, "device", None), "id", -1)
    pointer = MemoryPointer(UnownedMemory(facts["data"][0], size, obj, device), 0)
    return ndarray(shape, dtype, pointer, facts.get("strides"))


def from_dlpack(obj):
    """Take an array of this stand-in, or one that also has __cuda_array_interface__, with no copy."""
    if isinstance(obj, ndarray):
        return obj.view()
    if hasattr(obj, "__cuda_array_interface__"):
        return _wrap(obj)
    raise TypeError("from_dlpack: %s is not an array on this device" % type(obj))


def asnumpy(a, stream=None, order="C", out=None, blocking=True):
    if isinstance(a, ndarray):
        return a.get(stream=stream, order=order, out=out, blocking=blocking)
    result = np.asarray(a, order=order)
    if out is not None:
        out[...] = result
        return out
    return result


def copyto(dst, src, casting="same_kind", where=None):
    if not isinstance(dst, ndarray) or where is not None:
        raise TypeError("copyto: device array without mask expected")
    if isinstance(src, ndarray):
        if not np.can_cast(src.dtype, dst.dtype, casting):
            raise TypeError("Cannot cast %s to %s in %s casting mode" % (src.dtype, dst.dtype, casting))
        dst._assign(src)
    else:
        dst.fill(src)


def may_share_memory(a, b, max_work=None):
    """Return whether two device arrays lie in one allocation and their byte ranges meet."""

    def bounds(x):
        low, high = x.data.ptr, x.data.ptr + x.itemsize
        for n, step in zip(x.shape, x.strides):
            low, high = low + min(0, (n - 1) * step), high + max(0, (n - 1) * step)
        return low, high

    (a0, a1), (b0, b1) = bounds(a), bounds(b)
    return bool(a.size and b.size and a0 < b1 and b0 < a1)
