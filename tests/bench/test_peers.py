"""What the layer's bench holds its peers to, and that a peer leaves nothing behind."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from bench.moe_layer import set_routing
from bench.peers import PEERS, Peer, check, convoy, cuda_stand_ins, installed_peers, results
from moe import MoEConfig, MoELayer

T, D, F, E, K = 64, 32, 16, 8, 2


def case(routing: str) -> tuple[MoELayer, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    layer = MoELayer(MoEConfig(d_model=D, d_ff=F, num_experts=E, top_k=K))
    return layer, set_routing(layer.router.weight, torch.randn(T, D), K, routing), torch.randn(T, D)


@pytest.fixture
def no_group_left():
    had = dist.is_initialized()
    yield
    if dist.is_initialized() and not had:
        dist.destroy_process_group()


@pytest.mark.parametrize("routing", ["natural", "zipf", "worst"])
@pytest.mark.parametrize("name", PEERS)
def test_a_peer_that_is_installed_does_the_same_work(name, routing, monkeypatch, no_group_left):
    monkeypatch.setattr("bench.peers.PEERS", {name: PEERS[name]})
    layer, x_TD, grad_TD = case(routing)
    peers = installed_peers(layer)
    if not peers:
        pytest.skip(f"{name} is not for this machine")
    check(name, results(peers[name], x_TD, grad_TD), results(convoy(layer), x_TD, grad_TD))


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_takes_the_dtype_of_the_layer(name, monkeypatch, no_group_left):
    monkeypatch.setattr("bench.peers.PEERS", {name: PEERS[name]})
    layer, x_TD, _ = case("natural")
    layer = layer.to(torch.bfloat16)
    assert layer.router.weight.dtype == torch.float32
    peers = installed_peers(layer)
    if not peers:
        pytest.skip(f"{name} is not for this machine")
    assert peers[name].call(x_TD.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("what", ["router.weight", "experts.w_gate", "experts.w_down"])
def test_a_peer_that_does_other_work_is_refused(what):
    layer, x_TD, grad_TD = case("natural")
    other = MoELayer(layer.config)
    other.load_state_dict(layer.state_dict())
    wanted = results(convoy(layer), x_TD, grad_TD)
    check("other", results(convoy(other), x_TD, grad_TD), wanted)
    with torch.no_grad():
        other.get_parameter(what).mul_(1.01)
    with pytest.raises(RuntimeError, match="other does not compute what Convoy does"):
        check("other", results(convoy(other), x_TD, grad_TD), wanted)


def test_a_parameter_without_a_gradient_is_refused():
    layer, x_TD, grad_TD = case("natural")
    peer = Peer(layer, layer.router.weight, lambda x_TD: layer(x_TD).hidden)
    layer.register_parameter("idle", torch.nn.Parameter(torch.zeros(1)))
    with pytest.raises(RuntimeError, match="idle has no gradient"):
        results(peer, x_TD, grad_TD)


def test_what_is_not_installed_is_named_once(monkeypatch, capsys):
    def missing(layer: MoELayer) -> Peer:
        raise ImportError("No module named 'elsewhere'")

    monkeypatch.setattr("bench.peers.PEERS", {"elsewhere": missing})
    layer, *_ = case("natural")
    assert not installed_peers(layer) | installed_peers(layer)
    assert capsys.readouterr().out == "elsewhere is left out: No module named 'elsewhere'\n"


def test_stand_ins_stay_inside():
    names = ("current_device", "current_stream", "Stream", "stream")
    before = [getattr(torch.cuda, name) for name in names]
    with cuda_stand_ins():
        if not torch.cuda.is_available():
            assert torch.cuda.current_device() == "cpu"
            assert torch.cuda.Stream() is torch.cuda.current_stream()
    assert [getattr(torch.cuda, name) for name in names] == before


@pytest.mark.parametrize("routing", ["natural", "zipf", "worst"])
def test_no_token_nearly_ties(routing):
    torch.manual_seed(0)
    weight_ED, x_TD = torch.empty(E, D), torch.randn(4096, D)
    routed_TD = set_routing(weight_ED, x_TD, K, routing)
    best_TK = (routed_TD @ weight_ED.t()).topk(K + 1).values
    assert routed_TD.shape == x_TD.shape
    assert (best_TK[:, K - 1] - best_TK[:, K]).min() > 0.9e-3
