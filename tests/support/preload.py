"""Imported once by the server that test ranks fork from."""

import functools

import numpy.random  # noqa: F401
import torch
import torch._dynamo

import pretrain.train  # noqa: F401 - with all that a rank of a run imports
from pretrain.train import trainer
from tests.support.writers import use_served_writers

# All ranks are on this machine: its speed is measured once, and not for 0.3 s in every rank.
torch.set_num_threads(1)  # a fork must not take the threads of a product with it
trainer.peak_flops_per_second = functools.cache(trainer.peak_flops_per_second)
trainer.peak_flops_per_second(torch.device("cpu"), torch.float32)

use_served_writers()
