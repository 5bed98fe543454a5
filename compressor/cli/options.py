"""Arguments and options that several commands have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

_Function = TypeVar("_Function", bound=Callable[..., Any])

spec_argument = click.argument("spec", type=click.Path(path_type=Path))
set_option = click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a key of the spec, as in --set passes.1.bits=4. May be given again.",
)
json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document on stdout."
)
force_option = click.option(
    "--force",
    is_flag=True,
    help="Write into a folder that holds other files; those of the same names are replaced.",
)
history_option = click.option(
    "--history",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A file with one line for each run; shows where the metric stepped.",
)
label_option = click.option(
    "--label", default="", metavar="TEXT", help="What --history calls this run."
)
_COMPARE = (
    click.argument("base", type=click.Path(path_type=Path)),
    click.argument("candidate", type=click.Path(path_type=Path)),
    click.option(
        "--artifact",
        metavar="NAME",
        help="File name or format of the artifact, where the runs have several; float for the "
        "float model.",
    ),
    click.option(
        "--base-artifact", metavar="NAME", help="The same for BASE, where it is another one."
    ),
    click.option(
        "--allow",
        type=click.Choice(("model", "version")),
        multiple=True,
        help="Compare all the same where the float models, or the versions of compressor, "
        "differ. May be given again.",
    ),
    click.option(
        "--timing/--no-timing",
        default=True,
        show_default=True,
        help="Run both artifacts in turn to time them, where both are here and run here; or take "
        "what their runs measured.",
    ),
    history_option,
)


def compare_options(function: _Function) -> _Function:
    """Add the arguments and options of commands that compare two runs."""
    for option in reversed(_COMPARE):
        function = option(function)
    return function
