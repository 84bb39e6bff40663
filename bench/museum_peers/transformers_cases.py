"""Losses of mixture-of-experts models in transformers, and the steps of its Trainer.

Legend: T tokens, E experts, B batch, S sequence.
"""

from __future__ import annotations

import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from bench.museum_peers.frame import Answer, peer_case

HUB_0 = "huggingface_hub==0.25.2"
FIRST_4 = (HUB_0, "tokenizers==0.15.2")
ACCUMULATES = (HUB_0, "tokenizers==0.20.3", "accelerate==0.34.2")
RESCALES = ("huggingface_hub==0.34.4", "tokenizers==0.21.4", "accelerate==1.10.1")
RESUMES = ("huggingface_hub==0.35.3", "tokenizers==0.22.1", "accelerate==1.10.1")
EXPERTS = 4


def _switch_loss(logits_TE: torch.Tensor, top_k: int) -> float:
    """The loss of equations 4 to 6 of Switch Transformers (Fedus et al.), times ``top_k``."""
    scores_TE = logits_TE.softmax(-1)
    chosen_TE = torch.zeros_like(scores_TE).scatter_(1, scores_TE.topk(top_k).indices, 1.0)
    return float(EXPERTS * (chosen_TE.mean(0) * scores_TE.mean(0)).sum())


def _mixtral(**options: Any) -> Any:
    """A Mixtral with two small layers, from a fixed seed."""
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(5)
    config: Any = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, num_local_experts=EXPERTS,
        num_experts_per_tok=2, initializer_range=0.5, **options,
    )  # fmt: skip
    return MixtralForCausalLM(config).eval()


def _balancing_loss(logits: Any, top_k: int) -> float:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    return float(load_balancing_loss_func(logits, EXPERTS, top_k))


def _aux_of_padded(pads: int) -> float:
    """The balancing loss of two sequences, each before ``pads`` positions of padding."""
    ids_BS = torch.randint(1, 64, (2, 12), generator=torch.Generator().manual_seed(6))
    mask_BS = torch.ones_like(ids_BS)
    fill_BS = torch.zeros(2, pads, dtype=ids_BS.dtype)
    ids_BS, mask_BS = torch.cat([ids_BS, fill_BS], 1), torch.cat([mask_BS, fill_BS], 1)
    with torch.no_grad():
        out = _mixtral()(input_ids=ids_BS, attention_mask=mask_BS, output_router_logits=True)
    return float(out.aux_loss)


@peer_case(
    "huggingface/transformers#28255",
    went_wrong="Mixtral's balancing loss did not rise when a router sent all tokens to one expert.",
    wrong=("transformers==4.36.2", *FIRST_4),
    fixed=("transformers==4.37.0", *FIRST_4),
)
def the_balancing_loss_is_that_of_its_formula() -> Answer:
    torch.manual_seed(4)
    logits_TE = torch.randn(64, EXPERTS) + torch.tensor([4.0, 0.0, 0.0, 0.0])
    seen, formula = _balancing_loss((logits_TE,), 2), _switch_loss(logits_TE, 2)
    return Answer(abs(seen - formula) < 1e-4, f"{seen:.4f}, the formula gives {formula:.4f}")


@peer_case(
    "huggingface/transformers#28505",
    went_wrong="Positions of padding counted in Mixtral's balancing loss.",
    wrong=("transformers==4.37.0", *FIRST_4),
    fixed=("transformers==4.39.0", *FIRST_4),
)
def padding_changes_no_balancing_loss() -> Answer:
    plain, padded = _aux_of_padded(0), _aux_of_padded(24)
    return Answer(abs(plain - padded) < 1e-4, f"{plain:.4f} without padding, {padded:.4f} with")


@peer_case(
    "huggingface/transformers#31464",
    went_wrong="The loss pools the layers, so layers that each collapse look balanced together.",
    wrong=("transformers==5.24.0",),
    fixed=None,
    no_fix="The issue was closed without a change; 5.24.0 is the newest release.",
)
def layers_that_collapse_on_different_experts_have_the_loss_of_collapse() -> Answer:
    layers = tuple(torch.full((32, EXPERTS), -20.0) for _ in range(EXPERTS))
    for expert, logits_TE in enumerate(layers):
        logits_TE[:, expert] = 20.0
    seen = _balancing_loss(layers, 1)
    each = [_switch_loss(logits_TE, 1) for logits_TE in layers]
    mean = sum(each) / len(each)
    return Answer(
        abs(seen - mean) < 1e-3,
        f"{seen:.3f} for four layers of loss {mean:.3f} each; perfect balance has 1.000",
    )


