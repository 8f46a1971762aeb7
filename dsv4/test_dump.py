import errno
from pathlib import Path

import h5py
import numpy as np
import pytest

from dsv4 import dump, files
from dsv4.dump import DumpError, DumpReader, DumpWriter, from_bf16_bits, sidecar, to_bf16_bits

ATTRS = {
    "kind": "variant",
    "variant": "B1",
    "plan": {"q_format": "fp8"},
    "checkpoint": "c" * 64,
    "prompt": "p" * 64,
    "prompt_id": "capital",
    "compress_ratios": [0, 4],
}
POSITIONS = np.array([3, 4, 7])


def write(path: Path, values: np.ndarray, parent=None, **attrs) -> Path:
    with DumpWriter(path, ATTRS | attrs, parent) as file:
        file.rows("compounded", "prefill", POSITIONS)
        file.put(
            "compounded",
            "prefill",
            1,
            "attn_in",
            values,
            "f32",
            attrs={"draw_distance": np.array([1e-3, 2e-3])},
        )
    return path


@pytest.fixture
def values():
    return np.arange(6, dtype=np.float32).reshape(3, 2) + np.float32(0.1)


def test_what_is_written_is_read(tmp_path, values):
    with DumpWriter(tmp_path / "a.h5", ATTRS) as file:
        file.attr("exercised", {"batch": 1})
        file.rows("isolated", "decode", POSITIONS)
        file.put("isolated", "decode", 1, "attn_in", values, "f32")
        file.put("isolated", "decode", 1, "q", np.float32([[1.5, -0.0], [3, np.inf], [2, 8]]), "bf16")
        file.put("isolated", "decode", 1, "topk", np.int64([[1, -1]] * 3), "i32")
        file.put(
            "isolated", "decode", 1, "comp_bytes", np.uint8([[7, 8]]), "u8", entry_positions=np.array([3])
        )
        file.put("isolated", "decode", "model", "logits", values, "f32")
    with DumpReader(tmp_path / "a.h5", {"checkpoint": "c" * 64}) as read:
        assert read.attrs["plan"] == {"q_format": "fp8"}
        assert read.attrs["exercised"] == {"batch": 1}
        assert read.layers("isolated", "decode") == [1, "model"]
        assert read.taps("isolated", "decode", 1) == ["attn_in", "q", "comp_bytes", "topk"]
        assert read.rows("isolated", "decode").tolist() == [3, 4, 7]
        assert read.entry_positions("isolated", "decode", 1).tolist() == [3]
        assert read.get("isolated", "decode", 1, "attn_in").tobytes() == values.tobytes()
        assert np.signbit(read.get("isolated", "decode", 1, "q")[0, 1])
        assert read.get("isolated", "decode", 1, "topk").dtype == np.int32
        assert read.dataset_attrs("isolated", "decode", 1, "q")["dtype"] == "bf16"
        assert not read.has("isolated", "decode", 1, "kv")
        assert read.rows("compounded", "decode").size == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.h5", "a.h5.sha256"]


def test_a_large_tap_is_packed_and_read_as_it_was(tmp_path):
    values = np.zeros((3, dump.PACK_FROM), np.float32) + np.float32(0.1)
    path = write(tmp_path / "a.h5", values)
    with DumpReader(path) as read, h5py.File(path) as file:
        assert read.get("compounded", "prefill", 1, "attn_in").tobytes() == values.tobytes()
        assert file["compounded/prefill/1/attn_in"][()].tobytes() == values.tobytes()
    assert path.stat().st_size < values.nbytes


def test_a_dump_is_plain_hdf5(tmp_path, values):
    first = write(tmp_path / "a.h5", values)
    second = write(tmp_path / "b.h5", values, parent=first)
    with DumpWriter(tmp_path / "c.h5", ATTRS) as file:
        file.rows("isolated", "decode", POSITIONS)
        file.put("isolated", "decode", 1, "topk", np.empty((3, 0), np.int32), "i32", attrs={"count": 3})
    for path in (first, second):
        with h5py.File(path) as file:
            dataset = file["compounded/prefill/1/attn_in"]
            assert dataset[()].tobytes() == values.tobytes()
            assert dataset.attrs["dtype"] == "f32"
            assert dataset.attrs["draw_distance"].tolist() == [1e-3, 2e-3]
    with h5py.File(tmp_path / "c.h5") as file:
        dataset = file["isolated/decode/1/topk"]
        assert (dataset.shape, dataset.dtype, dict(dataset.attrs)) == (
            (3, 0),
            "i4",
            {"dtype": "i32", "count": 3},
        )


