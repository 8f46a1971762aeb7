"""Classes of tokens of a byte tokenizer and of tokenizers of longer pieces."""

from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from dsv4.generate.token_class import class_of, token_class
from dsv4.prompts import PromptTokenizer

NANO = PromptTokenizer(Path(__file__).parents[2] / "data/nano")


@pytest.mark.parametrize(
    ("token", "expected"),
    [
        *((byte, "letter") for byte in b"azAZ"),
        *((byte, "digit") for byte in b"09"),
        *((byte, "punctuation") for byte in b".,(_+=$`<"),
        *((byte, "space") for byte in b" \t"),
        *((byte, "newline") for byte in b"\n\r"),
        *((byte, "other") for byte in (0, 0x7F, 0xC3, 0xA9)),  # of control characters, of a character in two
        *((token, "control") for token in (256, 257, 260, 319)),
        (320, "other"),
    ],
)
def test_a_byte_is_of_one_class(token, expected):
    assert token_class(NANO, token) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" the", "letter"),
        ("\n\n", "newline"),
        (" \n  ", "newline"),
        ("    ", "space"),
        ("\u3000", "space"),
        ("):\n", "punctuation"),
        (" 2024", "digit"),
        ("\u00bd", "digit"),
        ("\u00e9t\u00e9", "letter"),
        ("\u0301", "letter"),  # a mark alone
        ("\u5b57", "letter"),
        ("\u2192", "punctuation"),
        (" \ufffd", "other"),
        ("e\ufffd", "letter"),
        ("\x00", "other"),
        ("", "other"),
    ],
)
def test_a_longer_piece_goes_by_its_first_character_that_is_no_white_space(text, expected):
    assert class_of(text) == expected


def written(tmp_path, model, pre_tokenizer, decoder):
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizer, decoder
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    return PromptTokenizer(tmp_path)


def test_pieces_of_byte_level_bpe(tmp_path):
    names = ["\u0120the", "\u010a", "\u010a\u0120\u0120", "\u0120", "\u01207", "):", "\u00c3\u00a9", "\u00c3"]
    vocabulary = {name: index for index, name in enumerate(names)}
    own = written(
        tmp_path,
        models.BPE(vocabulary, []),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    found = [token_class(own, token) for token in range(len(names) + 2)]
    assert found == [
        *("letter", "newline", "newline", "space", "digit", "punctuation", "letter", "other"),
        *("control", "control"),
    ]


def test_pieces_with_sentencepieces_space(tmp_path):
    names = ["\u2581the", "\u2581", "\u2581\u2581", "a", "<0x0A>"]
    vocabulary = {name: index for index, name in enumerate(names)}
    decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    own = written(tmp_path, models.BPE(vocabulary, []), pre_tokenizers.Metaspace(), decoder)
    assert [token_class(own, token) for token in range(5)] == [
        "letter",
        "space",
        "space",
        "letter",
        "newline",
    ]
