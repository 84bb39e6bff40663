"""What DeepEP 2.1 says of its ElasticBuffer, over gloo on a CPU: README.md and buffers/elastic.py.

The tests import this file under DeepEP's name. DeepEP itself needs a Hopper GPU. A row arrives
once, its experts are numbered within the rank, and -1 stands for experts of other ranks. Also
float32 is taken, so that sums can be compared closely.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

topk_idx_t = torch.int64
__version__ = "2.1.0"


@dataclass
class EPHandle:
    num_experts: int
    num_max_tokens_per_rank: int
    num_sms: int
    topk_idx: Tensor
    num_recv_tokens_per_expert_list: list[int]
    sources: list[tuple[int, int]]
    """Rank and token of every row that arrived."""


class ElasticBuffer:
    built = 0

    def __init__(self, group: dist.ProcessGroup, *, num_max_tokens_per_rank: int, hidden: int,
                 num_topk: int, deterministic: bool, explicitly_destroy: bool) -> None:  # fmt: skip
        self.group, self.room = group, num_max_tokens_per_rank
        self.hidden, self.num_topk = hidden, num_topk
        assert deterministic
        assert explicitly_destroy
        ElasticBuffer.built += 1

    def _everywhere(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.group.size()
        dist.all_gather_object(found, value, group=self.group)
        return found

    def dispatch(self, x: Any, topk_idx: Tensor | None = None, topk_weights: Tensor | None = None,
                 num_experts: int | None = None, num_max_tokens_per_rank: int | None = None,
                 num_sms: int = 0, handle: EPHandle | None = None,
                 do_cpu_sync: bool | None = None) -> tuple[Any, ...]:  # fmt: skip
        parts = x if isinstance(x, tuple) else (x,)
        assert all(part.is_contiguous() for part in parts)
        assert parts[0].shape[1] == self.hidden
        assert len(parts[0]) <= self.room
        if isinstance(x, tuple):
            assert parts[0].dtype == torch.float8_e4m3fn
            assert parts[1].dtype == torch.float32
            parts = (parts[0].view(torch.uint8), parts[1])  # gloo's pickles know no float8
        cached = handle is not None
        if handle is not None:
            assert topk_idx is None
            assert topk_weights is None
            assert not do_cpu_sync
            assert num_sms
        else:
            assert topk_idx is not None
            assert topk_weights is not None
            assert num_experts
            assert topk_idx.dtype == topk_idx_t
            assert topk_weights.dtype == torch.float32
            assert topk_idx.shape == topk_weights.shape == (len(parts[0]), self.num_topk)
            assert topk_idx.is_contiguous()
            assert topk_weights.is_contiguous()
            assert num_max_tokens_per_rank == self.room
            assert num_experts % self.group.size() == 0
            assert int(topk_idx.min()) >= -1
            assert int(topk_idx.max()) < num_experts
        everyone = self._everywhere((parts, topk_idx, topk_weights))
        if handle is None:
            assert topk_idx is not None
            assert num_experts
            assert num_max_tokens_per_rank
            size = num_experts // self.group.size()
            first = size * self.group.rank()
            here = [(i >= first) & (i < first + size) for _, i, _ in everyone]
            sources = [(r, int(t)) for r, mine in enumerate(here) for t in mine.any(1).nonzero()]
            # The numbers within the rank; -1 for experts elsewhere, with weights of 0.
            local = [
                torch.where(mine, numbers - first, -1)
                for (_, numbers, _), mine in zip(everyone, here, strict=True)
            ]
            counts = [sum(int((i == e).sum()) for i in local) for e in range(size)]
            handle = EPHandle(num_experts, num_max_tokens_per_rank, num_sms or 20, topk_idx.clone(),
                              counts, sources)  # fmt: skip
        rows = tuple(
            torch.stack([everyone[r][0][n][t] for r, t in handle.sources])
            if handle.sources
            else part.new_empty(0, *part.shape[1:])
            for n, part in enumerate(parts)
        )
        if isinstance(x, tuple):
            rows = (rows[0].view(torch.float8_e4m3fn), rows[1])
        found = rows if isinstance(x, tuple) else rows[0]
        if cached:
            return found, None, None, handle, None
        none = self.num_topk
        indices = [local[r][t] for r, t in handle.sources]
        weights = [everyone[r][2][t] * here[r][t] for r, t in handle.sources]
        assert topk_idx is not None
        assert topk_weights is not None
        return (
            found,
            torch.stack(indices) if indices else topk_idx.new_empty(0, none),
            torch.stack(weights) if weights else topk_weights.new_empty(0, none),
            handle,
            None,
        )

    def combine(
        self, x: Tensor, handle: EPHandle, topk_weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None, None]:
        assert x.is_contiguous()
        assert x.shape == (len(handle.sources), self.hidden)
        T, K = handle.topk_idx.shape
        out, weights = torch.zeros(T, self.hidden), torch.zeros(T, K)
        if topk_weights is not None:
            assert topk_weights.shape == (len(x), K)
            assert topk_weights.dtype == torch.float32
            assert topk_weights.is_contiguous()
        for sources, rows, sums in self._everywhere((handle.sources, x, topk_weights)):
            for number, (rank, token) in enumerate(sources):
                if rank == self.group.rank():
                    out[token] += rows[number].float()
                    if sums is not None:
                        weights[token] += sums[number]
        return out.to(x.dtype), weights if topk_weights is not None else None, None
