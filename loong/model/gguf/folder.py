"""The tokenizer of a GGUF file as the files of a Hugging Face folder."""

import hashlib
from pathlib import Path

import msgspec

from loong.model.gguf.header import read_header
from loong.model.gguf.metadata import Metadata
from loong.model.gguf.tokenizer import adds_bos, gguf_tokenizer, named_tokens
from loong.model.made_once import made_once

_VERSION = "1"  # of the folder's content: change it with the content, because a folder is never made twice
_TEMPLATE = "tokenizer.chat_template"


def tokenizer_folder(path: Path, cache_folder: Path) -> Path:
    """Return a folder with the tokenizer and chat template of a file, made by `made_once`.

    Its name has a hash of the file's header, so that another file of the same name gets another folder.
    Raises ConfigError naming the missing, damaged or unsupported part of the tokenizer.
    """
    header = read_header(path)
    with path.open("rb") as file:
        digest = hashlib.sha256(_VERSION.encode() + file.read(header.size)).hexdigest()[:16]

    def fill(folder: Path) -> None:
        metadata = Metadata(header)
        gguf_tokenizer(metadata).save(str(folder / "tokenizer.json"))
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **named_tokens(metadata),
            "add_bos_token": adds_bos(metadata),
            "clean_up_tokenization_spaces": False,
            **_chat_template(metadata),
        }
        encoded = msgspec.json.format(msgspec.json.encode(settings), indent=2)
        (folder / "tokenizer_config.json").write_bytes(encoded)

    return made_once(cache_folder / f"{path.stem}-{digest}", fill)


def _chat_template(metadata: Metadata) -> dict[str, object]:
    """Return the template, or several with their names, in the form of tokenizer_config.json."""
    default = metadata.optional(_TEMPLATE, str)
    prefix = f"{_TEMPLATE}."
    named = [
        {"name": key.removeprefix(prefix), "template": metadata.required(key, str)}
        for key in metadata.values
        if key.startswith(prefix)
    ]
    if default is None:
        return {"chat_template": named} if named else {}
    return {"chat_template": [{"name": "default", "template": default}, *named] if named else default}
