"""The command `kvfold verify`."""

from pathlib import Path
from typing import Any

import click

from ..core.command_options import read_options, takes
from ..core.console import Command, notice, show_json, show_table, show_text
from .request import VerifyRequest, carry_out
from .verify import FAILED


@click.command("verify", cls=Command)
@click.argument("directory", type=click.Path(path_type=Path))
@takes(VerifyRequest, without=("directory", "run"))
@click.option("--lint", "static", is_flag=True, help="Apply the rules alone; load nothing.")
@click.option("--restore-rope", "former", is_flag=True, hidden=True, help="The former name of --restore.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def main(static: bool, former: bool, as_json: bool, **options: Any) -> None:
    """Check that the checkpoint in DIRECTORY is what it claims to be, in the engines that are to run it.

    First, each engine's rules are applied to the written files: they find what it would drop, misread or
    refuse. Then the checkpoint runs in transformers, in a process that cannot import kvfold. It compares
    predictions with the source's, decoding with and without the cache, and the live cache with kvfold.json.
    With `--engine vllm`, `sglang` or `mlx`, where these are installed, the same text and tokens run there
    too, and with `--engine llama.cpp --llama-cpp DIR` in llama.cpp. Exit code 3 where something fails.
    Nothing in DIRECTORY changes, but for `--renew-code`, which refuses links and code that is not kvfold's,
    and for `--restore`, which refuses links.
    """
    renamed = {"restore": True} if former else {}
    asked = read_options(VerifyRequest, options, run=not static, **renamed)
    report = carry_out(asked)
    if as_json:
        show_json(report.to_dict())
    else:
        table = report.grid()
        show_table(table.title, table.columns, table.rows)
        unknown = {finding.engine for finding in report.findings if finding.effect == "not known"}
        known = [name for name in report.engines if report.failures or name not in unknown]
        verdict = "does not pass" if report.failures else "passes"
        words = [f"{verdict} for {', '.join(known)}"] if known else []
        other = ",".join(sorted({one.engine for one in report.findings if one.fails} - {"transformers"}))
        if other:
            words.append(f"kvfold convert --engine {other} writes an output that does, or says why not")
        if unknown:
            words.append(f"not all is known of {', '.join(sorted(unknown))}, see above")
        show_text(f"{report.directory} {'; '.join(words)}")
    if not static:
        from ..checkpoints.record import changed_since, read_record, source_directory

        source = asked.source or source_directory(asked.directory, "--source")
        name = changed_since(read_record(asked.directory), source) if source else None
        if name:
            notice(f"{source} is not what {asked.directory} was made of: kvfold.json records another {name}")
    if report.failures:
        raise SystemExit(FAILED)
