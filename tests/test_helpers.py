"""The surroundings that the other tests rely on."""

import socket

import pytest
import torch

from helpers import load_case, tiny_llama, tiny_qwen3


def test_network_is_refused_and_loopback_is_not() -> None:
    with pytest.raises(OSError, match="may not use the network"):
        socket.create_connection(("192.0.2.1", 80), timeout=1)  # an address that is set aside for documentation
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname(), timeout=1).close()


def test_a_golden_case_without_gradients_loads() -> None:
    golden = load_case("markov/vanilla")
    assert golden.grads == {}
    assert golden.case and golden.state and golden.inputs and golden.expected


@pytest.mark.parametrize("build", [tiny_qwen3, tiny_llama])
def test_a_tiny_target_depends_on_its_seed_only(build: type[torch.nn.Module]) -> None:
    before = torch.random.get_rng_state()
    one, same, other = build(seed=1), build(seed=1), build(seed=2)
    assert torch.equal(before, torch.random.get_rng_state())
    assert not one.training
    ids = torch.arange(1, 9).unsqueeze(0)
    assert torch.equal(one(ids).logits, same(ids).logits)
    assert not torch.equal(one(ids).logits, other(ids).logits)
