"""A training loop of your own with MoE layers of Convoy and its checkpoints.

python examples/own_loop.py --steps 20
torchrun --nproc-per-node 2 examples/own_loop.py --steps 40

A byte-level language model learns this file. The second command resumes the checkpoint of the
first one on two ranks, each with half of the experts. The losses go on nearly as on one rank: the
loss that balances the experts looks at each rank's own tokens.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn import functional as F

import ckpt
from moe import MoEConfig, MoELayer
from parallel import ParallelDims, Topology, apply_expert_parallel, apply_fsdp

BATCH, SEQ_LEN = 8, 32


class Block(nn.Module):
    """A causal mix of the last bytes, and an MoE layer."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d_model)
        self.mix = nn.Conv1d(d_model, d_model, kernel_size=4)
        self.moe = MoELayer(MoEConfig(d_model=d_model, d_ff=64, num_experts=8, top_k=2))

    def forward(self, x_BSD: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states, and the loss that balances the experts."""
        past_BDS = F.pad(self.norm(x_BSD).transpose(1, 2), (3, 0))
        x_BSD = x_BSD + self.mix(past_BDS).transpose(1, 2)
        hidden_BSD, aux = self.moe(x_BSD)
        return x_BSD + hidden_BSD, aux.aux_loss


class Model(nn.Module):
    """Two blocks over bytes."""

    def __init__(self, d_model: int = 48) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, d_model)
        self.blocks = nn.ModuleList(Block(d_model) for _ in range(2))
        self.head = nn.Linear(d_model, 256)

    def forward(self, tokens_BS: Tensor) -> tuple[Tensor, Tensor]:
        """The mean loss of the next bytes, and the loss of all routers."""
        x_BSD, aux = self.embed(tokens_BS[:, :-1]), torch.zeros((), device=tokens_BS.device)
        for block in self.blocks:
            x_BSD, balance = block(x_BSD)
            aux = aux + balance
        logits_BSV = self.head(x_BSD)
        # Here and not in the loop: FSDP warns of logits, which are a view, as a model's output.
        loss = F.cross_entropy(logits_BSV.flatten(0, 1), tokens_BS[:, 1:].flatten())
        return loss, aux


def batch_of(step: int, rank: int, ranks: int, text: Tensor) -> Tensor:
    """This rank's sequences of a step, whose global batch does not depend on the ranks."""
    draw = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - SEQ_LEN - 1, (BATCH,), generator=draw)
    return torch.stack([text[s : s + SEQ_LEN + 1] for s in starts[rank::ranks]])


def main() -> None:
    """Train until ``--steps``, from the newest checkpoint in ``--checkpoints``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--checkpoints", default="own-loop-checkpoints")
    args = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group()
    else:  # without torchrun: one rank
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = "cuda" if torch.cuda.is_available() else "cpu"

    torch.manual_seed(0)  # equal initial weights on every rank
    model = Model().to(device)
    dims = ParallelDims.build(Topology(dp_shard=ranks, ep=ranks), device)
    apply_expert_parallel(model, dims.ep_mesh, dims.ep_node_meshes)
    apply_fsdp(model, dims, blocks=list(model.blocks))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    done = 0
    if ckpt.committed_steps(args.checkpoints):
        weights, moments = get_state_dict(model, optimizer)
        done = ckpt.load_state_dict(args.checkpoints, {"model": weights, "optim": moments})
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    text = torch.tensor(list(Path(__file__).read_bytes()), device=device)
    for step in range(done + 1, args.steps + 1):
        tokens_BS = batch_of(step, rank, ranks, text)
        loss, aux = model(tokens_BS)
        # Gradients are summed over ranks: each rank has its share of the batch's loss.
        ((loss + aux) / ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == args.steps:
            mean = loss.detach() / ranks
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step}  loss {mean.item():.4f}", flush=True)
            weights, moments = get_state_dict(model, optimizer)
            ckpt.save_state_dict(args.checkpoints, {"model": weights, "optim": moments}, step=step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
