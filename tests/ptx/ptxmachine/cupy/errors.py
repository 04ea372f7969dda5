"""The exceptions of CUDA as CuPy names them."""


class CUDARuntimeError(RuntimeError):
    def __init__(self, status, text=""):
        super().__init__("%s: %s" % (status, text))
        self.status = status


class CUDADriverError(RuntimeError):
    def __init__(self, status, text=""):
        super().__init__("%s: %s" % (status, text))
        self.status = status


class CompileException(Exception):
    """NVRTC's log, as CuPy's CompileException."""

    def __init__(self, msg, source, name, options, backend="nvrtc"):
        super().__init__(msg)
        self._msg, self.source, self.name, self.options, self.backend = msg, source, name, options, backend

    def get_message(self):
        return self._msg

    def __str__(self):
        return self._msg
