"""`kvfold engines`: what each engine does with each kind of output, and the evidence of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from ..core.console import Command, show_json, show_table
from .rules.engine_names import ENGINES, NAMES


def verdict(output: str, engine: str) -> str:
    """Return what an engine does with a kind of output, in a few words.

    Args:
        output: of `output_kinds.OUTPUTS`.
        engine: of ENGINES.

    Returns:
        `run` or `read`, if an output that breaks no rule runs there, and how that is known; `no`; `saves no
        cache`; `not known`.
    """
    from .rules.engine_rules import RULES
    from .rules.output_kinds import OUTPUTS, PAIRS, UNKNOWN
    from .rules.rule_checks import OF_WIDTHS
    from .rules.rule_types import FAILING, Written

    evidence = PAIRS[output, engine]
    if evidence is None:
        return UNKNOWN
    _, layout, (latent, rope) = OUTPUTS[output]
    example = Written(Path(), {"kv_lora_rank": latent, "qk_rope_head_dim": rope}, {})
    # The rules that such an output breaks by what it is and by its widths.
    effects = [
        rule.effect
        for rule in RULES
        if engine in rule.engines and layout in rule.layouts
        if not rule.condition or (rule.found in OF_WIDTHS and rule.found(example))
    ]
    if any(effect in FAILING for effect in effects):
        return "no"
    return f"saves no cache ({evidence.kind})" if "saves no cache" in effects else evidence.kind


def runs_table() -> str:
    """Return what each engine does with each kind of output as a Markdown table, as README.md holds it."""
    _, columns, rows = _tables(engine_table())[0]
    return _in_markdown(columns, rows)


def _in_markdown(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def engine_table(engines: Sequence[str] = ENGINES) -> dict[str, Any]:
    """Return every verdict, rule and kernel of some engines with its evidence, as plain values.

    Returns:
        `pairs`: for each kind of output and engine the verdict and its evidence. `rules`: engine, outputs,
        condition, effect, reason, evidence. `hardware`: kernels for 512+64 and 256+64. `cache_formats`:
        number formats that a cache is stored in, by engine, outputs and hardware.
    """
    from .rules.engine_rules import RULES
    from .rules.output_kinds import CACHE_FORMATS, HARDWARE, LAYOUTS, OUTPUTS, PAIRS

    pairs = []
    for key, (label, *_) in OUTPUTS.items():
        for engine in engines:
            evidence = PAIRS[key, engine]
            proof = None if evidence is None else asdict(evidence)
            pairs.append(
                {"output": label, "engine": engine, "verdict": verdict(key, engine), "evidence": proof}
            )
    rules = [
        {
            "engine": engine,
            "outputs": [LAYOUTS[layout] for layout in rule.layouts],
            "condition": rule.condition,
            "effect": rule.effect,
            "why": rule.why,
            "evidence": asdict(evidence),
        }
        for engine in engines
        for rule in RULES
        if (evidence := rule.engines.get(engine)) is not None
    ]
    hardware = [
        {**row._asdict(), "evidence": asdict(row.evidence)} for row in HARDWARE if row.engine in engines
    ]
    formats = [
        {
            **row._asdict(),
            "layouts": [LAYOUTS[layout] for layout in row.layouts],
            "takes": dict(row.takes),
            "evidence": asdict(row.evidence),
        }
        for row in CACHE_FORMATS
        if row.engine in engines
    ]
    return {"pairs": pairs, "rules": rules, "hardware": hardware, "cache_formats": formats}


def markdown() -> str:
    """Return the four tables in Markdown, as docs/engines.md holds them."""
    parts = []
    for title, columns, rows in _tables(engine_table()):
        parts.append(f"{title}:\n\n{_in_markdown(columns, rows)}")
    return "\n\n".join(parts) + "\n"


def _tables(found: dict[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    """Return the title, the columns and the rows of each table."""
    from .rules.output_kinds import LAYOUTS

    engines = list(dict.fromkeys(pair["engine"] for pair in found["pairs"]))
    verdicts = {(pair["output"], pair["engine"]): pair["verdict"] for pair in found["pairs"]}
    outputs = list(dict.fromkeys(pair["output"] for pair in found["pairs"]))
    pairs = [[output, *(verdicts[output, engine] for engine in engines)] for output in outputs]
    hardware = [
        [NAMES[row["engine"]], row["hardware"], row["wide"], row["narrow"], _proof(row["evidence"])]
        for row in found["hardware"]
    ]
    formats = [
        [
            NAMES[row["engine"]],
            "all" if len(row["layouts"]) == len(LAYOUTS) else "; ".join(row["layouts"]),
            row["hardware"],
            ", ".join(row["takes"]) or "none of these",
            row["note"],
            _proof(row["evidence"]),
        ]
        for row in found["cache_formats"]
    ]
    rules = [
        [
            NAMES[rule["engine"]],
            "all" if len(rule["outputs"]) == len(LAYOUTS) else "; ".join(rule["outputs"]),
            rule["condition"] or "always",
            rule["effect"],
            rule["why"],
            _proof(rule["evidence"]),
        ]
        for rule in found["rules"]
    ]
    return [
        ("Outputs that break no rule", ["output", *(NAMES[engine] for engine in engines)], pairs),
        ("Kernels by hardware", ["engine", "hardware", "512+64", "256+64", "evidence"], hardware),
        (
            "Number formats of the cache",
            ["engine", "outputs", "hardware", "stored in", "remarks", "evidence"],
            formats,
        ),
        ("Rules", ["engine", "outputs", "when", "effect", "reason", "evidence"], rules),
    ]


def _proof(evidence: dict[str, str]) -> str:
    return f"{evidence['kind']}: {evidence['version']}, {evidence['date']}, {evidence['proof']}"


@click.command("engines", cls=Command)
@click.option(
    "--engine",
    "engines",
    multiple=True,
    type=click.Choice(ENGINES),
    help="Only this engine; may be repeated.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def main(engines: tuple[str, ...], as_json: bool) -> None:
    """Show what each engine does with each kind of output, and how that is known.

    `run` and `read` say that an output runs there if it breaks no rule, and whether the engine was run or its
    source was read. Every rule names its condition, its effect and its evidence.
    """
    found = engine_table(engines or ENGINES)
    if as_json:
        show_json(found)
        return
    for title, columns, rows in _tables(found):
        show_table(title, columns, rows)
