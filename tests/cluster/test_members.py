"""Who joins a launch: the exclude list, and the rule for machines that come."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from cluster.members import exclude, node_name, read_exclusions
from cluster.members.rendezvous import MembersHandler, convoy_rendezvous

ROOT = Path(__file__).resolve().parents[2]


class Inner:
    """A rendezvous of so many members, and so many machines that wait."""

    def __init__(self, members: int) -> None:
        self._state_holder = SimpleNamespace(state=SimpleNamespace(participants=dict.fromkeys(
            range(members))))  # fmt: skip
        self.waiting = 0

    def next_rendezvous(self) -> SimpleNamespace:
        members, store = len(self._state_holder.state.participants), HashStore()
        for rank in range(1, members):  # the others have said where they are
            store.set(f"node-order/{rank}", '""')
        return SimpleNamespace(store=store, rank=0, world_size=members)

    def num_nodes_waiting(self) -> int:
        return self.waiting

    def lose_one(self) -> None:
        self._state_holder.state.participants.popitem()


def joined(scale_up: str, checkpoints: Path | None = None) -> tuple[MembersHandler, Inner]:
    inner = Inner(3)
    handler = MembersHandler(inner, scale_up, checkpoints=checkpoints)
    handler.next_rendezvous()
    return handler, inner


def commit(folder: Path, step: int) -> None:
    (folder / "manifests").mkdir(exist_ok=True)
    (folder / "manifests" / f"step-{step:08d}.json").touch()


def test_at_once_a_machine_that_comes_is_taken_in():
    handler, inner = joined("at_once")
    assert handler.num_nodes_waiting() == 0
    inner.waiting = 1
    assert handler.num_nodes_waiting() == 1


def test_at_checkpoint_a_machine_waits_for_the_next_commit(tmp_path):
    commit(tmp_path, 10)
    handler, inner = joined("at_checkpoint", tmp_path)
    inner.waiting = 1
    assert [handler.num_nodes_waiting() for _ in range(3)] == [0, 0, 0]
    commit(tmp_path, 20)
    assert handler.num_nodes_waiting() == 1


def test_never_a_machine_waits_until_a_member_is_lost():
    handler, inner = joined("never")
    inner.waiting = 1
    assert handler.num_nodes_waiting() == 0
    inner.lose_one()
    assert handler.num_nodes_waiting() == 1


@pytest.mark.parametrize("scale_up", ["at_checkpoint", "never"])
def test_a_member_that_was_restarted_does_not_wait(tmp_path, scale_up):
    handler, inner = joined(scale_up, tmp_path)
    inner.lose_one()  # its torchrun has left, and waits to join again
    inner.waiting = 1
    assert handler.num_nodes_waiting() == 1


def test_a_machine_of_the_exclude_list_does_not_join(tmp_path, monkeypatch):
    monkeypatch.setenv("CONVOY_NODE_NAME", "node-7")
    assert node_name() == "node-7"
    handler = MembersHandler(Inner(2), "at_once", tmp_path)
    exclude(tmp_path / "exclude.json", "node-6", "slow")
    assert handler.next_rendezvous().world_size == 2
    exclude(tmp_path / "exclude.json", "node-7", "wrong sums")
    exclude(tmp_path / "exclude.json", "node-7", "a second reason")
    with pytest.raises(RendezvousError, match=r"node-7 is on the exclude list .*: wrong sums"):
        handler.next_rendezvous()
    assert handler.shutdown(), "the rendezvous stays open for the other machines"
    assert [(e.node, e.reason) for e in read_exclusions(tmp_path / "exclude.json")] == [
        ("node-6", "slow"),
        ("node-7", "wrong sums"),
    ]


@pytest.mark.parametrize("text", ["{", "[]", json.dumps({"excluded": [{"name": "a"}]})])
def test_what_is_no_exclude_list_is_named(tmp_path, text):
    (tmp_path / "exclude.json").write_text(text)
    with pytest.raises(ValueError, match=r"exclude\.json must be an exclude list"):
        read_exclusions(tmp_path / "exclude.json")


def parameters(**config: str) -> RendezvousParameters:
    return RendezvousParameters(
        backend="convoy", endpoint="127.0.0.1:0", run_id="test", min_nodes=1, max_nodes=1, **config
    )


ADD = """
import sys
from pathlib import Path
from cluster.members import exclude
for number in range(20):
    exclude(Path(sys.argv[1]), f"{sys.argv[2]}-{number}", "slow")
"""


def test_machines_that_write_the_list_at_once_lose_no_entry(tmp_path):
    path = tmp_path / "exclude.json"
    writers = [
        subprocess.Popen([sys.executable, "-c", ADD, str(path), name], cwd=ROOT) for name in "abc"
    ]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    assert len({one.node for one in read_exclusions(path)}) == 60


def test_the_inner_rendezvous_is_torchruns_own(tmp_path):
    config = {"scale_up": "never", "run_dir": str(tmp_path), "last_call_timeout": "1"}
    handler = convoy_rendezvous()(parameters(**config, is_host="1"))
    assert isinstance(handler, MembersHandler)
    assert handler.inner.get_backend() == "c10d"
    assert handler.inner.settings.timeout.last_call.total_seconds() == 1
    info = handler.next_rendezvous()
    assert (info.rank, info.world_size) == (0, 1)
    assert len(handler.inner._state_holder.state.participants) == 1
    assert handler.num_nodes_waiting() == 0
    handler.shutdown()
    assert handler.is_closed()


def test_torchrun_finds_the_backend_by_its_name():
    handler = get_rendezvous_handler(parameters(is_host="1"))
    assert handler.get_backend() == "convoy"
    handler.shutdown()


def test_wrong_keys_are_named():
    with pytest.raises(ValueError, match=r"rdzv-conf scale_up \(soon\) must be one of at_once"):
        convoy_rendezvous()(parameters(scale_up="soon"))
    for store in ("etcd", "convoy"):
        with pytest.raises(ValueError, match=rf"store \({store}\) must be one of c10d, etcd-v2"):
            convoy_rendezvous()(parameters(store=store))
    with pytest.raises(ValueError, match=r"at_checkpoint\) needs run_dir or checkpoints"):
        convoy_rendezvous()(parameters(scale_up="at_checkpoint"))
