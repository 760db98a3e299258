"""Folds run by llama.cpp, held against transformers, and what 16 and fewer bits cost them.

`make test-llamacpp LLAMA_CPP=DIR`, or `python -m benchmarks.llama_cpp --llama-cpp DIR`. Each fold is checked
by `kvfold verify --engine llama.cpp`. Then the bundled checkpoint and its latent folds are written as GGUF in
several types. Each is compared with the same model in BF16, by the mean absolute difference of the
log-probabilities of a text's tokens. Exit code 1 where something is wrong.
"""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import click

from kvfold.convert.cli import main as convert
from kvfold.core.console import Command, show_table
from kvfold.engines.engine_runs import CHUNKS, CONTEXT
from kvfold.engines.llama_programs import LlamaCpp, LlamaFailure
from kvfold.engines.rules.engine_rules import lint
from kvfold.engines.verify import verify
from kvfold.texts.corpus import read_text
from tests.support.tiny import make

from .engine_rows import UPDATE, finish
from .folds import DEMO, HEAD, SOURCES, widen
from .gguf_types import GOAL, TYPES, quantised
from .saved_rows import SavedRows

MOST = 5.0  # times that fails: a linear norm loses hundreds of times as much
_LATENT = "--to mla --engine llama.cpp --length 128 --sequences 8 --refine 20"
# source, options; refused ones must be refused by a rule, and by the converter.
FOLDS = (
    ("demo", "--to gqa --kv-heads 2 --calibration none"),
    ("demo", _LATENT),
    ("demo", f"{_LATENT} --kv-budget 12.5%"),
    ("llama", "--to mla --engine llama.cpp --rank 512 --calibration none"),
    ("llama", "--to mla --engine llama.cpp --rank 256 --calibration none"),
    ("qwen2", "--to gqa --kv-heads 2 --calibration none"),
    ("qwen3", "--to gqa --kv-heads 2 --calibration none"),
)
REFUSED = (("gpt_neox", "--to gqa --kv-heads 2 --calibration none"),)


def make_source(name: str, place: Path) -> Path:
    """Make a source of folds.SOURCES with the bundled checkpoint's tokenizer, or that checkpoint, once."""
    if place.exists():
        return place
    if name == "demo":
        return widen(DEMO, place, HEAD)
    size = 2056 if name == "qwen2" else 2048  # Qwen2's tokenizer class adds a token to the 2,048
    make(place, **{**SOURCES[name], "vocab_size": size, "bos_token_id": 0, "eos_token_id": 1})
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(DEMO / file, place / file)
    return place


def fold(source: Path, options: str, out: Path) -> Path:
    """Write a fold."""
    convert.main([str(source), *options.split(), "--out", str(out)], standalone_mode=False)
    return out


def checked(llama: LlamaCpp, name: str, options: str, source: Path, out: Path) -> dict[str, Any]:
    """Return the row of a fold that llama.cpp must run."""
    report = verify(out, ["llama.cpp"], source, llama_cpp=llama.home)
    row: dict[str, Any] = {"source": name, "options": options, "class": report.measured.get("class")}
    told = report.measured.get("llama.cpp", {})
    ran = any(check.name == "llama.cpp" for check in report.checks)
    return row | told | {"failures": report.failures or ([] if ran else list(report.unasked))}


def refused(llama: LlamaCpp, name: str, options: str, out: Path, work: Path) -> dict[str, Any]:
    """Return the row of a fold that a rule says llama.cpp refuses: the converter must refuse it too."""
    rules = [str(finding) for finding in lint(out, ["llama.cpp"]) if finding.fails]
    try:
        llama.convert(out, work / "refused.gguf", "f32")
        failures = ["the converter takes it, but a rule says that it does not"]
        why = ""
    except LlamaFailure as failure:
        failures, why = ([] if rules else [f"no rule says that {failure}"]), str(failure)
    return {"source": name, "options": options, "refused": why, "rules": rules, "failures": failures}


