"""Which tokenizer belongs to weights: of a Hugging Face folder, and of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from convoy.convert.hf import HFConfig
from corpus.config import END_OF_DOCUMENT, ChatConfig, DataConfig
from corpus.documents import jinja_template
from corpus.location import is_there
from corpus.tokenizer import read_tokenizer, tokenizer_fingerprint
from pretrain.errors import InputError

TOKENIZER = "tokenizer.json"
"""The file of a tokenizer that the tokenizers library reads, in folders of Hugging Face too."""
_OTHER_FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json",
                "vocab.txt", "tiktoken.model")  # fmt: skip


class FoundTokenizer(NamedTuple):
    """A tokenizer of a folder."""

    path: Path | str
    end_token: str
    """The token that ends a document."""
    tokenizer: Tokenizer
    chat: ChatConfig | None = None
    """How conversations are written, where the weights were trained on conversations."""

    @property
    def fingerprint(self) -> str:
        """See :func:`corpus.tokenizer.tokenizer_fingerprint`."""
        return tokenizer_fingerprint(self.tokenizer)


def tokenizer_of_hf(folder: Path, vocab_size: int) -> FoundTokenizer | None:
    """The tokenizer of a Hugging Face folder; None where the folder has no file of a tokenizer.

    Raises InputError for a tokenizer that the run could not use: it would train with another.
    """
    path = folder / TOKENIZER
    if not path.exists():
        others = [name for name in _OTHER_FILES if (folder / name).exists()]
        if others:
            raise InputError(
                f"{folder / others[0]} is read only as a {TOKENIZER}: make one with transformers' "
                f'AutoTokenizer.from_pretrained("{folder}").save_pretrained("{folder}")'
            )
        return None
    try:
        names = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more specific
        raise InputError(f"{path} cannot be read: {error}") from None
    config = HFConfig.read(folder)
    ends = [end for end in _end_tokens(folder, config, names) if names.token_to_id(end) is not None]
    if not ends:
        raise config.wrong("eos_token_id", f"be the id of a token of {path}")
    try:
        return FoundTokenizer(path, ends[0], read_tokenizer(path, vocab_size, ends[0]))
    except InputError as error:
        raise InputError(f"{config.where}: {config.theirs(str(error))}") from None


def _end_tokens(folder: Path, config: HFConfig, tokenizer: Tokenizer) -> Iterator[str]:
    ids = config.values.get("eos_token_id", [])
    for number in ids if isinstance(ids, list) else [ids]:
        if isinstance(number, int) and (token := tokenizer.id_to_token(number)) is not None:
            yield token
    path = folder / "tokenizer_config.json"
    try:
        eos = json.loads(path.read_text()).get("eos_token") if path.exists() else None
    except (OSError, ValueError, AttributeError) as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    if isinstance(eos, dict):
        eos = eos.get("content")
    if isinstance(eos, str):
        yield eos
    yield END_OF_DOCUMENT


def tokenizer_of_checkpoint(
    root: Path, state: Mapping[str, Any], data: DataConfig | None, vocab_size: int
) -> FoundTokenizer | None:
    """The tokenizer that a checkpoint's weights were trained with; None where it is not found.

    Looked at are the corpus of the run, ``data.tokenizer``, and the file that an import puts beside
    its checkpoints. A file with another fingerprint than that of ``state`` is passed over.
    """
    known = state.get("tokenizer")
    if data is None or known == "":
        return None
    named = [] if data.tokenizer is None else [data.tokenizer]
    places: list[Path | str] = [data.tokenizer_file, *named, root.parent / TOKENIZER]
    for path in places:
        if is_there(path):
            try:
                made = FoundTokenizer(
                    path,
                    data.end_token,
                    read_tokenizer(path, vocab_size, data.end_token),
                    data.chat,
                )
            except InputError:
                continue
            if known in (None, made.fingerprint):
                return made
    return None


def files_of_hf(found: FoundTokenizer, longest: int) -> dict[str, bytes]:
    """The files with which transformers' AutoTokenizer reads a tokenizer from a folder."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": found.end_token,
        "model_max_length": longest,
        "clean_up_tokenization_spaces": False,
    }
    if found.chat is not None:
        config["chat_template"] = jinja_template(found.chat)
    return {
        TOKENIZER: found.tokenizer.to_str(pretty=True).encode(),
        "tokenizer_config.json": (json.dumps(config, indent=2) + "\n").encode(),
    }
