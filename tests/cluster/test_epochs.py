"""The rule of epochs, and the journal in a real store."""

import threading
import time
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from cluster.members import Epoch, Journal, JournalWatch, Life, Word, decide
from cluster.members.epochs import renumber

A, B, C, D = (Life(seat, 0) for seat in range(4))
READY = Word(ready=True, turn=7, least_turn=7, done_step=7)


def epoch(*lives: Life) -> Epoch:
    return Epoch(3, lives, source=0)


@pytest.mark.parametrize(
    ("stay", "joined", "numbers"),
    [
        ([A, B, C], [], [A, B, C]),
        ([A, B], [], [A, B]),
        ([B, C], [], [C, B]),
        ([A, C], [D], [A, D, C]),
        ([C], [], [C]),
        ([A, B, C], [D], [A, B, C, D]),
        ([B], [Life(0, 1), D], [Life(0, 1), B, D]),
    ],
)
def test_as_many_replicas_as_possible_keep_their_number(stay, joined, numbers):
    assert renumber([A, B, C], stay, joined) == numbers


def test_every_living_member_is_waited_for():
    assert decide(epoch(A, B, C), {A: READY}, {C: "killed"}, []) is None
    after = decide(epoch(A, B, C), {A: READY, B: READY}, {C: "killed"}, [])
    assert (after.number, after.lives, after.source) == (4, (A, B), 0)
    assert after.left == ((C, "killed"),)
    assert not after.some_behind


def test_a_replica_that_waits_gets_the_state_of_the_one_that_has_passed_most_barriers():
    words = {
        A: Word(ready=True, turn=7, least_turn=7, done_step=7),
        B: Word(ready=True, turn=8, least_turn=7, done_step=6),
    }
    back = Life(2, 1)
    after = decide(epoch(A, B, C), words, {C: "killed"}, [back])
    assert after.lives == (A, B, back)
    assert (after.source, after.turn) == (1, 8)
    assert (after.some_behind, after.done_step, after.joined) == (True, 6, (back,))


def test_a_member_that_has_not_got_the_state_yet_gets_it_from_another():
    after = decide(epoch(A, B, C), {A: READY, B: Word(ready=False)}, {C: "killed"}, [])
    assert (after.lives, after.joined, after.source) == ((A, B), (B,), 0)


def test_where_nobody_has_the_state_all_seats_found_an_epoch_with_the_checkpoint():
    gone = {A: "killed", B: "killed"}
    again = [Life(0, 1), Life(1, 1)]
    assert decide(epoch(A, B), {}, gone, again[:1], seats=2) is None
    after = decide(epoch(A, B), {}, gone, again, seats=2)
    assert (after.source, after.lives, after.joined) == (None, tuple(again), tuple(again))
    late = decide(epoch(A, B), {}, gone, again[:1], seats=None)
    assert late.lives == (Life(0, 1),), "after a time those that are there"


def test_a_member_without_the_state_does_not_found_an_epoch():
    words = {A: Word(ready=False)}
    assert decide(epoch(A, B), words, {B: "killed"}, [Life(1, 1)], seats=1) is None


def test_an_epoch_is_in_the_store_as_it_is():
    after = decide(epoch(A, B, C), {A: READY, B: READY}, {C: "killed"}, [D])
    assert Epoch.decode(after.encode()) == after


def serve() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def client(server: TCPStore) -> TCPStore:
    return TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=20))


def test_the_first_word_about_a_life_stands_and_is_ended_once():
    server = serve()
    entries: list[dict] = []
    ended = threading.Event()

    def see(entry: dict) -> None:
        entries.append(entry)
        if "end" in entry:
            ended.set()

    watch = JournalWatch(client(server), see, lambda why: None, 0.01)
    journal = Journal(client(server))
    journal.declare_gone(A, "killed")
    journal.declare_gone(A, "its collective failed")
    journal.write(end=True)
    assert ended.wait(20)
    watch.close()
    assert entries == [{"gone": [0, 0], "why": "killed"}, {"end": True}]
    assert (journal.why_gone(A), journal.why_gone(B)) == ("killed", None)
    assert journal.end_code() is None
    journal.end(0)
    journal.end(1)
    assert journal.end_code() == 0


def test_a_change_whose_writer_died_before_it_wrote_is_passed_over(monkeypatch):
    monkeypatch.setattr("cluster.members.epochs._HOLE_SECONDS", 0.05)
    server = serve()
    entries: list[dict] = []
    watch = JournalWatch(client(server), entries.append, lambda why: None, 0.01)
    store = client(server)
    store.add("journal", 1)  # and no entry
    Journal(store).write(waiting=[1, 1])
    until = time.monotonic() + 20
    while not entries and time.monotonic() < until:
        time.sleep(0.01)
    watch.close()
    assert entries == [{"waiting": [1, 1]}]


def test_the_loss_of_the_store_is_ended():
    server = serve()
    lost = threading.Event()
    watch = JournalWatch(client(server), lambda entry: None, lambda why: lost.set(), 0.01)
    del server
    assert lost.wait(20)
    watch.close()
