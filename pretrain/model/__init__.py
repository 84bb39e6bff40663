"""The reference decoder: attention, initial weights and FLOP counts."""

from pretrain.model.decoder import (
    Block,
    Decoder,
    DecoderLayer,
    DecoderOutput,
    Drafting,
    ModelConfig,
    meta_decoder,
)
from pretrain.model.flops import forward_flops, peak_flops_per_second
from pretrain.model.init import first_matrix, init_parameters, is_bias, is_hidden_matrix
from pretrain.model.mtp import MTPConfig
from pretrain.model.small_steps import small_steps

__all__ = [
    "Block",
    "Decoder",
    "DecoderLayer",
    "DecoderOutput",
    "Drafting",
    "MTPConfig",
    "ModelConfig",
    "first_matrix",
    "forward_flops",
    "init_parameters",
    "is_bias",
    "is_hidden_matrix",
    "meta_decoder",
    "peak_flops_per_second",
    "small_steps",
]
