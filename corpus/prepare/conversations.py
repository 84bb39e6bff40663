"""Conversations to tokens, those that are no targets as their complements."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer, decoders

from corpus.documents import Conversation, Piece, Segment
from corpus.errors import InputError


class ConversationEncoder:
    """Encodes conversations with one tokenizer.

    In the texts of the template the spelling of a special token is that token. In a message's
    content it is ordinary text: a message cannot end its own turn.

    Args:
        tokenizer: a tokenizer.json as text.

    Raises InputError for a tokenizer that is not byte-level: one of SentencePiece puts a space in
    front of each piece.
    """

    def __init__(self, tokenizer: str) -> None:
        self._plain, self._special = Tokenizer.from_str(tokenizer), Tokenizer.from_str(tokenizer)
        self._plain.encode_special_tokens, self._special.encode_special_tokens = True, False
        if not isinstance(self._plain.decoder, decoders.ByteLevel):
            raise InputError("data.tokenizer must be byte-level with [data.chat]")
        added = self._plain.get_added_tokens_decoder().values()
        names = [re.escape(token.content) for token in added if token.special]
        self._spelled = re.compile("|".join(names) or r"(?!)")

    def encode(self, conversations: Sequence[Conversation]) -> list[np.ndarray]:
        """The token ids of each conversation, int64; ``~id`` for tokens that are no targets."""
        pieces = [piece for conversation in conversations for piece in conversation]
        encoded = iter(
            self._special.encode_batch_fast([p.text for p in pieces], add_special_tokens=False)
        )
        return [
            np.concatenate([self._ids(piece, next(encoded).ids) for piece in conversation])
            for conversation in conversations
        ]

    def _ids(self, piece: Piece, ids: Sequence[int]) -> np.ndarray:
        if any(s.is_content and self._spells(s.text) for s in piece.segments):
            ids = [number for segment in piece.segments for number in self._segment(segment)]
        array = np.array(ids, np.int64)
        return array if piece.is_target else ~array

    def _spells(self, text: str) -> bool:
        """Whether a text spells a special token, as it is or as the tokenizer normalizes it."""
        normalizer = self._plain.normalizer
        texts = [text] if normalizer is None else [text, normalizer.normalize_str(text)]
        return any(self._spelled.search(spelled) for spelled in texts)

    def _segment(self, segment: Segment) -> list[int]:
        tokenizer = self._plain if segment.is_content else self._special
        ids: list[int] = tokenizer.encode(segment.text, add_special_tokens=False).ids
        return ids
