"""The parser: scopes, literals, directives, and errors with their line."""

import numpy as np
import pytest
from ptxmachine.parser import PtxError, parse
from ptxsupport import compiled, evaluate, ptx, same


def test_scopes_hide_names_and_labels():
    """Two inline asm blocks with the same register and label names, and a shadowed outer name."""
    block = "{ .reg .pred p; .reg .b32 t; setp.gt.u32 p, %a, {0}; mov.u32 t, {1}; @p bra DONE; mov.u32 t, 0; DONE: add.u32 %d, %d, t; }"
    code = (
        "mov.u32 %d, 0; .reg .b32 t; mov.u32 t, 1000;"
        + block.replace("{0}", "1").replace("{1}", "5")
        + block.replace("{0}", "2").replace("{1}", "7")
        + "add.u32 %d, %d, t;"
    )
    same(evaluate(code, {"a": ("u32", [1, 2, 3])}, {"d": "u32"}), [1000, 1005, 1012])


@pytest.mark.parametrize(
    "text,value",
    [("10", 10), ("0x1F", 31), ("0x1FU", 31), ("017", 15), ("0b101", 5), ("-3", 2**32 - 3), ("WARP_SZ", 32)],
)
def test_integer_literals(text, value):
    same(evaluate("mov.u32 %%d, %s;" % text, {"a": ("u32", [0])}, {"d": "u32"}), [value])


def test_float_literals():
    same(evaluate("add.f32 %d, %a, 0f40490FDB;", {"a": ("f32", [0])}, {"d": "f32"}), np.float32([np.pi]))
    same(evaluate("add.f64 %d, %a, 0d400921FB54442D18;", {"a": ("f64", [0])}, {"d": "f64"}), [np.pi])
    same(evaluate("mov.f32 %d, 1.5;", {"a": ("f64", [0])}, {"d": "f32"}), [1.5])
    same(evaluate("add.f32 %d, %a, -1.5;", {"a": ("f32", [0])}, {"d": "f32"}), [-1.5])


def test_module_facts():
    module = parse(
        compiled(
            '__constant__ float c[3] = {1, 2, 3}; __device__ int g = 7; struct S { int a; double b; };\nextern "C" __global__ void __launch_bounds__(96) k(S s, char x, float* p) { p[0] = c[s.a] + s.b + g + x; }'
        )
    )
    kernel = module.kernels["k"]
    assert module.target == "sm_80" and kernel.max_threads == 96
    assert [(p.offset, p.size) for p in kernel.params] == [
        (0, 16),
        (16, 1),
        (24, 8),
    ] and kernel.param_bytes == 32
    assert module.variables["c"].data == np.float32([1, 2, 3]).tobytes() and module.variables["g"].size == 4
    assert all(ins.source for ins in kernel.instructions if ins.op in ("add", "st"))


@pytest.mark.parametrize(
    "text,message",
    [
        ("add.u32 %nope, %t, 1;", r"line 7: unknown register %nope"),
        ("bra NOWHERE;", r"line 7: unknown label NOWHERE"),
        ("add.u32 %t, %t, ;", r"line 7: operand expected"),
        (".magic 3;", r"line 7: unknown directive '.magic'"),
        ("add.u32 %t, %t ? 1;", r"line 7: unexpected text"),
        (".reg .v4 .f32 %x;", r"line 7: register type"),
    ],
)
def test_errors_name_the_line(text, message):
    with pytest.raises(PtxError, match=message):
        parse(ptx(".reg .b32 %t;" + text))
    with pytest.raises(PtxError, match="unknown directive"):
        parse(".version 8.0\n.nonsense\n")
    with pytest.raises(PtxError, match="64-bit"):
        parse(".version 8.0\n.target sm_80\n.address_size 32\n")


def test_an_instruction_that_cannot_be_bound_is_named():
    with pytest.raises(PtxError, match=r"PTX line \d+.*add.u32"):
        evaluate("add.u32 %d, %a;", {"a": ("u32", [0])}, {"d": "u32"})
    with pytest.raises(PtxError, match=r"PTX line \d+.*setp.zz.u32"):
        evaluate(".reg .pred %p; setp.zz.u32 %p, %a, 1; mov.u32 %d, 1;", {"a": ("u32", [0])}, {"d": "u32"})


@pytest.mark.parametrize(
    "text",
    (
        "barrier.cluster.arrive;",
        "ld.shared::cluster.u32 %d, [%a];",
        "mbarrier.init.shared.b64 [%a], 1;",
        "wgmma.fence.sync.aligned;",
        "shfl.up.b32 %d, %a, 1, 0;",
        "setmaxnreg.inc.sync.aligned.u32 40;",
        "mov.u32 %d, %clock;",
        "tex.1d.v4.s32.s32 %d, %a;",
    ),
)
def test_what_is_not_there_is_refused_by_name(text):
    """Never skipped: the instruction (or special register) and its line are in the message."""
    with pytest.raises(
        PtxError, match=text.split()[0].rstrip(";").replace(".", r"\.") if "clock" not in text else "%clock"
    ):
        evaluate(text + " mov.u32 %d, 1;", {"a": ("u32", [0])}, {"d": "u32"})


def test_debug_sections_and_comments_are_passed_over():
    text = ptx(
        '.loc 1 5 3, function_name $L__info_string0, inlined_at 1 9 2\n// a comment\nmov.u32 %r0, 1; /* two\nlines */ .pragma "nounroll";'.replace(
            "mov.u32 %r0", ".reg .b32 %r<3>; mov.u32 %r0"
        )
    )
    module = parse(text + '.file 1 "a.cu"\n.section .debug_str { $L__info_string0: .b8 95, 0 }\n')
    ins = module.kernels["t"].instructions[0]
    assert ins.source == (1, 5) and module.files[1] == "a.cu"
