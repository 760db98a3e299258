"""The page of what can be folded to what and run where, from the tables that the code obeys."""

from kvfold.convert.families.rows import FAMILIES
from kvfold.convert.families.support import Support, support
from kvfold.engines.engine_table import NAMES, verdict
from kvfold.engines.rules.engine_names import ENGINES
from kvfold.engines.rules.evidence import CLASSES
from kvfold.engines.rules.output_kinds import OUTPUTS

from .markdown import table

INTRODUCTION = """# Support matrix

This page is made from the tables and rules that the code obeys. `kvfold families` and `kvfold engines`
print the same. `kvfold verify DIR --engine NAME` applies the rules of an engine to one output.

## Families and targets

`exact` means that where a fold discards nothing (as many groups as heads, equal heads, full rank), the
logits are those of the source. `approximate` and `no` name the reason. MLA needs rotary frequencies that do
not depend on the length, and no window below `max_position_embeddings`.

- **GQA**, **MQA**: in the source's own class, or in the class that is named.

- **MLA, stock**: the dense `DeepseekV3ForCausalLM` of transformers, without any code of kvfold. Where
  attention is latent already, the source's own class with a narrower latent.

- **MLA, vLLM and SGLang**: the same class in the one shape that both have kernels for (512+64).

- **MLA, remote**: the source's class with kvfold's attention next to the weights. `decoupled` caches a
  rotary key next to the latent; `intact` rebuilds keys and then rotates them.
"""
CLASSES_INTRODUCTION = """## Targets and engines

`run` and `read` say that an output runs there if it breaks no rule ([Engines](engines.md)), and whether the
engine was executed or its source was read. `no class` means that the engine has no class of its own for the
family; the rules say what it does then. An MLA output has the DeepSeek-V3 class, or kvfold's own, whatever
its family.
"""
_LATENT = [output for output in OUTPUTS if output != "grouped"]


def support_page() -> str:
    """Return the page in Markdown: families by targets, and families by engines."""
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