def compare_types(llama: LlamaCpp, root: Path) -> list[dict[str, Any]]:
    """Return what each type of weights costs the bundled checkpoint, and its fitted and linear folds."""
    source = make_source("demo", root / "demo")
    text = root / "text.txt"
    text.write_text(read_text("stdlib").joined[: CONTEXT * CHUNKS * 16], encoding="utf-8")
    work = root / "types"
    work.mkdir()
    own = quantised(llama, source, work, text, CHUNKS)
    rows: list[dict[str, Any]] = [{"model": "source", **own, "failures": []}]
    for norm in ("fitted", "linear"):
        out = fold(source, f"{_LATENT} --latent-norm {norm} --dtype bfloat16", root / f"types-{norm}")
        found = quantised(llama, out, work, text, CHUNKS)
        failures = [
            f"{kind}: {found[kind]:.4f} is over {MOST} times the source's {own[kind]:.4f}"
            for kind in TYPES
            if norm == "fitted" and found[kind] > MOST * own[kind]
        ]
        ratios = {f"{kind} / source": found[kind] / own[kind] for kind in TYPES}
        reached = all(ratio <= GOAL for ratio in ratios.values())
        rows.append({"model": f"MLA, {norm} norm", **found, **ratios, "goal": reached, "failures": failures})
    return rows


@click.command(cls=Command)
@click.option(
    "--llama-cpp", "home", type=click.Path(exists=True, file_okay=False, path_type=Path), required=True,
    help="Source of llama.cpp with llama-perplexity, llama-completion and llama-quantize built.",
)  # fmt: skip
@click.option(
    "--only",
    metavar="WORDS",
    default="",
    help="Folds whose source contains these words, or `types`; saves nothing without --update.",
)
@UPDATE
def main(home: Path, only: str, update: bool) -> None:
    """Run every fold, print the tables, and save them in benchmarks/results/llama-cpp-cpu.json."""
    llama = LlamaCpp.at(home)
    saved = SavedRows("llama-cpp-cpu", {"version": llama.version}, update=update)
    again = bool(only) or not update  # otherwise what has a row is not run
    rows: list[dict[str, Any]] = []
    types: list[dict[str, Any]] = []

    def keep(section: str, row: dict[str, Any], *key: str) -> None:
        if not row["failures"]:
            saved.put(section, row, *key)
            if update:
                saved.write()

    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        for number, (name, options) in enumerate((*FOLDS, *REFUSED)):
            if only not in name or not (again or saved.find("rows", source=name, options=options) is None):
                continue
            source = make_source(name, root / name)
            out = fold(source, options, root / f"fold-{number}")
            if (name, options) in REFUSED:
                rows.append(refused(llama, name, options, out, root))
            else:
                rows.append(checked(llama, name, options, source, out))
            click.echo(f"{name} {options}: {'; '.join(rows[-1]['failures']) or 'ok'}", err=True)
            keep("rows", rows[-1], "source", "options")
        if only in ("", "types") and (again or saved.find("types") is None):
            types = compare_types(llama, root)
            for row in types:
                keep("types", row, "model")
    _show(rows, types)
    finish(saved, [*rows, *types], only, update)


def _show(rows: list[dict[str, Any]], types: list[dict[str, Any]]) -> None:
    cells = [
        (
            row["source"],
            row["options"],
            f"{row['max_difference']:.1e}" if "max_difference" in row else row.get("refused", "-")[:60],
            f"{row['kl']['mean']:.1e}" if "kl" in row else "-",
            f"{row['cache']:g}" if row.get("cache") else "-",
            "FAILS" if row["failures"] else "ok",
        )
        for row in rows
    ]
    show_table(
        "llama.cpp against transformers", ("source", "fold", "log-probabilities", "KL", "cache", ""), cells
    )
    if types:
        lines = [
            (row["model"], *(f"{row[kind]:.4f}" for kind in TYPES), "FAILS" if row["failures"] else "ok")
            for row in types
        ]
        show_table("mean difference of log-probabilities from BF16, nats", ("", *TYPES, ""), lines)


if __name__ == "__main__":
    main()
