"""`crystallite completion`: a script for the shell, made from the table of commands."""

from __future__ import annotations

import argparse
from typing import Any

from crystallite.cli.commands import COMMANDS
from crystallite.cli.options import Command

__all__ = ["run", "script"]


def run(options: argparse.Namespace, given: dict[str, Any]) -> int:
    """Print the script; 0."""
    print(script(options.shell))
    return 0


def script(shell: str) -> str:
    """Lines for a shell's start-up file; zsh reads those of bash.

    >>> "crystallite analyze" in script("bash"), script("zsh").splitlines()[0]
    (False, 'autoload -U +X compinit && compinit && autoload -U +X bashcompinit && bashcompinit')
    """
    before = "autoload -U +X compinit && compinit && autoload -U +X bashcompinit && bashcompinit\n"
    cases = "\n".join(f"    {_case(command)}" for command in COMMANDS.values())
    return f"""{before if shell == "zsh" else ""}_crystallite() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}} words="" choices=""
  case ${{COMP_WORDS[1]}} in
{cases}
  esac
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "{" ".join(COMMANDS)} --help --version" -- "$current"))
  elif [ "${{current#-}}" != "$current" ]; then
    COMPREPLY=($(compgen -W "$words --help" -- "$current"))
  elif [ -n "$choices" ]; then
    COMPREPLY=($(compgen -W "$choices" -- "$current"))
  else
    COMPREPLY=($(compgen -f -- "$current"))
  fi
}}
complete -o filenames -F _crystallite crystallite"""


def _case(command: Command) -> str:
    words = " ".join(option.word for option in command.options if not option.positional)
    chosen = "".join(
        f" {'*' if option.positional else option.word}) choices='{' '.join(option.choices)}';;"
        for option in command.options
        if option.choices
    )
    choices = f" case $previous in{chosen} esac" if chosen else ""
    return f"{command.name}) words='{words}';{choices};;" if choices else f"{command.name}) words='{words}';;"