def test_a_dump_written_twice_is_the_same_bytes(tmp_path, values):
    assert write(tmp_path / "a.h5", values).read_bytes() == write(tmp_path / "b.h5", values).read_bytes()


def test_a_link_is_read_through_the_open_dump_beside_it(tmp_path, values):
    first = write(tmp_path / "a" / "p.h5", values)
    second = write(tmp_path / "b" / "p.h5", values, parent=first)
    tap = "compounded", "prefill", 1, "attn_in"
    with DumpReader(first, keep=True) as beside:
        with DumpReader(second, beside=[beside]) as read:
            assert read.raw(*tap) is beside.raw(*tap)
        assert beside.layers("compounded", "prefill") == [1]  # it is still open
        beside.raw(*tap)[0] += 1
        with DumpReader(second, beside=[beside]) as read, pytest.raises(DumpError, match="rewritten"):
            read.raw(*tap)


def test_bf16_is_never_rounded_by_the_writer():
    every = np.arange(1 << 16, dtype=np.uint16)
    wide = from_bf16_bits(every)
    back = to_bf16_bits(wide)
    assert np.array_equal(back[~np.isnan(wide)], every[~np.isnan(wide)])
    assert np.isnan(from_bf16_bits(back[np.isnan(wide)])).all()
    with pytest.raises(ValueError, match=r"2 values are not BF16, first .* at \(0, 1\)"):
        to_bf16_bits(np.float32([[1, 1.001], [2, 3.0001]]))


def test_equal_bytes_become_a_link_and_keep_their_attributes(tmp_path, values):
    first = write(tmp_path / "a" / "p.h5", values)
    second = write(tmp_path / "b" / "p.h5", values, parent=first)
    third = write(tmp_path / "c" / "p.h5", values, parent=second)
    with DumpReader(third) as read:
        assert read.source("compounded", "prefill", 1, "attn_in")[0].resolve() == first.resolve()
        assert read.get("compounded", "prefill", 1, "attn_in").tobytes() == values.tobytes()
        assert read.dataset_attrs("compounded", "prefill", 1, "attn_in")["draw_distance"].tolist() == [
            1e-3,
            2e-3,
        ]


def test_minus_zero_is_not_linked_to_zero(tmp_path, values):
    first = write(tmp_path / "a.h5", np.zeros_like(values))
    second = write(tmp_path / "b.h5", -np.zeros_like(values), parent=first)
    with DumpReader(second) as read:
        assert read.source("compounded", "prefill", 1, "attn_in")[0] == second


def test_a_rewritten_parent_is_refused_but_new_attributes_are_not(tmp_path, values):
    first = write(tmp_path / "a.h5", values)
    second = write(tmp_path / "b.h5", values, parent=first)
    write(first, values, commit="another")
    with DumpReader(second) as read:
        assert read.get("compounded", "prefill", 1, "attn_in").tobytes() == values.tobytes()
    write(first, values + 1)
    with DumpReader(second) as read, pytest.raises(DumpError, match=r"b\.h5: .*attn_in is a link to .*a\.h5"):
        read.get("compounded", "prefill", 1, "attn_in")
    first.unlink()
    with DumpReader(second) as read, pytest.raises(DumpError, match="which is gone"):
        read.get("compounded", "prefill", 1, "attn_in")


def test_a_link_to_the_reference_answers_for_both_modes(tmp_path, values):
    reference = write(tmp_path / "reference.h5", values, kind="reference")
    with DumpWriter(tmp_path / "b.h5", ATTRS, [reference]) as file:
        file.rows("isolated", "prefill", POSITIONS)
        file.put("isolated", "prefill", 1, "attn_in", values, "f32")
    with DumpReader(tmp_path / "b.h5") as read:
        assert read.source("isolated", "prefill", 1, "attn_in")[1] == "/compounded/prefill/1/attn_in"
        assert read.get("isolated", "prefill", 1, "attn_in").tobytes() == values.tobytes()
    with DumpReader(reference) as read:
        assert read.get("isolated", "prefill", 1, "attn_in").tobytes() == values.tobytes()


