"""Parsed PTX that is kept in memory and in files."""

import os

import pytest
from ptxmachine import stored

KERNEL = r"""
extern "C" __global__ void scaled(const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = 2.f * x[i];
}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty cache folder, nothing in memory, and no text too short for a file."""
    monkeypatch.setenv("PTX_MACHINE_CACHE", str(tmp_path))
    monkeypatch.setattr(stored, "_modules", {})
    monkeypatch.setattr(stored, "LONG", 1)
    return tmp_path / "parsed"


def files(folder):
    return sorted(os.listdir(folder))


def doubled(cupy):
    kernel = cupy.RawModule(code=KERNEL).get_function("scaled")
    x, y = cupy.arange(100, dtype="float32"), cupy.zeros(100, "float32")
    kernel((1,), (128,), (x, y, 100))
    return (y.get() == 2 * x.get()).all()


def test_a_file_serves_other_processes(cupy, folder, monkeypatch):
    assert doubled(cupy) and len(files(folder)) == 1
    stored._modules.clear()
    monkeypatch.setattr(stored, "_parse", lambda text: pytest.fail("parsed twice"))
    cupy.reset(arch="80")
    assert doubled(cupy) and len(files(folder)) == 1


def test_a_broken_file_is_made_anew(cupy, folder):
    assert doubled(cupy)
    (name,) = files(folder)
    for rubbish in (b"", (folder / name).read_bytes()[:-9], b"rubbish"):
        (folder / name).write_bytes(rubbish)
        stored._modules.clear()
        cupy.reset(arch="80")
        assert doubled(cupy) and files(folder) == [name] and (folder / name).stat().st_size > 100


def test_other_code_of_the_parser_means_another_file(cupy, folder, monkeypatch):
    assert doubled(cupy)
    stored._modules.clear()
    monkeypatch.setattr(stored, "_maker", lambda: b"another")
    cupy.reset(arch="80")
    assert doubled(cupy) and len(files(folder)) == 2


def test_only_so_much_is_kept_in_memory(cupy, folder, monkeypatch):
    monkeypatch.setattr(stored, "KEPT", 1)
    assert doubled(cupy) and len(stored._modules) == 1
    text = next(iter(stored._modules)).replace("scaled", "other")
    assert list(stored.parsed(text).programs) == ["other"] and list(stored._modules) == [text]


def test_a_folder_that_cannot_be_written(cupy, folder, monkeypatch):
    folder.parent.joinpath("parsed").write_text("a file in its place")
    assert doubled(cupy)
