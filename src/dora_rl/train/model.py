"""The policy as a Hugging Face module, and the two passes the trainer makes over it.

Owns attention over a prefix tree and the output layer, which is applied only where a completion token is predicted.
Knows nothing of rewards or losses: the loss comes in as a function of log-probabilities.

Shapes: L tokens in the row, N of them predict something, T completion tokens, D hidden size, V vocabulary;
C rows of one chunk of the output layer, P completion tokens they predict. Log-probabilities are in nats.
"""

# mypy: allow-untyped-calls
# transformers annotates little of what it lets one call.

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from dora_rl.config import ConfigError
from dora_rl.train.tree import Block, PrefixTree, TokenPair, build_tree

TokenLoss = Callable[[Tensor, Tensor], Tensor]
"""(log-probabilities [P], which of the T completion tokens these are [P]) -> their summed loss, a scalar."""

_ATTENTION = "prefix_tree"
_CHUNK_LOGITS = 2**23
"""Logits alive at once: 32 MiB in float32, small enough to stay in a processor's cache."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Of every completion token, in the tree's order. Carries no gradient."""

    logprobs_T: Tensor
    entropies_T: Tensor


def load_model(folder: Path) -> PreTrainedModel:
    """float32, from local files only, no code from the folder. Raises ConfigError when it cannot be trained here."""
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} holds no config.json; model.path must name a Hugging Face model folder")
    logging.disable_progress_bar()  # the terminal belongs to the run
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, use_safetensors=True, attn_implementation=_ATTENTION
    )
    model.eval()  # no dropout: the gradient must belong to the distribution that sampled
    _require_plain_logits(model)
    return model


def tree_scores(model: PreTrainedModel, tree: PrefixTree, temperature: float) -> Scores:
    """log softmax(logits / temperature) of the completion tokens, and the entropies where they were drawn."""
    with torch.no_grad():
        hidden_ND = _hidden(model, tree)
        return _gather(
            tree, [(c.tokens_P, c.logprobs_P, c.entropies_P) for c in _head(model, tree, hidden_ND, temperature)]
        )


def tree_backward(model: PreTrainedModel, tree: PrefixTree, temperature: float, loss: TokenLoss) -> Scores:
    """Add the gradient of the summed loss to the parameters' `.grad`.

    The loss is a sum over tokens, so the output layer goes forward and backward chunk by chunk: the full logits never
    exist and nothing is computed twice. Softmax's gradient is written out: d logits = d logprob * (onehot - p) / T.
    """
    hidden_ND = _hidden(model, tree)
    head = output_layer(model)
    weight_VD = head.weight
    grad_ND = torch.zeros_like(hidden_ND)
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    with torch.no_grad():
        if weight_VD.requires_grad and weight_VD.grad is None:
            weight_VD.grad = torch.zeros_like(weight_VD)
        for chunk in _head(model, tree, hidden_ND.detach(), temperature):
            parts.append((chunk.tokens_P, chunk.logprobs_P, chunk.entropies_P))
            pull_P = _pull(loss, chunk.logprobs_P, chunk.tokens_P)
            pull_C = torch.zeros(len(chunk.probs_CV)).index_add_(0, chunk.row_P, pull_P)
            grad_CV = chunk.probs_CV.mul_(-pull_C[:, None])
            grad_CV.index_put_((chunk.row_P, chunk.target_P), pull_P, accumulate=True)
            grad_CV /= temperature
            grad_ND[chunk.rows] = grad_CV @ weight_VD
            if weight_VD.grad is not None:
                weight_VD.grad.addmm_(grad_CV.T, hidden_ND[chunk.rows])
    hidden_ND.backward(grad_ND)
    return _gather(tree, parts)


def output_layer(model: PreTrainedModel) -> nn.Linear:
    head: nn.Module | None = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or {name for name, _ in head.named_parameters()} != {"weight"}:
        raise ConfigError(f"{type(model).__name__} has no plain linear output layer; choose a model that has one")
    return head


def _require_plain_logits(model: PreTrainedModel) -> None:
    """Some models scale or cap their logits after the output layer, which `_head` would miss. Ask this one."""
    tree = build_tree([[TokenPair((0, 1), (1, 0))]], share=True)
    with torch.no_grad():
        logits_LV = model(
            tree.token_ids_L[None], position_ids=tree.positions_L[None], use_cache=False, tree_blocks=tree.blocks
        ).logits[0]
        logprobs_T = logits_LV[tree.predictors_N].log_softmax(-1)[tree.predictor_T, tree.targets_T]
    gap = float((logprobs_T - tree_scores(model, tree, 1.0).logprobs_T).abs().max())
    if gap > 1e-3:
        raise ConfigError(
            f"{type(model).__name__} changes its logits after the output layer (by {gap:.1e} nats), "
            "which the trainer does not know; choose another model"
        )


