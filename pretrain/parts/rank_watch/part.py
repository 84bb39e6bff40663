"""Ranks whose losses differ from those of other ranks, as a part of a step."""

from __future__ import annotations

from pretrain.observe import RankLossOdd
from pretrain.parts.rank_watch.rule import LossOutliers
from pretrain.parts.step import Part, PartContext, StepFacts, Wish


class OddLosses(Part):
    """Publishes ranks whose losses are odd, see :class:`LossOutliers`; rank 0 looks at all ranks.

    Ranks at different places of a sequence, as in context parallelism, are compared apart. Nothing
    is remembered over a restart: see there.
    """

    name = "rank_watch"

    def __init__(self, context: PartContext) -> None:
        self.context, layout = context, context.topology
        ranks = range(layout.world if context.rank == 0 else 0)
        groups = ([r for r in ranks if layout.place(r).cp == cp] for cp in range(layout.cp))
        self._groups = [LossOutliers(group) for group in groups if group]

    def judge(self, facts: StepFacts) -> Wish | None:
        """Publish ranks with odd losses in a try of a step; nothing is wished for."""
        sums, tokens = map(facts.reports.column, ("loss_sum", "target_tokens"))
        for group in self._groups:
            for outlier in group.after(sums, tokens):
                self.context.publish(
                    RankLossOdd(
                        step=facts.step - 1,
                        rank=outlier.rank,
                        loss=outlier.loss,
                        usual_loss=outlier.usual,
                        z=outlier.z,
                        steps=outlier.steps,
                    )
                )
        return None
