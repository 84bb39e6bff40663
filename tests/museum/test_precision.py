"""Numbers of few bits where many are needed.

Routers, biases, norms, sums and losses beside GEMMs in bfloat16, float16 and float8.

Legend: T tokens, D d_model, E experts, K top_k, V vocab.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from moe import MoEConfig, MoELayer
from parallel import clip_grad_norm
from pretrain.parallelize import next_token_loss
from tests.museum.cases import Edit, case
from tests.museum.shared_numbers import EXPERTS, Step, W, batch_of, error, on_ranks
from tests.museum.shared_runs import run
from tests.support.jobs import data_of, prepare_job
from tests.support.layouts import spec_for

CONFIG = MoEConfig(d_model=32, d_ff=24, num_experts=4, top_k=2)


@case(
    "NVIDIA/Megatron-LM#1482",
    "In training in bfloat16 the biases that balance experts became bfloat16 too, in which their "
    "small updates can be lost.",
    Edit("router/topk.py", "super()._apply(keep_wide(fn), recurse)", "super()._apply(fn, recurse)"),
    Edit("router/topk.py", "self.expert_bias = before.to(after.device)", "pass"),
)
def test_small_updates_of_biases_are_kept_in_a_layer_in_bfloat16():
    """A bias of 0.5 of a layer in bfloat16 moves by an update of 0.001, up and down."""
    fields = {"score_func": "sigmoid", "expert_bias": True, "bias_update_rate": 1e-3}
    router = MoELayer(MoEConfig(**CONFIG.model_dump(exclude_unset=True) | fields)).bfloat16().router
    router.expert_bias.fill_(0.5)
    router.update_bias(torch.tensor([9, 1, 1, 1]))
    assert router.expert_bias.tolist() == pytest.approx([0.499, 0.501, 0.501, 0.501], abs=1e-5)


@case(
    "vllm-project/vllm#14027",
    "Logits of routers were computed in bfloat16 where the model was trained with float32, which "
    "cost accuracy.",
    Edit(
        "router/topk.py",
        "dtype = torch.promote_types(torch.float32, x_TD.dtype)",
        "dtype = x_TD.dtype",
    ),
)
def test_a_layer_in_bfloat16_chooses_by_logits_in_float32():
    """Tokens of a layer in bfloat16 take the experts that float64 takes, also where bfloat16 could
    not tell two logits apart."""
    layer = MoELayer(CONFIG).bfloat16()
    layer.router.weight.data[1] = layer.router.weight.data[0] * (1 + 1e-3)
    x_TD = torch.randn(512, 32, dtype=torch.bfloat16)
    logits_TE = x_TD.double() @ layer.router.weight.detach().double().t()
    expected_TK = logits_TE.topk(2).indices.sort(1).values
    assert torch.equal(layer(x_TD).aux.topk_indices_TK.sort(1).values, expected_TK)


@case(
    "ISEEKYAN/Megatron-LM#149",
    "Gradients of micro-batches were added up in bfloat16 and converted to float32 at the end, so "
    "that the norm was not that of other backends.",
    Edit(
        "parallel/apply/fsdp.py",
        "MixedPrecisionPolicy(compute_dtype, torch.float32)",
        "MixedPrecisionPolicy(compute_dtype, compute_dtype)",
    ),
)
def test_gradients_of_micro_batches_are_added_in_float32():
    """In bfloat16 the gradient of 32 equal micro-batches is that of one, with few parts in 100,000
    of difference."""
    step = Step("", ((batch_of([W]),) * 32,), dtype=torch.bfloat16, memory={"zero_stage": 1})
    (many,) = on_ranks(step)
    (one,) = on_ranks(replace(step, batches=((batch_of([W]),),)))
    for name in (EXPERTS, "layers.0.ffn.w_up.weight", "layers.0.attention.wq.weight"):
        assert error(many.gradients[name], one.gradients[name]) < 1e-4


class _Half(nn.Module):
    """A matrix in float16 with gradients of 300: the norm, 76,800, is no number of float16."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(256, 256, dtype=dtype))
        self.weight.grad = torch.full_like(self.weight, 300.0)


