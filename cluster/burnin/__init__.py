"""Burn-in: which machines are sound, before a run trusts them.

Every rank of a launch takes part. One check follows another, see ``BurnIn.run``:

=============  =====================================================================  ============
check          what it does                                                           who is named
=============  =====================================================================  ============
memory         patterns over nearly all free memory of an accelerator                 the rank
numerics       products, functions, attention, gradients: bits equal for each kind    the minority
products       FLOP/s of one large product, against the median, three times           the rank
training step  a few steps of a small model: bits equal for each kind                 the minority
storage        write with fsync and read of the folder of checkpoints                 the rank
links          every pair within nodes, every pair of nodes on each rail              fewest nodes
all-to-all     the rows of an expert-parallel layer: content, bytes per second        the receiver
all-reduce     exact sums, bytes per second                                           the receiver
=============  =====================================================================  ============

A rank that does not answer is named too. Ranks answer over the store (``board``), so a rank that
hangs in a collective is told from the ranks that wait for it.
"""

from cluster.burnin.board import Board, MissingRanksError
from cluster.burnin.measures import product_shape
from cluster.burnin.run import BurnIn, BurnInOptions, ExpectedRates
from cluster.burnin.verdict import Verdict

__all__ = [
    "Board", "BurnIn", "BurnInOptions", "ExpectedRates", "MissingRanksError", "Verdict",
    "product_shape",
]  # fmt: skip
