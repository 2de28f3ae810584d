"""A command that could not be carried out, as the event that answers it. What it means is the core's to decide."""

from typing import assert_never

from dora_rl.core import messages as m


def failed(command: m.Command, *, at: float, error: str, saved_tokens: int = 0) -> m.Event:
    """The answer to `command` when it failed with `error`; a segment keeps the tokens that had been reported."""
    match command:
        case m.Load(instance=instance, version=version):
            return m.Loaded(at=at, instance=instance, version=version, error=error)
        case m.Generate():
            return m.Generated(
                at=at,
                rollout=command.rollout,
                segment=command.segment,
                attempt=command.attempt,
                instance=command.instance,
                version=command.version,
                reason="failed",
                num_tokens=saved_tokens,
                error=error,
            )
        case m.Detach(rollout=rollout, attempt=attempt):
            return m.Detached(at=at, rollout=rollout, attempt=attempt, error=error)
        case m.Score(group=group, attempt=attempt):
            return m.Scored(at=at, group=group, attempt=attempt, rewards=(), digest="", error=error)
        case m.Accumulate(iteration=iteration, attempt=attempt, group=group):
            return m.Accumulated(at=at, iteration=iteration, attempt=attempt, group=group, error=error)
        case m.Step(iteration=iteration, attempt=attempt):
            return m.Stepped(at=at, iteration=iteration, attempt=attempt, improved=False, busy_s=0.0, error=error)
        case m.Publish(version=version, attempt=attempt):
            return m.Published(at=at, version=version, attempt=attempt, error=error)
        case m.Close(iteration=iteration):
            return m.Closed(at=at, iteration=iteration, error=error)
        case m.Evaluate(evaluation=evaluation):
            return m.Evaluated(at=at, evaluation=evaluation, error=error)
        case m.Forget(version=version):
            return m.Forgotten(at=at, version=version, error=error)
        case m.Export(version=version):
            return m.Exported(at=at, version=version, error=error)
        case _:
            assert_never(command)


def one_line(error: BaseException) -> str:
    """An exception as one line: its kind where that says something, and its message."""
    text = " ".join(str(error).split())
    name = type(error).__name__
    return f"{name}: {text}" if text and name not in text else text or name
