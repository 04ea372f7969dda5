"""The report that ends a run."""


class Fault(RuntimeError):
    """Something that a GPU would hide.

    Attributes: kind, kernel, opcode, line (of the PTX), text (that line), source (file, line of the CUDA C or
    None), block (x, y, z), warp, lane, thread (x, y, z), detail.
    """

    def __init__(
        self,
        kind,
        detail,
        kernel=None,
        ins=None,
        text="",
        source=None,
        block=None,
        warp=None,
        lane=None,
        thread=None,
    ):
        self.kind, self.detail, self.kernel = kind, detail, kernel
        self.opcode, self.line = (ins.opcode, ins.line) if ins is not None else (None, None)
        self.text, self.source = text.strip(), source
        self.block, self.warp, self.lane, self.thread = block, warp, lane, thread
        parts = ["%s: %s" % (kind, detail)]
        if kernel is not None:
            parts.append("kernel %s" % kernel)
        if ins is not None:
            parts.append("PTX line %d: %s" % (ins.line, self.text or ins.opcode))
        if source is not None:
            parts.append("CUDA C %s:%d" % source)
        if block is not None:
            parts.append(
                "block (%d, %d, %d), warp %d, lane %d, thread (%d, %d, %d)" % (*block, warp, lane, *thread)
            )
        super().__init__("\n  ".join(parts))


class LaunchError(RuntimeError):
    """A launch that CUDA would refuse."""
