"""One reward function as each of four other systems would call it; dora-rl calls them as they are.

PYTHONPATH=examples .venv/bin/dora-rl train my.toml --set "reward.functions=['foreign_rewards:compute_score']"
"""

import torch


def brief(completions, **kwargs):
    """TRL: all answers at once; of a chat each is a list with the assistant's turn."""
    texts = [completion if isinstance(completion, str) else completion[0]["content"] for completion in completions]
    return [1.0 / (1.0 + len(text)) for text in texts]


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """verl: one answer at a time."""
    return {"score": sum(character.isdigit() for character in solution_str) / max(1, len(solution_str))}


def digits_reward_fn(prompt, completions, prompt_ids, completion_ids, answer, **kwargs):
    """AReaL: one answer at a time, with the row's columns."""
    return len(set(completion_ids)) / max(1, len(completion_ids)) + float(str(answer) in completions)


def reward_func(queries, prompts, labels, **kwargs):
    """OpenRLHF: prompt and answer as one text."""
    rewards = torch.tensor([float(len(query) - len(prompt)) for query, prompt in zip(queries, prompts, strict=True)])
    return {"rewards": rewards, "scores": rewards.clamp(0, 1), "extra_logs": {}}
