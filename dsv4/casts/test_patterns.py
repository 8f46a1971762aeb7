"""Casts with known answers: ``# P`` marks the producer's line, ``# H`` the cast's; ``# P H`` is both."""

import textwrap

import pytest

from dsv4.casts.hits import Direction, Status
from dsv4.casts.sweep import sweep

HEAD = """
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import nn

BF16, f32 = torch.bfloat16, torch.float32
"""
WIDENED, NARROWED, UNCLEAR = Direction.WIDENED, Direction.NARROWED, Direction.UNCLEAR

REPORTED = {
    "float": (WIDENED, "def f(a):\n x = a.to(BF16)  # P\n return x.float()  # H"),
    "to": (WIDENED, "def f(a):\n x = a.bfloat16()  # P\n return x.to(torch.float32)  # H"),
    "to(dtype=)": (WIDENED, "def f(a):\n x = a.half()  # P\n return x.to(dtype=torch.float32)  # H"),
    "to(device, dtype)": (
        WIDENED,
        "def f(a, device):\n x = a.to(BF16)  # P\n return x.to(device, torch.float32)  # H",
    ),
    "to(other.dtype)": (
        WIDENED,
        "def f(a, n):\n x = a.to(BF16)  # P\n w = torch.ones(n)\n return w * x.to(w.dtype)  # H",
    ),
    "to(other)": (
        WIDENED,
        "def f(a, n):\n x = a.to(BF16)  # P\n w = torch.ones(n)\n return w * x.to(w)  # H",
    ),
    "type": (WIDENED, "def f(a):\n x = a.to(BF16)  # P\n return x.type(torch.float32)  # H"),
    "type by string": (WIDENED, "def f(a):\n x = a.to(BF16)  # P\n return x.type('torch.FloatTensor')  # H"),
    "type_as": (
        WIDENED,
        "def f(a, n):\n x = a.to(BF16)  # P\n w = torch.zeros(n)\n return x.type_as(w)  # H",
    ),
    "double": (WIDENED, "def f(n):\n x = torch.zeros(n)  # P\n return x.double().sum()  # H"),
    "a name for the dtype": (WIDENED, "def f(a):\n x = a.to(BF16)  # P\n return x.to(f32)  # H"),
    "factory's dtype": (
        WIDENED,
        "def f(n):\n x = torch.empty(n, dtype=torch.bfloat16)  # P\n return x.float()  # H",
    ),
    "as_tensor": (
        WIDENED,
        "def f(a):\n x = a.to(BF16)  # P\n return torch.as_tensor(x, dtype=torch.float32)  # H",
    ),
    "tensor": (WIDENED, "def f(a):\n x = a.to(BF16)  # P\n return torch.tensor(x, dtype=f32)  # H"),
    "copy_": (WIDENED, "def f(a, n):\n out, x = torch.empty(n), a.to(BF16)  # P\n out.copy_(x)  # H"),
    "softmax's dtype": (
        WIDENED,
        "def f(a, b):\n x = torch.matmul(a.to(BF16), b)  # P\n return F.softmax(x, -1, dtype=torch.float32)  # H",
    ),
    "an argument": (WIDENED, "def f(a, w):\n x = a.to(BF16)  # P\n return F.linear(x.float(), w)  # H"),
    "a keyword argument": (
        WIDENED,
        "def f(a, g):\n x = a.to(BF16)  # P\n return g(1, scores=x.float())  # H",
    ),
    "one chain": (WIDENED, "def f(a):\n return (\n  a\n  .bfloat16()  # P\n  .float()  # H\n )"),
    "the producer is an operation": (
        WIDENED,
        "def f(a, w):\n a = a.to(BF16)\n x = F.linear(a, w)  # P\n return x.float()  # H",
    ),
    "through views": (
        WIDENED,
        "def f(a):\n x = a.to(BF16)  # P\n"
        " return x.reshape(2, -1)[:, 1:].transpose(0, 1).unflatten(0, (2, 2)).contiguous().float()  # H",
    ),
    "through names": (
        WIDENED,
        "def f(a):\n x = a.to(BF16)  # P\n y = x.view(-1)\n z = y[3:].mT\n return z.float()  # H",
    ),
    "of a chunk": (
        WIDENED,
        "def f(a):\n x = a.to(BF16)  # P\n gate, up = x.chunk(2, -1)\n return gate.float() * 2  # H",
    ),
    "in one branch": (
        WIDENED,
        "def f(a, c):\n x = torch.ones(3)\n if c:\n  x = a.to(BF16)  # P\n return x.float()  # H",
    ),
    "by a choice": (
        WIDENED,
        "def f(a, c, n):\n x = a.to(BF16) if c else torch.ones(n)  # P\n return x.float()  # H",
    ),
    "a loop's body": (
        WIDENED,
        "def f(a):\n total = torch.zeros(1)\n for each in a:\n  x = each.to(BF16)  # P\n"
        "  total = total + x.float()  # H\n return total",
    ),
    "across a call": (
        WIDENED,
        "def norm(a, dtype=BF16):\n y = a.square()\n return y.to(dtype)\n"
        "def f(a):\n x = norm(a)  # P\n return x.float()  # H",
    ),
    "across a call, by its dtype argument": (
        WIDENED,
        "def norm(a, out, dtype=f32):\n out = torch.empty(3, dtype=dtype)\n return out\n"
        "def f(a):\n x = norm(a, a, dtype=BF16)  # P\n return x.float()  # H",
    ),
    "into a call": (
        WIDENED,
        "def scores(q):\n return q.float() @ q.T  # H\ndef f(a):\n x = a.to(BF16)  # P\n return scores(x)",
    ),
    "an annotated parameter": (WIDENED, "def f(x: BFloat16[Tensor, 'T D']):  # P\n return x.float()  # H"),
    "an attribute": (
        WIDENED,
        "class M(nn.Module):\n def __init__(self, n):\n  self.cache = torch.zeros(n, dtype=BF16)  # P\n"
        " def forward(self, rows):\n  return self.cache[rows].float()  # H",
    ),
    "a module made with a dtype": (
        WIDENED,
        "class M(nn.Module):\n def __init__(self):\n  self.q = nn.Linear(3, 3, dtype=BF16)\n"
        " def forward(self, a):\n  x = self.q(a)  # P\n  return x.float()  # H",
    ),
    "an object that is called": (
        WIDENED,
        "class Wide:\n def __call__(self, a, dtype):\n  return torch.empty(3, dtype=dtype)\n"
        "class Layer:\n q: Wide | None\n"
        "def f(at: Layer, a):\n x = at.q(a, BF16)  # P\n return x.float()  # H",
    ),
    "under a key": (
        WIDENED,
        "def f(a):\n return {'hidden': a.to(BF16)}  # P\ndef g(env):\n return env['hidden'].float()  # H",
    ),
    "a lambda": (WIDENED, "def f(a):\n x = a.to(BF16)  # P\n return lambda rows: x[rows].float()  # H"),
    "out of FP8": (
        WIDENED,
        "def f(pages):\n x = pages.view(torch.float8_e4m3fn)\n y = x * 1  # P\n return y.float()  # H",
    ),
    "a kernel that loads what it stored": (
        WIDENED,
        "@triton.jit\ndef k(p, q):\n x = tl.load(q).to(tl.float32)\n tl.store(p, x.to(tl.bfloat16))  # P\n"
        " y = tl.load(p).to(tl.float32)  # H\n tl.store(q, y)",
    ),
    "narrowed next": (NARROWED, "def f(n):\n x = torch.randn(n)  # P\n return x.to(BF16)  # H"),
    "narrowed in the chain": (
        NARROWED,
        "def f(n):\n a = torch.randn(n)\n b = a + 1\n return (a * b).bfloat16()  # P H",
    ),
    "a product, narrowed": (
        NARROWED,
        "def f(n):\n w = torch.randn(n)\n x = torch.matmul(w, w)  # P\n y = x.view(-1)\n return y.to(dtype=BF16)  # H",
    ),
    "narrowed to FP8": (
        NARROWED,
        "def f(n):\n x = torch.ones(n)\n y = x.clamp(-448, 448)  # P\n"
        " return y.to(torch.float8_e4m3fn), x.amax()  # H",
    ),
    "accumulated in place": (
        NARROWED,
        "def f(parts, n):\n total = torch.zeros(n)\n for each in parts:\n  total += each  # P\n"
        " return total.to(BF16)  # H",
    ),
    "defined under a condition": (
        WIDENED,
        "if torch.cuda.is_available():\n def f(a):\n  x = a.to(BF16)  # P\n  return x.float()  # H",
    ),
    "quantised": (
        NARROWED,
        "def f(w, quantize_fp8):\n x = F.rms_norm(torch.ones(3), w)  # P\n return quantize_fp8(x)  # H",
    ),
    "a wide result of a call, quantised": (
        NARROWED,
        "def norm(n):\n return torch.ones(n).square()\n"
        "def f(ops):\n y = norm(3)  # P\n return ops.act_quant(y, 128)  # H",
    ),
    "type_as something narrow": (
        NARROWED,
        "def f(a, n):\n w = torch.empty(n, dtype=BF16)\n x = torch.ones(n)  # P\n return w + x.type_as(w)  # H",
    ),
    "not evident": (UNCLEAR, "def f(x):  # P\n return torch.einsum('td,cd->tc', x.float(), x)  # H"),
}

