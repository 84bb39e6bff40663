"""The contract of trackers, as tests for pytest: a tracker of your own keeps it where a subclass of
:class:`TrackerContract` passes. No run imports this module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from pretrain.observe.tracking import About, Tracker, open_trackers
from pretrain.spec import TrackingConfig

ABOUT = About("tiny", "0123456789abcdef", 0, {"train.steps": "6", "record.code": "c0ffee"})
"""A first start of a run."""


class TrackerContract:
    """What :class:`pretrain.observe.tracking.Tracking` asks of a tracker.

    A subclass sets ``to``, and says what the tracker has kept::

        class TestMine(TrackerContract):
            to = "my_package.my_module:MyTracker"

            def kept(self, run_dir):
                return {(name, step): value, ...}
    """

    to = ""
    """As in ``tracking.to``: a known name, or ``package.module:Class``."""

    def kept(self, run_dir: Path) -> Mapping[tuple[str, int], float]:
        """What the tracker has of the run in this folder, by name and step."""
        raise NotImplementedError

    def _start(self, run_dir: Path, about: About = ABOUT) -> Tracker:
        config = TrackingConfig(to=[self.to])
        (sink,) = open_trackers(config, run_dir)
        sink.close()  # its thread: the calls below come from this one
        tracker = sink.tracker
        tracker.start(about)
        return tracker

    def test_values_are_kept_by_name_and_step(self, tmp_path: Path) -> None:
        """Two steps with different names."""
        tracker = self._start(tmp_path)
        tracker.log(2, {"train/loss": 2.5, "speed/mfu": 0.25})
        tracker.log(4, {"train/loss": 2.25})
        tracker.finish(ok=True)
        assert dict(self.kept(tmp_path)) == {
            ("train/loss", 2): 2.5, ("speed/mfu", 2): 0.25, ("train/loss", 4): 2.25,
        }  # fmt: skip

    def test_values_of_one_step_come_in_several_calls(self, tmp_path: Path) -> None:
        """An interval, an evaluation and the ledger are of one step."""
        tracker = self._start(tmp_path)
        tracker.log(2, {"train/loss": 2.5})
        tracker.log(2, {"eval/loss": 2.75})
        tracker.finish(ok=True)
        assert dict(self.kept(tmp_path)) == {("train/loss", 2): 2.5, ("eval/loss", 2): 2.75}

    def test_a_second_start_goes_on_with_the_run(self, tmp_path: Path) -> None:
        """The same run id and another spec; the first start has failed."""
        tracker = self._start(tmp_path)
        tracker.log(2, {"train/loss": 2.5})
        tracker.finish(ok=False)
        parameters = {**ABOUT.parameters, "train.steps": "8"}
        tracker = self._start(tmp_path, replace(ABOUT, step=2, parameters=parameters))
        tracker.log(4, {"train/loss": 2.25})
        tracker.finish(ok=True)
        assert dict(self.kept(tmp_path)) == {("train/loss", 2): 2.5, ("train/loss", 4): 2.25}

    def test_a_start_without_values_ends(self, tmp_path: Path) -> None:
        """A start may end before its first interval."""
        self._start(tmp_path).finish(ok=False)
        assert dict(self.kept(tmp_path)) == {}
