"""The command line: its commands, and how failures are reported."""

from __future__ import annotations

import errno
import faulthandler
import gc
import os
import sys
import traceback
from collections.abc import Mapping
from contextlib import nullcontext
from importlib import import_module
from typing import Any, NoReturn

import click

from compressor.catalog import raised_by_third_party
from compressor.cli.signals import Termination, asked_to_end
from compressor.errors import (
    CompressorError,
    DataError,
    ExitCode,
    FullDiskError,
    InputError,
    printable,
)
from compressor.progress import quiet_libraries

_RESUMED = ("run", "quantize", "tune", "explain")  # keep what they have finished

# In the order in which a newcomer meets them; each is imported when it is asked for.
COMMANDS: Mapping[str, str] = {
    "init": "compressor.cli.catalog:init",
    "plan": "compressor.cli.run:plan",
    "run": "compressor.cli.run:run",
    "quantize": "compressor.cli.run:quantize",
    "inspect": "compressor.cli.inspect:inspect",
    "tune": "compressor.cli.tune:tune",
    "explain": "compressor.cli.explain:explain",
    "bench": "compressor.cli.bench:bench",
    "compare": "compressor.cli.compare:compare",
    "gate": "compressor.cli.compare:gate",
    "verify": "compressor.cli.verify:verify",
    "unpack": "compressor.cli.unpack:unpack",
    "passes": "compressor.cli.catalog:passes",
    "exporters": "compressor.cli.catalog:exporters",
    "schema": "compressor.cli.catalog:schema",
    "doctor": "compressor.cli.catalog:doctor",
}

_OF_DISKS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ESTALE)
_PIPE_CLOSED = 128 + 13  # as a shell reports a process that SIGPIPE ended


def report(error: CompressorError, *, debug: bool) -> int:
    """Print an error that the user can fix, one line for each cause."""
    _trace(error, debug=debug)
    for cause in getattr(error, "errors", (error,)):
        _line(f"error: {cause}")
    return int(error.exit_code)


def failed(error: Exception, command: str | None = None, *, debug: bool) -> int:
    """Print why a command failed, and return its exit code."""
    if isinstance(error, FullDiskError) and command in _RESUMED:
        error.remedy += "; finished passes are kept"
    if isinstance(error, CompressorError):
        return report(error, debug=debug)
    if isinstance(error, BrokenPipeError):
        return pipe_closed()
    return (
        system(error, debug=debug) if isinstance(error, OSError) else internal(error, debug=debug)
    )


def usage(error: click.ClickException) -> int:
    """Print an error in the command line."""
    text = error.format_message().rstrip(".")
    context = getattr(error, "ctx", None)
    path = "compress" if context is None else context.command_path
    _line(f"error: {text[:1].lower()}{text[1:]}; see {path} --help")
    return int(ExitCode.BAD_SPEC)


def interrupted(command: str | None = None) -> int:
    """Print that a command was interrupted, and whether it can be resumed."""
    _line("interrupted" + ("; the same command resumes" if command in _RESUMED else ""))
    return int(ExitCode.INTERRUPTED)


def pipe_closed() -> int:
    """Print nothing: the reader of the output has exited."""
    # Python flushes stdout when it exits, and would complain then.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return _PIPE_CLOSED


def system(error: OSError, *, debug: bool) -> int:
    """Print an error of the operating system about a file."""
    name = error.filename
    if error.strerror is None or (name is None and error.errno not in _OF_DISKS):
        return internal(error, debug=debug)
    subject = "a file" if error.errno == errno.EIO else "output"
    subject = subject if name is None else f"file {os.fsdecode(name)!r}"
    problem = f"cannot be used ({error.strerror})"
    return report(InputError(subject, problem, "check the path and its disk"), debug=debug)


def internal(error: Exception, *, debug: bool) -> int:
    """Print a defect of this program, or of a package that extends it."""
    what = f"raised {type(error).__name__}: {error}"
    if package := raised_by_third_party(error):
        mend = "correct it, or report it to its authors; --debug shows the traceback"
        return report(DataError(package, what, mend), debug=debug)
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
    click.echo(printable(" ".join(text.split("\n"))), err=True)


_NAME = "compress"
_DEBUG, _VERBOSE = "--debug", "-v"
_HELP = ["-h", "--help"]
_OBJECTS = 50_000  # made since garbage was last collected


