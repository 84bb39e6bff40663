"""Convoy's model with the weights of a checkpoint, held to what another project computed."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F

import ckpt
from parallel import Topology
from pretrain.model import meta_decoder
from pretrain.model.decoder import Decoder
from pretrain.parallelize import parameter_layouts
from pretrain.spec import JobSpec
from pretrain.state import model_arrays


def model_of(spec: JobSpec, root: Path) -> Decoder:
    """The model of a spec with the weights of a checkpoint; every array must be there."""
    model = meta_decoder(spec.model, spec.moe).to_empty(device="cpu")
    arrays = model_arrays(model, model, parameter_layouts(model, Topology()), 0)
    ckpt.load(root, ckpt.read_manifest(root), arrays, extra="ignore")
    return model


def assert_same_logits(model: Decoder, expected: Path) -> None:
    theirs = torch.load(expected)
    with torch.no_grad():
        logits = model.eval()(theirs["tokens"]).logits
    model.train()
    torch.testing.assert_close(logits, theirs["logits"], rtol=1e-4, atol=1e-4)


def assert_same_training(model: Decoder, expected: Path) -> None:
    """Steps of AdamW on one batch give equal losses: the gradients are equal too."""
    theirs = torch.load(expected)
    tokens_BS, optimizer = theirs["tokens"], torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in theirs["losses"]:
        optimizer.zero_grad()
        logits_TV = model(tokens_BS[:, :-1]).logits.flatten(0, 1)
        loss = F.cross_entropy(logits_TV, tokens_BS[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    torch.testing.assert_close(losses, theirs["losses"], rtol=1e-5, atol=0.0)
    assert losses[-1] < losses[0] - 0.01
