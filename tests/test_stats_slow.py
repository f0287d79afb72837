"""Does an interval that says 95% hold the truth in 95 of 100 worlds? Planted truth, simulated worlds, `pytest -s` prints the figures."""
import numpy as np
import pandas as pd
import pytest
from scipy import special, stats

from granite.stats import (bootstrap_mean, cluster_bootstrap, minimum_detectable_effect, odds_ratios, paired_bootstrap, pass_hat_k, permutation_test,
                           wilson)

pytestmark = pytest.mark.slow


def within(rate, n, expected, what, slack=0.0):
    "`rate` over n worlds is `expected` within 3.5 Monte Carlo errors, or at most `slack` further off."
    error = np.sqrt(expected * (1 - expected) / n)
    print(f"\n{what}: {rate:.3f}, expected {expected:.3f}, Monte Carlo error {error:.3f}, {n} worlds")
    assert abs(rate - expected) <= 3.5 * error + slack, what


def covers(estimate, truth): return estimate.low <= truth <= estimate.high


def percentile_coverage(n):
    "What theory expects of a percentile bootstrap of n normal means: z and an uncorrected SD in place of t."
    return 2 * stats.t(n - 1).cdf(stats.norm.ppf(0.975) * np.sqrt((n - 1) / n)) - 1


@pytest.mark.parametrize("method, expected", [("t", 0.95), ("percentile", percentile_coverage(9)), ("bca", percentile_coverage(9))])
def test_mean_of_nine_models(method, expected):
    rng, worlds = np.random.default_rng(1), 600
    hits = [covers(bootstrap_mean(rng.normal(0.4, 0.15, 9), rng, method=method), 0.4) for _ in range(worlds)]
    within(np.mean(hits), worlds, expected, f"mean of 9 models, {method}", slack=0.015)


def test_wilson_exactly():
    "No simulation needed: sum the binomial probabilities of the counts whose interval holds p."
    for n in (20, 100, 972):
        made, k = [wilson(i, n) for i in range(n + 1)], np.arange(n + 1)
        low, high = np.array([(e.low, e.high) for e in made]).T
        chances = np.linspace(0.02, 0.98, 97)
        covered = np.array([stats.binom.pmf(k, n, p)[(low <= p) & (p <= high)].sum() for p in chances])
        print(f"\nWilson, n = {n}: mean {covered.mean():.3f}, least {covered.min():.3f}")
        assert 0.945 < covered.mean() < 0.965 and covered.min() > 0.83


def crossed(rng, models, scenarios, sd_model, sd_scenario, sd_cell):
    value = (rng.normal(0, sd_model, models)[:, None] + rng.normal(0, sd_scenario, scenarios) + rng.normal(0, sd_cell, (models, scenarios))).ravel()
    m, s = np.divmod(np.arange(models * scenarios), scenarios)
    return pd.DataFrame({"model": m, "scenario": s, "tc": value})


def test_two_way_holds_where_one_way_fails():
    rng, worlds, hits = np.random.default_rng(2), 250, []
    for _ in range(worlds):
        frame = crossed(rng, 20, 30, 0.1, 0.3, 0.2)
        hits.append([covers(cluster_bootstrap(frame, "tc", rng, clusters=c), 0.0) for c in (["model"], ["model", "scenario"])])
    one, two = np.mean(hits, axis=0)
    print(f"\nscenarios that differ: model bootstrap covers {one:.3f}, two-way {two:.3f}")
    assert one < 0.75
    within(two, worlds, 0.94, "two-way bootstrap, 20 models x 30 scenarios", slack=0.015)


def test_two_way_is_cautious_with_pure_noise():
    "Noise of single cells enters the two-way variance three times (Owen 2007), so it may cover too much, never too little."
    rng, worlds = np.random.default_rng(3), 100
    rate = np.mean([covers(cluster_bootstrap(crossed(rng, 20, 30, 0, 0, 0.3), "tc", rng), 0.0) for _ in range(worlds)])
    print(f"\npure noise: two-way covers {rate:.3f}")
    assert rate > 0.97


LEVELS = np.array(["L4", "L3", "L2"])


def planted(rng, models=9, scenarios=27, gain=0.08, spread=0.05):
    "Completion with a gain at L3 that differs between models, none at L2."
    m, s, l = (a.ravel() for a in np.meshgrid(np.arange(models), np.arange(scenarios), np.arange(3), indexing="ij"))
    own = rng.uniform(-spread, spread, (models, 3)) * [0, 1, 1]
    p = 0.45 + rng.uniform(-0.15, 0.15, models)[m] + rng.uniform(-0.15, 0.15, scenarios)[s] + own[m, l] + np.array([0, gain, 0])[l]
    return pd.DataFrame({"model": m, "scenario": s, "level": pd.Categorical(LEVELS[l], LEVELS, ordered=True), "tc": (rng.random(len(p)) < p).astype(int)})


