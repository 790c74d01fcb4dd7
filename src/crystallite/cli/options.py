"""What a command of the table says about itself: its options, and how they become words and keywords."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from crystallite.core.errors import InvalidOption

__all__ = ["Command", "Option", "imported"]


@dataclass(frozen=True)
class Option:
    """An option of a command: a keyword of the function that the command calls, or one of the command line's own."""

    name: str  # the function's keyword
    help: str  # a full phrase; the default is added to it
    type: Callable[[str], Any] = str
    default: Any = None  # the function's, to be shown; only those of the command line's own are ever filled in
    choices: tuple[str, ...] = ()
    metavar: str | None = None
    takes: str = "one"  # "one" value, "many" in a row, "repeated", "nothing"; "argument" or "arguments" if positional
    value: Any = True  # what an option that takes nothing stands for
    flag: str = ""  # where the command line has another word than the keyword
    own: bool = False  # of the command line alone, not a keyword of the function
    required: bool = False
    must_be: str = ""  # a path: a file that is "there", a file or folder that is "readable", or "new"
    needs: str = ""  # the option without which this one says nothing
    excludes: tuple[str, ...] = ()

    @property
    def positional(self) -> bool:
        return self.takes.startswith("argument")

    @property
    def word(self) -> str:
        """As the user writes it."""
        if self.positional:
            return self.metavar or self.name
        return self.flag or f"--{self.name.replace('_', '-')}"

    @property
    def key(self) -> str:
        """Its name in what the parser returns: words are unique, keywords need not be."""
        return self.name if self.positional else self.word.removeprefix("--").replace("-", "_")

    @property
    def described(self) -> str:
        """The phrase for the help, with the default."""
        if self.default is None or self.default == () or self.takes == "nothing":
            return self.help
        default = "all" if self.default == ("*",) else f"{self.default}"
        return f"{self.help} (default: {default})"


@dataclass(frozen=True)
class Command:
    """A command: what it calls, what it takes, and an example."""

    name: str
    help: str
    description: str
    options: tuple[Option, ...]
    run: str  # module:function that is called with the values of own options, and the keywords that were given
    functions: tuple[str, ...] = ()  # module:function whose keywords the options are
    one_of: tuple[str, ...] = ()  # words of which exactly one must be given
    example: str = ""

    def check(self, given: dict[str, Any]) -> None:
        """Refuse options that do not go together and paths that cannot be meant, before anything heavy is imported."""
        named = {option.word: option for option in self.options if option.key in given}
        if self.one_of and len(chosen := [word for word in self.one_of if word in named]) != 1:
            got = " and ".join(chosen) or "none of them"
            raise InvalidOption(f"pass exactly one of {', '.join(self.one_of)}; got {got}")
        for word, option in named.items():
            if option.needs and option.needs not in named:
                raise InvalidOption(f"{word} needs {option.needs}")
            for other in option.excludes:
                if other in named:
                    raise InvalidOption(f"{word} and {other} do not go together; pass one of them")
            value = given[option.key]
            for path in value if isinstance(value, list) else [value]:
                if option.must_be == "new" and Path(path).exists():
                    raise InvalidOption(f"{path}: exists already; choose another name or remove it")
                if option.must_be == "there" and not Path(path).is_file():
                    raise InvalidOption(f"{path}: no such file")
                if option.must_be == "readable" and not Path(path).exists():
                    raise InvalidOption(f"{path}: no such file or folder")

    def keywords(self, given: dict[str, Any]) -> dict[str, Any]:
        """What was given of the function's own keywords, and nothing else."""
        return {option.name: given[option.key] for option in self.options if not option.own and option.key in given}

    def own(self, given: dict[str, Any]) -> dict[str, Any]:
        """The command line's own options: as given, or their defaults."""
        return {option.key: given.get(option.key, option.default) for option in self.options if option.own}

    def reworded(self, message: str) -> str:
        """An error of the function in the words of the command line: `polish_steps=` as `--polish-steps`."""
        words = {option.name: option.word for option in self.options if not option.positional and not option.flag}
        names = "|".join(sorted(words, key=len, reverse=True))
        if not names:
            return message

        def spelled(found: re.Match[str]) -> str:
            value = (found["value"] or "").strip("\"'")
            return words[found["name"]] + (f" {value}" if value not in ("", "True") else "")

        message = re.sub(rf"\b(?<![-./])(?P<name>{names})=(?P<value>\"\w*\"|'\w*'|[\w.]*\w)?", spelled, message)
        return re.sub(rf"(^|; )({names})(?=:| must | needs )", lambda found: found[1] + words[found[2]], message)


def imported(path: str) -> Any:
    """What `module:name` or `module:name.name` stands for.

    >>> imported("crystallite.core.errors:InvalidOption.__name__")
    'InvalidOption'
    """
    module, _, names = path.partition(":")
    found: Any = import_module(module)
    for name in names.split("."):
        found = getattr(found, name)
    return found
