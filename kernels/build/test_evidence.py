"""Facts from recorded lines of PTX, SASS and ptxas."""

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
