"""Who joins a launch: the exclude list, and the rule for machines that come."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousParameters,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from cluster.members import etcd_outage, exclude, node_name, read_exclusions, rendezvous
from cluster.members.etcd_outage import OutageBackend
from cluster.members.rendezvous import MembersHandler, convoy_rendezvous

pytestmark = pytest.mark.waits

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


class Store(RendezvousBackend):
    """A state of two members that a store holds, and how many questions have no answer."""

    name = "in memory"

    def __init__(self) -> None:
        self.now = datetime.now(UTC)
        heartbeats = {"alive": self.now, "lost": self.now - timedelta(hours=2)}
        self.state, self.token = pickle.dumps(SimpleNamespace(last_heartbeats=heartbeats)), 0
        self.unanswered, self.rivals = 0, 0

    def get_state(self) -> tuple[bytes, Any]:
        if self.unanswered:
            self.unanswered -= 1
            raise RendezvousConnectionError("away")
        return self.state, self.token

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool]:
        self.get_state()
        if self.rivals:  # another machine writes first
            self.rivals, self.token = self.rivals - 1, self.token + 1
        is_written = token == self.token
        if is_written:
            self.state, self.token = state, self.token + 1
        return self.state, self.token, is_written

    def heartbeats(self) -> dict[str, datetime]:
        found: dict[str, datetime] = pickle.loads(self.state).last_heartbeats
        return found


def backend_of(store: Store, interval: timedelta = timedelta(0)) -> OutageBackend:
    """With ``interval`` 0 every question without an answer is an outage."""
    hour = timedelta(hours=1)
    return OutageBackend(store, interval=interval, expiry=hour, limit=hour)


def test_members_that_were_alive_are_alive_after_an_outage():
    for ask in ("get_state", "set_state"):
        store = Store()
        backend = backend_of(store)
        store.unanswered, store.rivals = 1, 2
        arguments = [store.state, store.token] if ask == "set_state" else []
        with pytest.raises(RendezvousConnectionError):
            getattr(backend, ask)(*arguments)
        answer = getattr(backend, ask)(*arguments)
        after = store.heartbeats()
        assert after["alive"] > store.now
        assert after["lost"] == store.now - timedelta(hours=2)
        assert answer[:2] == (store.state, store.token), "what others read"
        assert ask == "get_state" or answer[2] is False, "a rival was first"


def test_an_outage_that_comes_back_at_once_is_one_outage():
    store = Store()
    backend = backend_of(store)

    def fails_once(state: bytes, token: Any = None) -> Any:
        del store.set_state
        raise RendezvousConnectionError("away again")

    store.unanswered, store.set_state = 1, fails_once
    for _ in range(2):
        with pytest.raises(RendezvousConnectionError):
            backend.get_state()
    backend.get_state()
    assert store.heartbeats()["alive"] > store.now


def test_a_store_that_answers_at_once_is_left_alone():
    store = Store()
    backend = backend_of(store, timedelta(hours=1))
    store.unanswered = 1
    with pytest.raises(RendezvousConnectionError):
        backend.get_state()
    assert backend.get_state() == (store.state, 0)
    assert store.heartbeats()["alive"] == store.now


def test_what_needs_the_store_asks_again_and_ranks_that_train_do_not(monkeypatch):
    for module in (etcd_outage, rendezvous):
        monkeypatch.setattr(module, "_PAUSE_SECONDS", 0.0)
    store, inner = Store(), Inner(2)
    backend = backend_of(store)
    handler = MembersHandler(inner, "at_once", backend=backend)
    join, waiting = inner.next_rendezvous, inner.num_nodes_waiting
    inner.next_rendezvous = lambda: backend.get_state() and join()
    inner.num_nodes_waiting = lambda: backend.get_state() and waiting()
    store.unanswered = 3
    assert handler.next_rendezvous().world_size == 2
    store.unanswered, inner.waiting = 2, 1
    assert [handler.num_nodes_waiting() for _ in range(3)] == [0, 0, 1]
    backend.limit, store.unanswered = timedelta(seconds=-1), 1
    with pytest.raises(RendezvousConnectionError):
        handler.next_rendezvous()
    assert not backend.waits


def test_a_rendezvous_that_is_not_in_etcd_ends_with_its_store():
    handler, inner = joined("at_once")

    def away() -> int:
        raise RendezvousConnectionError("away")

    inner.num_nodes_waiting = away
    with pytest.raises(RendezvousConnectionError):
        handler.num_nodes_waiting()
