"""Every variant of the CUDA kernels compiles without a warning: architectures, types, head dims, rules, toolkits.

A few with the compiler at hand in the default run; all of them, with the two oldest toolkits too, with -m slow.
"""

import re
import sys

import pytest
from cuda_kit import PTX
from variant_kit import DIMS, DIRECTIONS, DTYPES, variants

from burstmpi.backends import modules, tiles

sys.path[:0] = [str(PTX), str(PTX.parent.parent / "benchmarks")]
from generate_ptx import TOOLKITS  # noqa: E402
from ptxmachine.nvrtc import default_toolkit, fetched_toolkit  # noqa: E402
from sass import Cubin  # noqa: E402

def quiet(toolkit, arch, source, defines):
    """Compile to machine code and look for words of warning in what the compiler and ptxas say."""
    code = (modules.folder() / f"{source}.cu").read_text()
    cubin = Cubin(code, arch, modules.options(defines), f"{source}.cu", toolkit)
    said = [line for line in cubin.log.splitlines() if re.search(r"warning|error", line, re.IGNORECASE)]
    assert not said, (source, arch, defines, said)
    return cubin


@pytest.mark.parametrize("arch, dtype, d", [("75", "float16", 64), ("86", "bfloat16", 128), ("120", "float64", 32)])
def test_some_variants(arch, dtype, d):
    for variant in variants(arch, dtype, d, d, "both", fills=(0,)):
        quiet(default_toolkit(), arch, variant.source, dict(variant.defines))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("arch", tiles.ARCHITECTURES)
@pytest.mark.parametrize("version", ("12.8", "13.0", "installed"))
def test_all_variants(version, arch, dtype):
    if arch == "75" and dtype == "bfloat16":
        pytest.skip("sm_75 has no bfloat16: refused by the table")
    toolkit = default_toolkit() if version == "installed" else fetched_toolkit(TOOLKITS[version])
    if toolkit is None:
        pytest.skip(f"toolkit {version} cannot be fetched")
    for d, dv in DIMS:
        for bend in ("plain", "both"):
            for variant in variants(arch, dtype, d, dv, bend, fills=(0,)):
                cubin = quiet(toolkit, arch, variant.source, dict(variant.defines))
                assert version != "installed" or cubin.seconds < 60, (variant, cubin.seconds)
    for source, names in (("survey", {}), ("plain", {"TO": 3, "FROM": 1, "VECTOR": 4})):
        quiet(toolkit, arch, source, names)


def test_bfloat16_is_refused_where_there_is_none():
    for direction in DIRECTIONS:
        with pytest.raises(ValueError, match="bfloat16.*sm_75"):
            tiles.kernel(direction, "75", "bfloat16", 64, 64)


@pytest.mark.parametrize("d", (0, 4, 12, 264, 512))
def test_head_dims_that_no_kernel_serves(d):
    for direction in DIRECTIONS:
        for dtype in ("float16", "float64"):
            with pytest.raises(ValueError, match=f"head dim.*got {d}"):
                tiles.kernel(direction, "80", dtype, d, 64)


def test_architectures_between():
    """A GPU that the table does not name takes the entry of the next older one; an older one is refused."""
    assert [tiles.architecture(c) for c in ("75", "80", "87", "90", "103", "121")] == ["75", "80", "86", "90", "100", "120"]
    with pytest.raises(ValueError, match="70"):
        tiles.architecture("70")


def test_headers_are_in_the_key(monkeypatch, tmp_path):
    """CuPy's cache does not know what a source includes: a changed header must change the options."""
    for path in modules.folder().glob("*.cu*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(modules, "folder", lambda: tmp_path)
    modules.headers_id.cache_clear()
    before = modules.options({"A": 1})
    (tmp_path / "ptx.cuh").write_text((tmp_path / "ptx.cuh").read_text() + "\n")
    modules.headers_id.cache_clear()
    assert modules.options({"A": 1}) != before
    modules.headers_id.cache_clear()
