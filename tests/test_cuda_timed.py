"""The timing of benchmarks/kernels.py --gpu: on the stand-in for CuPy as far as that goes, since it has no clock."""

import subprocess
import sys
import types

import cuda_kit
import host_kit
import numpy as np
import pytest

from burstmpi.backends import reference

BENCHMARKS = cuda_kit.PTX.parent.parent / "benchmarks"
sys.path[:0] = [str(BENCHMARKS)]
import timed  # noqa: E402

WINDOWS = [(), (("causal", True),), (("window", (3, 2)),), (("causal", True), ("window", (5, None))), (("documents", (0, 4, 4, 20)),)]


@pytest.mark.parametrize("rows", [1, 7, 20])
@pytest.mark.parametrize("options", WINDOWS, ids=str)
def test_operations_are_those_of_visible_pairs(rows, options):
    if options and options[0][0] == "documents" and rows != 20:
        pytest.skip("boundaries of 20 rows")
    case = timed.Case(2, rows, 4, 2, 24, "float32", options)
    seen = sum(bool(x) for row in reference.visible(case.rules, rows, rows)[0] for x in row)
    multiply_adds = 2 * 4 * seen * 24  # batch, heads
    assert timed.operations(case) == (2 * 2 * multiply_adds, 2 * 5 * multiply_adds)


def test_peaks_are_those_of_data_sheets():
    """TFLOP/s of boards at their boost clocks; within what the sheets round."""
    for device, dtype, told in [
        (("80", "NVIDIA A100", 108, 1410000), "bfloat16", 312), (("80", "NVIDIA A100", 108, 1410000), "float64", 19.5),
        (("90", "NVIDIA H100 SXM", 132, 1830000), "float16", 989), (("90", "NVIDIA H100 SXM", 132, 1980000), "float32", 67),
        (("89", "NVIDIA GeForce RTX 4090", 128, 2520000), "float16", 165), (("86", "NVIDIA RTX A6000", 84, 1800000), "bfloat16", 155),
        (("80", "NVIDIA A100", 108, 1410000), "float32", 19.5), (("75", "Tesla T4", 40, 1590000), "float16", 65),
    ]:  # fmt: skip
        assert timed.peak(*device, dtype) / 1e12 == pytest.approx(told, rel=0.02), (device, dtype)


@pytest.fixture
def clock(monkeypatch):
    """The stand-in, with a device that has a clock rate, and events that tell how much work lies between them."""
    if cuda_kit.REAL:
        pytest.skip("a GPU has a clock of its own")
    cupy = cuda_kit.device("80")
    asked = []

    def elapsed(start, end):
        assert start._op is not None and end._op is not None and start._op.done and end._op.done  # recorded, waited for
        asked.append((start, end))
        return 2.0

    monkeypatch.setattr(cupy.cuda, "get_elapsed_time", elapsed, raising=False)
    told = cupy.cuda.Device.attributes
    monkeypatch.setattr(cupy.cuda.Device, "attributes", property(lambda self: {**told.fget(self), "ClockRate": 1410000}))
    return cupy, asked


@pytest.mark.parametrize("dtype, options, deterministic", [("bfloat16", (("causal", True),), False), ("float32", (), True)])
def test_what_is_timed_is_right(clock, dtype, options, deterministic):
    """The calls that are timed leave the results of attention and its gradients."""
    cupy, _ = clock
    case = timed.Case(1, 40, 2, 1, 32, dtype, options)
    forward, prepare, backward, results = timed.ours(cupy, case, deterministic=deterministic)
    for call in (forward, forward, prepare, backward, backward):  # again: nothing is added to what was there
        call()
    got = [cupy.asnumpy(x) for x in results]
    q, k, v, dout = (x.astype(host_kit.DTYPES[dtype]) for x in timed.arrays(case))
    true, same = host_kit.exact(dout, q, k, v, **dict(options)), host_kit.naive(dout, q, k, v, narrow=dtype == "bfloat16", **dict(options))
    floors = (same[5][0], np.finfo(np.float32).eps, *same[5][1:])
    for name, mine, want, near, floor in zip(("out", "lse", "dq", "dk", "dv"), got, true, same, floors):
        host_kit.check(name, mine, want, near, "float32" if name == "lse" else dtype, 2.0, host_kit.rms(true[1]), floor)


