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
from pretrain.parallelize.schedule import bubble

__all__ = [
    "AUX_LOSSES",
    "NO_MTP",
    "LocalBatch",
    "MTPLoss",
    "ParallelModel",
    "RoutedTokens",
    "RoutingStats",
    "StepResult",
    "bubble",
    "forward_backward",
    "mask_of",
    "next_token_loss",
    "parallelize",
    "routing_stats",
]
