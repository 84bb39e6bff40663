"""The files of a source, the units of work that they are cut into, and the documents of a unit."""

from corpus.documents.conversation import Conversation, Piece, Segment, jinja_template
from corpus.documents.copied_source import copy_source
from corpus.documents.documents import Document, is_held_out, read_unit
from corpus.documents.files import Found, cut_into_units, find_files, skipped_as_json
from corpus.documents.unit import Unit

__all__ = [
    "Conversation",
    "Document",
    "Found",
    "Piece",
    "Segment",
    "Unit",
    "copy_source",
    "cut_into_units",
    "find_files",
    "is_held_out",
    "jinja_template",
    "read_unit",
    "skipped_as_json",
]
