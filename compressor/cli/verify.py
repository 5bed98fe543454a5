"""``compress verify``."""

from __future__ import annotations

from pathlib import Path

import click

from compressor.cli.options import PATH, json_option, print_result, shown_progress


@click.command()
@click.argument("path", type=PATH)
@click.option(
    "--sign",
    "private",
    type=PATH,
    metavar="KEY",
    help="Sign the hashes of all files with this private Ed25519 key (PEM), if all are unchanged.",
)
@click.option(
    "--key",
    "public",
    type=PATH,
    metavar="PUBLIC",
    help="Check what the owner of this public Ed25519 key (PEM) has signed.",
)
@json_option
def verify(path: Path, private: Path | None, public: Path | None, as_json: bool) -> None:
    """Prove that files are unchanged, byte for byte.

    PATH is an output folder of compress run or compress quantize, which is compared with its
    manifest.json, or an artifact: one in such a folder, model.json and its weights, an archive, or
    a TensorRT engine with its manifest. If a file was changed, is missing or is new, the exit code
    is 3, and the file and the damaged tensors are named.

    A manifest shows damage, not who wrote it. With --sign, SHA256SUMS and its signature are written
    beside the files; whoever has the public key checks both with --key. A key is made with
    `openssl genpkey -algorithm ed25519 -out key.pem`, its public half with
    `openssl pkey -in key.pem -pubout -out public.pem`.
    """
    from compressor.errors import ExitCode, SpecError
    from compressor.lab.verify.verify import sign
    from compressor.lab.verify.verify import verify as compared
    from compressor.report.pages.inspect import proof_page

    if private is not None and public is not None:
        raise SpecError("--sign and --key", "exclude each other", "give one of them")
    with shown_progress() as progress:
        if private is not None:
            proof = sign(path, private, progress)
        else:
            proof = compared(path, public, progress)
    print_result(proof.as_json, lambda: proof_page(proof), as_json=as_json)
    if not proof.ok:
        raise click.exceptions.Exit(int(ExitCode.BAD_INPUT))
