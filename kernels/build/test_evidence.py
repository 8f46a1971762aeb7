"""Facts from recorded lines of PTX, SASS and ptxas."""

import struct

import pytest

from kernels.build import evidence
from kernels.build.judge import short

PTX = """
	wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {%r1}, %rd1, %rd2, p, 1, 1;
	@%p5 tcgen05.mma.cta_group::1.kind::f8f6f4 [ %r9 + 0 ], %rd4, %rd5, %r7, %p3;
	mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%r1}, {%r2}, {%r3}, {%r4};
	mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%r1}, {%r2}, {%r3}, {%r4};
	wgmma.fence.sync.aligned;
"""


def test_tensor_instructions_are_counted_by_name():
    found = evidence.tensor_instructions(PTX)
    assert list(found.values()) == [2, 1, 1]
    assert short(found) == ["mma e4m3", "tcgen05 kind::f8f6f4", "wgmma e4m3"]


@pytest.mark.parametrize(
    ("line", "bad"),
    [
        ("/*0220*/  F2FP.F16.E4M3.UNPACK_B R12, R1 ;", True),
        ("/*0220*/  F2FP.F16.E4M3.UNPACK_B R7, R1     &req={0}   ?trans1;", True),
        ("/*0220*/  F2FP.F16.E4M3.UNPACK_B R7, R1.H1 ;", True),
        ("/*0220*/  F2FP.F16.E4M3.UNPACK_B R12, R10 ;", False),
        ("/*0220*/  F2FP.F16.E4M3.UNPACK_B R1, R12 ;", False),
        ("/*0220*/  F2FP.BF16.F32.PACK_AB R2, R1, R3 ;", False),
    ],
)
def test_the_bad_cast_is_one_that_reads_the_stack_pointer(line, bad):
    assert bool(evidence.miscompiled_casts(line)) == bad


@pytest.mark.parametrize(
    ("low", "bad"),
    [
        (0x00000001FFBC723E, True),  # F2FP.F16.E4M3.UNPACK_B R188, R1
        (0x00000005FFBC723E, False),  # F2FP.F16.E4M3.UNPACK_B R188, R5
        (0x00000005FF01723E, False),  # F2FP.F16.E4M3.UNPACK_B R1, R5
    ],
)
def test_an_instruction_shows_that_it_reads_the_stack_pointer(low, bad):
    assert evidence.may_read_stack_pointer(low | 0x000FE200020006FF << 64) == bad


def elf(kind: int, flags: int, content: bytes) -> bytes:
    """A cubin of one section, as far as that is read."""
    header = bytearray(64)
    struct.pack_into("<Q", header, 0x28, 64)
    struct.pack_into("<HH", header, 0x3A, 64, 1)
    return (
        bytes(header)
        + struct.pack("<IIQQQQ", 0, kind, flags, 0, 128, len(content)).ljust(64, b"\0")
        + content
    )


def test_conversions_are_those_of_the_sections_that_run():
    code = struct.pack(
        "<QQQQ", 0x00000001FFBC723E, 0x000FE200020006FF, 0x0000000000007918, 0x000FC00000000000
    )
    assert list(evidence.conversions(elf(1, 6, code))) == [0x000FE200020006FF00000001FFBC723E]
    assert list(evidence.conversions(elf(1, 2, code))) == []  # a constant bank
    assert list(evidence.conversions(elf(8, 6, code))) == []  # names a size, holds nothing


@pytest.mark.parametrize(
    ("words", "sass", "found", "looks"),
    [
        ([0x00000005FFBC723E], "", [], False),  # nothing reads R1: the disassembler has nothing to say
        (
            [0x00000001FFBC723E],
            "F2FP.F16.E4M3.UNPACK_B R188, R1 ;",
            ["F2FP.F16.E4M3.UNPACK_B R188, R1"],
            True,
        ),
        ([0x00000001FFBC723E], "F2FP.BF16.F32.PACK_AB R188, R5, R1 ;", [], True),
        ([0x0000000000007918], "F2FP.F16.E4M3.UNPACK_B R7, R1 ;", ["F2FP.F16.E4M3.UNPACK_B R7, R1"], True),
    ],
    ids=["clean", "bad", "other", "unknown-encoding"],
)
def test_the_disassembler_looks_where_a_conversion_may_be_bad_or_none_is_found(
    tmp_path, monkeypatch, words, sass, found, looks
):
    cubin, asked = tmp_path / "one.cubin", []
    cubin.write_bytes(elf(1, 6, b"".join(struct.pack("<QQ", word, 0x000FE200020006FF) for word in words)))
    monkeypatch.setattr(evidence, "disassemble", lambda path: (asked.append(path), (sass, ""))[1])
    facts = evidence.describe("cvt.rn.f16x2.e4m3x2 %r1, %rs1;", cubin, LOG)
    assert facts["miscompiled_casts"] == found
    assert bool(asked) == looks


LOG = """ptxas info    : Compiling entry function 'f' for 'sm_90a'
ptxas info    : Function properties for f
    8 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 8 bytes cumulative stack size
ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ...
"""


def test_resources_come_from_ptxas():
    assert evidence.resources(LOG) == {
        "registers": 168,
        "stack_bytes": 8,
        "spill_store_bytes": 16,
        "spill_load_bytes": 24,
    }
    assert "serialized" in evidence.warnings(LOG)[0]
    with pytest.raises(ValueError, match="named no registers"):
        evidence.resources("")
