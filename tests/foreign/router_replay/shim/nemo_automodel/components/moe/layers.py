"""Automodel's gate, as Convoy's router.

Legend: T tokens, D d_model, K top_k.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nemo_automodel.components.moe.config import MoEConfig
from nemo_automodel.components.moe.router_replay import RouterReplay, RouterReplayMode
from router import TopKRouter
from tests.foreign.touching import touch


class Gate(TopKRouter):
    def __init__(self, config: MoEConfig) -> None:
        super().__init__(config.dim, config.of_convoy())
        self.router_replay = RouterReplay() if config.enable_routing_replay else None

    def forward(self, x_TD: Tensor, token_mask_T: Tensor, cp_mesh: Any) -> Any:  # type: ignore[override]
        """Weights and experts, [T, K] each, and no loss."""
        assert cp_mesh is None
        touch()
        replay, record_TK = self.router_replay, None
        if replay is not None and replay.mode is RouterReplayMode.REPLAY:
            record_TK = replay.target_indices
            if record_TK is None:
                raise RuntimeError("a gate has no target indices")
        try:
            routed = super().forward(x_TD, replay_indices_TK=record_TK, token_mask_T=token_mask_T)
        except ValueError as refusal:
            raise ValueError(f"the recorded choice does not match: {refusal}") from refusal
        if replay is not None and replay.mode is RouterReplayMode.RECORD:
            replay.recorded_indices = routed.topk_indices_TK
        return routed.expert_weights_TK, routed.expert_indices_TK, None
