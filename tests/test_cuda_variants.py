"""Every variant of the CUDA kernels compiles without a warning: architectures, types, head dims, rules, toolkits.

A few with the compiler at hand in the default run; all of them, with the two oldest toolkits too, with -m slow: to machine code those
with both softcap and ALiBi or none, and backward of the half types with every bend; to PTX, by the compiler's front end alone, the others.
"""

import re
import sys
import time

import pytest
from cuda_kit import PTX
from variant_kit import BENDS, DIMS, DIRECTIONS, DTYPES, OTHER, UNEQUAL, helpers, variants

from burstmpi.backends import modules, tiles

sys.path[:0] = [str(PTX), str(PTX.parent.parent / "benchmarks")]
from generate_ptx import TOOLKITS  # noqa: E402
from ptxmachine.nvrtc import CompileError, default_toolkit, fetched_toolkit  # noqa: E402
from sass import ADDED, Cubin  # noqa: E402


def quiet(toolkit, arch, source, defines, machine_code=True):
    """Compile to machine code, or to PTX alone, and look for words of warning in what the compiler and ptxas say; seconds of CPU."""
    code, options, name = (modules.folder() / f"{source}.cu").read_text(), modules.options(defines), f"{source}.cu"
    start = time.process_time()
    log = Cubin(code, arch, options, name, toolkit).log if machine_code else toolkit.compile(code, arch, (*options, *ADDED), name)[2]
    said = [line for line in log.splitlines() if re.search(r"warning|error", line, re.IGNORECASE)]
    assert not said, (source, arch, defines, said)
    return time.process_time() - start


@pytest.mark.parametrize("arch, dtype, d", [("75", "float16", 64), ("120", "float64", 32)])
def test_some_variants(arch, dtype, d):
    for variant in variants(arch, dtype, d, d, "both", fills=(0,)):
        seconds = quiet(default_toolkit(), arch, variant.source, dict(variant.defines))
        assert seconds < 10, (variant, seconds)


def toolkit_of(version):
    toolkit = default_toolkit() if version == "installed" else fetched_toolkit(TOOLKITS[version])
    if toolkit is None:
        pytest.skip(f"toolkit {version} cannot be fetched")
    return toolkit


VERSIONS = ("12.8", "13.0", "installed")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("arch", tiles.ARCHITECTURES)
@pytest.mark.parametrize("version", VERSIONS)
def test_all_variants(version, arch, dtype):
    """Backward of float16 and bfloat16 has pins of its own for each bend: all of them to machine code."""
    if arch == "75" and dtype == "bfloat16":
        pytest.skip("sm_75 has no bfloat16: refused by the table")
    toolkit = toolkit_of(version)
    for d, dv in DIMS:
        for bend in BENDS:
            for variant in variants(arch, dtype, d, dv, bend):
                machine_code = variant.fill == 0 and (bend in ("plain", "both") or variant.source == "backward")
                seconds = quiet(toolkit, arch, variant.source, dict(variant.defines), machine_code)
                assert version != "installed" or seconds < 60, (variant, seconds)


@pytest.mark.slow
@pytest.mark.parametrize("arch, dtype", OTHER)
def test_all_pairs_of_head_dims(arch, dtype):
    """Those that differ, to PTX: what does not fit does not compile."""
    for d, dv in UNEQUAL:
        for variant in variants(arch, dtype, d, dv, "plain", fills=(0,)):
            quiet(default_toolkit(), arch, variant.source, dict(variant.defines), machine_code=False)


@pytest.mark.slow
@pytest.mark.parametrize("arch", tiles.ARCHITECTURES)
@pytest.mark.parametrize("version", VERSIONS)
def test_all_helpers(version, arch):
    toolkit = toolkit_of(version)
    for source, defines in dict.fromkeys((source, defines) for source, _, defines in helpers()):
        quiet(toolkit, arch, source, dict(defines))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_tile_that_does_not_fit_does_not_compile(direction, dtype):
    """A byte of shared memory less than a tile wants, or a table that counts it wrongly."""
    kernel = tiles.kernel(direction, "80", dtype, 64, 64)
    for wrong in ({"SHARED_LIMIT": kernel.defines["SHARED"] - 1}, {"SHARED": kernel.defines["SHARED"] + 16}):
        with pytest.raises(CompileError, match="static assertion failed.*shared memory"):
            quiet(default_toolkit(), "80", kernel.source, kernel.defines | {"BURST_SOFTCAP": 0, "BURST_ALIBI": 0} | wrong, machine_code=False)


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
