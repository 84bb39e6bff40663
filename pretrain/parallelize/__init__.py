"""The decoder over ranks, and one forward and backward pass through it."""

from pretrain.parallelize.decoder import LaidOut, lay_out
from pretrain.parallelize.forward_backward import Part, forward_backward, next_token_loss
from pretrain.parallelize.results import Pass, Routing, routing_of
from pretrain.parallelize.schedule import bubble

__all__ = [
    "LaidOut",
    "Part",
    "Pass",
    "Routing",
    "bubble",
    "forward_backward",
    "lay_out",
    "next_token_loss",
    "routing_of",
]
