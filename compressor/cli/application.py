"""The command group: its commands, and what becomes of their failures."""

from __future__ import annotations

import signal
import sys
from contextlib import nullcontext
from types import FrameType
from typing import Any, NoReturn

import click

from compressor.cli.doctor import doctor
from compressor.cli.failures import internal, interrupted, pipe_closed, report, usage
from compressor.cli.init import init
from compressor.cli.inspect import inspect
from compressor.cli.passes import exporters, passes
from compressor.cli.plan import plan
from compressor.cli.quiet import quiet_libraries
from compressor.cli.run import run
from compressor.cli.schema import schema
from compressor.errors import CompressorError

_NAME = "compress"
_DEBUG = "--debug"


class Application(click.Group):
    """A command group that turns every failure into a message and an exit code."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take ``--debug`` wherever it stands: it is added to a command that failed."""
        if _DEBUG in args:
            args = [_DEBUG, *(a for a in args if a != _DEBUG)]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command that was asked for."""
        debug = bool(ctx.params["debug"])
        try:
            with nullcontext() if debug else quiet_libraries():
                return super().invoke(ctx)
        except (click.exceptions.Exit, click.Abort, click.ClickException):
            raise
        except CompressorError as error:
            code = report(error, debug=debug)
        except KeyboardInterrupt:
            code = interrupted()
        except BrokenPipeError:
            code = pipe_closed()
        except Exception as error:  # noqa: BLE001 - nothing lies outside this handler
            code = internal(error, debug=debug)
        raise click.exceptions.Exit(code)

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
        sys.exit(code or 0)


@click.group(cls=Application, invoke_without_command=True)
@click.version_option(package_name="compressor", message="compressor %(version)s")
@click.option(_DEBUG, is_flag=True, help="Show tracebacks and the libraries' warnings.")
@click.pass_context
def application(ctx: click.Context, debug: bool) -> None:
    """Compress a trained network ahead of time, and prove that it still works.

    One YAML spec names the model, the data, the passes and the exports. Begin with `compress init
    MODEL`, look at `compress plan SPEC`, and then `compress run SPEC`.

    Exit codes: 0 done; 1 done, but a limit failed; 2 the spec, an option or a path is wrong; 3 the
    model, data or a file is unusable; 4 an artifact failed its check; 130 interrupted.
    """
    del debug  # Application.invoke reads it
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


for _command in (run, plan, init, inspect, passes, exporters, schema, doctor):
    application.add_command(_command)


def main() -> NoReturn:
    """Run the command line of this process; a termination signal counts as Ctrl-C."""
    signal.signal(signal.SIGTERM, _interrupt)
    application.main()


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    del number, frame
    raise KeyboardInterrupt
