"""Every variant of the CUDA kernels, said once: who compiles them all and who runs them all take this list."""

from __future__ import annotations

import hashlib
import itertools
import re
from dataclasses import dataclass

from burstmpi.backends import modules, tiles
from burstmpi.backends.block import TYPES

DTYPES = ("float16", "bfloat16", "float32", "float64")
DIMS = (*((d, d) for d in tiles.HEAD_DIMS), (192, 128))
UNEQUAL = tuple(itertools.permutations(tiles.HEAD_DIMS, 2))  # 192/128 among them
OTHER = tuple(itertools.product([x for x in tiles.ARCHITECTURES if x != "89"], ("float16", "float32", "float64")))  # sm_89 is sm_86 here, bfloat16 float16
BENDS = {"plain": (0, 0), "softcap": (1, 0), "alibi": (0, 1), "both": (1, 1)}  # BURST_SOFTCAP, BURST_ALIBI
DIRECTIONS = {"forward": [{}, {"SORTED": 1}], "backward": [{"WITH_DQ": 1}, {"WITH_DQ": 0}], "backward_queries": [{}]}
PAIRS = [(arch, dtype) for dtype in DTYPES for arch in tiles.ARCHITECTURES if (arch, dtype) != ("75", "bfloat16")]


@dataclass(frozen=True)
class Variant:
    """A build: raw_kernels/<source>.cu with these -D, and which of its kernels are launched.

    way : SORTED, or WITH_DQ
    fill : columns that the head dims of a call lack, where the build knows (PADDED) that some are
    """

    direction: str
    arch: str
    way: tuple
    fill: int
    kernel: tiles.Kernel
    defines: tuple
    names: tuple

    @property
    def source(self) -> str:
        return self.kernel.source

    @property
    def launches(self) -> set:
        """What ``Launches`` records of it."""
        return {(self.source, name, self.defines) for name in self.names}


def variants(arch, dtype, d, dv, bend="plain", fills=(0, 8)):
    """Yield all variants of the kernels of a type and its native head dims.

    fills : 8: with those of head dims that are filled up, where they are builds of their own
    """
    softcap, alibi = BENDS[bend]
    for direction, ways in DIRECTIONS.items():
        for fill in fills:
            kernel = tiles.kernel(direction, arch, dtype, d - fill, dv - fill)
            if fill and not kernel.defines.get("PADDED"):
                continue
            for way in ways:
                if "SORTED" in way and not kernel.spans:
                    continue
                defines = {**kernel.defines, "BURST_SOFTCAP": softcap, "BURST_ALIBI": alibi, **way}
                names = {
                    "forward": ("forward", "forward_merge"),
                    "backward": ("backward", *["backward_prepare"] * bool(kernel.prepared_bytes), *["backward_fold"] * way.get("WITH_DQ", 0)),
                    "backward_queries": ("backward_queries",),
                }  # fmt: skip
                yield Variant(direction, arch, tuple(way.items()), fill, kernel, tuple(defines.items()), names[direction])


SURVEY = ("survey_keys", "survey_sort", "survey_queries", "survey_weights", "survey_order", "survey_slopes")


def helpers():
    """All (source, kernel, -D) that are no attention, as ``Launches`` records them; all architectures have the same."""
    size = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
    widths = lambda *names: [w for w in (1, 2, 4, 8) if w * max(size[name] for name in names) <= 16]  # noqa: E731
    told = lambda name, **defines: ("plain", name, tuple(defines.items()))  # noqa: E731
    yield from (("survey", name, ()) for name in SURVEY)
    for to, code in TYPES.items():
        yield from (told("delta", TYPE=code, VECTOR=width) for width in widths(to))
        for index in ("u32", "u64"):
            yield from (told("clear", TO=code, VECTOR=width, INDEX=index) for width in widths(to))
            for of, other in TYPES.items():
                for name in ("copy", *["add"] * (to == of and size[to] >= 4)):
                    yield from (told(name, TO=code, VECTOR=width, FROM=other, INDEX=index) for width in widths(to, of))


def digest(ptx: str) -> str:
    """Of PTX without the lines that name the architecture: what has the same is the same program."""
    return hashlib.sha256(re.sub(r"(?m)^\.(version|target)\b.*$", "", ptx).encode()).hexdigest()


class Launches(modules.Modules):
    """Kernels that tell when they are launched.

    launched : (source, kernel, -D) so far
    """

    def __init__(self, cupy):
        super().__init__(cupy)
        self.launched = set()

    def kernel(self, source, name, shared=0, **defines):
        launch = super().kernel(source, name, shared, **defines)

        def told(grid, block, arguments, **more):
            launch(grid, block, arguments, **more)
            self.launched.add((source, name, tuple(defines.items())))

        return told
