"""The `slivertune` command."""

from __future__ import annotations

import argparse
import logging
import re
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from slivertune import __version__
from slivertune.core.masking import learn, masked
from slivertune.core.option_parser import OptionParser
from slivertune.core.presets import example_names, preset_names, preset_path, run_file_names
from slivertune.core.terminal_text import print_line
from slivertune.core.typed_command import naming_options, typed_command

_FAILED = 1
_BAD_ARGUMENTS = 2
_INTERRUPTED = 130
_LONG_NUMBER = re.compile(r"\d{100,}")


@naming_options()
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Arguments without the program's name. By default, the arguments of this process.

    Returns:
        The exit code: 0 for success, 1 for a failure, 2 for bad arguments, 130 after Ctrl-C.
    """
    # `deepspeed` puts the local rank first. The environment has it too.
    words = sys.argv[1:] if argv is None else argv
    arguments = [each for each in words if not each.startswith(("--local_rank=", "--local-rank="))]
    learn(arguments)
    _quiet_libraries()
    if argv is None:
        # Trackers publish the command line of their process, so secrets in it are masked.
        sys.argv[1:] = masked(words)
    debug = arguments[:1] == ["--debug"]
    if debug:
        del arguments[0]
    if arguments in (["train", "-h"], ["train", "--help"]):
        from slivertune.training.options.help import help_text

        print(help_text(has_all=False), end="")
        raise SystemExit(0)  # as argparse does
    # `train` has its own parser of two hundred arguments, which imports torch and transformers.
    if arguments[:1] == ["train"]:
        return _train(arguments[1:], debug=debug)
    # `plan` and `compare` have their own parsers too, and import torch.
    reads_itself = arguments[:1] in (["plan"], ["compare"])
    options = (
        argparse.Namespace(command=arguments[0]) if reads_itself else _make_parser().parse_args(arguments or ["-h"])
    )
    try:
        _act(options, arguments[1:])
    except KeyboardInterrupt:
        output = getattr(options, "output_dir", None)
        there = "is whole" if output is not None and Path(output).exists() else "was not written"
        end, command = "" if output is None else f"; {output} {there}", tuple[str, ...]()
        if options.command == "compare":
            end, command = "; continue with the missing runs:", typed_command(*arguments)
        _say(f"slivertune {options.command}: interrupted{end}", command)
        return _INTERRUPTED
    except Exception as error:
        bad_arguments = (ValueError, FileExistsError, *(() if reads_itself else (FileNotFoundError,)))
        code = _BAD_ARGUMENTS if isinstance(error, bad_arguments) else _FAILED
        return _complain(options.command, error, code, debug=debug)
    return 0


def _act(options: argparse.Namespace, arguments: list[str]) -> None:
    """Run a command other than `train`, and import its modules only now.

    `plan` and `compare` parse their own arguments.
    """
    if options.command == "path":
        print(preset_path(options.preset))
    elif options.command == "plan":
        from slivertune.planning.command import run_plan
        from slivertune.training.command_line.plan_words import parse_plan_arguments

        run_plan(parse_plan_arguments(arguments))
    elif options.command == "compare":
        from slivertune.training.comparison.command import run_compare

        run_compare(arguments)
    elif options.command == "report":
        from slivertune.training.run_report.command import run_report

        print(run_report(Path(options.folder), None if options.output is None else Path(options.output)))
    elif options.command == "merge":
        from slivertune.deltas.merge_command import run_merge

        run_merge(
            options.deltas,
            options.output_dir,
            base=options.model_name_or_path,
            allow_quantized_base=options.allow_quantized_base,
        )
    else:
        from slivertune.deltas.merge_command import run_unmerge

        run_unmerge(options.merged, options.output_dir)


class _CommandParser(OptionParser):
    """Prints a mistyped command's error in one line and exits."""

    def error(self, message: str) -> NoReturn:
        """Print the error and a suggestion, and exit."""
        print_line(f"{self.prog}: error: {self.explain(message)}", sys.stderr)
        self.exit(_BAD_ARGUMENTS)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Report unknown arguments as an error of the command itself, not of its parent parser."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return parsed, unknown


def _make_parser() -> _CommandParser:
    parser = _CommandParser(
        prog="slivertune",
        description="Fine-tune a sliver of a model at a time.",
        epilog="slivertune COMMAND --help lists what a command takes.",
    )
    parser.add_argument("--version", action="version", version=f"slivertune {__version__}")
    parser.add_argument("--debug", action="store_true", help="before the command: show the whole traceback of an error")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    commands.add_parser("train", add_help=False, help="fine-tune a causal language model or a classifier")
    commands.add_parser("plan", add_help=False, help="plan a run's memory and time; find settings that fit a GPU")
    commands.add_parser("compare", add_help=False, help="train on one task by several methods, at an equal budget")
    path = commands.add_parser(
        "path",
        help="print the path of a preset",
        description="Print the path of a preset, as for accelerate launch --config_file $(slivertune path PRESET) ...; "
        f"{', '.join(run_file_names())} are for slivertune train $(slivertune path PRESET) ...",
    )
    presets, examples = ", ".join(preset_names()), ", ".join(example_names())
    path.add_argument(
        "preset",
        metavar="PRESET",
        help=f"{presets} (endings optional), or an example by its whole name: {examples}",
    )
    _add_merge_commands(commands)
    report = commands.add_parser(
        "report",
        help="draw a run: loss, rate, groups, gradient norm, speed, memory",
        description="Draw the log of a run of slivertune train or any Trainer, finished or not, from its folder.",
        allow_abbrev=False,
    )
    report.add_argument("folder", metavar="RUN", help="the run's folder, such as runs/hift")
    report.add_argument("--output", metavar="PNG", help="file to write; report.png in the run's folder by default")
    return parser


