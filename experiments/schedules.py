"""The optimiser of the trainings: Adam with clipped gradients and a cosine schedule."""

import optax

RISE = 0.05  # share of the updates in which the learning rate rises


def clipped_adam(
    peak: float, num_steps: int, *, norm: float = 10.0, weight_decay: float | None = None
) -> optax.GradientTransformation:
    """Adam, or AdamW where there is a weight decay; the rate ends at a hundredth of its peak."""
    rising = max(1, int(RISE * num_steps))
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, peak, rising, max(num_steps, rising + 1), 0.01 * peak
    )
    adam = optax.adam(schedule)
    if weight_decay is not None:
        adam = optax.adamw(schedule, weight_decay=weight_decay)
    return optax.chain(optax.clip_by_global_norm(norm), adam)
