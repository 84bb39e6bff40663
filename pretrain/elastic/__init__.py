"""The same run on other ranks: layouts for the ranks that there are, and spares."""

from pretrain.elastic.layout import ChosenLayout, choose_layout, launched_layout
from pretrain.elastic.spares import stand_by, with_spares
from pretrain.elastic.warm import with_warm_restarts

__all__ = [
    "ChosenLayout",
    "choose_layout",
    "launched_layout",
    "stand_by",
    "with_spares",
    "with_warm_restarts",
]
