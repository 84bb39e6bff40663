"""Cases of NeMo Automodel: its gate's loss that balances experts.

Legend: T tokens, D d_model, E experts.
"""

from __future__ import annotations

from bench.museum_peers.frame import Answer, peer_case

_NEEDS = ("omegaconf==2.3.0", "antlr4-python3-runtime==4.9.3", "torchdata==0.11.0")


@peer_case(
    "NVIDIA-NeMo/Automodel#1408",
    went_wrong="The gate threw away the tensor that carries the balancing loss, so the loss had no "
    "gradient.",
    wrong=("nemo-automodel==0.2.0", *_NEEDS),
    fixed=("nemo-automodel==0.4.0", *_NEEDS),
)
def the_balancing_loss_has_a_gradient() -> Answer:
    """The gradient of the gate with the balancing loss differs from the gradient without."""
    import torch
    from nemo_automodel.components.moe import layers

    gradients = []
    for coefficient in (0.0, 1.0):
        torch.manual_seed(0)
        gate = layers.Gate(
            layers.MoEConfig(
                n_routed_experts=4, n_shared_experts=0, n_activated_experts=2, n_expert_groups=1,
                n_limited_groups=1, train_gate=True, gate_bias_update_factor=0.0,
                aux_loss_coeff=coefficient, score_func="softmax", route_scale=1.0, dim=8,
                inter_dim=8, moe_inter_dim=8, norm_topk_prob=True, softmax_before_topk=True,
                dtype=torch.float32,
            )
        )  # fmt: skip
        torch.nn.init.normal_(gate.weight)
        x_TD = torch.randn(16, 8)
        weights_TK = gate(x_TD, torch.ones(16, dtype=torch.bool), None)[0]
        (weights_TK * torch.arange(2.0)).sum().backward()
        gradients.append(gate.weight.grad)
    without, with_loss = gradients
    change = (with_loss - without).norm().item()
    return Answer(change > 1e-6, f"the loss changes the gate's gradient by {change:.3g}")
