"""Write nano's tokenizer: ids 0..255 are the bytes, 256..260 the control tokens, the rest reserved.

``python data/nano/make_tokenizer.py`` rewrites tokenizer.json, tokenizer_config.json and
generation_config.json beside this file; the output is deterministic.
"""

import json
from pathlib import Path

HERE = Path(__file__).resolve().parent
BOS, EOS, USER, ASSISTANT, EOT = range(256, 261)
VOCAB_SIZE = 320
CONTROL = {
    BOS: "<|bos|>",
    EOS: "<|eos|>",
    USER: "<|user|>",
    ASSISTANT: "<|assistant|>",
    EOT: "<|end_of_turn|>",
}
CHAT_TEMPLATE = (
    "{{ '<|bos|>' }}{% for m in messages %}"
    "{{ ('<|user|>' if m['role'] == 'user' else '<|assistant|>') + m['content'] + '<|end_of_turn|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def byte_alphabet() -> list[str]:
    """Return the printable character that byte-level BPE writes for each byte, in byte order.

    The GPT-2 alphabet: printable Latin-1 bytes stand for themselves, the others for U+0100 onwards.
    """
    keep = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in keep else chr(next(others)) for byte in range(256)]


def special_tokens() -> dict[int, str]:
    """Return id -> text of every token that is no byte."""
    reserved = {i: f"<|reserved_{i}|>" for i in range(EOT + 1, VOCAB_SIZE)}
    return CONTROL | reserved


def tokenizer_json() -> dict:
    """Return the ``tokenizers`` file: BPE without merges, so one token is one byte."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    added = [
        {
            "id": i,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for i, text in special_tokens().items()
    ]
    vocab = {char: byte for byte, char in enumerate(byte_alphabet())}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab | {text: i for i, text in special_tokens().items()},
            "merges": [],
        },
    }


def write_json(path: Path, content: dict) -> None:
    """Write ``content`` readably, with a final newline."""
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def main() -> None:
    """Write the three files."""
    write_json(HERE / "tokenizer.json", tokenizer_json())
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 4096,
        "bos_token": CONTROL[BOS],
        "eos_token": CONTROL[EOS],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(HERE / "tokenizer_config.json", config)
    generation = {"bos_token_id": BOS, "eos_token_id": [EOS, EOT], "do_sample": False}
    write_json(HERE / "generation_config.json", generation)


if __name__ == "__main__":
    main()