@dataclass(slots=True)
class _Chunk:
    rows: slice
    probs_CV: Tensor
    tokens_P: Tensor
    row_P: Tensor
    target_P: Tensor
    logprobs_P: Tensor
    entropies_P: Tensor


def _head(model: PreTrainedModel, tree: PrefixTree, hidden_ND: Tensor, temperature: float) -> Iterator[_Chunk]:
    weight_VD = output_layer(model).weight
    step = max(1, _CHUNK_LOGITS // len(weight_VD))
    for start in range(0, len(hidden_ND), step):
        rows = slice(start, min(start + step, len(hidden_ND)))
        tokens_P = torch.nonzero((tree.predictor_T >= rows.start) & (tree.predictor_T < rows.stop))[:, 0]
        row_P, target_P = tree.predictor_T[tokens_P] - start, tree.targets_T[tokens_P]
        logits_CV = (hidden_ND[rows] @ weight_VD.T).div_(temperature)
        lse_C = logits_CV.logsumexp(-1)
        probs_CV = (logits_CV - lse_C[:, None]).exp_()
        entropy_C = lse_C - torch.linalg.vecdot(probs_CV, logits_CV)
        yield _Chunk(
            rows, probs_CV, tokens_P, row_P, target_P, logits_CV[row_P, target_P] - lse_C[row_P], entropy_C[row_P]
        )


def _pull(loss: TokenLoss, logprobs_P: Tensor, tokens_P: Tensor) -> Tensor:
    """d loss / d log-probability, one number per token."""
    with torch.enable_grad():
        leaf_P = logprobs_P.detach().requires_grad_()
        (pull_P,) = torch.autograd.grad(loss(leaf_P, tokens_P), leaf_P)
    return pull_P


def _gather(tree: PrefixTree, parts: list[tuple[Tensor, Tensor, Tensor]]) -> Scores:
    """Chunks follow the row; put their tokens back into the order of the trajectories."""
    logprobs_T, entropies_T = torch.empty(len(tree.targets_T)), torch.empty(len(tree.targets_T))
    for tokens_P, logprobs_P, entropies_P in parts:
        logprobs_T[tokens_P], entropies_T[tokens_P] = logprobs_P, entropies_P
    return Scores(logprobs_T, entropies_T)


def _hidden(model: PreTrainedModel, tree: PrefixTree) -> Tensor:
    """Last hidden states of the predicting positions, [N, D]."""
    output = model.base_model(
        tree.token_ids_L[None], position_ids=tree.positions_L[None], use_cache=False, tree_blocks=tree.blocks
    )
    hidden_ND: Tensor = output.last_hidden_state[0].index_select(0, tree.predictors_N)
    return hidden_ND


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    tree_blocks: tuple[Block, ...],
    scaling: float | None = None,
    dropout: float = 0.0,
    **unsupported: Any,
) -> tuple[Tensor, None]:
    """Attention in each block and to its ancestors. query [1, heads, L, head size] -> [1, L, heads, head size]."""
    asked = sorted(name for name in ("softcap", "sliding_window", "s_aux") if unsupported.get(name) is not None)
    if asked or dropout or attention_mask is not None:
        needs = ", ".join(asked) or "dropout or a mask of its own"
        raise ConfigError(f"this model's attention needs {needs}, which the trainer does not know; choose another")
    grouped = query.shape[1] != key.shape[1]
    parts: list[Tensor] = []
    for block in tree_blocks:
        whole = block.mask_QK is None
        k = key[:, :, block.start : block.end] if whole else key.index_select(2, block.keys_K)
        v = value[:, :, block.start : block.end] if whole else value.index_select(2, block.keys_K)
        parts.append(
            functional.scaled_dot_product_attention(
                query[:, :, block.start : block.end],
                k,
                v,
                attn_mask=block.mask_QK,
                is_causal=whole,
                scale=scaling,
                enable_gqa=grouped,
            )
        )
    return torch.cat(parts, dim=2).transpose(1, 2), None


AttentionInterface.register(_ATTENTION, _attend)
