"""Two tests of what was sampled: against other samples, and against the model's own probabilities."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM


def chi_square(first: Counter[int], second: Counter[int]) -> float:
    """p of Pearson's test that two samples of tokens come from one distribution; rare tokens are put together.

    It takes tokens for independent. Within an answer they are not quite, which makes small p a little more frequent
    than they should be; `drawn_from` has no such fault.
    """
    tokens = sorted({*first, *second}, key=lambda token: -(first[token] + second[token]))
    common = [token for token in tokens if first[token] + second[token] >= 20]
    columns = []
    for counts in (first, second):
        rest = sum(counts.values()) - sum(counts[token] for token in common)
        columns.append([*(counts[token] for token in common), rest])
    table = torch.tensor(columns, dtype=torch.float64)
    table = table[:, table.sum(0) > 0]
    expected = table.sum(1, keepdim=True) * table.sum(0, keepdim=True) / table.sum()
    return _tail(((table - expected) ** 2 / expected).sum(), table.shape[1] - 1)


def drawn_from(model_dir: Path, prompt: Sequence[int], answers: Sequence[tuple[Sequence[int], int]]) -> float:
    """p of a chi-square test that tokens were drawn from the model's own probabilities, each in its own context.

    `answers`: token ids of each, all of one length, and the position from which on they are judged. Seen minus expected
    counts are a sum of martingale differences, so that the test holds however much one token depends on those before;
    their covariance is the sum of diag(p) - p p^T (Hall and Heyde, Martingale Limit Theory and Its Application, 1980).
    """
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, local_files_only=True)
    rows_NT = torch.tensor([[*prompt, *tokens] for tokens, _ in answers])
    with torch.inference_mode():
        logits_NTV = model(rows_NT).logits[:, len(prompt) - 1 : -1].double()
    seen_NT = rows_NT[:, len(prompt) :]
    first_N1 = torch.tensor([[begin] for _, begin in answers])
    judged_NT = torch.arange(seen_NT.shape[1])[None] >= first_N1
    p_MV: Tensor = torch.softmax(logits_NTV, -1)[judged_NT]
    seen_V = torch.bincount(seen_NT[judged_NT], minlength=p_MV.shape[1]).double()
    # The counts add up, so the last token's follows from the others'.
    excess = (seen_V - p_MV.sum(0))[:-1]
    covariance = torch.diag(p_MV.sum(0)[:-1]) - p_MV[:, :-1].T @ p_MV[:, :-1]
    return _tail(excess @ torch.linalg.solve(covariance, excess), len(excess))


def _tail(statistic: Tensor, freedom: int) -> float:
    """Of the chi-square distribution beyond the statistic."""
    half = torch.tensor(freedom / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half, statistic / 2))