def _add_merge_commands(commands: argparse._SubParsersAction[_CommandParser]) -> None:
    merge = commands.add_parser(
        "merge",
        help="add SFT deltas, or a LoRA adapter, to a plain checkpoint",
        description="Write a copy of a checkpoint with SFT deltas, or a LoRA adapter of PEFT, added to its weights.",
    )
    merge.add_argument(
        "deltas",
        nargs="+",
        metavar="DELTAS",
        help="folder with deltas (several are summed), or the folder of one adapter",
    )
    merge.add_argument(
        "--model_name_or_path",
        metavar="BASE",
        help="base: a folder with safetensors files, or the hub id of a model in the cache; by default the base "
        "that the deltas or the adapter name",
    )
    merge.add_argument(
        "--allow_quantized_base",
        action="store_true",
        help="add deltas that were trained over a 4-bit model to the 16-bit one; results are close, not identical",
    )
    unmerge = commands.add_parser(
        "unmerge",
        help="remove merged SFT deltas from a checkpoint",
        description="Write a copy of a merged checkpoint with the base's weights restored, to the bit.",
    )
    unmerge.add_argument("merged", metavar="MERGED", help="folder that `slivertune merge` wrote")
    for command in (merge, unmerge):
        command.add_argument("--output_dir", required=True, metavar="FOLDER", help="folder to write; must not exist")


def _train(argv: list[str], *, debug: bool) -> int:
    from slivertune.training.ranks.coordinator import LaunchCoordinator, SilentError, join_launch

    coordinator = LaunchCoordinator()
    arguments = None
    is_ready = False
    try:
        coordinator = join_launch()
        from slivertune.training.assemble import assemble
        from slivertune.training.command_line.parse import parse_train_arguments
        from slivertune.training.display import make_console, one_voice
        from slivertune.training.run import describe_finished, execute

        console = make_console(quiet=not coordinator.is_first)
        with one_voice(console):
            coordinator.agree_on("arguments", argv)
            arguments = parse_train_arguments(argv, coordinator)
            coordinator.reach(1)
            if arguments.folder.is_finished:
                if coordinator.is_first:
                    print_line(f"slivertune train: {describe_finished(arguments)}", sys.stdout)
                return 0
            run = assemble(arguments, console, coordinator)
            is_ready = True
            coordinator.reach(2)
            execute(run, console)
    except KeyboardInterrupt:
        from slivertune.training.ranks.launchers import is_launched

        if is_launched():  # a launcher sends the signal a second time
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        line, command = "interrupted before anything was trained", list[str]()
        if arguments is not None:
            from slivertune.training.run import describe_interruption

            line, command = describe_interruption(arguments)
        if coordinator.is_first:
            _say(f"slivertune train: {line}", command)
        return _INTERRUPTED
    except SilentError:
        coordinator.await_error_report()
        return _FAILED if is_ready else _BAD_ARGUMENTS
    except Exception as error:
        # Before the run is assembled, such an error means bad arguments. Later, it means that something broke.
        code = _BAD_ARGUMENTS if isinstance(error, (ValueError, FileExistsError)) and not is_ready else _FAILED
        if coordinator.owns_error(str(error)):
            where = coordinator.name if is_ready or not coordinator.is_first else ""
            _complain("train", error, code, debug=debug, where=where)
            coordinator.publish_error(str(error))
        return code
    return 0


def _quiet_libraries() -> None:
    """Silence messages that libraries log at import and that do not matter here."""
    # transformers imports bitsandbytes through peft, and it warns of a 4-bit kernel that nothing here calls.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    # torchao reports its kernels for other GPUs, and registers enums in a way that torch now warns about.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).addFilter(_is_of_use)


def _is_of_use(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    return not text.startswith("Failed to load") and "is an Enum subclass" not in text


def _complain(command: str, error: Exception, code: int, *, debug: bool, where: str = "") -> int:
    if debug:
        print(masked("".join(traceback.format_exception(error))), end="", file=sys.stderr)
    text = _LONG_NUMBER.sub(
        lambda found: f"{found[0][:20]}... ({len(found[0]):,} digits)", " ".join(str(error).split())
    )
    kind = "" if isinstance(error, (ValueError, RuntimeError, OSError)) and text else f"{type(error).__name__}: "
    print_line(f"slivertune {command}: error{where}: {kind}{text}", sys.stderr)
    return code


def _say(line: str, command: Sequence[str] = ()) -> None:
    """Print a line below the text that Ctrl-C left on the screen."""
    print(file=sys.stderr)
    print_line(line, sys.stderr, command=command)
