"""Every call of CuPy that the library makes exists in the real CuPy, with these arguments; no GPU is needed for that.

The calls are read off the source.  CuPy itself is imported in a process of its own, as tests of this one may have put
the stand-in in its place.
"""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "burstmpi"

# Names of the library's own variables and attributes that hold CuPy's objects.
HOLDERS = {
    "cupy": "cupy", "_cupy": "cupy",
    "event": "cupy.cuda.Event",
    "stream": "cupy.cuda.Stream", "out": "cupy.cuda.Stream", "into": "cupy.cuda.Stream", "compute": "cupy.cuda.Stream",
    "device": "cupy.cuda.Device",
    "data": "cupy.cuda.MemoryPointer",
}  # fmt: skip
# out and data are names of arrays too: there only what a stream or a pointer has is looked at.
ONLY = {"out": {"ptr", "wait_event"}, "data": {"ptr", "memset_async"}, "device": {"id", "pci_bus_id", "attributes", "compute_capability", "use"}}


RETURNS = {"cupy.get_default_memory_pool": "cupy.cuda.MemoryPool", "cupy.RawModule.get_function": "cupy.RawKernel"}


def chain(node, aliases):
    """cupy.cuda.x.y for an expression, or None."""
    if isinstance(node, ast.Call):
        made = chain(node.func, aliases)
        return RETURNS.get(made, made) if made in RETURNS or (made or "").rsplit(".", 1)[-1][:1].isupper() else None
    if isinstance(node, ast.Name):
        return aliases.get(node.id) or HOLDERS.get(node.id) if node.id not in ONLY or node.id in aliases else f"?{node.id}"
    if isinstance(node, ast.Attribute):
        if node.attr in HOLDERS and not isinstance(node.value, ast.Attribute):
            return HOLDERS[node.attr] if node.attr not in ONLY else f"?{node.attr}"
        base = chain(node.value, aliases)
        if node.attr in HOLDERS and (base is None or not base.startswith("cupy")):
            return f"?{node.attr}" if node.attr in ONLY else HOLDERS[node.attr]
        if base is None:
            return None
        if base.startswith("?"):
            return f"{HOLDERS[base[1:]]}.{node.attr}" if node.attr in ONLY[base[1:]] else None
        return f"{base}.{node.attr}"
    return None


def calls():
    """[(file:line, dotted name, positional arguments, names of keyword arguments, whether it is called)]"""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text())
        for function in [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.Module))]:
            inside = [n for n in ast.walk(function)] if isinstance(function, ast.FunctionDef) else []
            aliases = {}
            for node in inside:
                if isinstance(node, ast.Assign) and len(node.targets) == 1:
                    pairs = [(node.targets[0], node.value)]
                    if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
                        pairs = list(zip(node.targets[0].elts, node.value.elts))
                    for target, value in pairs:
                        name = chain(value, aliases)
                        if isinstance(target, ast.Name) and name is not None and name.startswith("cupy"):
                            aliases[target.id] = name
            called = {id(n.func): n for n in inside if isinstance(n, ast.Call)}
            for node in inside:
                if not isinstance(node, ast.Attribute):
                    continue
                name = chain(node, aliases)
                call = called.get(id(node))
                if name is None or not name.startswith("cupy.") or (name in HOLDERS.values() and call is None):
                    continue
                where = f"{path.name}:{node.lineno}"
                starred = call is not None and any(isinstance(a, ast.Starred) for a in call.args)
                found.append((where, name, len(call.args) if call and not starred else 0,
                              [k.arg for k in call.keywords] if call else [], call is not None))  # fmt: skip
    return found


CHECK = r"""
import inspect, json, re, sys
import cupy, cupyx
print("CuPy", cupy.__version__)
bad = []
for where, name, count, keywords, called in json.load(sys.stdin):
    thing = cupy
    parts = name.split(".")[1:]
    for i, part in enumerate(parts):
        owner, thing = thing, getattr(thing, part, None)
        if thing is None and owner is cupy.cuda.Stream:  # of objects, not of the class
            thing = getattr(cupy.cuda.Stream.null, part, None)
        if thing is None:
            break
    if thing is None:
        bad.append(f"{where}: {name} is not in CuPy")
        continue
    if not called:
        continue
    method = inspect.isclass(owner) and not inspect.isclass(thing)
    try:
        maker = thing.__init__ if inspect.isclass(thing) else thing
        signature = inspect.signature(maker)
        if list(signature.parameters) == ["self", "args", "kwargs"]:
            raise ValueError  # of a class in Cython: its text tells
        try:
            signature.bind(*([None] * (count + (method or inspect.isclass(thing)))), **dict.fromkeys(keywords))
        except TypeError as error:
            bad.append(f"{where}: {name}: {error}")
    except (ValueError, TypeError):  # in Cython: its text tells
        text = (thing.__doc__ or "").strip().splitlines()
        line = text[0] if text else ""
        found = re.match(r"[\w.]+\((.*)\)", line)
        if found is None:
            bad.append(f"{where}: {name}: no signature to be found") if not inspect.isclass(thing) else None
            continue
        told = [part.strip() for part in re.sub(r"\([^)]*\)", "", found.group(1)).split(",") if part.strip()]
        told = [part for part in told if part not in ("self", "*", "/")]
        names = [re.split(r"[=:]", part)[0].split()[-1] for part in told]
        needed = sum("=" not in part for part in told)
        if not needed <= count + len(keywords) or count > len(told) or set(keywords) - set(names):
            bad.append(f"{where}: {name}({count} arguments, {keywords}) does not fit {line}")
print(*bad, sep="\n")
sys.exit(bool(bad))
"""


def verify(path=None):
    """Run CHECK with the CuPy of this environment, or with one in a folder; return its output."""
    listed = calls()
    some = {"Event.record", "Stream.wait_event", "runtime.memcpyAsync", "Device.use", "MemoryPool.free_all_blocks"}
    assert len(listed) > 40 and {f"cupy.cuda.{name}" for name in some} <= {name for _, name, *_ in listed}
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(path)} if path else None
    code = CHECK
    run = subprocess.run([sys.executable, "-c", code], input=json.dumps(listed), capture_output=True, text=True, env=environment)
    if "No module named 'cupy'" in run.stderr:
        pytest.skip("CuPy is not installed: pip install burstmpi[cuda]")
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_the_installed_cupy_has_all_that_is_called():
    assert verify().startswith("CuPy ")


def test_a_wrong_call_would_be_noticed(monkeypatch):
    wrong = [
        ("x.py:1", "cupy.cuda.Event.rekord", 0, [], True),
        ("x.py:2", "cupy.cuda.Stream.wait_event", 2, [], True),
        ("x.py:3", "cupy.cuda.runtime.memcpyAsync", 4, [], True),
        ("x.py:4", "cupy.cuda.Event", 0, ["timing"], True),
    ]
    real = calls()
    for entry in wrong:
        monkeypatch.setattr(sys.modules[__name__], "calls", lambda entry=entry: [*real, entry])
        with pytest.raises(AssertionError, match=entry[1]):
            verify()


@pytest.mark.slow
@pytest.mark.parametrize("version", [13, 14])
def test_wheels_of_cupy(version, tmp_path):
    """Fetches the wheel."""
    fetch = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--only-binary", ":all:", "--target", str(tmp_path)]
    wanted = [f"cupy-cuda13x>={version}.0,<{version + 1}", "fastrlock", "cuda-pathfinder"]
    done = subprocess.run([*fetch, *wanted], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no wheel of CuPy {version}: {done.stderr.splitlines()[-1:]}")
    assert verify(tmp_path).startswith(f"CuPy {version}.")
