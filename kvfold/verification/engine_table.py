"""`kvfold engines`: what each engine does with each kind of output, and the evidence of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from ..convert.decide.engines import ENGINES
from ..core.console import Command, show_json, show_table

if TYPE_CHECKING:
    from ..convert.decide.lint import Rule

NAMES = {
    "transformers": "transformers",
    "vllm": "vLLM",
    "sglang": "SGLang",
    "llama.cpp": "llama.cpp",
    "mlx": "MLX",
    "tensorrt-llm": "TensorRT-LLM",
    "tgi": "TGI",
}


def verdict(layout: str, engine: str) -> str:
    """Return what an engine does with a kind of output, in a few words.

    Args:
        layout: of `engine_pairs.LAYOUTS`.
        engine: of ENGINES.

    Returns:
        `run` or `read`, if an output that breaks no rule runs there, and how that is known; `no`; `saves no
        cache`; `not known`.
    """
    from ..convert.decide.rules.engine_pairs import PAIRS, UNKNOWN

    evidence = PAIRS[layout, engine]
    if evidence is None:
        return UNKNOWN
    effects = [rule.effect for rule in _rules(layout, engine) if not rule.condition]
    if any(effect in ("prints nonsense", "refuses to load") for effect in effects):
        return "no"
    return f"saves no cache ({evidence.kind})" if "saves no cache" in effects else evidence.kind


def _rules(layout: str, engine: str) -> list[Rule]:
    from ..convert.decide.engine_rules import RULES

    return [rule for rule in RULES if engine in rule.engines and layout in rule.layouts]


def engine_table(engines: Sequence[str] = ENGINES) -> dict[str, Any]:
    """Return every verdict, rule and kernel of some engines with its evidence, as plain values.

    Returns:
        `pairs`: for each kind of output and engine the verdict and its evidence. `rules`: engine, outputs,
        condition, effect, reason, evidence. `hardware`: kernels for 512+64 and 256+64.
    """
    from ..convert.decide.engine_rules import RULES
    from ..convert.decide.rules.engine_pairs import HARDWARE, LAYOUTS, PAIRS

    pairs = []
    for layout, output in LAYOUTS.items():
        for engine in engines:
            evidence = PAIRS[layout, engine]
            proof = None if evidence is None else asdict(evidence)
            pairs.append(
                {"output": output, "engine": engine, "verdict": verdict(layout, engine), "evidence": proof}
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
    return {"pairs": pairs, "rules": rules, "hardware": hardware}


def markdown() -> str:
    """Return the three tables in Markdown, as docs/serve.md holds them."""
    parts = []
    for title, columns, rows in _tables(engine_table()):
        lines = [columns, ["---"] * len(columns), *rows]
        body = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
        parts.append("\n".join([f"{title}:", "", *body]))
    return "\n\n".join(parts) + "\n"


def _tables(found: dict[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    """Return the title, the columns and the rows of each table."""
    engines = list(dict.fromkeys(pair["engine"] for pair in found["pairs"]))
    verdicts = {(pair["output"], pair["engine"]): pair["verdict"] for pair in found["pairs"]}
    outputs = list(dict.fromkeys(pair["output"] for pair in found["pairs"]))
    pairs = [[output, *(verdicts[output, engine] for engine in engines)] for output in outputs]
    hardware = [
        [NAMES[row["engine"]], row["hardware"], row["wide"], row["narrow"], _proof(row["evidence"])]
        for row in found["hardware"]
    ]
    rules = [
        [
            NAMES[rule["engine"]],
            "all" if len(rule["outputs"]) == len(outputs) else "; ".join(rule["outputs"]),
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
