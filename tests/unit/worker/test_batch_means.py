"""Weighted means over the batches of an evaluation: exact, in any order."""

import math

from runtime.evaluation.batch_means import BatchMeans, weighted_means


def test_a_batch_in_parts_has_the_means_of_its_parts():
    parts = [BatchMeans(b, (("x", x, w),)) for b, x, w in ((0, 1, 3), (0, 5, 1), (1, 7, 2))]
    assert weighted_means(parts) == {"x": (1 * 3 + 5 * 1 + 7 * 2) / 6}


def test_means_are_exact_and_independent_of_the_order():
    batches = [BatchMeans(i, (("x", 0.1 * i, float(i % 4)),)) for i in range(1000)]
    found = weighted_means(batches)
    assert found == weighted_means(batches[::-1])
    exact = math.fsum(0.1 * i * (i % 4) for i in range(1000)) / sum(i % 4 for i in range(1000))
    assert found["x"] == exact


def test_batches_of_weight_0_do_not_count_and_others_that_are_not_finite_do():
    def means(*pairs):
        return weighted_means(BatchMeans(i, (("x", *pair),)) for i, pair in enumerate(pairs))["x"]

    assert means((math.nan, 0.0), (2.0, 1.0)) == 2.0
    assert math.isnan(means((math.nan, 1.0), (2.0, 1.0)))
    assert means((math.inf, 1.0), (2.0, 1.0)) == math.inf
    assert math.isnan(means((1.0, 0.0)))