NOT_REPORTED = {
    "FP32 already": "def f(n):\n x = torch.zeros(n)\n return x.float()",
    "back from FP32 to its own dtype": "def f(n):\n x = torch.zeros(n)\n return x.to(x.dtype)",
    "a wide value that others read too": "def f(n):\n x = torch.randn(n)\n return x.to(BF16), x.sum()",
    "a view's base that others read too": "def f(n):\n x = torch.randn(n)\n y = x[1:]\n return y.to(BF16), x.sum()",
    "read again in a closure": "def f(n):\n x = torch.randn(n)\n y = x.half()\n return y, lambda: x.sum()",
    "integers": "def f(n):\n i = torch.arange(n)\n return i.float(), (i > 3).float(), i.long()",
    "a device": "def f(a, device):\n x = a.to(BF16)\n return x.to(device), x.to('cuda'), x.to(a.device)",
    "registers of a kernel": "@triton.jit\ndef k(p, q):\n x = tl.load(p).to(tl.float32)\n"
    " y = tl.cast(x, tl.bfloat16)\n z = tl.dot(y, y, out_dtype=tl.float32)\n tl.store(q, z.to(tl.bfloat16))",
    "a reduction that casts as it reads": "def f(a):\n x = a.to(BF16)\n return x.sum(-1, dtype=torch.float32)",
    "a factory": "def f(a, n):\n x = a.to(BF16)\n return x + torch.zeros(n, dtype=torch.float32).sum()",
    "a parameter that is narrowed": "def f(x: Float32[Tensor, 'T']):\n return x.to(BF16)",
    "a weight that is narrowed": "W = torch.ones(3)\ndef f(a):\n return a @ W.to(BF16)",
    "reinterpreted bytes": "def f(a):\n x = a.to(torch.uint8)\n return x.view(torch.float8_e4m3fn)",
    "a Python number": "def f(a):\n return float(a.item()), torch.tensor(2.0, dtype=torch.float32)",
    "a fused quantiser's input": "def f(a, rmsnorm_quantise):\n x = torch.ones(3)\n return rmsnorm_quantise(x)",
    "a dequantiser": "def f(dequantize):\n x = torch.ones(3)\n return dequantize(x)",
}


