"""The policy-gradient loss and what is told about it. Knows tensors; knows nothing of trajectories or files.

Shapes: T completion tokens of any number of answers, concatenated. There is no padding, hence no mask: a token is in or
it is not there, whatever its id.
"""

from typing import Any

import torch
from torch import Tensor

_MAX_LOG_RATIO = 20.0


def grpo_loss(
    logprobs_T: Tensor, behaviour_T: Tensor, advantages_T: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """Minus PPO's clipped surrogate (Schulman et al. 2017, eq. 7), two bounds as in DAPO (Yu et al. 2025), summed.

    The ratio is taken against the log-probabilities of the version that sampled, so stale answers are corrected for.
    A sum, not a mean: the trainer divides by the batch's own number of tokens once all of them are known.
    """
    # Bounded so that no ratio is infinite: clipping away an infinite one would leave 0 * inf = NaN in the gradient.
    ratio_T = (logprobs_T - behaviour_T).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
    bounded_T = ratio_T.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -torch.minimum(ratio_T * advantages_T, bounded_T * advantages_T).sum()


def loss_stats(
    logprobs_T: Tensor,
    behaviour_T: Tensor,
    advantages_T: Tensor,
    entropies_T: Tensor,
    staleness_T: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> dict[str, Any]:
    """Metrics of a whole batch, one or more tokens, under the weights before its optimizer step.

    clip_fraction: share of tokens whose gradient the clipping removes. kl: Schulman's k3 estimate of
    KL(behaviour, current), in nats. ess_share: (sum w)^2 / (T sum w^2) of the ratios w, 1 when on-policy.
    mismatch: |the trainer's log-probability - the recorded one|, in nats; its causes are rounding and staleness.
    """
    if not len(logprobs_T):
        raise ValueError("statistics need one completion token or more, got none")
    change_T = (logprobs_T - behaviour_T).double()
    ratio_T = change_T.exp()
    gap_T = change_T.abs()
    cut_T = torch.where(advantages_T > 0, ratio_T > 1.0 + clip_high, (ratio_T < 1.0 - clip_low) & (advantages_T < 0))
    loss = grpo_loss(logprobs_T, behaviour_T, advantages_T, clip_low=clip_low, clip_high=clip_high)
    return {
        "policy/loss": loss.item() / len(logprobs_T),
        "policy/kl": (ratio_T - 1.0 - change_T).mean().item(),
        "policy/clip_fraction": cut_T.double().mean().item(),
        "policy/entropy": entropies_T.double().mean().item(),
        "policy/ess_share": (ratio_T.sum() ** 2 / (len(ratio_T) * (ratio_T**2).sum())).item(),
        "policy/first_ratio_max_deviation": (ratio_T - 1.0).abs().max().item(),
        "mismatch/mean_abs_logprob_diff": gap_T.mean().item(),
        "mismatch/max_abs_logprob_diff": gap_T.max().item(),
        "mismatch/by_staleness": {
            str(int(age)): gap_T[staleness_T == age].mean().item() for age in torch.unique(staleness_T)
        },
    }
