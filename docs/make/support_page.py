"""The page of what can be folded to what and run where, from the tables that the code obeys."""

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from kvfold.convert.decide.engines import ENGINES
from kvfold.convert.decide.rules.engine_pairs import OUTPUTS
from kvfold.convert.decide.rules.known_classes import CLASSES
from kvfold.convert.families.recognition import FAMILIES
from kvfold.convert.families.support import Support, support
from kvfold.verification.engine_table import NAMES, engine_table, verdict

from .markdown import table

INTRODUCTION = """# Support matrix

This page is made from the tables and rules that the code obeys. `kvfold families` and `kvfold engines`
print the same. `kvfold verify DIR --engine NAME` applies the rules of an engine to one output.

## Families and targets

`exact` means that where a fold discards nothing (as many groups as heads, equal heads, full rank), the
logits are those of the source. `approximate` and `no` name the reason. MLA needs rotary frequencies that do
not depend on the length, and no window below `max_position_embeddings`.

- **GQA**, **MQA**: in the source's own class, or in the class that is named.

- **MLA, stock**: the dense `DeepseekV3ForCausalLM` of transformers, without any code of kvfold.

- **MLA, vLLM and SGLang**: the same class in the one shape that both have kernels for (512+64).

- **MLA, remote**: the source's class with kvfold's attention next to the weights. `decoupled` caches a
  rotary key next to the latent; `intact` rebuilds keys and then rotates them.
"""
CLASSES_INTRODUCTION = """## Targets and engines

`run` and `read` say that an output runs there if it breaks no rule, and whether the engine was executed or
its source was read. `no class` means that the engine has no class of its own for the family; the rules say
what it does then. An MLA output has the DeepSeek-V3 class, or kvfold's own, whatever its family.
"""
RULES_INTRODUCTION = """## Rules of the engines

Engines drop, ignore or reinterpret fields without an error. A rule applies to outputs that have the
property in its second column. [Serve](serve.md) has the kernels by hardware.
"""
_LATENT = [output for output in OUTPUTS if output != "grouped"]


def support_page() -> str:
    """Return the page in Markdown: families by targets, families by engines, and the rules of each engine."""
    kinds = sorted(FAMILIES, key=lambda kind: FAMILIES[kind].label.lower())
    head = ("family", "`model_type`", "GQA", "MQA", "MLA, stock", "MLA, vLLM and SGLang", "MLA, remote")
    engines = ("output", *(NAMES[engine] for engine in ENGINES))
    return "\n".join(
        [
            INTRODUCTION,
            table(head, [_targets(kind) for kind in kinds]),
            "",
            CLASSES_INTRODUCTION,
            table(engines, [*map(_latent, _LATENT), *map(_classes, kinds)]),
            "",
            RULES_INTRODUCTION,
            *_rules(),
        ]
    )


def _targets(kind: str) -> tuple[str, ...]:
    family = FAMILIES[kind]
    return family.label, f"`{kind}`", *(_cell(cell, family.architecture) for cell in support(kind))


def _cell(cell: Support, own: str) -> str:
    """Return a status, with the class where it is neither the source's nor the column's."""
    rehosted = cell.container == "rehosted" and cell.architecture != own
    return f"{cell} as `{cell.architecture}`" if rehosted else str(cell)


def _latent(output: str) -> tuple[str, ...]:
    return f"**{OUTPUTS[output].label}**", *(verdict(output, engine) for engine in ENGINES)


def _classes(kind: str) -> tuple[str, ...]:
    """Return what each engine does with a family folded to GQA or MQA."""
    family = FAMILIES[kind]
    written = family.host or kind
    if all(cell.status == "no" for cell in support(kind) if cell.target != "mla"):
        return f"{family.label}, GQA and MQA", *("no" for _ in ENGINES)
    has_class = [engine not in CLASSES or written in CLASSES[engine] for engine in ENGINES]
    verdicts = [verdict("grouped", engine) for engine in ENGINES]
    found = [known if has else "no class" for known, has in zip(verdicts, has_class, strict=True)]
    return f"{family.label}, GQA and MQA", *found


def _rules() -> list[str]:
    parts = []
    rules: list[dict[str, Any]] = engine_table()["rules"]
    for engine, entries in groupby(rules, key=lambda rule: str(rule["engine"])):
        rules_table = table(("outputs", "when", "effect", "reason", "evidence"), map(_rule, entries))
        parts.append(f"### {NAMES[engine]}\n\n{rules_table}\n")
    return parts


def _rule(rule: Mapping[str, Any]) -> tuple[str, ...]:
    proof = _proof(rule["evidence"])
    return "; ".join(rule["outputs"]), rule["condition"] or "always", rule["effect"], rule["why"], proof


def _proof(evidence: Mapping[str, str]) -> str:
    return f"{evidence['kind']}: {evidence['version']}, {evidence['date']}, `{evidence['proof']}`"
