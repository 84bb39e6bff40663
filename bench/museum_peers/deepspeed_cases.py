"""Cases of DeepSpeed: the norm that clips, learning rates, and what a load reads.

DeepSpeed runs on a CPU with gloo as it is; its engine needs none of its compiled operators here.
"""

from __future__ import annotations

import os
from typing import Any

from bench.museum_peers.frame import Answer, peer_case, run_gloo

_NEEDS = ("hjson==3.1.0", "py-cpuinfo==9.0.0", "einops==0.8.1", "msgpack==1.1.2", "ninja==1.13.0")


def _parameters(gradients: list[list[float]]) -> Any:
    import torch

    parameters = [torch.nn.Parameter(torch.zeros(len(g))) for g in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = torch.tensor(gradient)
    return parameters


def _deepspeed() -> Any:
    """DeepSpeed with its process group."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    return deepspeed


def _three_norm(rank: int) -> float:
    _deepspeed()
    from deepspeed.runtime.utils import clip_grad_norm_

    parameters = _parameters([[1.0, 2.0], [3.0, 4.0]])
    return float(clip_grad_norm_(parameters, max_norm=1e9, norm_type=3))


@peer_case(
    "deepspeedai/DeepSpeed#8313",
    went_wrong="The norms of tensors were squared whatever the order of the norm, so a 3-norm of "
    "all gradients was no norm of them.",
    wrong=("deepspeed==0.19.3", *_NEEDS),
    fixed=("deepspeed==0.19.8", *_NEEDS),
)
def the_norm_that_clips_is_the_norm_of_all_gradients_together() -> Answer:
    import torch

    seen = run_gloo(_three_norm, 1, group=False)[0]
    right = torch.tensor([1.0, 2.0, 3.0, 4.0]).norm(3).item()
    return Answer(abs(seen - right) < 1e-4, f"3-norm {seen:.4f} of gradients whose is {right:.4f}")


def _expert_norm(rank: int) -> float:
    _deepspeed()
    from deepspeed.runtime.utils import clip_grad_norm_

    # Each rank has another expert; a parameter of an expert is marked as DeepSpeed's layer does.
    parameters = _parameters([[3.0, 4.0]] if rank == 0 else [[5.0, 12.0]])
    for parameter in parameters:
        parameter.allreduce, parameter.group_name = False, "ep_size_2"
    return float(clip_grad_norm_(parameters, max_norm=1e9))


@peer_case(
    "deepspeedai/DeepSpeed#8475",
    went_wrong="Ranks with different experts averaged their norms, so the norm that clips depended "
    "on where experts are.",
    wrong=("deepspeed==0.19.8", *_NEEDS),
    fixed=None,
    no_fix="the issue is open, and 0.19.8 is the newest release on the package index",
)
def the_norm_that_clips_does_not_depend_on_where_experts_are() -> Answer:
    seen = run_gloo(_expert_norm, 2, group=False)
    right = (5.0**2 + 13.0**2) ** 0.5
    return Answer(
        all(abs(norm - right) < 1e-4 for norm in seen),
        f"norm {seen[0]:.4f} of experts on two ranks, {right:.4f} of both experts together",
    )


@peer_case(
    "deepspeedai/DeepSpeed#7303",
    went_wrong="A warm-up without a peak of its own went to a fixed 0.001 and not to the "
    "optimizer's learning rate.",
    wrong=("deepspeed==0.16.9", *_NEEDS),
    fixed=("deepspeed==0.19.8", *_NEEDS),
)
def the_learning_rate_that_a_job_names_is_the_one_it_trains_with() -> Answer:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import torch
    from deepspeed.runtime.lr_schedules import WarmupLR

    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))], lr=5e-7)
    schedule = WarmupLR(optimizer, warmup_num_steps=2)
    for _ in range(5):
        schedule.step()
    seen = optimizer.param_groups[0]["lr"]
    return Answer(abs(seen - 5e-7) < 1e-12, f"learning rate {seen:g} after warm-up to 5e-07")


def _warmed(kind: str, **options: Any) -> list[float]:
    """Learning rates of two groups, of 0.1 and 0.2, after DeepSpeed's schedule warmed up."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import torch
    from deepspeed.runtime import lr_schedules

    groups = [{"params": [torch.nn.Parameter(torch.zeros(2))], "lr": lr} for lr in (0.1, 0.2)]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    schedule = getattr(lr_schedules, kind)(optimizer, warmup_num_steps=2, **options)
    for _ in range(4):
        schedule.step()
    return [group["lr"] for group in optimizer.param_groups]


@peer_case(
    "deepspeedai/DeepSpeed#8171",
    went_wrong="A warm-up without a peak of its own went to the learning rate of the first group "
    "of parameters, in all groups.",
    wrong=("deepspeed==0.19.3", *_NEEDS),
    fixed=("deepspeed==0.19.8", *_NEEDS),
)
def each_group_of_parameters_has_its_own_learning_rate() -> Answer:
    seen = _warmed("WarmupLR")
    return Answer(seen == [0.1, 0.2], f"learning rates {seen} of groups with 0.1 and 0.2")


def _steps_of(engine: Any, number: int) -> None:
    import torch

    for _ in range(number):
        engine.backward(engine(torch.ones(1, 4, dtype=torch.bfloat16)).sum())
        engine.step()


def _zero_3_weights(rank: int) -> dict[str, float]:
    """A weight at two saves, and after a load of the first of them without the optimizer."""
    import tempfile

    import torch

    deepspeed = _deepspeed()

    def engine() -> Any:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        config = {
            "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3},
            "bf16": {"enabled": True}, "zero_force_ds_cpu_optimizer": False,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
        }  # fmt: skip
        return deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )[0]

    def weight(of: Any) -> float:
        with deepspeed.zero.GatheredParameters(list(of.module.parameters())):
            return float(of.module.weight[0, 0])

    with tempfile.TemporaryDirectory() as folder:
        trained, seen = engine(), {}
        for tag in ("earlier", "later"):
            _steps_of(trained, 2)
            trained.save_checkpoint(folder, tag=tag)
            seen[tag] = weight(trained)
        fresh = engine()
        fresh.load_checkpoint(folder, tag="earlier", load_optimizer_states=False)
        return {**seen, "loaded": weight(fresh)}


@peer_case(
    "deepspeedai/DeepSpeed#8499",
    went_wrong="A load of one checkpoint without the optimizer's state took the weights of the "
    "latest checkpoint instead.",
    wrong=("deepspeed==0.19.8", *_NEEDS),
    fixed=None,
    no_fix="the issue is open, and 0.19.8 is the newest release on the package index",
)
def a_load_has_the_weights_of_the_checkpoint_that_it_names() -> Answer:
    """ZeRO 3 on one rank; the first of two checkpoints is loaded by its tag."""
    seen = run_gloo(_zero_3_weights, 1, group=False)[0]
    return Answer(
        abs(seen["loaded"] - seen["earlier"]) < 1e-6,
        f"weight {seen['loaded']:.4f} loaded of 'earlier', which has {seen['earlier']:.4f}; "
        f"'later' has {seen['later']:.4f}",
    )
