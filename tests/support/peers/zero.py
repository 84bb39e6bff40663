"""A tiny MoE model of transformers, trained by DeepSpeed for some steps and saved.

    python -m tests.support.peers.zero FOLDER [BEGIN]

FOLDER gets ``universal``, the universal checkpoint that DeepSpeed's own tool makes after these
steps, ``hf``, the model as transformers saves it, and ``expected.pt``: losses of further steps
(``continued``). With BEGIN, a folder with a universal checkpoint ``universal``, the run goes on
from there, and FOLDER gets ``resumed.pt``, with ``continued`` alone.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

import torch

VOCAB, STEPS = 320, 3


def model() -> Any:
    """The model, with the same random weights in every call."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=12, moe_intermediate_size=16, intermediate_size=40,
            num_experts=8, num_experts_per_tok=2, mlp_only_layers=[], tie_word_embeddings=False,
            max_position_embeddings=64, router_aux_loss_coef=0.0,
        )
    )  # fmt: skip


def engine(universal: bool) -> Any:
    import deepspeed

    made = model()
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
        "zero_force_ds_cpu_optimizer": False,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-2, "torch_adam": True, "betas": [0.9, 0.95], "weight_decay": 0.1},
        },
        "scheduler": {
            "type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": 1e-2},
        },
        "checkpoint": {"load_universal": universal},
    }  # fmt: skip
    return deepspeed.initialize(model=made, model_parameters=made.parameters(), config=config)[0]


def steps(of: Any) -> list[float]:
    """The losses of some steps, before each of them."""
    tokens_BS = torch.randint(VOCAB, (2, 24), generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(STEPS):
        loss = of(input_ids=tokens_BS, labels=tokens_BS).loss
        losses.append(loss.item())
        of.backward(loss)
        of.step()
    return losses


def main(folder: Path, begin: Path | None = None) -> None:
    from deepspeed.checkpoint import ds_to_universal

    torch.set_num_threads(1)
    if begin is not None:
        run = engine(True)
        run.load_checkpoint(str(begin), tag="universal")
        assert run.global_steps == STEPS
        torch.save({"continued": steps(run)}, folder / "resumed.pt")
        return
    run = engine(False)
    steps(run)
    note = {"universal_checkpoint_info": {"universal_checkpoint_version": 0.2}}
    run.save_checkpoint(str(folder), tag="zero", client_state=note)
    sys.argv[1:] = ["--input_folder", str(folder / "zero"), "--output_folder",
                    str(folder / "universal"), "--num_extract_workers", "1",
                    "--num_merge_workers", "1"]  # fmt: skip
    ds_to_universal.main(ds_to_universal.parse_arguments())
    run.module.save_pretrained(folder / "hf")
    torch.save({"continued": steps(run)}, folder / "expected.pt")


if __name__ == "__main__":
    os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    main(*map(Path, sys.argv[1:]))
