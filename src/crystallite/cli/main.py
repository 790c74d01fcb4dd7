"""The `crystallite` command: the table of commands as a parser, and one line for whatever goes wrong."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import crystallite
from crystallite.cli.commands import COMMANDS
from crystallite.cli.options import Command, Option, imported
from crystallite.core.errors import CrystalliteError, InvalidOption

__all__ = ["main"]

_TAKES: dict[str, dict[str, Any]] = {
    "many": {"nargs": "+"},
    "arguments": {"nargs": "+"},
    "repeated": {"action": "append"},
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0 on success, 2 with one line on standard error when the input is bad.

    1 when there was nothing to do, when a model failed its validation, or when the reader of our output has left; 130
    when the user interrupted it.
    """
    given = vars(_parser().parse_args(arguments))
    command = COMMANDS[given.pop("command")]
    try:
        command.check(given)
        code: int = imported(command.run)(argparse.Namespace(**command.own(given)), command.keywords(given))
        return code
    except BrokenPipeError:  # the reader of our output has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (CrystalliteError, OSError) as error:
        message = command.reworded(str(error)) if isinstance(error, InvalidOption) else str(error)
        print(f"crystallite: {' '.join(message.split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("crystallite: interrupted", file=sys.stderr)
        return 130


class _Parser(argparse.ArgumentParser):
    """Bad arguments are one line that names the nearest good one."""

    def error(self, message: str) -> NoReturn:
        wrong = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)|unrecognized arguments: (--[^\s=]+)", message)
        if wrong:
            known = re.findall(r"[\w-]+", wrong[2]) if wrong[2] else list(self._option_string_actions)
            near = difflib.get_close_matches(wrong[1] or wrong[3], known, 1)
            message += f"; did you mean {near[0]}?" if near else ""
        self.exit(2, f"crystallite: {message} (see {self.prog} --help)\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """A command's own parser refuses what it does not know: it can name the nearest."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="crystallite",
        description="Take trained neural networks apart along the structure that training left in them.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"crystallite {crystallite.__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", dest="command")
    for command in COMMANDS.values():
        _add(commands, command)
    return parser


def _add(commands: Any, command: Command) -> None:
    parser = commands.add_parser(
        command.name,
        help=command.help,
        description=command.description,
        epilog=f"example:\n{command.example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for option in command.options:
        parser.add_argument(*([option.name] if option.positional else [option.word]), **_argument(option))


def _argument(option: Option) -> dict[str, Any]:
    """What argparse wants to know; without a default, so that only what was given comes out."""
    said: dict[str, Any] = {"help": option.described.replace("%", "%%")}
    if not option.positional:
        said |= {"default": argparse.SUPPRESS, "required": option.required, "dest": option.key}
    if option.takes == "nothing":
        return said | {"action": "store_const", "const": option.value}
    choices = {"choices": option.choices} if option.choices else {}
    return said | {"type": option.type, "metavar": option.metavar} | choices | _TAKES.get(option.takes, {})