@pytest.mark.parametrize(
    ("put", "message"),
    [
        (("isolated", "decode", 1, "attn_on", np.zeros((3, 2), np.float32), "f32"), "no such tap"),
        (("isolated", "prefill", 1, "attn_in", np.zeros((3, 2), np.float32), "f32"), "comes first"),
        (
            ("isolated", "decode", 1, "attn_in", np.zeros((2, 2), np.float32), "f32"),
            "2 on axis 0, 3 positions",
        ),
        (("isolated", "decode", 1, "attn_in", np.zeros((3, 2)), "f32"), "float64 array for dtype 'f32'"),
        (
            ("isolated", "decode", 1, "attn_in", np.full((3, 2), np.float32(0.1)), "bf16"),
            "attn_in: 6 values are not BF16",
        ),
        (("isolated", "decode", 1, "attn_in", np.zeros((3, 2), np.float32), "f64"), "dtype 'f64'; allowed"),
        (
            ("isolated", "decode", 1, "comp", np.zeros((3, 2), np.float32), "f32"),
            "entry_positions are needed",
        ),
        (("isolated", "decode", 1, "topk", np.full((3, 1), 1 << 40), "i32"), "int64 array for dtype 'i32'"),
    ],
)
def test_writer_refuses(tmp_path, put, message):
    def attempt():
        with DumpWriter(tmp_path / "a.h5", ATTRS) as file:
            file.rows("isolated", "decode", POSITIONS)
            file.put(*put)

    with pytest.raises(ValueError, match=message):
        attempt()
    assert list(tmp_path.iterdir()) == []


def test_attributes_are_required(tmp_path):
    with pytest.raises(ValueError, match="attributes missing: plan, checkpoint"):
        DumpWriter(tmp_path / "a.h5", {key: ATTRS[key] for key in ATTRS if key not in ("plan", "checkpoint")})
    with pytest.raises(ValueError, match="kind 'dump'"):
        DumpWriter(tmp_path / "a.h5", ATTRS | {"kind": "dump"})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda path: path.write_bytes(path.read_bytes()[:-100]),
            r"SHA-256 is [0-9a-f]{12}…, a.h5.sha256 says",
        ),
        (lambda path: sidecar(path).write_text("0" * 64), "says 000000000000…"),
        (lambda path: sidecar(path).unlink(), "a.h5.sha256 is missing, the write was cut short"),
        (lambda path: path.unlink(), "no such dump"),
        (lambda path: h5py.File(path, "a").attrs.__setitem__("commit", "x"), "truncated or changed"),
    ],
    ids=["truncated", "sidecar mismatch", "no sidecar", "missing", "attribute changed"],
)
def test_reader_refuses_damage(tmp_path, values, damage, message):
    path = write(tmp_path / "a.h5", values)
    damage(path)
    with pytest.raises(DumpError, match=message):
        DumpReader(path)


@pytest.mark.parametrize(
    ("attrs", "message"),
    [
        ({"checkpoint": "d" * 64}, "checkpoint is 'd+', expected 'c+'"),
        ({"schema": 2}, "schema is 2, expected 1"),
    ],
)
def test_reader_refuses_another_identity_naming_both_sides(tmp_path, values, attrs, message):
    path = write(tmp_path / "a.h5", values, **attrs)
    with pytest.raises(DumpError, match=message):
        DumpReader(path, {"checkpoint": "c" * 64})


def test_an_interrupted_write_leaves_the_old_dump(tmp_path, values):
    path = write(tmp_path / "a.h5", values)
    before = path.read_bytes()
    with pytest.raises(KeyboardInterrupt), DumpWriter(path, ATTRS):
        raise KeyboardInterrupt
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 2


def test_leftovers_of_a_killed_writer_are_removed(tmp_path, values, monkeypatch):
    write(tmp_path / "a.h5", values)
    dead = tmp_path / f".a.h5.{files.socket.gethostname()}.4194303.00.tmp"
    dead.touch()
    monkeypatch.setattr(files, "alive", lambda pid: pid != 4194303)
    write(tmp_path / "a.h5", values)
    assert not dead.exists()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (errno.EACCES, "folder is read-only"),
        (errno.ENOSPC, "the disk is full"),
        (errno.EROFS, "file system is read-only"),
    ],
)
def test_a_folder_that_takes_no_files_is_named(tmp_path, values, monkeypatch, code, message):
    def refuse(*_args, **_options):
        raise OSError(code, "refused")

    monkeypatch.setattr(dump.h5py, "File", refuse)
    with pytest.raises(DumpError, match=rf"a\.h5: cannot be written: .*{message}"):
        write(tmp_path / "a.h5", values)
    assert list(tmp_path.iterdir()) == []


def test_results_folder_that_is_a_file_is_named(tmp_path, values):
    (tmp_path / "results").touch()
    with pytest.raises(DumpError, match="cannot be written"):
        write(tmp_path / "results" / "a.h5", values)
