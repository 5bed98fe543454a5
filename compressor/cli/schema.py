"""``compress schema``."""

from __future__ import annotations

import click


@click.command()
def schema() -> None:
    """Print the JSON Schema of a spec.

    An editor that knows it completes and checks specs while they are written. For editors with
    yaml-language-server, save it as spec.schema.json and begin the spec with

        # yaml-language-server: $schema=spec.schema.json
    """
    from compressor.files import json_text
    from compressor.spec.schema import spec_schema

    click.echo(json_text(spec_schema()), nl=False)
