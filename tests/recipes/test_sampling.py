"""Sampled continuations."""

import pytest
import torch

from lightning_megatrain.recipes.sampling import Sampling, continue_tokens


def successor(tokens):
    """Logits that prefer the last token plus one, of 8, then plus two."""
    logits = torch.zeros(*tokens.shape, 8)
    logits.scatter_(-1, ((tokens + 1) % 8)[..., None], 4.0)
    logits.scatter_(-1, ((tokens + 2) % 8)[..., None], 3.0)
    return logits


def test_zero_temperature_takes_the_most_probable():
    prompt = torch.tensor([[5], [0]])
    out = continue_tokens(successor, prompt, Sampling(max_new_tokens=4, temperature=0), context=3)
    assert out.tolist() == [[5, 6, 7, 0, 1], [0, 1, 2, 3, 4]]


def test_top_k_limits_the_choice_and_the_seed_decides():
    prompt = torch.tensor([[0]])

    def draw(seed):
        sampling = Sampling(max_new_tokens=40, temperature=1.0, top_k=2, seed=seed)
        return continue_tokens(successor, prompt, sampling, context=8)[0]

    steps = draw(0).diff() % 8
    assert set(steps.tolist()) == {1, 2}
    assert torch.equal(draw(0), draw(0))
    assert not torch.equal(draw(0), draw(1))


def test_the_model_never_sees_more_than_its_context():
    seen = []

    def forward(tokens):
        seen.append(tokens.shape[1])
        return successor(tokens)

    continue_tokens(forward, torch.tensor([[1, 2]]), Sampling(max_new_tokens=5), context=4)
    assert seen == [2, 3, 4, 4, 4]


def test_a_row_ends_at_a_stop_token_and_all_end_together():
    sampling = Sampling(max_new_tokens=6, temperature=0)
    out = continue_tokens(successor, torch.tensor([[5], [4]]), sampling, context=8, stop=[7])
    assert out.tolist() == [[5, 6, 7, 7], [4, 5, 6, 7]]
    alone = continue_tokens(successor, torch.tensor([[7]]), sampling, context=8, stop=[7])
    assert alone.tolist() == [[7, 0, 1, 2, 3, 4, 5]]  # one in the prompt ends nothing


@pytest.mark.parametrize("wrong", [{"temperature": -1.0}, {"top_k": 0}, {"max_new_tokens": -1}])
def test_values_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Sampling(**wrong)


def test_an_empty_prompt_is_refused():
    with pytest.raises(ValueError, match="at least one token"):
        continue_tokens(successor, torch.empty(1, 0, dtype=torch.int64), Sampling(), context=4)
