"""A few steps of a small model on one rank alone, for a burn-in."""

from __future__ import annotations

import hashlib

import torch
from torch.nn import functional as F

from moe import MoEConfig
from pretrain.model import Decoder, ModelConfig

_STEPS = 3
_MODEL = ModelConfig(
    vocab_size=512, d_model=128, num_layers=2, num_heads=4, num_kv_heads=2, d_ff=256
)
_MOE = MoEConfig(d_model=128, d_ff=128, num_experts=8, top_k=2)


def small_steps(device: torch.device) -> str:
    """Train a mixture-of-experts decoder for three steps; returns a hash of its parameters.

    Equal devices have equal bits: every number that goes in comes from a generator on the CPU.

    Raises ValueError where the loss is not finite.
    """
    model = Decoder(_MODEL, _MOE)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02, generator=generator)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    for _ in range(_STEPS):
        tokens_BS = torch.randint(_MODEL.vocab_size, (4, 65), generator=generator).to(device)
        logits = model(tokens_BS[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), tokens_BS[:, 1:].flatten())
        if not bool(loss.isfinite()):
            raise ValueError(f"the loss of a training step is {loss.item()}")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
