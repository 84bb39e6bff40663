"""Imported once by the server that test ranks fork from."""

import functools
import gc
import importlib

import torch
import torch._dynamo

from pretrain.train import trainer
from tests.support.fake_gpu import values
from tests.support.writers import use_served_writers

# What doors and open kinds import on demand: once here, and not in every rank.
for module in (
    "ckpt.background.claim",
    "ckpt.read.load",
    "ckpt.state_dict.load",
    "ckpt.state_dict.save",
    "convoy.preparation",
    "moe.dispatch.all_gather",
    "moe.dispatch.all_to_all",
    "moe.dispatch.padded_all_to_all",
    "moe.uncompiled",
    "numpy.ma",
    "numpy.random",
    "parallel.apply.cached_sequence",
    "pretrain.checkpoint.tiers",
    "pretrain.elastic.warm",
    "pretrain.parallelize.orders",
    "pretrain.train.entry",
    "router.capacity_dropless",
    "router.capacity_fixed",
    "router.routing_top_k",
    "torch.distributed.pipelining",
    "torch.nn.attention.flex_attention",
):
    importlib.import_module(module)

# All ranks are on this machine: its speed is measured once, and not for 0.3 s in every rank.
torch.set_num_threads(1)  # a fork must not take the threads of a product with it
trainer.peak_flops_per_second = functools.cache(trainer.peak_flops_per_second)
trainer.peak_flops_per_second(torch.device("cpu"), torch.float32)

use_served_writers()
if values.is_wanted():
    values.install()

# A rank's garbage collector would visit every object of these modules, and copy their pages.
gc.collect()
gc.freeze()
