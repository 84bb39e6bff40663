"""Padding is taken out of an input on the host, and put back into the output.

What is computed is then what is computed for the tokens without padding: sums over tokens have
equal bits, and padding costs no GEMM. On an accelerator the number of tokens is not known to the
host, and the mask is carried along instead.

Legend: T tokens and padding, N tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


class TokenRows:
    """Which rows of an input are tokens.

    Args:
        token_mask_T: [T] bool on the host, true for a token.
    """

    def __init__(self, token_mask_T: Tensor) -> None:
        self.rows_N = token_mask_T.nonzero().squeeze(1)
        self.num_rows = len(token_mask_T)
        self.has_no_padding = len(self.rows_N) == self.num_rows

    def of(self, x: Tensor) -> Tensor:
        """[T, ...] -> [N, ...]: the tokens."""
        return x if self.has_no_padding else x.index_select(0, self.rows_N)

    def back(self, x: Tensor, padding: float) -> Tensor:
        """[N, ...] -> [T, ...]: the tokens in their rows, and ``padding`` in the others."""
        if self.has_no_padding:
            return x
        return x.new_full((self.num_rows, *x.shape[1:]), padding).index_copy(0, self.rows_N, x)


def token_rows_of(token_mask_T: Tensor | None) -> TokenRows | None:
    """The rows of the tokens, where padding can be taken out.

    None without a mask, on an accelerator, and within ``torch.compile``.
    """
    if token_mask_T is None or torch.compiler.is_compiling():
        return None
    return TokenRows(token_mask_T) if token_mask_T.device.type == "cpu" else None
