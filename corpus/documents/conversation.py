"""A conversation of a line of JSON, as the pieces of text that are and are not to be learnt."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

from corpus.config import ChatConfig


class Segment(NamedTuple):
    """Text of a template, or the content of a message."""

    text: str
    is_content: bool
    """Contents have no special tokens, whatever they spell."""
    is_target: bool


class Piece(NamedTuple):
    """Segments between two changes from context to answer: they are tokenized as one text, so that
    a prompt has the tokens that the model is given when it is asked."""

    segments: tuple[Segment, ...]

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(segment.text for segment in self.segments)

    @property
    def is_target(self) -> bool:
        """Whether the model learns to write the piece."""
        return self.segments[0].is_target


Conversation = tuple[Piece, ...]
"""Ends with an answer; empty where there is none."""


def conversation_of(messages: object, chat: ChatConfig) -> Conversation:
    """The pieces of a list of messages, up to the last answer.

    Raises ValueError, which says what is wrong with a message, where the messages are no such list,
    have a role without a text around it, or call tools.
    """
    if not isinstance(messages, list) or not messages:
        raise ValueError("the list of messages must have some")
    segments = [Segment(chat.begin, False, False)]
    kept = 0
    for number, message in enumerate(messages, 1):
        role, content = _checked(number, message, chat)
        around, is_answer = chat.roles[role], role in chat.answers
        segments += [
            Segment(around.before, False, False),
            Segment(content, True, is_answer),
            Segment(around.after, False, is_answer),
        ]
        kept = len(segments) if is_answer else kept
    segments = [segment for segment in segments[:kept] if segment.text]
    if not any(segment.is_target for segment in segments):
        return ()
    grouped = groupby(segments, key=lambda segment: segment.is_target)
    return tuple(Piece(tuple(group)) for _, group in grouped)


def text_of(conversation: Sequence[Piece]) -> str:
    """The text of a conversation, as its template writes it."""
    return "".join(piece.text for piece in conversation)


def _checked(number: int, message: Any, chat: ChatConfig) -> tuple[str, str]:
    """The role and the content of a message."""
    where = f"message {number}"
    if not isinstance(message, dict):
        raise ValueError(f"{where} must be an object with a role and a content")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in chat.roles:
        known = ", ".join(chat.roles)
        raise ValueError(f"{where} has the role {role}, and [data.chat.roles] has {known}")
    for name in ("tool_calls", "function_call"):
        if message.get(name):
            raise ValueError(
                f"{where} has {name}, which no template can write: put them in content"
            )
    if not isinstance(content, str):
        raise ValueError(f"{where} must have a text as its content, and has {_kind(content)}")
    return role, content


def _kind(value: object) -> str:
    return "none" if value is None else f"a {type(value).__name__}"


def jinja_template(chat: ChatConfig) -> str:
    """The template for transformers' ``tokenizer.apply_chat_template``: equal text for messages
    that end with an answer, and what comes before an answer with ``add_generation_prompt``."""

    def quoted(text: str) -> str:
        escaped = text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
        escaped = escaped.replace("\r", "\\r")
        return f"'{escaped}'"

    parts = [
        f"{{{{ {quoted(chat.begin)} }}}}" if chat.begin else "",
        "{% for message in messages %}",
    ]
    for number, (name, role) in enumerate(chat.roles.items()):
        test = f"message['role'] == {quoted(name)}"
        parts.append(f"{{% {'elif' if number else 'if'} {test} %}}")
        parts.append(f"{{{{ {quoted(role.before)} + message['content'] + {quoted(role.after)} }}}}")
    names = ", ".join(chat.roles)
    refusal = f"raise_exception({quoted(f'the role of a message must be one of {names}')})"
    parts += [f"{{% else %}}{{{{ {refusal} }}}}{{% endif %}}{{% endfor %}}"]
    before = quoted(chat.roles[chat.answers[0]].before)
    parts.append(f"{{% if add_generation_prompt %}}{{{{ {before} }}}}{{% endif %}}")
    return "".join(parts)
