"""Hugging Face checkpoints: configs, families, tensor names and files."""

from pretrain.convert.hf.config import HFConfig
from pretrain.convert.hf.families import FAMILIES, Family, Sections, family_for, family_of
from pretrain.convert.hf.files import HFCheckpoint, HFWeights, write_json, write_safetensors
from pretrain.convert.hf.tensors import HFTensor, hf_tensors

__all__ = [
    "FAMILIES",
    "Family",
    "HFCheckpoint",
    "HFConfig",
    "HFTensor",
    "HFWeights",
    "Sections",
    "family_for",
    "family_of",
    "hf_tensors",
    "write_json",
    "write_safetensors",
]