def swept(tmp_path, source):
    (tmp_path / "fixture.py").write_text(HEAD + textwrap.dedent(source) + "\n")
    return [cast for cast in sweep(tmp_path).casts if cast.status is Status.OPEN]


def marked(source, letter):
    lines = (HEAD + source).split("\n")
    return [n for n, line in enumerate(lines, 1) if letter in line.partition("# ")[2].split()]


@pytest.mark.parametrize("name", REPORTED)
def test_a_cast_is_reported_with_its_line_producer_and_direction(tmp_path, name):
    direction, source = REPORTED[name]
    (cast,) = swept(tmp_path, source)
    assert [cast.line] == marked(source, "H")
    assert [cast.producer.line] == marked(source, "P")
    assert cast.direction is direction
    assert cast.file == "fixture.py"
    assert cast.producer.file == "fixture.py"


@pytest.mark.parametrize("name", NOT_REPORTED)
def test_what_costs_nothing_of_its_own_is_not_reported(tmp_path, name):
    assert swept(tmp_path, NOT_REPORTED[name]) == []


def test_casts_of_a_kernel_are_listed_apart_as_free(tmp_path):
    (tmp_path / "fixture.py").write_text(HEAD + NOT_REPORTED["registers of a kernel"])
    casts = sweep(tmp_path).casts
    registers = [cast.text for cast in casts if cast.reason == "in registers"]
    assert registers == ["tl.load(p).to(tl.float32)", "tl.cast(x, tl.bfloat16)", "z.to(tl.bfloat16)"]
    assert [cast.text for cast in casts if cast.reason == "the accumulator's dtype"] == [
        "tl.dot(y, y, out_dtype=tl.float32)"
    ]


def test_a_function_that_is_nested_too_deeply_is_warned_of(tmp_path):
    (tmp_path / "deep.py").write_text(f"def f(a):\n return {'+'.join(['a'] * 2000)}\n")
    (tmp_path / "good.py").write_text(HEAD + REPORTED["float"][1])
    found = sweep(tmp_path)
    assert [line.partition(",")[0] for line in found.warnings] == ["deep.py:1: not swept to its end"]
    assert [cast.file for cast in found.casts if cast.status is Status.OPEN] == ["good.py"]


def test_there_are_as_many_patterns_as_was_asked_for():
    assert sum(direction is not UNCLEAR for direction, _ in REPORTED.values()) >= 25
    assert len(NOT_REPORTED) >= 10
