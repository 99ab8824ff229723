"""How many tokens one model needs for another's loss."""

import math

import pytest
from _lib.intervals import token_efficiencies, token_efficiency, tokens_to_reach


def run(losses, seed=0):
    points = [{"tokens": 100 * 2**number, "loss": loss} for number, loss in enumerate(losses)]
    return {"seed": seed, "curve": points}


def test_between_two_evaluations_the_logarithm_of_the_tokens_counts():
    curve = run([5.0, 4.0, 3.0])["curve"]
    assert tokens_to_reach(curve, 4.0) == pytest.approx(200)
    assert tokens_to_reach(curve, 3.5) == pytest.approx(200 * math.sqrt(2))
    assert tokens_to_reach(curve, 6.0) == 100 and tokens_to_reach(curve, 2.9) is None


def test_a_loss_that_rises_again_was_reached_the_first_time():
    assert tokens_to_reach(run([5.0, 3.0, 4.0, 2.0])["curve"], 3.5) < 200


def test_the_leading_model_needs_a_part_of_its_tokens_and_the_other_the_reciprocal():
    fast, slow = run([4.0, 3.0, 2.0, 1.5]), run([5.0, 4.0, 3.0, 2.0])
    assert token_efficiency(fast, slow) == pytest.approx(2.0)
    assert token_efficiency(slow, fast) == pytest.approx(0.5)
    assert token_efficiency(fast, fast) == pytest.approx(1.0)


def test_seeds_are_paired_and_the_interval_is_that_of_the_logarithms():
    others = [run([5.0, 4.0, 3.0, 2.0], seed) for seed in (0, 1)]
    runs = [run([4.0, 3.0, 2.0, 1.5], 1), run([3.0, 2.0, 1.5, 1.2], 0), run([9.0, 9.0, 9.0, 9.0], 7)]
    found = token_efficiencies(runs, others)
    assert found["by_seed"] == pytest.approx([2.0, 4.0])
    assert found["mean"] == pytest.approx(math.sqrt(8))
    half = 12.706 * math.log(2) / 2  # Student's t of one degree of freedom, times the standard error of two values
    assert found["interval_of_95_percent"] == pytest.approx([math.sqrt(8) * math.exp(s * half) for s in (-1, 1)], 1e-3)


@pytest.mark.parametrize("losses", [[2.0], [5.0, 4.0, 2.0]])
def test_runs_that_were_hardly_evaluated_say_nothing(losses):
    assert token_efficiencies([run(losses)], [run(losses)]) is None
