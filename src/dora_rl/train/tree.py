"""Lays the answers of several groups out in one row, every shared prefix once.

A tree of tokens: a node is a token in its context, so a prompt is computed once for its group, worked examples once for
all groups that show them, and the common beginning of two answers once for both. Knows tokens; knows nothing of models.

Shapes: L tokens in the row, N of them predict something, T completion tokens, Q queries and K keys of one block.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


class Answer(Protocol):
    @property
    def prompt_token_ids(self) -> tuple[int, ...]: ...
    @property
    def completion_token_ids(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class TokenPair:
    """The least that is an answer."""

    prompt_token_ids: tuple[int, ...]
    completion_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """Row positions [start, end) and what they attend to."""

    start: int
    end: int
    keys_K: Tensor
    """Row positions, ascending: the block itself and its ancestors."""

    mask_QK: Tensor | None
    """True where the key is the query itself or one of its ancestors. None: an unshared chain, plainly causal."""


@dataclass(frozen=True, slots=True)
class PrefixTree:
    token_ids_L: Tensor
    positions_L: Tensor
    """Depth in the tree: position ids restart after a shared prefix."""

    blocks: tuple[Block, ...]
    predictors_N: Tensor
    """Row positions whose output predicts some completion token; each once."""

    predictor_T: Tensor
    """For each completion token, trajectory after trajectory: which of the N predicts it."""

    targets_T: Tensor

    @property
    def num_tokens(self) -> int:
        """What a forward pass computes."""
        return len(self.token_ids_L)


def build_tree(groups: Sequence[Sequence[Answer]], *, share: bool) -> PrefixTree:
    """Completion tokens keep the order of groups, members and positions. Without `share` every answer is its own chain.

    The last completion token predicts nothing and is not computed.
    """
    nodes = _Nodes(share=share)
    blocks: list[Block] = []
    predictors: list[int] = []
    targets: list[int] = []
    # A block is what one group adds to the row; without sharing, what one answer adds.
    for family in groups if share else [[member] for group in groups for member in group]:
        start = len(nodes.token_ids)
        for member in family:
            path = nodes.insert(_context(member))
            n = len(member.completion_token_ids)
            predictors += path[len(path) - n :] if n else ()
            targets += member.completion_token_ids
        if len(nodes.token_ids) > start:
            blocks.append(nodes.block(start))
    unique, inverse = np.unique(np.asarray(predictors, dtype=np.int64), return_inverse=True)
    return PrefixTree(
        token_ids_L=torch.tensor(nodes.token_ids, dtype=torch.long),
        positions_L=torch.tensor(nodes.depths, dtype=torch.long),
        blocks=tuple(blocks),
        predictors_N=torch.from_numpy(unique),
        predictor_T=torch.from_numpy(inverse.astype(np.int64)),
        targets_T=torch.tensor(targets, dtype=torch.long),
    )


def _context(member: Answer) -> tuple[int, ...]:
    if not member.prompt_token_ids:
        raise ValueError("an answer needs a prompt of one token or more, got none; mend the data")
    return (*member.prompt_token_ids, *member.completion_token_ids)[:-1] if member.completion_token_ids else ()


class _Nodes:
    """The tree while it grows. A parent always stands before its children in the row."""

    def __init__(self, *, share: bool) -> None:
        self.token_ids: list[int] = []
        self.depths: list[int] = []
        self._parents: list[int] = []
        self._children: dict[tuple[int, int], int] = {}
        self._share = share

    def insert(self, token_ids: Sequence[int]) -> list[int]:
        """The row position of every token of this context, old ones reused."""
        path: list[int] = []
        parent = -1
        for depth, token in enumerate(token_ids):
            node = self._children.get((parent, token)) if self._share else None
            if node is None:
                node = len(self.token_ids)
                self.token_ids.append(token)
                self.depths.append(depth)
                self._parents.append(parent)
                self._children[parent, token] = node
            path.append(node)
            parent = node
        return path

    def block(self, start: int) -> Block:
        """Everything from `start` on. Only its own ancestors are keys, so attention never grows with the whole row."""
        end = len(self.token_ids)
        own = range(start, end)
        if self._parents[start] == -1 and all(self._parents[node] == node - 1 for node in own[1:]):
            return Block(start, end, torch.arange(start, end), None)
        roots = sorted({self._parents[node] for node in own} - set(own) - {-1})
        outside = sorted({ancestor for root in roots for ancestor in self._ancestry(root)})
        column = {node: i for i, node in enumerate([*outside, *own])}
        mask = np.zeros((end - start, len(column)), dtype=np.bool_)
        for node in own:
            row, parent = node - start, self._parents[node]
            if parent >= start:
                mask[row] = mask[parent - start]
            else:
                mask[row, [column[ancestor] for ancestor in self._ancestry(parent)]] = True
            mask[row, column[node]] = True
        return Block(start, end, torch.tensor(list(column), dtype=torch.long), torch.from_numpy(mask))

    def _ancestry(self, node: int) -> Iterator[int]:
        while node != -1:
            yield node
            node = self._parents[node]
