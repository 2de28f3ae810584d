"""Scores stored trajectories again, with plain `transformers`, under the kept weights of the run.

The recorded log-probabilities must belong to the version that is stamped on the trajectory and to no other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import torch
from safetensors import SafetensorError
from torch import Tensor

from dora_rl.audit.report import Recomputed
from dora_rl.config import Config
from dora_rl.train.score import score, unfit
from dora_rl.wire.rollouts import Trajectory
from dora_rl.wire.weights import load_saved

OWN_LIMIT = 1e-3
"""Largest difference per token under the own version, in nats: float32 engine against float32 model give 1e-4."""

CONTRAST = 10.0
"""How many times larger the mean difference under any other version has to be."""

OTHERS_NEEDED = 2
"""Other versions with different weights, below which the comparison shows nothing."""


@dataclass(kw_only=True, slots=True)
class Again:
    """What scoring again has shown."""

    recomputed: list[Recomputed] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def recompute_logprobs(
    folder: Path, config: Config, trajectories: Sequence[Trajectory], count: int, *, made: int
) -> Again:
    """Score `count` trajectories, drawn by the run's seed and spread over the kept versions; and what is wrong.

    `made`: the versions that the run published, kept or not.
    """
    again = Again()
    kept = {int(path.name): path for path in (folder / "weights").glob("*") if path.name.isdecimal()}
    # One that lies in two places is the same twice, or has been found by C2.
    once = list({one.rollout: one for one in trajectories}.values())
    drawn = draw(once, list(kept), count, seed=config.run.seed)
    if len(drawn) < count:
        said = f"recompute: {count} trajectories were asked for, but only {len(drawn)}"
        if len(drawn) == len(once):
            again.notes.append(f"{said} were made")
        else:
            again.problems.append(
                f"{said} belong to the kept versions {sorted(kept)}; ask for fewer, or keep more (audit.keep_versions)"
            )
    try:
        faults = unfit(folder / "model", drawn)
    except (OSError, ValueError) as error:
        again.problems.append(f"recompute: {str(error).partition(chr(10))[0]}")
        return again
    again.problems += [f"recompute: {fault}" for fault in faults.values()]
    drawn = [one for one in drawn if one.rollout not in faults]
    checksums: dict[int, str] = {}
    diffs: dict[int, dict[int, Tensor]] = {one.rollout: {} for one in drawn}
    for version, weights in sorted(kept.items()):
        try:
            facts = load_saved(weights)[0]
            if facts.version != version:
                raise ValueError(f"{weights} says that it holds version {facts.version!r}; restore the folder")
            scores = score(folder / "model", weights, drawn, config.rollout.temperature)
        except (OSError, ValueError, SafetensorError) as error:
            again.problems.append(f"recompute: version {version}: {error}")
            continue
        checksums[version] = facts.checksum
        for one, values in zip(drawn, scores, strict=True):
            diffs[one.rollout][version] = (torch.tensor(values) - torch.tensor(one.logprobs)).abs()
    # A version whose weights could not be read has said what is wrong; its trajectories cannot be compared.
    judge([one for one in drawn if one.version in checksums], checksums, diffs, again, made=made)
    return again


def judge(
    drawn: Sequence[Trajectory],
    checksums: Mapping[int, str],
    diffs: Mapping[int, Mapping[int, Tensor]],
    again: Again,
    *,
    made: int,
) -> None:
    """Compare own and other versions; `diffs`: absolute differences per token, by rollout and version.

    The limit holds for every token. The contrast is taken over all tokens drawn from one version: a single short answer
    may consist of tokens of which every version is equally sure.
    """
    problems = again.problems
    for version in sorted({int(one.version) for one in drawn}):
        of_version = [one for one in drawn if one.version == version]
        others = [other for other in checksums if checksums[other] != checksums[version]]
        if len({checksums[other] for other in others}) < OTHERS_NEEDED:
            said = (
                f"recompute: version {version} can be told from {len(others)} other kept versions with different "
                f"weights, at least {OTHERS_NEEDED} are needed"
            )
            if made > OTHERS_NEEDED:
                problems.append(f"{said}; raise audit.keep_versions")
            else:
                again.notes.append(f"{said}, but the run made only {made} versions in all")
        own_mean = _mean([diffs[one.rollout][version] for one in of_version])
        for other in others:
            mean = _mean([diffs[one.rollout][other] for one in of_version])
            if mean == 0.0 or mean < CONTRAST * own_mean:
                names = sorted(one.rollout for one in of_version)
                problems.append(
                    f"recompute: trajectories {names} of version {version} differ by {mean:.1e} under version {other}, "
                    f"by {own_mean:.1e} under their own; expected {CONTRAST:g} times more under the other"
                )
        for one in of_version:
            own = float(diffs[one.rollout][version].max())
            # Written so that a NaN fails.
            if not own <= OWN_LIMIT:
                problems.append(
                    f"recompute: trajectory {one.rollout} (member {one.member} of group {one.group_id}) differs by "
                    f"{own:.1e} under its own version {version}, at most {OWN_LIMIT:g} is allowed"
                )
            means = {other: float(diffs[one.rollout][other].mean()) for other in others}
            again.recomputed.append(Recomputed(trajectory=one.rollout, version=version, own_max_diff=own, others=means))


def draw(trajectories: Sequence[Trajectory], versions: Sequence[int], count: int, *, seed: int) -> list[Trajectory]:
    """In turn from every version, each time one at random, until there are `count` or no more."""
    rng = Random(seed)
    piles = [[one for one in trajectories if one.version == v and one.completion_token_ids] for v in sorted(versions)]
    for pile in piles:
        pile.sort(key=lambda one: one.rollout)
        rng.shuffle(pile)
    drawn: list[Trajectory] = []
    while len(drawn) < count and any(piles):
        drawn += [pile.pop() for pile in piles if pile][: count - len(drawn)]
    return drawn


def _mean(parts: Sequence[Tensor]) -> float:
    return float(torch.cat(list(parts)).double().mean())
