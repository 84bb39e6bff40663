"""Memory that does not keep what was written: patterns over as much as can be had."""

from __future__ import annotations

import torch

_BLOCK = 1 << 28
"""Bytes of one tensor."""
_SHARE_OF_DEVICE = 0.9
"""Of an accelerator's free memory."""
_PATTERNS = (0x5555555555555555, -0x5555555555555556)
"""Every bit is 0 once and 1 once, at every address."""


def memory_fault(device: torch.device, cpu_bytes: int) -> str | None:
    """What is wrong with the memory of a device; None where every byte kept its value.

    Args:
        device: an accelerator, nearly all of whose free memory is written, or the CPU.
        cpu_bytes: to write on a CPU.
    """
    amount = cpu_bytes
    if device.type == "cuda":
        amount = int(torch.cuda.mem_get_info(device)[0] * _SHARE_OF_DEVICE)
    words = torch.arange(_BLOCK // 8, device=device)  # another value at each address
    blocks: list[torch.Tensor] = []
    try:
        for _ in range(max(1, amount // _BLOCK)):
            blocks.append(torch.empty_like(words))
    except torch.OutOfMemoryError as error:
        if not blocks:
            return str(error).splitlines()[0]
    for pattern in _PATTERNS:
        for number, block in enumerate(blocks):
            torch.bitwise_xor(words, pattern ^ number, out=block)
        for number, block in enumerate(blocks):
            wrong = block.bitwise_xor_(words) != pattern ^ number
            if bool(wrong.any()):
                first = int(wrong.nonzero()[0])
                count = int(wrong.sum())
                return (
                    f"{count} words of {_BLOCK >> 20} MiB did not keep their value; the first is "
                    f"word {first} of block {number}"
                )
    return None
