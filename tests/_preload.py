"""Imported once by the server that test ranks fork from."""

import torch
import torch.distributed
import torch.distributed.fsdp
import torch.distributed.tensor  # noqa: F401
