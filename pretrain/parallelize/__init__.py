"""The parallelized decoder, and one forward and backward of a step."""

from pretrain.parallelize.decoder import ParallelModel, parallelize
from pretrain.parallelize.forward_backward import (
    LocalBatch,
    RoutedTokens,
    forward_backward,
    mask_of,
    next_token_loss,
)
from pretrain.parallelize.mtp import NO_MTP, MTPLoss
from pretrain.parallelize.results import AUX_LOSSES, RoutingStats, StepResult, routing_stats
from pretrain.parallelize.schedule import bubble, place_of
from pretrain.parallelize.stages import FLOAT8_COST, LayerCosts, divide_layers, layer_costs

__all__ = [
    "AUX_LOSSES",
    "FLOAT8_COST",
    "NO_MTP",
    "LayerCosts",
    "LocalBatch",
    "MTPLoss",
    "ParallelModel",
    "RoutedTokens",
    "RoutingStats",
    "StepResult",
    "bubble",
    "divide_layers",
    "forward_backward",
    "layer_costs",
    "mask_of",
    "next_token_loss",
    "parallelize",
    "place_of",
    "routing_stats",
]
