"""Hugging Face checkpoints: configs, families, tensor names and files."""

from pretrain.convert.hf.config import HFConfig
from pretrain.convert.hf.families import (
    FAMILIES,
    Family,
    Sections,
    expressing,
    family_for,
    family_of,
)
from pretrain.convert.hf.files import from_hf, has_mtp, open_hf, to_hf
from pretrain.convert.hf.tensors import HFTensor, hf_tensors

__all__ = [
    "FAMILIES",
    "Family",
    "HFConfig",
    "HFTensor",
    "Sections",
    "expressing",
    "family_for",
    "family_of",
    "from_hf",
    "has_mtp",
    "hf_tensors",
    "open_hf",
    "to_hf",
]
