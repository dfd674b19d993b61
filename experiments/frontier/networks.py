"""The networks of the frontier: from one block to twelve, random and trained posteriors."""

from __future__ import annotations

from experiments.frontier.problem import Spec, Training

COLD, FULL = 0.1, 1.0  # weights of the KL divergence

_ALL = (
    # As small as a network can be: to try the command.
    Spec("random_b1_t4_d8", 1, 4, 8, batch=2),
    # Random posteriors.
    Spec("random_b1_t16_d32", 1, 16, 32, batch=8),
    Spec("random_b1_t64_d128", 1, 64, 128, batch=4, samples=2000),
    Spec("random_b4_t16_d32", 4, 16, 32, batch=8),
    Spec("random_b4_t64_d64", 4, 64, 64, batch=4, samples=2000),
    Spec("random_b12_t16_d32", 12, 16, 32, batch=8, samples=2000),
    Spec("random_b12_t64_d64", 12, 64, 64, batch=4, samples=1000),
    Spec("random_b2_t196_d384", 2, 196, 384, batch=1, samples=200),
    Spec("random_b1_t1024_d128", 1, 1024, 128, batch=1, samples=200),
    Spec("random_b2_t1024_d768", 2, 1024, 768, batch=1, samples=64),
    Spec("random_b12_t196_d384", 12, 196, 384, batch=1, samples=64),
    Spec("random_b12_t196_d768", 12, 196, 768, batch=1, samples=64),
    Spec("random_b12_t1024_d768", 12, 1024, 768, batch=1, samples=32),
    # Trained posteriors: digits in patches of 2 x 2 pixels (T 16) or 1 x 1 (T 64).
    Spec("trained_b1_d32_cold", 1, 16, 32, batch=8, training=Training(COLD)),
    Spec("trained_b2_d32_cold", 2, 16, 32, batch=8, training=Training(COLD)),
    Spec("trained_b2_d32_cold_seed5", 2, 16, 32, batch=8, training=Training(COLD, seed=5)),
    Spec("trained_b2_d32_full", 2, 16, 32, batch=8, training=Training(FULL)),
    Spec("trained_b2_d64_cold", 2, 16, 64, batch=8, training=Training(COLD)),
    Spec("trained_b3_d48_kl0.3", 3, 16, 48, batch=8, training=Training(0.3)),
    Spec("trained_b4_d32_full", 4, 16, 32, batch=8, training=Training(FULL)),
    Spec("trained_b4_d32_cold_seed1", 4, 16, 32, batch=8, training=Training(COLD, seed=1)),
    Spec("trained_b2_d32_t64_cold", 2, 64, 32, batch=4, training=Training(COLD, steps=2000)),
)

NETWORKS = {spec.name: spec for spec in _ALL}
"""All networks by their names, in the order in which they are measured."""

QUICK = ("random_b1_t64_d128", "trained_b2_d32_cold")
LARGE = (
    "random_b1_t1024_d128",
    "random_b2_t1024_d768",
    "random_b12_t196_d384",
    "random_b12_t196_d768",
    "random_b12_t1024_d768",
)
DEFAULT = tuple(name for name in NETWORKS if name not in LARGE and name != "random_b1_t4_d8")
