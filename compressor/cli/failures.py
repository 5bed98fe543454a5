"""What a failure prints on stderr, and its exit code."""

from __future__ import annotations

import os
import sys
import traceback

import click

from compressor.errors import CompressorError, ExitCode

_PIPE_CLOSED = 128 + 13  # as a shell reports a process that SIGPIPE ended


def report(error: CompressorError, *, debug: bool) -> int:
    """Print an error of the user's making, one line for each cause."""
    _trace(error, debug=debug)
    for cause in getattr(error, "errors", (error,)):
        _line(f"error: {cause}")
    return int(error.exit_code)


def usage(error: click.ClickException) -> int:
    """Print what is wrong with the command line."""
    text = error.format_message().rstrip(".")
    context = getattr(error, "ctx", None)
    path = "compress" if context is None else context.command_path
    _line(f"error: {text[:1].lower()}{text[1:]}; see {path} --help")
    return int(ExitCode.BAD_SPEC)


def interrupted() -> int:
    """Say that nothing is lost."""
    _line("interrupted; the same command resumes")
    return int(ExitCode.INTERRUPTED)


def pipe_closed() -> int:
    """Say nothing: whoever read the output has gone."""
    # Python flushes stdout when it exits, and would complain then.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return _PIPE_CLOSED


def internal(error: Exception, *, debug: bool) -> int:
    """Print a failure that nobody foresaw."""
    _trace(error, debug=debug)
    _line(
        f"internal error: {type(error).__name__}: {error}; please report it; "
        "--debug shows the traceback"
    )
    return int(ExitCode.BAD_INPUT)


def _trace(error: Exception, *, debug: bool) -> None:
    if debug:
        click.echo("".join(traceback.format_exception(error)), err=True, nl=False)


def _line(text: str) -> None:
    """Print one line, whatever line breaks a library's message has."""
    click.echo(" ".join(text.split("\n")), err=True)
