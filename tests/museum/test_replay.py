"""Routes that are replayed or computed again.

A trainer that replays the routes of a sampler, or runs a layer again in its backward, must use the
very experts, with weights and gradients of its own router.

Legend: B batch, S sequence, T tokens, D d_model, E experts, K top_k.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe import MoELayer
from parallel import apply_recompute
from tests.museum.cases import Edit, case
from tests.museum.shared_routing import layer_of, one_expert, tokens

WEIGHTS = "self.routing.weights(logits_TE, scores_TE, indices_TK, gaps)"


def _worst_two(layer: MoELayer, x_TD: Tensor) -> Tensor:
    """[T, 2] the experts that the router likes least: a record that has drifted from the router."""
    return (x_TD @ layer.router.weight.detach().T).topk(2, largest=False).indices


@torch.no_grad()
def _replayed_by_hand(layer: MoELayer, x_TD: Tensor, routes: list[list[int]]) -> Tensor:
    """The experts of each route, weighted by the router's present scores over their sum."""
    rows = []
    for x_D, experts in zip(x_TD, routes, strict=True):
        scores = (layer.router.weight @ x_D).softmax(0)
        total = sum((scores[e] for e in experts), scores.new_zeros(()))
        parts = [scores[e] / total * one_expert(layer, e, x_D) for e in experts]
        rows.append(torch.stack(parts).sum(0) if parts else torch.zeros_like(x_D))
    return torch.stack(rows)


@case(
    "ISEEKYAN/Megatron-LM#79",
    "Weights of replayed experts were read from scores that were zero outside of the router's own "
    "choice, so that a drifted replay had outputs and gradients of zero.",
    Edit(
        "router/topk.py",
        WEIGHTS,
        WEIGHTS.replace(
            "scores_TE",
            "scores_TE * torch.zeros_like(scores_TE).scatter(1, "
            "self.routing.choose(preferences_TE, mask_T), 1.0)",
        ),
    ),
)
def test_a_drifted_replay_has_weights_and_gradients():
    """Replayed experts that the router would not choose are weighted by its scores of them."""
    layer = layer_of(aux_loss_coeff=0.0)
    worst_TK = _worst_two(layer, tokens())
    hidden, _ = layer(tokens(), replay_indices_TK=worst_TK)
    wanted_TD = _replayed_by_hand(layer, tokens(), worst_TK.tolist())
    torch.testing.assert_close(hidden, wanted_TD, rtol=1e-4, atol=1e-5)
    hidden.square().sum().backward()
    assert layer.router.weight.grad.norm() > 1e-3


@case(
    "radixark/miles#3146",
    "Replayed routes were flattened batch first and tokens sequence first, so that most tokens of "
    "a batch of two got another token's experts.",
    Edit(
        "moe/layer.py",
        "x_for[0], seq_len, replay_indices_TK, prior_expert_counts_E, token_mask_T",
        "x_for[0], seq_len, replay_indices_TK if replay_indices_TK is None or x.ndim < 3 else "
        "replay_indices_TK.unflatten(0, x.shape[:2]).transpose(0, 1).flatten(0, 1), "
        "prior_expert_counts_E, token_mask_T",
    ),
)
def test_a_batch_replays_each_tokens_own_route():
    """Two sequences in one batch are replayed as each of them by itself."""
    layer = layer_of()
    x_BSD = tokens().view(2, 12, 16)
    routes_TK = _worst_two(layer, tokens())
    together_BSD = layer(x_BSD, replay_indices_TK=routes_TK).hidden
    for b in range(2):
        alone = layer(x_BSD[b], replay_indices_TK=routes_TK.chunk(2)[b]).hidden
        torch.testing.assert_close(together_BSD[b], alone)


@case(
    "NovaSky-AI/SkyRL#2091",
    "Rows without a recorded route were filled with the first experts, which then computed all "
    "padding.",
    Edit(
        "router/topk.py",
        "wanted_TK = replay_TK.where(replay_TK >= 0, -1 - replay_TK)",
        "replay_TK = torch.where(replay_TK == E, torch.arange(replay_TK.shape[1]), replay_TK)\n"
        "            wanted_TK = replay_TK.where(replay_TK >= 0, -1 - replay_TK)",
    ),
)
def test_a_token_without_a_route_loads_no_expert():
    """Rows of the number that stands for no expert are computed and counted by none."""
    layer = layer_of()
    routes_TK = _worst_two(layer, tokens())
    routes_TK[8:] = 4
    hidden, aux = layer(tokens(), replay_indices_TK=routes_TK)
    assert int(aux.tokens_per_expert_E.sum()) == 8 * 2
    assert int(aux.stopwatch.rows) == 8 * 2
    wanted_TD = _replayed_by_hand(layer, tokens(), routes_TK[:8].tolist() + [[]] * 16)
    torch.testing.assert_close(hidden, wanted_TD, rtol=1e-4, atol=1e-5)


@case(
    "radixark/miles#2770",
    "Empty places in a row with fewer experts than top_k were replaced by arbitrary ones, whose "
    "weights changed those of the recorded experts.",
    Edit(
        "router/routing.py",
        "weights_TK = weights_TK.masked_fill(expert_indices_TK == E, 0)",
        "weights_TK = weights_TK + 0",
    ),
)
def test_a_route_of_fewer_experts_is_replayed_with_those_alone():
    """A row with one expert and an empty place has the whole weight on the one expert."""
    layer = layer_of()
    routes_TK = _worst_two(layer, tokens())
    routes_TK[::2, 1] = 4
    wanted_TD = _replayed_by_hand(
        layer, tokens(), [[e for e in row if e < 4] for row in routes_TK.tolist()]
    )
    hidden = layer(tokens(), replay_indices_TK=routes_TK).hidden
    torch.testing.assert_close(hidden, wanted_TD, rtol=1e-4, atol=1e-5)


@case(
    "NVIDIA-NeMo/Automodel#3140",
    "Tokens with tied scores took other experts when the layer was computed again in the backward, "
    "and buffers no longer had the shape of the forward's.",
    Edit("router/topk.py", "return self.kept_choices.of_call(choose)", "return choose()"),
)
def test_tied_tokens_take_the_same_experts_when_they_are_computed_again():
    """Recomputation takes the forward's experts where a device breaks ties otherwise each time."""
    gradients = []
    for how in ("none", "full"):
        layer = layer_of(routing="tests.museum.shared_routing:Turning")
        layer.router.weight.data.zero_()
        apply_recompute([layer], how)
        layer(tokens()).hidden.square().sum().backward()
        gradients.append({name: p.grad for name, p in layer.named_parameters()})
    for name, wanted in gradients[0].items():
        assert torch.equal(gradients[1][name], wanted), name
