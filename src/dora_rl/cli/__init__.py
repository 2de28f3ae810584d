"""The command line. Wiring only: every command's work stands in the module that it calls.

Exit status: 0 done and true; 1 the run failed or an audit found a broken promise; 2 bad input, before anything
started; 130 interrupted by the user.
"""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from dora_rl import __version__
from dora_rl.cli.guardian import guarded
from dora_rl.config import Config, ConfigError, load_config


def run() -> int:
    """What the shell calls."""
    return guarded(main)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    os.environ.setdefault("TQDM_DISABLE", "1")  # the terminal belongs to the command
    try:
        status: int = arguments.run(arguments)
    except ConfigError as error:
        print(f"dora-rl: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # who reads has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        print(f"dora-rl: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("dora-rl: interrupted", file=sys.stderr)
        return 130
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dora-rl", description="Reinforcement learning that never waits for the longest answer."
    )
    parser.add_argument("--version", action="version", version=f"dora-rl {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser(
        "train",
        help="train a model as a configuration says",
        epilog="Example: dora-rl train examples/quickstart.toml --set run.seed=1 --set run.iterations=5. Every setting "
        "stands in src/dora_rl/config.py. Exit status: 0 done, 1 failed, 2 bad input, 130 interrupted.",
    )
    train.add_argument("config", type=Path, metavar="CONFIG.toml", help="a TOML file, like those in examples/")
    train.add_argument(
        "--set", action="append", default=[], metavar="section.key=VALUE", help="change one setting (may be repeated)"
    )
    train.add_argument("--run-dir", type=Path, metavar="DIR", help="the run's own folder (default: runs/NAME-TIME)")
    train.add_argument("--quiet", action="store_true", help="print the result alone")
    train.set_defaults(run=_train)

    data = commands.add_parser("data", help="show the first prompts as the model will see them")
    data.add_argument("config", type=Path, metavar="CONFIG.toml")
    data.add_argument(
        "--set", action="append", default=[], metavar="section.key=VALUE", help="change one setting (may be repeated)"
    )
    data.add_argument("--rows", type=_count, default=3, metavar="N", help="how many (default: 3)")
    data.set_defaults(run=_data)

    audit = commands.add_parser("audit", help="prove from a run's folder that it kept its promises")
    audit.add_argument("folder", type=Path, metavar="RUN")
    audit.add_argument(
        "--recompute",
        type=_count,
        default=0,
        metavar="N",
        help="score N answers again, under kept weights (default: none)",
    )
    audit.add_argument("--json", action="store_true", help="print the report as JSON")
    audit.set_defaults(run=_audit)

    bench = commands.add_parser("bench", help="measurements").add_subparsers(required=True, metavar="BENCHMARK")
    core = bench.add_parser("core", help="events per second of the scheduler alone")
    core.add_argument("run_folder", type=Path, nargs="?", metavar="RUN", help="take the event mix of this run")
    core.add_argument("--json", action="store_true", help="print the figures as JSON")
    core.set_defaults(run=_bench_core)
    migration = bench.add_parser("migration", help="first token after a move, with KV carried and computed again")
    migration.add_argument("config", type=Path, nargs="?", metavar="CONFIG.toml", help="model and engine settings")
    migration.add_argument("--json", action="store_true", help="print the figures as JSON")
    migration.set_defaults(run=_bench_migration)
    strategies = bench.add_parser("strategies", help="all strategies under one law of durations")
    strategies.add_argument("config", type=Path, metavar="CONFIG.toml", help="with a [pace] section")
    strategies.add_argument("--run-dir", type=Path, metavar="DIR", help="also measure with real engines, here")
    strategies.add_argument("--repeats", type=_count, default=3, metavar="N", help="runs of each (default: 3)")
    strategies.add_argument("--only", nargs="*", default=[], metavar="NAME", help="these contenders only")
    strategies.add_argument(
        "--ratios",
        type=float,
        nargs="*",
        default=[],
        metavar="X",
        help="also search where training costs X times as much, in the simulator (a minute for each X)",
    )
    strategies.add_argument("--json", action="store_true", help="print rows, runs, sweep and ratios as JSON")
    strategies.set_defaults(run=_bench_strategies)
    return parser


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"a number from 0 on is needed, got {text!r}")
    return int(text)


def _train(arguments: argparse.Namespace) -> int:
    config: Config = load_config(arguments.config, arguments.set)
    # Only here: they import torch, Ray and vLLM, and a mistake in the configuration should not wait for that.
    from dora_rl.core.messages import ProtocolError
    from dora_rl.run.launch import default_folder, prepare, train
    from dora_rl.run.screen import open_screen
    from dora_rl.run.stopping import Stopping
    from dora_rl.wire.errors import RemoteError

    with Stopping() as stopping, open_screen(quiet=arguments.quiet) as screen:
        run = prepare(config, arguments.run_dir or default_folder(config), screen.line)
        try:
            return asyncio.run(train(run, screen, stopping))
        except (RemoteError, ProtocolError, OSError) as error:  # a full disk is OSError
            print(f"dora-rl: the run failed: {error}", file=sys.stderr)
            return 1


def _data(arguments: argparse.Namespace) -> int:
    config = load_config(arguments.config, arguments.set)
    from dora_rl.cli.data import show_data

    show_data(config, arguments.rows, _say)
    return 0


def _audit(arguments: argparse.Namespace) -> int:
    from dora_rl.audit.history import AuditError
    from dora_rl.audit.judge import audit_run

    try:
        report = audit_run(arguments.folder, arguments.recompute)
    except AuditError as error:
        raise ConfigError(str(error)) from error
    print(report.dumps() if arguments.json else report.to_text())
    return 0 if report.verdict == "pass" else 1


def _bench_core(arguments: argparse.Namespace) -> int:
    from dora_rl.bench.core import bench_core
    from dora_rl.obs.journal import JournalError

    try:
        result = bench_core(arguments.run_folder)
    except JournalError as error:
        raise ConfigError(str(error)) from error
    print(json.dumps(result.to_json()) if arguments.json else result.to_text())
    return 0


def _bench_migration(arguments: argparse.Namespace) -> int:
    from dora_rl.bench.migration import bench_migration, to_json, to_text
    from dora_rl.wire.errors import RemoteError

    try:
        points = bench_migration(load_config(arguments.config) if arguments.config else None)
    except RemoteError as error:
        print(f"dora-rl: the benchmark failed: {error}", file=sys.stderr)
        return 1
    print(json.dumps(to_json(points)) if arguments.json else to_text(points))
    return 0


def _bench_strategies(arguments: argparse.Namespace) -> int:
    from dora_rl.bench.strategies import bench_strategies

    say = (lambda text: print(text, file=sys.stderr, flush=True)) if arguments.json else _say
    result = bench_strategies(
        load_config(arguments.config),
        folder=arguments.run_dir,
        repeats=arguments.repeats,
        only=arguments.only,
        ratios=arguments.ratios,
        say=say,
    )
    if arguments.json:
        print(json.dumps(result))
    return 0


def _say(text: str) -> None:
    print(text, flush=True)
