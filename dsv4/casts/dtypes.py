"""Names and sizes of dtypes, under any of their spellings."""

from collections.abc import Iterable

INT, UNKNOWN = "int", ""
BYTES = {
    "float4_e2m1fn_x2": 0.5,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float64": 8,
}
ALIASES = {
    "half": "float16",
    "float": "float32",
    "double": "float64",
    "float8e4nv": "float8_e4m3fn",
    "float8e5": "float8_e5m2",
    "HalfTensor": "float16",
    "BFloat16Tensor": "bfloat16",
    "FloatTensor": "float32",
    "DoubleTensor": "float64",
    "BFloat16": "bfloat16",
    "Float16": "float16",
    "Float32": "float32",
    "Float64": "float64",
    "fp32": "float32",
    "bf16": "bfloat16",
}
INTEGERS = {
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "bool",
    "long",
    "int",
    "short",
}
INTEGERS |= {"int1", "LongTensor", "IntTensor", "BoolTensor", "ByteTensor"}


def named(name: str) -> str | None:
    """A dtype's one name by the last part of any spelling (``torch.half``, ``tl.float8e5``); None if it is none."""
    last = name.rpartition(".")[2]
    last = ALIASES.get(last, last)
    return last if last in BYTES else INT if last in INTEGERS else None


def narrower(left: str, right: str) -> bool:
    """Whether ``left`` is a float of fewer bytes than ``right``."""
    return left in BYTES and right in BYTES and BYTES[left] < BYTES[right]


def promoted(dtypes: Iterable[str]) -> str:
    """What torch computes in when values of these dtypes meet; unknown if it depends on an unknown one."""
    found = set(dtypes)
    floats = found & BYTES.keys()
    if not floats:
        return UNKNOWN if UNKNOWN in found or not found else INT
    widest = max(floats, key=BYTES.__getitem__)
    if UNKNOWN in found:  # it could only be wider still
        return widest if BYTES[widest] >= 4 else UNKNOWN
    ties = [name for name in floats if BYTES[name] == BYTES[widest]]
    return widest if len(ties) == 1 else "float32"
