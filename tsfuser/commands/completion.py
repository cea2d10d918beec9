"""`tsfuser completion SHELL`: what makes the Tab key complete commands and options of `tsfuser`.

In: bash, zsh or fish. Out: text for the shell's start file. Example, in ~/.bashrc:
`eval "$(tsfuser completion bash)"`.
"""

from __future__ import annotations

import argparse

SUMMARY = "print what makes the Tab key complete `tsfuser` in a shell"

_BASH = """_tsfuser() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} options
  case ${{COMP_WORDS[1]}} in
{cases}
    *) options="{commands}" ;;
  esac
  [ "$COMP_CWORD" -eq 1 ] && options="{commands}"
  COMPREPLY=($(compgen -W "$options" -- "$word") $([ "$COMP_CWORD" -gt 1 ] && compgen -f -- "$word"))
}}
complete -o filenames -F _tsfuser tsfuser
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), metavar="SHELL", help="bash, zsh or fish")


def command(chosen: argparse.Namespace) -> int:
    found = _words(chosen.parser)
    print(_fish(found) if chosen.shell == "fish" else _bash(found, chosen.shell == "zsh"), end="")
    return 0


def _words(parser: argparse.ArgumentParser) -> dict[str, tuple[str, list[str]]]:
    """Command -> what it does, and its options and fixed words."""
    (commands,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    about = {action.dest: action.help or "" for action in commands._choices_actions}
    found = {}
    for name, inner in commands.choices.items():
        words = [option for action in inner._actions for option in action.option_strings[-1:]]
        words += [str(word) for action in inner._actions for word in (action.choices or ())]
        found[name] = (about[name], words)
    return found


def _bash(found: dict[str, tuple[str, list[str]]], zsh: bool) -> str:
    cases = "\n".join(f'    {name}) options="{" ".join(words)}" ;;' for name, (_, words) in found.items())
    text = _BASH.format(cases=cases, commands=" ".join(found))
    return f"autoload -U +X bashcompinit && bashcompinit\n{text}" if zsh else text


def _fish(found: dict[str, tuple[str, list[str]]]) -> str:
    lines = []
    for name, (about, words) in found.items():
        said = about.replace("\\", "\\\\").replace("'", "\\'")
        lines.append(f"complete -c tsfuser -n __fish_use_subcommand -f -a {name} -d '{said}'")
        seen = f"-n '__fish_seen_subcommand_from {name}'"
        lines += [
            f"complete -c tsfuser {seen} -l {word[2:]}" if word.startswith("--")
            else f"complete -c tsfuser {seen} -a {word}"
            for word in words
        ]  # fmt: skip
    return "\n".join(lines) + "\n"
