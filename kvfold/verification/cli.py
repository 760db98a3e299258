"""The command `kvfold verify`."""

from pathlib import Path

import click

from ..convert.decide.engines import ENGINES
from ..core.cache_dtypes import CACHE_DTYPES
from ..core.console import Command, notice, show_json, show_table, show_text
from .engine_runs import check_llama_cpp
from .verify import FAILED, VerificationReport, verify


@click.command("verify", cls=Command)
@click.argument("directory", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--engine", "engines", multiple=True, type=click.Choice(ENGINES), default=ENGINES[:1], show_default=True,
    help="Engine whose rules are applied; may be given several times.",
)  # fmt: skip
@click.option(
    "--source",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="The checkpoint that it was made from.  [default: as kvfold.json says]",
)
@click.option(
    "--llama-cpp",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="llama.cpp, with convert_hf_to_gguf.py and its built programs: runs --engine llama.cpp.",
)
@click.option(
    "--cache-dtype", type=click.Choice(list(CACHE_DTYPES)),
    help="Also say which engines store this output's cache in that number format.",
)  # fmt: skip
@click.option(
    "--renew-code", is_flag=True,
    help="First replace the Python files of an earlier kvfold in DIRECTORY with this version's.",
)  # fmt: skip
@click.option("--lint", "static", is_flag=True, help="Apply the rules alone; load nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
def main(
    directory: Path,
    engines: tuple[str, ...],
    source: Path | None,
    llama_cpp: Path | None,
    renew_code: bool,
    static: bool,
    as_json: bool,
    cache_dtype: str | None,
) -> None:
    """Check that the checkpoint in DIRECTORY is what it claims to be, in the engines that are to run it.

    First, each engine's rules are applied to the written files: they find what it would drop, misread or
    refuse. Then the checkpoint runs in transformers, in a process that cannot import kvfold. It compares
    predictions with the source's, decoding with and without the cache, and the live cache with kvfold.json.
    With `--engine vllm`, `sglang` or `mlx`, where these are installed, the same text and tokens run there
    too, and with `--engine llama.cpp --llama-cpp DIR` in llama.cpp. Exit code 3 where something fails.
    Nothing in DIRECTORY changes, but for `--renew-code`, which refuses links and code that is not kvfold's.
    """
    if renew_code:
        check_llama_cpp(engines, llama_cpp)
        _renew(directory)
    report = verify(directory, engines, source, run=not static, llama_cpp=llama_cpp, cache_dtype=cache_dtype)
    if as_json:
        show_json(report.to_dict())
    else:
        _show(report)
    if not static:
        _look_for_changes(directory, source)
    if report.failures:
        raise SystemExit(FAILED)


def _renew(directory: Path) -> None:
    """Replace the code of an earlier kvfold, and say so."""
    from ..models.remote_code import renew

    names = renew(directory)
    notice(
        f"renewed {', '.join(names)} in {directory}"
        if names
        else f"the code of {directory} is this version's"
    )


def _look_for_changes(directory: Path, source: Path | None) -> None:
    """Say that a checkpoint was compared with something else than it was made of."""
    from ..checkpoints.record import changed_since, read_record, source_directory

    source = source or source_directory(directory, "--source")
    name = changed_since(read_record(directory), source) if source else None
    if name:
        notice(f"{source} is not what {directory} was made of: kvfold.json records another {name}")


def _show(report: VerificationReport) -> None:
    table = report.grid()
    show_table(table.title, table.columns, table.rows)
    unknown = {finding.engine for finding in report.findings if finding.effect == "not known"}
    known = report.engines if report.failures else [name for name in report.engines if name not in unknown]
    verdict = "does not pass" if report.failures else "passes"
    words = [f"{verdict} for {', '.join(known)}"] if known else []
    other = ",".join(sorted({one.engine for one in report.findings if one.fails} - {"transformers"}))
    words += [f"kvfold convert --engine {other} writes an output that does, or says why not"] if other else []
    words += [f"not all is known of {', '.join(sorted(unknown))}, see above"] if unknown else []
    show_text(f"{report.directory} {'; '.join(words)}")