def test_planted_gain_against_l4():
    rng, worlds, seen = np.random.default_rng(4), 150, []
    for _ in range(worlds):
        r = paired_bootstrap(planted(rng), rng, metrics=["tc"])
        seen.append((covers(r["tc", "L3"].difference, 0.08), covers(r["tc", "L2"].difference, 0.0), r["tc", "L2"].p_permutation <= 0.05, r["tc", "L3"].difference.value))
    l3, l2, wrong, gain = np.mean(seen, axis=0)
    within(l3, worlds, percentile_coverage(9), "planted L3 gain of 0.08, paired bootstrap of 9 models", slack=0.02)
    within(l2, worlds, percentile_coverage(9), "no gain at L2, paired bootstrap of 9 models", slack=0.02)
    print(f"\nsign flips find a gain where none is in {wrong:.3f} of worlds; mean estimate of the planted gain {gain:.4f}")
    assert wrong <= 0.05 + 3.5 * np.sqrt(0.05 * 0.95 / worlds)
    assert abs(gain - 0.08) < 3.5 * 0.05 / np.sqrt(worlds)


def test_sign_flips_keep_their_level():
    rng, worlds = np.random.default_rng(5), 400
    wrong = np.mean([permutation_test(np.zeros(9), rng.standard_t(3, 9), rng).value <= 0.05 for _ in range(worlds)])
    within(wrong, worlds, 25 / 512, "sign flips under no effect, heavy tails")


def clustered(rng, models=30, trials=40, effect=0.4, spread=0.6):
    "Log odds with model effects, and an L3 effect that differs between models."
    m, l = np.repeat(np.arange(models), 2 * trials), np.tile(np.repeat([0, 1], trials), models)
    eta = rng.normal(0, 0.8, models)[m] + (effect + rng.normal(0, spread, models)[m]) * l
    return pd.DataFrame({"model": m, "level": pd.Categorical(LEVELS[l], LEVELS, ordered=True), "tc": (rng.random(len(eta)) < special.expit(eta)).astype(int)})


def population_odds(effect=0.4, spread=0.6):
    "The odds ratio of the population means, by Gauss-Hermite quadrature."
    x, w = np.polynomial.hermite_e.hermegauss(60)
    mean = lambda center, sd: (w * special.expit(center + sd * x)).sum() / w.sum()
    return float(np.exp(special.logit(mean(effect, np.hypot(0.8, spread))) - special.logit(mean(0, 0.8))))


def test_clustered_errors_hold_where_independent_ones_fail():
    rng, worlds, truth, hits = np.random.default_rng(6), 150, population_odds(), []
    for _ in range(worlds):
        frame = clustered(rng)
        made = [odds_ratios(frame, terms=["level"], **how)["L3"] for how in ({}, {"errors": "model"}, {"method": "gee"})]
        hits.append([covers(r, truth) for r in made])
    naive, robust, gee = np.mean(hits, axis=0)
    print(f"\nodds ratio {truth:.3f}: independent errors cover {naive:.3f}")
    assert naive < 0.85
    within(robust, worlds, 0.95, "odds ratio, errors clustered by 30 models", slack=0.015)
    within(gee, worlds, 0.95, "odds ratio, GEE over 30 models", slack=0.015)


def test_pass_hat_k_is_unbiased():
    rng, worlds = np.random.default_rng(7), 60
    made = []
    for _ in range(worlds):
        p = np.repeat(rng.beta(1, 1, 200), 5)
        frame = pd.DataFrame({"model": "m", "level": "L4", "scenario": np.repeat(np.arange(200), 5), "tc": (rng.random(1000) < p).astype(int)})
        made.append(pass_hat_k(frame, 3).value)
    print(f"\npass^3 of chances spread evenly over 0 to 1: {np.mean(made):.4f}, truth 0.25")
    assert abs(np.mean(made) - 0.25) < 3.5 * np.std(made) / np.sqrt(worlds)


def test_minimum_detectable_effect_has_its_power():
    rng, worlds = np.random.default_rng(8), 20_000
    d = np.resize([-1.0, 1.0], 9) - 1 / 9 * np.resize([-1.0, 1.0], 9).sum()
    effect = minimum_detectable_effect(d / d.std(ddof=1)).value
    found = stats.ttest_1samp(rng.normal(effect, 1, (worlds, 9)), 0, axis=1).pvalue <= 0.05
    within(found.mean(), worlds, 0.8, f"power at the minimum detectable effect of 9 models ({effect:.3f} SD)")
