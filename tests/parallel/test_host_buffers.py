"""Memory of large host tensors is taken again, and never while a tensor holds it."""

from __future__ import annotations

import gc
import mmap
import os
import random
import threading

import pytest
import torch

from moe import MoEConfig, MoELayer
from parallel.comm import host_buffers
from parallel.comm.host_buffers import HOST_BUFFERS, HostBuffers, empty_like, new_empty, zeros_like

MANY = 1 << 20  # numbers of a tensor: 4 MiB


def test_memory_is_taken_again_when_the_last_view_goes():
    buffers = HostBuffers()
    first = buffers.empty((4, MANY // 4), torch.float32)
    place, view = first.data_ptr(), first[1:]
    del first
    second = buffers.empty((MANY,), torch.float32)
    assert second.data_ptr() != place
    del view
    assert buffers.idle_bytes == 4 * MANY
    third = buffers.empty((MANY,), torch.float32)
    assert third.data_ptr() == place
    assert buffers.idle_bytes == 0


def test_a_little_larger_memory_is_taken_and_a_much_larger_one_is_not():
    buffers = HostBuffers()
    place = buffers.empty((10 * MANY,), torch.float32).data_ptr()
    much_less = buffers.empty((5 * MANY,), torch.float32)
    assert much_less.data_ptr() != place
    less = buffers.empty((9 * MANY,), torch.float32)
    assert less.data_ptr() == place
    assert less.shape == (9 * MANY,)


def test_a_tensor_is_no_view_and_has_the_strides_of_an_ordinary_one():
    tensor = HostBuffers().empty((3, 5, 1000), torch.float64)
    assert not tensor._is_view()
    assert tensor.is_contiguous()
    assert tensor.storage_offset() == 0
    assert HostBuffers().empty((0, 7), torch.float32).shape == (0, 7)


def test_idle_memory_is_bounded_and_can_be_released(monkeypatch):
    monkeypatch.setattr(host_buffers, "MOST_IDLE_BYTES", 8 * MANY)
    buffers = HostBuffers()
    held = [buffers.empty((MANY,), torch.float32) for _ in range(5)]
    del held
    assert buffers.idle_bytes == 8 * MANY
    buffers.release()
    assert buffers.idle_bytes == 0


def test_of_too_much_idle_memory_the_oldest_goes(monkeypatch):
    monkeypatch.setattr(host_buffers, "MOST_IDLE_BYTES", 8 * MANY)
    buffers = HostBuffers()
    first = buffers.empty((MANY,), torch.float32)
    second = buffers.empty((2 * MANY,), torch.float32)
    del first
    place = second.data_ptr()
    del second  # there is room for this one, and not for both
    assert buffers.idle_bytes == 8 * MANY
    assert buffers.empty((2 * MANY,), torch.float32).data_ptr() == place


def test_memory_may_be_given_back_while_other_memory_is_taken(monkeypatch):
    """As by a collection of garbage in the middle of a call."""
    buffers = HostBuffers()
    held = [buffers.empty((MANY,), torch.float32)]
    settle = buffers._settle

    def collect() -> None:
        held.clear()
        settle()

    monkeypatch.setattr(buffers, "_settle", collect)
    taken = buffers.empty((MANY,), torch.float32)
    assert not held
    del taken
    assert buffers.idle_bytes == 4 * MANY


def test_a_forked_process_has_copies():
    buffers = HostBuffers()
    held = buffers.empty((2, MANY), torch.float32).fill_(1)
    child = os.fork()
    if not child:
        held.numpy()[:] = 2  # without torch's threads, which a fork does not have
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert (held == 1).all()


def test_what_tensors_are_like():
    like = torch.randn(3, MANY, dtype=torch.bfloat16)
    assert empty_like(like).shape == like.shape
    assert empty_like(like).dtype == torch.bfloat16
    assert not zeros_like(like).any()
    for other in (torch.randn(3), torch.empty(2 * MANY, device="meta")):
        assert new_empty(other, 2, 2).shape == (2, 2)
        assert empty_like(other).device == other.device
    assert new_empty(like, 0, 5).shape == (0, 5)


def test_the_default_device_is_another_one():
    like = torch.randn(3, MANY)
    with torch.device("meta"):
        taken = HostBuffers().empty((MANY,), torch.float32)
        assert taken.device == empty_like(like).device == torch.device("cpu")
        assert HostBuffers().empty((0,), torch.float32).device == torch.device("cpu")


def test_a_kernel_without_huge_pages(monkeypatch):
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 9999)
    assert (HostBuffers().empty((MANY,), torch.float32).fill_(2) == 2).all()


def test_a_saved_tensor_has_its_own_bytes_and_no_more():
    buffers = HostBuffers()
    buffers.empty((2 * MANY,), torch.float32).fill_(3)
    tensor = buffers.empty((MANY + 5,), torch.float32)
    assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_threads_never_share_memory():
    buffers, wrong = HostBuffers(), []

    def work(number: int) -> None:
        order, held = random.Random(number), []
        for turn in range(200):
            value = number * 1000 + turn
            tensor = buffers.empty((order.choice((1, 2)) * 1024, 300), torch.float32).fill_(value)
            held.append((value, tensor[order.randrange(1000) :]))
            if len(held) > order.randrange(1, 6):
                value, tensor = held.pop(order.randrange(len(held)))
                if not (tensor == value).all():
                    wrong.append(value)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("kept", [False, True])
def test_gradients_stay_what_they_are_while_they_are_held(kept):
    """A layer whose gradients come from memory that earlier gradients had."""
    torch.manual_seed(0)
    layer = MoELayer(MoEConfig(d_model=256, d_ff=512, num_experts=8, top_k=2, backend="packed"))
    x = torch.randn(512, 256)
    HOST_BUFFERS.release()

    def gradients() -> list[torch.Tensor]:
        layer.zero_grad()
        layer(x).hidden.square().sum().backward()
        return [p.grad for p in layer.parameters()]

    expected = [grad.clone() for grad in gradients()]
    held = []
    for turn in range(3):
        found = gradients()
        if kept:
            held.append(found)
        del found
        layer.zero_grad()
        gc.collect()
        assert bool(HOST_BUFFERS.idle_bytes) or kept, turn
    for found in [*held, gradients()]:
        for grad, value in zip(found, expected, strict=True):
            assert torch.equal(grad, value)
