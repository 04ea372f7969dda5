"""Compile CUDA C to PTX with the NVRTC of a wheel (or of an installed toolkit), with no GPU.

A `Toolkit` is one NVRTC library and its headers.  `default_toolkit()` finds the one that pip installed beside
this interpreter; `fetched_toolkit()` installs another version into a cache folder, for tests that ask
whether the code of several toolkits is understood.
"""

import ctypes
import glob
import hashlib
import os
import re
import subprocess
import sys
import sysconfig
import tempfile


class CompileError(RuntimeError):
    """NVRTC refused the source; `log` is what it printed."""

    def __init__(self, message, log=""):
        super().__init__(message)
        self.log = log


class Toolkit:
    """One NVRTC library with its headers.  `version` is (major, minor)."""

    def __init__(self, library, includes):
        self.library_path = library
        self.includes = [path for path in includes if os.path.isdir(path)]
        # The builtins library lies beside NVRTC and is found by its soname: load it first.
        for builtins in sorted(glob.glob(os.path.join(os.path.dirname(library), "libnvrtc-builtins.so*"))):
            ctypes.CDLL(builtins, mode=ctypes.RTLD_LOCAL)
        self._lib = ctypes.CDLL(library)
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self._lib.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        self.version = (major.value, minor.value)

    def __repr__(self):
        return "Toolkit(%d.%d)" % self.version

    def _check(self, code, log=""):
        if code:
            self._lib.nvrtcGetErrorString.restype = ctypes.c_char_p
            text = self._lib.nvrtcGetErrorString(code).decode()
            raise CompileError("nvrtc: %s%s" % (text, "\n" + log if log else ""), log)

    def _text(self, program, size_of, get):
        size = ctypes.c_size_t()
        self._check(getattr(self._lib, size_of)(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._lib, get)(program, buffer))
        return buffer.raw[: size.value].rstrip(b"\0").decode(errors="replace")

    def compile(self, source, arch, options=(), name="kernel.cu", name_expressions=()):
        """Return (ptx, lowered names, log) of CUDA C `source` for `arch` (80, "80", "sm_80" or "compute_80").

        Raises CompileError with NVRTC's log.
        """
        arch = "compute_" + re.sub(r"^(sm|compute)_", "", str(arch))
        options = ["--gpu-architecture=" + arch, *options, *("-I" + path for path in self.includes)]
        program = ctypes.c_void_p()
        self._check(
            self._lib.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name.encode(), 0, None, None)
        )
        try:
            for expression in name_expressions:
                self._check(self._lib.nvrtcAddNameExpression(program, expression.encode()))
            array = (ctypes.c_char_p * len(options))(*(text.encode() for text in options))
            code = self._lib.nvrtcCompileProgram(program, len(options), array)
            log = self._text(program, "nvrtcGetProgramLogSize", "nvrtcGetProgramLog")
            self._check(code, log)
            names = {}
            for expression in name_expressions:
                lowered = ctypes.c_char_p()
                self._check(self._lib.nvrtcGetLoweredName(program, expression.encode(), ctypes.byref(lowered)))
                names[expression] = lowered.value.decode()
            return self._text(program, "nvrtcGetPTXSize", "nvrtcGetPTX"), names, log
        finally:
            self._lib.nvrtcDestroyProgram(ctypes.byref(program))


def _in_folder(root):
    """Return the Toolkit whose wheels lie in `root` (a site-packages or --target folder), or None."""
    libraries = glob.glob(os.path.join(root, "nvidia", "*", "lib", "libnvrtc.so.*"))
    libraries.sort(key=lambda path: [int(n) for n in re.findall(r"\d+", path.rpartition(".so.")[2])], reverse=True)
    if not libraries:
        return None
    includes = sorted(glob.glob(os.path.join(root, "nvidia", "*", "include")))
    own = os.path.join(os.path.dirname(os.path.dirname(libraries[0])), "include")
    includes.sort(key=lambda path: path != own)
    includes += [os.path.join(path, "cccl") for path in includes]
    return Toolkit(libraries[0], includes)


_default = None


def default_toolkit():
    """Return the NVRTC beside this interpreter, else an installed CUDA toolkit.

    Raises CompileError where there is neither.
    """
    global _default
    if _default is None:
        folders = dict.fromkeys([sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"], *sys.path])
        for folder in folders:
            if folder and (found := _in_folder(folder)):
                _default = found
                return _default
        for root in [os.environ.get("CUDA_PATH", ""), os.environ.get("CUDA_HOME", ""), "/usr/local/cuda"]:
            for library in sorted(glob.glob(os.path.join(root, "lib64", "libnvrtc.so"))) if root else ():
                _default = Toolkit(
                    library, [os.path.join(root, "include"), os.path.join(root, "include", "cccl")]
                )
                return _default
        raise CompileError("nvrtc: no libnvrtc found; pip install burstmpi[test]")
    return _default


def cache_folder():
    """Return the folder for fetched toolkits (PTX_MACHINE_CACHE, else the user's cache)."""
    base = os.environ.get("PTX_MACHINE_CACHE")
    return base or os.path.join(os.environ.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache")), "ptxmachine")


def fetched_toolkit(requirements):
    """Return the Toolkit of pip `requirements` (a list of `name==version`), installed once into the cache folder.

    Returns None where pip cannot reach them.
    """
    key = hashlib.sha256(" ".join(requirements).encode()).hexdigest()[:16]
    target = os.path.join(cache_folder(), key)
    if not os.path.isdir(target):
        os.makedirs(cache_folder(), exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_folder()) as scratch:
            folder = os.path.join(scratch, "target")
            command = [
                sys.executable,
                "-m",
                "pip",
                "install",
                "--quiet",
                "--no-deps",
                "--disable-pip-version-check",
                "--target",
                folder,
                *requirements,
            ]
            if subprocess.run(command, capture_output=True).returncode:
                return None
            try:
                os.rename(folder, target)
            except OSError:  # another process was faster
                pass
    return _in_folder(target)
