"""The picture of one or more runs: what was learned, which versions were alive, and where the time went."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")  # draws into files; no screen is needed

from matplotlib import pyplot
from matplotlib.ticker import MaxNLocator

from dora_rl.obs.console import staleness_totals
from dora_rl.obs.folder import RunFolder


def plot_runs(runs: Sequence[Path], out: Path) -> None:
    """Draw finished runs of the same configuration over each other. Raises ValueError when one has no iteration."""
    lines = {run.name: RunFolder(run).read_metrics() for run in runs}
    empty = [name for name, metrics in lines.items() if not metrics]
    if empty:
        raise ValueError(f"no iterations in {', '.join(empty)}; name folders of finished runs")
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 7), layout="constrained")
    for index, (run, (name, metrics)) in enumerate(zip(runs, lines.items(), strict=True)):
        color = f"C{index}"
        _reward(axes[0, 0], metrics, RunFolder(run).read_eval(), name, color)
        _versions(axes[0, 1], metrics, color)
        _staleness(axes[1, 0], metrics, index, len(runs), color)
        _time(axes[1, 1], metrics, color)
    axes[0, 0].legend(fontsize="small")
    for axis in axes.flat:
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.savefig(out, dpi=120)
    pyplot.close(figure)


def _reward(axis: Any, metrics: Sequence[Any], evaluations: Sequence[Any], name: str, color: str) -> None:
    axis.plot([m["iteration"] for m in metrics], [m["reward/mean"] for m in metrics], color=color, alpha=0.5)
    for sampling, marker in (("sampled", "o"), ("greedy", "s")):
        held_out = [line for line in evaluations if line["sampling"] == sampling]
        axis.errorbar(
            [line["iteration"] for line in held_out],
            [line["score"] for line in held_out],
            yerr=[line["stderr"] or 0.0 for line in held_out],
            color=color,
            marker=marker,
            linestyle="none",
            capsize=3,
            label=f"{name}, held-out {sampling}",
        )
    axis.set(title="Reward: training (line), held-out (points)", xlabel="iteration", ylabel="share of right answers")


def _versions(axis: Any, metrics: Sequence[Any], color: str) -> None:
    iterations = [m["iteration"] for m in metrics]
    axis.step(iterations, [m["versions/alive_max"] for m in metrics], where="mid", color=color, alpha=0.4)
    axis.step(iterations, [m["versions/running_max"] for m in metrics], where="mid", color=color)
    axis.set(
        title="Versions running at once (dark), alive (light)", xlabel="iteration", ylabel="versions", ylim=(0, None)
    )


def _staleness(axis: Any, metrics: Sequence[Any], index: int, runs: int, color: str) -> None:
    counts = staleness_totals(metrics)
    width = 0.8 / runs
    axis.bar([s + (index - (runs - 1) / 2) * width for s in counts], list(counts.values()), width=width, color=color)
    axis.set(title="Staleness of trained groups", xlabel="versions", ylabel="groups", xticks=sorted(counts))


def _time(axis: Any, metrics: Sequence[Any], color: str) -> None:
    iterations = [m["iteration"] for m in metrics]
    axis.plot(iterations, [m["time/iteration_s"] for m in metrics], color=color)
    axis.plot(iterations, [m["time/exposed_rollout_s"] for m in metrics], color=color, linestyle=":")
    axis.set(title="Iteration time, of it waiting for answers (dotted)", xlabel="iteration", ylabel="s", ylim=(0, None))