@peer_case(
    "huggingface/transformers#44586",
    went_wrong="A coefficient above zero had no effect: the loss waits for another option.",
    wrong=("transformers==5.24.0",),
    fixed=None,
    no_fix="The pull request was closed unmerged; 5.24.0 is the newest release.",
)
def a_coefficient_above_zero_reaches_the_routers() -> Answer:
    ids_BS = torch.randint(1, 64, (2, 12), generator=torch.Generator().manual_seed(6))
    losses = []
    for coefficient in (0.0, 10.0):
        model = _mixtral(router_aux_loss_coef=coefficient).train()
        losses.append(float(model(input_ids=ids_BS, labels=ids_BS).loss))
    return Answer(losses[1] - losses[0] > 1.0, f"loss {losses[0]:.4f} at 0, {losses[1]:.4f} at 10")


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=2, initializer_range=0.3,
        )
    )  # fmt: skip


def _trainer(folder: str, model: Any, rows: list[Any], **options: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=folder, use_cpu=True, report_to="none", optim="sgd", learning_rate=0.1,
        lr_scheduler_type="constant", max_grad_norm=0.0, disable_tqdm=True, **options,
    )  # fmt: skip
    return Trainer(model=model, args=arguments, train_dataset=rows)


@peer_case(
    "huggingface/transformers#34191",
    went_wrong="The mean over micro-batches weighted each by one, and not by its target tokens.",
    wrong=("transformers==4.45.2", *ACCUMULATES),
    fixed=("transformers==4.46.1", *ACCUMULATES),
)
def a_batch_in_two_halves_takes_the_step_of_the_batch() -> Answer:
    ids = torch.randint(0, 32, (2, 16), generator=torch.Generator().manual_seed(8)).tolist()
    rows = [
        {"input_ids": row, "labels": [-100] * hidden + row[hidden:]}
        for row, hidden in zip(ids, (0, 13), strict=True)
    ]
    steps = []
    for size, halves in ((2, 1), (1, 2)):
        with tempfile.TemporaryDirectory() as folder:
            model = _llama()
            before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
            _trainer(
                folder, model, rows, per_device_train_batch_size=size, max_steps=1,
                gradient_accumulation_steps=halves, save_strategy="no",
            ).train()  # fmt: skip
            after = torch.cat([p.detach().flatten() for p in model.parameters()])
            steps.append(after - before)
    off = float((steps[1] - steps[0]).norm() / steps[0].norm())
    return Answer(off < 1e-4, f"the steps differ by {off:.1e} of the step")


@peer_case(
    "huggingface/transformers#39659",
    went_wrong="The last step of an epoch divided its fewer micro-batches by the full number.",
    wrong=("transformers==4.54.1", *RESCALES),
    fixed=("transformers==4.56.1", *RESUMES),
)
def a_last_step_of_fewer_micro_batches_is_their_mean() -> Answer:
    rows = [{"x": [1.0, 0.0], "y": [4.0]}] * 5

    class Line(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = torch.nn.Linear(2, 1, bias=False)
            self.line.weight.data.zero_()

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": (y - self.line(x)).mean()}

    model = Line()
    with tempfile.TemporaryDirectory() as folder:
        trainer = _trainer(
            folder, model, rows, per_device_train_batch_size=1, num_train_epochs=1,
            gradient_accumulation_steps=4, save_strategy="no",
        )  # fmt: skip
        weights = [0.0]
        trainer.create_optimizer()
        trainer.optimizer.register_step_post_hook(
            lambda *_: weights.append(float(model.line.weight[0, 0]))
        )
        trainer.train()
    sizes = [after - before for before, after in pairwise(weights)]
    seen = ", ".join(f"{size:.4f}" for size in sizes)
    return Answer(len(sizes) == 2 and abs(sizes[0] - sizes[1]) < 1e-6, f"steps of {seen}")


@peer_case(
    "huggingface/transformers#40691",
    went_wrong="A resume in the second epoch took the rest of the first epoch's order.",
    wrong=("transformers==4.56.1", *RESUMES),
    fixed=("transformers==5.24.0", "accelerate==1.15.0"),
)
def a_resume_in_the_second_epoch_keeps_that_epochs_order() -> Answer:
    rows = [{"input_ids": [n, n], "labels": [n, n]} for n in range(8)]

    def order(folder: str, resume: str | None) -> list[int]:
        model, seen = _llama(), []
        model.register_forward_pre_hook(
            lambda _, args, named: seen.append(int(named["input_ids"][0, 0])), with_kwargs=True
        )
        _trainer(
            folder, model, rows, per_device_train_batch_size=1, num_train_epochs=2,
            save_steps=11, save_strategy="steps", seed=9,
        ).train(resume_from_checkpoint=resume)  # fmt: skip
        return seen

    with tempfile.TemporaryDirectory() as folder:
        plain = order(folder, None)
        resumed = order(folder, str(Path(folder) / "checkpoint-11"))
    return Answer(resumed == plain[11:], f"samples {resumed} instead of {plain[11:]}")
