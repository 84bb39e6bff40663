"""Cases of Megatron-core: its router's balancing loss, capacity, and a scheduler that resumes.

All functions here are Megatron-core's own, called on a CPU.

Legend: T tokens, E experts.
"""

from __future__ import annotations

from typing import Any

from bench.museum_peers.frame import Answer, peer_case

_NEWEST = ("megatron-core==0.19.2", "triton==3.9.0")


@peer_case(
    "NVIDIA/Megatron-LM#2767",
    went_wrong="The balancing loss chose experts without groups and without the bias, so the loss "
    "balanced other experts than those that compute.",
    wrong=_NEWEST,
    fixed=None,
    no_fix="the pull request with a mend was closed, and 0.19.2 is the newest release",
)
def the_balancing_loss_counts_the_experts_that_compute() -> Answer:
    import torch
    from megatron.core.transformer.moe.moe_utils import (
        compute_routing_scores_for_aux_loss,
        topk_routing_with_score_function,
    )

    torch.manual_seed(0)
    logits_TE, bias_E = torch.randn(64, 8), torch.linspace(-1, 1, 8)
    _, computed_TE = topk_routing_with_score_function(
        logits_TE, 2, num_groups=4, group_topk=2, score_function="sigmoid", expert_bias=bias_E
    )
    counted_TE, _ = compute_routing_scores_for_aux_loss(logits_TE, 2, "sigmoid")
    other = int((computed_TE != counted_TE).any(1).sum())
    return Answer(other == 0, f"of {other} of 64 tokens the loss counts other experts")


@peer_case(
    "NVIDIA/Megatron-LM#1545",
    went_wrong="The balancing loss divided sigmoid scores by their sum plus 1e-20, so a router "
    "escaped from the loss by very low logits.",
    wrong=_NEWEST,
    fixed=None,
    no_fix="the issue is open, and 0.19.2 is the newest release",
)
def no_router_escapes_the_balancing_loss_by_low_logits() -> Answer:
    """All tokens choose the same two of eight experts: the Switch loss is 4 at any logits."""
    import torch
    from megatron.core.transformer.moe.moe_utils import (
        compute_routing_scores_for_aux_loss,
        switch_load_balancing_loss_func,
    )

    losses = []
    for low in (0.0, -60.0):
        logits_TE = torch.full((16, 8), low - 20.0)
        logits_TE[:, :2] = low
        map_TE, scores_TE = compute_routing_scores_for_aux_loss(logits_TE, 2, "sigmoid")
        loss = switch_load_balancing_loss_func(
            probs=scores_TE, tokens_per_expert=map_TE.sum(0), total_num_tokens=16, topk=2,
            num_experts=8, moe_aux_loss_coeff=1.0,
        )  # fmt: skip
        losses.append(float(loss))
    return Answer(
        abs(losses[1] - losses[0]) < 0.01,
        f"loss {losses[0]:.3f} at logits near 0, {losses[1]:.2g} with all logits 60 lower",
    )


def _scheduler(weight_decay: float) -> Any:
    import torch
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0)
    scheduler = OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=1e-3, min_lr=1e-4, lr_warmup_steps=2, lr_decay_steps=10,
        lr_decay_style="linear", start_wd=weight_decay, end_wd=weight_decay, wd_incr_steps=10,
        wd_incr_style="constant", use_checkpoint_opt_param_scheduler=True,
    )  # fmt: skip
    return optimizer, scheduler


@peer_case(
    "NVIDIA/Megatron-LM#7468",
    went_wrong="A scheduler that resumes wrote the weight decay of its arguments into the "
    "optimizer before it read that of the checkpoint.",
    wrong=_NEWEST,
    fixed=None,
    no_fix="the pull request with a mend is open, and 0.19.2 is the newest release",
)
def a_resumed_step_has_the_weight_decay_of_the_checkpoint() -> Answer:
    _, saved = _scheduler(0.1)
    saved.step(4)
    optimizer, resumed = _scheduler(0.3)
    resumed.load_state_dict(saved.state_dict())
    seen = optimizer.param_groups[0]["weight_decay"]
    return Answer(abs(seen - 0.1) < 1e-9, f"weight decay {seen:g} after a resume with 0.1 saved")
