from hypothesis import given
from hypothesis import strategies as st

from dora_rl.train.batch import Packer, score_group
from dora_rl.train.tree import build_tree


def size(groups):
    return build_tree([group.members for group in groups], share=True).num_tokens


@given(st.integers(0, 10_000), st.integers(1, 150))
def test_micro_batches_hold_whole_groups_in_order_of_arrival_within_the_budget(ragged_groups, seed, budget):
    groups = [score_group(group, trained_version=0)[1] for group in ragged_groups(seed, groups=6)]
    packer = Packer(budget=budget, share=True)
    micro_batches = [batch for group in groups for batch in packer.add(group)] + packer.flush()
    assert [group for batch in micro_batches for group in batch] == groups
    assert all(len(batch) == 1 or size(batch) <= budget for batch in micro_batches)


def test_a_micro_batch_is_given_out_as_soon_as_it_is_full(make_group):
    first, second = (score_group(make_group(i), trained_version=0)[1] for i in range(2))
    packer = Packer(budget=size([first]), share=True)
    assert packer.add(first) == [[first]]
    assert packer.add(second) == [[second]]
    assert packer.flush() == []


def test_the_loss_never_sees_a_member_without_reward(make_group):
    group = make_group(answers=[(8, 2), (9, 2), (10, 2)], rewards=(1.0, None, 0.0), version=3)
    advantages, scored = score_group(group, trained_version=5)
    assert advantages[1] is None
    assert scored is not None
    assert scored.members == (group[0], group[2])
    assert (scored.completion_tokens, scored.staleness) == (4, 2)


def test_a_group_without_spread_has_advantages_but_nothing_to_learn_from(make_group):
    assert score_group(make_group(rewards=(0.4, 0.4)), trained_version=0) == ([0.0, 0.0], None)