def test_rates_follow_from_times(clock, monkeypatch):
    """Median of the events' times, after a warm-up; operations over it; share of the device's peak."""
    cupy, asked = clock
    monkeypatch.setattr(timed, "others", lambda case: ())
    case = timed.Case(1, 24, 1, 1, 32, "float32")
    device = timed.device_of(cupy)
    assert device == ("80", "PTX machine sm_80", cupy.cuda.Device().attributes["MultiProcessorCount"], 1410000)
    rows = list(timed.measured(cupy, case, device, timer=timed.cupy_timer(cupy, warm=1, repeats=3)))
    assert len(asked) == 6 and len({id(e) for pair in asked for e in pair}) == 12
    rates = [count / 2e-3 for count in timed.operations(case)]
    most = timed.peak(*device, "float32")
    assert rows == [("burstmpi", *(pytest.approx(r / 1e12) for r in rates), *(pytest.approx(r / most) for r in rates))]


def test_the_whole_table(clock, monkeypatch, capsys):
    """The command's own loop over cases, with small ones."""
    monkeypatch.setattr(timed, "cases", lambda dtypes, dims: [("causal", timed.Case(1, 9, 1, 1, d, t, timed.RULES["causal"])) for t in dtypes for d in dims])
    monkeypatch.setattr(timed, "others", lambda case: ())
    real = timed.cupy_timer
    monkeypatch.setattr(timed, "cupy_timer", lambda cupy: real(cupy, warm=0, repeats=1))
    assert timed.main(["float32"], [32]) == 0
    told = capsys.readouterr().out
    assert "1.41 GHz" in told and "peak of float32" in told and "burstmpi" in told


def test_median():
    class Event:
        pass

    times = iter([9.0, 1.0, 2.0])
    calls = []
    timer = timed.Timer(Event, lambda e: calls.append("event"), lambda a, b: next(times), lambda: calls.append("wait"), warm=2, repeats=3)
    assert timer.seconds(lambda: calls.append("run")) == 2e-3
    assert calls == ["run"] * 2 + ["event", "run", "event"] * 3 + ["wait"]


@pytest.mark.parametrize("options", [(), (("causal", True),)], ids=["full", "causal"])
def test_torch_and_flash_attn_get_the_same_problem(options, monkeypatch):
    torch = pytest.importorskip("torch")

    def flash_attn_func(q, k, v, causal, window_size):
        assert window_size == (-1, -1)
        more = {"enable_gqa": True}
        turned = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(*turned, is_causal=causal, **more).transpose(1, 2)

    flash = types.SimpleNamespace(flash_attn_func=flash_attn_func)
    case = timed.Case(1, 12, 4, 2, 16, "float64", options)
    q, k, v, dout = (x.astype(np.float64) for x in timed.arrays(case))
    true = host_kit.exact(dout, q, k, v, **dict(options))
    forward, backward = timed.torch_case(torch, case, "cpu")
    np.testing.assert_allclose(forward().transpose(1, 2).numpy(), true[0], rtol=1e-9, atol=1e-12)
    for got, want in zip(backward(), true[2:]):
        np.testing.assert_allclose(got.transpose(1, 2).numpy(), want, rtol=1e-9, atol=1e-12)
    assert timed.flash_case(torch, flash, case, "cpu") is None  # float64
    half = timed.Case(1, 12, 4, 2, 16, "bfloat16", options)
    forward, backward = timed.flash_case(torch, flash, half, "cpu")
    assert np.abs(forward().float().numpy() - true[0]).max() < 0.1 and len(backward()) == 3
    windowed = timed.Case(1, 12, 4, 2, 16, "bfloat16", (("window", (3, 0)),))
    assert timed.torch_case(torch, windowed, "cpu") is None


def test_no_device():
    """One line and a failure where CuPy finds none."""
    if cuda_kit.REAL:
        pytest.skip("there is one")
    code = "import sys; sys.path[:0] = sys.argv[1:]; import ptxmachine.cupy as c; c.install(); c.cuda.is_available = lambda: False; import timed; sys.exit(timed.main(['float32'], [64]))"
    run = subprocess.run([sys.executable, "-c", code, str(BENCHMARKS), str(cuda_kit.PTX)], capture_output=True, text=True)
    assert run.returncode == 1 and run.stdout == "--gpu: CuPy finds no device\n", run
