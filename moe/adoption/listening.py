"""MoE layers in models that take a tensor from them: the auxiliary losses go to listeners."""

from __future__ import annotations

from torch import Tensor, nn

from moe.adoption.attention_masks import LastMask, token_mask
from moe.config import MoEConfig
from moe.layer import MoEAux, MoELayer


class InPlaceMoE(MoELayer):
    """An MoE layer in the place of a feed-forward module; made by :func:`moe.replace_mlp`.

    Called with [..., D] it gives [..., D]. :func:`moe.collect_aux` collects what else it computes.
    """

    def __init__(self, config: MoEConfig) -> None:
        super().__init__(config)
        self._listeners: list[list[MoEAux]] = []
        self._last_mask: LastMask = []

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """[..., D] -> [..., D]. Padding of the attention mask of the model's call is left out."""
        attention_mask = self._last_mask.pop() if self._last_mask else None
        hidden, aux = super().forward(x, token_mask=token_mask(attention_mask, x))
        for listener in self._listeners:
            listener.append(aux)
        return hidden


def listening_layers(model: nn.Module) -> list[MoELayer]:
    """The MoE layers of a model whose outputs are tensors, in the order of ``named_modules``.

    Raises ValueError where there is none.
    """
    layers = [
        module
        for module in model.modules()
        if isinstance(module, MoELayer) and hasattr(module, "_listeners")
    ]
    if not layers:
        raise ValueError(
            f"{type(model).__name__} must have adopted layers: call moe.adopt first, or "
            f"moe.replace_mlp"
        )
    return layers
