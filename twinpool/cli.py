"""The command line: finds the command, reports what is wrong with the flags. Each command lives in a file of its own and is
imported only when it runs, so that ``--help`` and ``status`` stay quick."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

from serving_core.errors import ConfigError, TwinpoolError
from twinpool.config_file import UnknownKey, read_config_file
from twinpool.serve_flags import add_serve_flags
from twinpool.status_flags import add_status_flags

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

_LIKENESS = 0.65  # of two flags, from 0 to 1: below it the one is no slip of the pen for the other


class _Parser(argparse.ArgumentParser):
    """Reports a mistake in one sentence instead of the whole usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: {message}; {self.prog} --help lists what there is\n")


def make_parser() -> argparse.ArgumentParser:
    """The parser of every command and flag."""
    parser = _Parser(prog="twinpool", description="LLM server with prefill and decode in separate pools.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"twinpool {version('twinpool')}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    add_serve_flags(commands.add_parser("serve", help="start a server", allow_abbrev=False))
    add_status_flags(commands.add_parser("status", help="show a running server's workers", allow_abbrev=False))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status: 0, 1 when it failed, 2 when it was asked for something impossible, 130 when
    Ctrl-C ended it before it was ready for that."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    parser = make_parser()
    try:
        flags = _parse(parser, arguments)
        if flags.command == "serve" and flags.config is not None:
            flags = _parse_with_config(Path(flags.config), arguments)
        return _run(flags)
    except TwinpoolError as error:
        print(f"twinpool: {_printable(str(error))}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _printable(text: str) -> str:
    """``text`` on one line: it may quote a file, which names a tensor as it likes."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def _parse(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    flags, unknown = parser.parse_known_args(argv)
    if unknown:
        raise ConfigError(_describe_unknown(parser, flags.command, unknown[0]))
    return flags


def _parse_with_config(path: Path, argv: list[str]) -> argparse.Namespace:
    """The file's flags first, so that those on the command line win."""
    parser = make_parser()
    serve = _subparser(parser, "serve")
    known = {
        option.removeprefix("--"): action.nargs != 0
        for action in serve._actions
        for option in action.option_strings
        if option.startswith("--") and option not in ("--help", "--config")
    }
    try:
        file = read_config_file(path, flags=known, repeatable=_repeatable(serve), opposites=_opposites(serve))
    except UnknownKey as error:
        raise ConfigError(f"{error}; {_suggest('serve', f'--{error.key}', [f'--{name}' for name in known])}") from error
    if file.model is not None:
        serve.set_defaults(model=file.model)
    after_command = argv.index("serve") + 1
    return _parse(parser, [*argv[:after_command], *file.arguments, *argv[after_command:]])


def _repeatable(parser: argparse.ArgumentParser) -> set[str]:
    lists = (action for action in parser._actions if isinstance(action, argparse._AppendAction))
    return {option.removeprefix("--") for action in lists for option in action.option_strings}


def _opposites(parser: argparse.ArgumentParser) -> dict[str, str]:
    """Of each switch that another one turns off, that other one."""
    off = {action.dest: action for action in parser._actions if isinstance(action, argparse._StoreFalseAction)}
    return {
        action.option_strings[0].removeprefix("--"): off[action.dest].option_strings[0].removeprefix("--")
        for action in parser._actions
        if isinstance(action, argparse._StoreTrueAction) and action.dest in off
    }


def _run(flags: argparse.Namespace) -> int:
    if flags.command == "serve":
        from twinpool.serve_command import serve_command

        return serve_command(flags)
    from twinpool.status_command import status_command

    return status_command(flags)


def _describe_unknown(parser: argparse.ArgumentParser, command: str, argument: str) -> str:
    name = argument.partition("=")[0]
    if not name.startswith("-"):
        return f"{command} takes no further argument, but got {argument!r}"
    known = [option for action in _subparser(parser, command)._actions for option in action.option_strings]
    return f"unknown flag {name}; {_suggest(command, name, [option for option in known if option.startswith('--')])}"


def _suggest(command: str, name: str, known: list[str]) -> str:
    nearest = difflib.get_close_matches(name, known, n=1, cutoff=_LIKENESS)
    return f"the nearest is {nearest[0]}" if nearest else f"twinpool {command} --help lists what there is"


def _subparser(parser: argparse.ArgumentParser, command: str) -> argparse.ArgumentParser:
    (commands,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    subparser: argparse.ArgumentParser = commands.choices[command]
    return subparser


if __name__ == "__main__":
    sys.exit(main())
