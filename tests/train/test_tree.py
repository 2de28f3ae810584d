import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_rl.train.tree import PrefixTree, TokenPair, build_tree


def answer(prompt, completion):
    return TokenPair(tuple(prompt), tuple(completion))


tokens = st.integers(0, 2)  # few, so that prefixes are often shared
answers = st.builds(answer, st.lists(tokens, min_size=1, max_size=5), st.lists(tokens, max_size=5))
batches = st.lists(st.lists(answers, min_size=1, max_size=4), max_size=4)


def seen_from(tree: PrefixTree, node: int) -> list[int]:
    """The tokens that this row position attends to, by position: its whole context."""
    (block,) = (block for block in tree.blocks if block.start <= node < block.end)
    row = node - block.start
    keys = block.keys_K[: row + 1] if block.mask_QK is None else block.keys_K[block.mask_QK[row]]
    by_position = sorted(keys.tolist(), key=lambda key: tree.positions_L[key].item())
    assert [tree.positions_L[key].item() for key in by_position] == list(range(len(by_position)))
    return tree.token_ids_L[by_position].tolist()


@given(batches, st.booleans())
def test_every_completion_token_is_predicted_from_its_own_context_and_nothing_else(groups, share):
    tree = build_tree(groups, share=share)
    wanted = [
        ([*member.prompt_token_ids, *member.completion_token_ids[:i]], token)
        for group in groups
        for member in group
        for i, token in enumerate(member.completion_token_ids)
    ]
    predictors = tree.predictors_N[tree.predictor_T].tolist()
    assert [(seen_from(tree, p), t) for p, t in zip(predictors, tree.targets_T.tolist(), strict=True)] == wanted


@given(batches)
def test_a_shared_tree_computes_every_context_once(groups):
    contexts = {
        (*member.prompt_token_ids, *member.completion_token_ids)[:n]
        for group in groups
        for member in group
        if member.completion_token_ids
        for n in range(1, len(member.prompt_token_ids) + len(member.completion_token_ids))
    }
    assert build_tree(groups, share=True).num_tokens == len(contexts)


def test_a_prompt_is_computed_once_for_its_group_and_the_last_token_of_an_answer_not_at_all():
    group = [answer([1, 2, 3], [4, 9]), answer([1, 2, 3], [5, 9])]
    assert build_tree([group], share=True).token_ids_L.tolist() == [1, 2, 3, 4, 5]
    assert build_tree([group], share=False).token_ids_L.tolist() == [1, 2, 3, 4, 1, 2, 3, 5]


def test_a_group_attends_to_the_prefix_that_an_earlier_group_computed():
    tree = build_tree([[answer([1, 2, 3], [9])], [answer([1, 2, 7, 8], [9])]], share=True)
    assert tree.token_ids_L.tolist() == [1, 2, 3, 7, 8]
    assert tree.blocks[1].keys_K.tolist() == [0, 1, 3, 4]


def test_an_end_token_inside_an_answer_is_a_token_like_any_other():
    tree = build_tree([[answer([1], [2, 2, 5, 2])]], share=True)
    assert tree.targets_T.tolist() == [2, 2, 5, 2]


def test_an_empty_answer_adds_nothing():
    assert build_tree([[answer([1, 2], [])]], share=True).num_tokens == 0


def test_an_answer_to_nothing_is_refused():
    with pytest.raises(ValueError, match="a prompt of one token or more"):
        build_tree([[answer([], [1])]], share=True)
