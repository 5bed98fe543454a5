"""Arguments and options that several commands have."""

from __future__ import annotations

from pathlib import Path

import click

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
