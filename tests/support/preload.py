"""Imported once by the server that test ranks fork from."""

import numpy.random  # noqa: F401
import torch._dynamo  # noqa: F401 - FSDP's first step imports it, for a second in every rank

import pretrain.train  # noqa: F401 - with all that a rank of a run imports
