"""Arithmetic whose bits must agree on all devices of one kind."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn import functional as F

_SIZE = 384


def kind_of(device: torch.device) -> str:
    """The model of the device: devices of one kind have equal bits."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return (
                    f"{line.partition(':')[2].strip()}, {torch.backends.cpu.get_cpu_capability()}"
                )
    except OSError:
        pass
    return f"CPU, {torch.backends.cpu.get_cpu_capability()}"


def arithmetic_hash(device: torch.device) -> str:
    """The hash of products, sums, functions and attention, with gradients, in three dtypes.

    The numbers that go in come from integers: they have the same bits everywhere.
    """
    digest = hashlib.sha256()
    count = torch.arange(_SIZE * _SIZE, dtype=torch.int64)
    # 1,103,515,245 is the multiplier of the C standard's example of rand().
    whole = ((count * 1_103_515_245 + 12_345) % (1 << 31)) % 2001 - 1000
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        x = (whole.reshape(_SIZE, _SIZE).to(dtype) / 1000).to(device).requires_grad_()
        product = x @ x.mT
        hidden = F.silu(product / 16) * torch.softmax(x, -1)
        heads = hidden.reshape(1, _SIZE, 6, _SIZE // 6).transpose(1, 2)
        attended = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        values = torch.sort(attended.flatten(), stable=True).values
        (values.float().square().mean() + hidden.float().exp().mean()).backward()
        assert x.grad is not None
        # The product by itself too: what comes after it may round a wrong last bit away.
        for tensor in (product.detach(), hidden.detach(), values.detach(), x.grad):
            digest.update(tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()


def differing(kinds: Sequence[str], hashes: Sequence[Sequence[str]]) -> dict[int, str]:
    """The ranks whose arithmetic is wrong, each with the reason.

    Args:
        kinds: of each rank's device.
        hashes: of each rank, one for each time that the rank has computed.

    A rank that disagrees with itself is wrong. Of the others, those are wrong that disagree with
    more than half of their kind. Where no hash has more than half, every rank of the kind is named.
    """
    found = {
        rank: "computes other numbers each time"
        for rank, mine in enumerate(hashes)
        if len(set(mine)) > 1
    }
    by_kind: dict[str, list[int]] = defaultdict(list)
    for rank, kind in enumerate(kinds):
        if rank not in found:
            by_kind[kind].append(rank)
    for kind, ranks in by_kind.items():
        counts = Counter(hashes[rank][0] for rank in ranks)
        most, times = counts.most_common(1)[0]
        if len(counts) == 1:
            continue
        if times * 2 <= len(ranks):
            found |= dict.fromkeys(ranks, f"computes other numbers than other ranks of {kind}, "
                                   f"and no numbers have a majority")  # fmt: skip
            continue
        for rank in ranks:
            if hashes[rank][0] != most:
                found[rank] = f"computes other numbers than {times} ranks of {kind}"
    return found