class Application(click.Group):
    """A command group that turns every failure into a message and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Return the names of all commands, in the order of their table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command, imported on first use; ``None`` where there is no such one."""
        if cmd_name not in self.commands and cmd_name in COMMANDS:
            module, _, attribute = COMMANDS[cmd_name].partition(":")
            command: click.Command = getattr(import_module(module), attribute)
            command.context_settings.setdefault("help_option_names", _HELP)
            self.add_command(command, cmd_name)
        return super().get_command(ctx, cmd_name)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Accept ``--debug`` anywhere: users append it to a command that failed."""
        both = (_DEBUG, _VERBOSE)
        if not {*both}.isdisjoint(args):
            args = [_DEBUG, *(a for a in args if a not in both)]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> NoReturn:
        """Run the command that was asked for, and turn what it raises into an exit code."""
        debug = bool(ctx.params["debug"])
        code = self._code(ctx, debug=debug)
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            code = code or pipe_closed()
        except OSError as error:
            pipe_closed()
            code = code or system(error, debug=debug)
        raise click.exceptions.Exit(code)

    def _code(self, ctx: click.Context, *, debug: bool) -> int:
        try:
            with nullcontext() if debug else quiet_libraries():
                super().invoke(ctx)
        except click.exceptions.Exit as done:
            return done.exit_code
        except (click.Abort, click.ClickException):
            raise
        except KeyboardInterrupt:
            return interrupted(ctx.invoked_subcommand)
        except SystemExit as error:  # of others' code; commands end by click's exception
            from compressor.spec.user_code import exit_error

            return report(exit_error(error), debug=debug)
        except Exception as error:  # noqa: BLE001 - nothing lies outside this handler
            if asked_to_end():  # so the error is what a library made of the signal
                return interrupted(ctx.invoked_subcommand)
            return failed(error, ctx.invoked_subcommand, debug=debug)
        return 0

    def main(self, *args: Any, **extra: Any) -> NoReturn:
        """Parse the command line, run it, and exit."""
        extra["standalone_mode"] = False
        extra["prog_name"] = _NAME
        try:
            code = super().main(*args, **extra)
        except click.Abort:
            code = interrupted()
        except click.ClickException as error:
            code = usage(error)
        except OSError as error:  # the help of all commands is printed before one is invoked
            code = failed(error, debug=False)
            pipe_closed()
        sys.exit(code or 0)


@click.group(
    cls=Application,
    invoke_without_command=True,
    context_settings={"help_option_names": _HELP},
)
@click.version_option(package_name="compressor", message="compressor %(version)s")
@click.option(_VERBOSE, _DEBUG, is_flag=True, help="Show tracebacks and the libraries' warnings.")
@click.pass_context
def application(ctx: click.Context, debug: bool) -> None:
    """Compress a trained network ahead of time, and prove that it still works.

    One YAML spec names the model, the data, the passes and the exports. Start with `compress init
    MODEL`, check with `compress plan SPEC`, and then `compress run SPEC`.

    Exit codes: 0 done; 1 done, but a limit failed; 2 the spec, an option or a path is wrong; 3 the
    model, data or a file is unusable; 4 an artifact failed its check; 130 interrupted.
    """
    del debug  # Application.invoke reads it
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def main() -> NoReturn:
    """Run the command line of this process; a termination signal counts as Ctrl-C."""
    _open_closed_streams()
    # A crash inside a library ends the process; this says at least where it was called.
    faulthandler.enable(sys.stderr, all_threads=False)
    termination = Termination(interrupted)
    termination.watch()
    # Where other processes want the same cores, PyTorch's threads lose hundreds of times more by
    # spinning at barriers than by sleeping. Read once, when PyTorch is first imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # NumPy's threads cannot sleep so, and it multiplies small matrices only.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # The libraries' objects stay. Looking for garbage among them after each 700 that are made, and
    # once more at the end, takes two seconds of a run.
    gc.set_threshold(_OBJECTS)
    gc.disable()  # until a command has imported what it needs
    try:
        application.main()
    except KeyboardInterrupt:  # before a command has begun
        sys.exit(interrupted())
    finally:
        termination.release()
        gc.freeze()


def _open_closed_streams() -> None:
    """Send what is printed to nobody where the caller has closed a stream (``>&-``).

    The next file that is opened would take its number otherwise, and be written over.
    """
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            handle = os.open(os.devnull, os.O_WRONLY)
            if handle != number:
                os.dup2(handle, number)
            setattr(sys, name, os.fdopen(number, "w", encoding="utf-8"))