@case(
    "facebookresearch/fairscale#263",
    "The norm that clips gradients was computed in float16, where the square of 5,000 is infinite, "
    "and so the norm was.",
    Edit("parallel/comm/gradients.py", "_foreach_norm(grads, dtype=dtype)", "_foreach_norm(grads)"),
)
def test_the_norm_of_gradients_in_float16_is_finite():
    """Gradients in float16 whose norm is beyond float16 are clipped by their norm."""
    model = _Half(torch.float16)
    assert clip_grad_norm(model, None, 256.0) == pytest.approx(76_800, rel=1e-4)
    assert model.weight.grad.float().mean() == pytest.approx(1.0, rel=1e-3)


@case(
    "NVIDIA/TransformerEngine#3193",
    "A fused loss kept its intermediate gradient in the buffer of its input, in bfloat16, and so "
    "bfloat16 logits had another loss than equal logits in float32.",
    Edit(
        "pretrain/parallelize/loss.py",
        "F.log_softmax(logits_TV[rows].float(), 1)",
        "F.log_softmax(logits_TV[rows], 1).float()",
    ),
)
def test_logits_in_bfloat16_have_the_loss_of_equal_logits_in_float32():
    """Logits in bfloat16 have the loss that the same numbers have in float64."""
    logits_BSV = (4 * torch.randn(1, 64, 1000)).bfloat16()
    targets_BS = torch.randint(1000, (1, 64))
    expected = F.cross_entropy(logits_BSV[0].double(), targets_BS[0], reduction="sum")
    assert float(next_token_loss(logits_BSV, targets_BS)) == pytest.approx(
        float(expected), rel=1e-6
    )


@case(
    "flashinfer-ai/flashinfer#3650",
    "In a product of float8 one row that was not a number made other rows of its tile so too, and "
    "a served model gave word salad.",
    Edit(
        "moe/float8/linear.py",
        "scales_MP = _scales_of(x_MPt.abs().amax(2))",
        "scales_MP = _scales_of(x_MPt.abs().amax(2).amax(0, keepdim=True).expand(M, -1))",
    ),
)
def test_a_token_that_is_not_a_number_changes_no_other_token_in_float8():
    """Experts in float8 give all other tokens the bits that they have beside a sound token."""
    layer = MoELayer(CONFIG.model_copy(update={"gemm": "float8"}))
    x_TD = torch.randn(64, 32)
    sound_TD = layer(x_TD).hidden
    bad_TD = x_TD.clone()
    bad_TD[7] = torch.nan
    with_bad_TD = layer(bad_TD).hidden
    others = torch.arange(64) != 7
    assert torch.equal(with_bad_TD[others], sound_TD[others])
    assert with_bad_TD[7].isnan().all()


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> dict[str, str]:
    return data_of(prepare_job(tmp_path_factory.mktemp("precision")))


@case(
    "vllm-project/speculators#765",
    "Parameters were trained in bfloat16, where a small step from 1.0 rounds back to 1.0: in all "
    "published models the weights of norms were exactly 1.0.",
    Edit(
        "pretrain/train/trainer.py",
        "job.optimizer.step()",
        "job.optimizer.step()\n"
        "        for parameter in job.model.parameters():\n"
        "            parameter.data.copy_(parameter.data.bfloat16())",
    ),
)
def test_weights_of_norms_leave_one_in_a_run_in_bfloat16(data, tmp_path):
    """Two steps at a rate of 0.0001 move every weight of norms, with compute in bfloat16."""
    spec = spec_for(
        tmp_path, data, "", model={"num_layers": 2}, precision={"compute": "bfloat16"},
        optimizer={"lr": 1e-4}, schedule={"warmup_steps": 0},
    )  # fmt: skip
    norms = {name: p for name, p in run(spec, 2).parameters.items() if name.endswith("norm.weight")}
    assert len(norms) == 9
    for name, weight in norms.items():
        assert (weight != 1).float().mean() > 0.9, name
