"""Support for each family: targets, containers, and exactness, from the rows that the code obeys.

`exact`: where a fold discards nothing (as many groups as heads, equal heads, full rank), the output's logits
are the source's.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import click

from ...core.console import Command, show_json, show_table, show_text
from .family import Block, Family
from .hosts import HOSTS
from .recognition import as_causal, intact_reason, is_multimodal, never_latent, stock_reasons
from .rows import FAMILIES
from .unfolded import verdict

# Nats per token of predicted loss that decoupled rotation may cost over intact rotation, at the same cache,
# where keys are normalised and the user leaves the form open.
LIMIT = 0.05
ANY = "any"  # text model of a multimodal class that builds the one that text_config names
# Model types whose folds the tests run with images in the input, against their sources.
TESTED = {
    "gemma3", "gemma4", "llama4", "llava", "mistral3", "qwen2_5_vl", "qwen3_5", "qwen3_vl",
}  # fmt: skip
LATENT = "its attention is latent already"
_NO_PLACE = "its config.json has no text_config next to a vision_config or audio_config"
_SEQUENCE = "it is an encoder-decoder model"


@dataclass(frozen=True, kw_only=True)
class Support:
    """One cell of the table.

    Attributes:
        target: `gqa`, `mqa` or `mla`.
        container: what the status is about: `grouped`, `rehosted`, `stock` (in transformers), `narrowed` (the
            source's own class with a narrower latent), `serving` (the stock class as other engines take it)
            or `remote`; None where there is none.
        architecture: the class that loads the output; None where nothing is written.
        status: `exact`, `approximate` or `no`.
        why: the reason, or what else one should know.
    """

    target: str
    container: Literal["grouped", "rehosted", "stock", "narrowed", "serving", "remote"] | None = None
    architecture: str | None = None
    status: Literal["exact", "approximate", "no"]
    why: str = ""

    def __str__(self) -> str:
        return self.status + (f" ({self.why})" if self.why else "")


def support(kind: str) -> tuple[Support, ...]:
    """Return what a family can become: a cell for gqa, for mqa, and for mla in each of its containers."""
    family = FAMILIES[kind]
    if family.latent:
        return _narrowed(family)
    stock = _latent(family)
    return _heads(family, "gqa"), _heads(family, "mqa"), stock, _serving(family, stock), _remote(family)


def _narrowed(family: Family) -> tuple[Support, ...]:
    """Return the cells of a family whose attention is latent already."""
    heads = [Support(target=target, status="no", why=LATENT) for target in ("gqa", "mqa")]
    own = Support(
        target="mla",
        container="narrowed",
        architecture=family.architecture,
        status="exact",
        why="a narrower latent in its own class",
    )
    serving = Support(target="mla", container="serving", status="no", why=LATENT)
    return *heads, own, serving, replace(serving, container="remote")


def _heads(family: Family, target: str) -> Support:
    if family.kv_heads is None and family.host is None:
        return Support(target=target, status="no", why="no class has fewer key/value heads than query heads")
    host = None if family.host is None else HOSTS[family.host]
    if host is not None and not host.any_heads and target == "gqa":
        return Support(
            target=target, status="no", why=f"{host.family.architecture} has one key/value head, or all"
        )
    written = family if host is None else host.family
    spans = family.k_norm is not None and family.norm_spans == "heads"
    where = "" if family.norm_flag is None else f" where {family.norm_flag} is true"
    notes = {
        "one norm spans all keys, and merged heads change it": spans,
        f"a turn passes the key norm nearly unchanged{where}": family.normalises and not spans,
        "transformers caches every query head": written.caches_queries,
        "values merge by dimension, because a gate follows them": family.gate is not None,
        "values are turned before they merge, because a norm follows them": family.value_norm,
    }
    return Support(
        target=target,
        container="grouped" if host is None else "rehosted",
        architecture=written.architecture,
        status="approximate" if spans else "exact",
        why="; ".join(note for note, holds in notes.items() if holds),
    )


def _latent(family: Family) -> Support:
    reasons = stock_reasons(family)
    if family.norm_flag is not None:  # first what holds without these norms too
        reasons = stock_reasons(replace(family, k_norm=None)) + reasons
    if reasons:
        regressed = family.k_norm is not None and not stock_reasons(replace(family, k_norm=None))
        why = (
            "it normalises its keys: approximate, by statistics, below full rank" if regressed else reasons[0]
        )
        return Support(target="mla", container="stock", status="no", why=why)
    notes = {
        "with sliding_window off": family.windowed,
        "its layers without rotation leave the rotary key empty": family.unrotated is not None,
    }
    why = "; ".join(note for note, holds in notes.items() if holds)
    return Support(
        target="mla", container="stock", architecture="DeepseekV3ForCausalLM", status="exact", why=why
    )


def _serving(family: Family, stock: Support) -> Support:
    """Return the cell of the stock class in the one shape that other engines take."""
    if stock.status == "no":
        return replace(stock, container="serving")
    if isinstance(family.block, Block) and family.block.activation != "silu":
        why = "engines other than transformers compute silu in the class"
        return replace(stock, container="serving", architecture=None, status="no", why=why)
    why = "exact for one key/value head of at most 64, all rotary, without biases"
    return replace(stock, container="serving", status="approximate", why=why)


def _remote(family: Family) -> Support:
    """Return the cell of the source's class with kvfold's attention, whose form is that of form.choose_form.

    Families with sinks have biases.
    """
    never = never_latent(family)
    if never is not None:
        return Support(target="mla", container="remote", status="no", why=never)
    reason = intact_reason(family, biased=True, unlike=family.unrotated is not None)
    form = "decoupled" if reason is None else f"intact: {reason}"
    if reason is None and family.k_norm is not None:
        form = f"intact: with statistics decoupled, where that loses at most {LIMIT} nats more"
        form += "" if family.norm_flag is None else f"; decoupled where {family.norm_flag} is false"
    return Support(
        target="mla", container="remote", architecture="KvfoldForCausalLM", status="exact", why=form
    )


@click.command("families", cls=Command)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of a table.")
@click.option(
    "--all",
    "every",
    is_flag=True,
    help="Show every causal language model and every multimodal model of the installed transformers.",
)
def main(as_json: bool, every: bool) -> None:
    """Show which families can be folded to what, in which container, and how exactly.

    `exact` means that where a fold discards nothing (as many groups as heads, full rank), the logits are the
    source's.
    """
    if every:
        _show_every(as_json)
        return
    table = {kind: support(kind) for kind in sorted(FAMILIES, key=lambda kind: FAMILIES[kind].label.lower())}
    if as_json:
        cells: dict[str, dict[str, Any]] = {kind: {} for kind in table}
        for kind, row in table.items():
            for cell in row:
                plain = {name: value for name, value in vars(cell).items() if name != "target"}
                cells[kind].setdefault(cell.target, []).append(plain)
        show_json({kind: {"family": FAMILIES[kind].label, **row} for kind, row in cells.items()})
        return
    rows = [(FAMILIES[kind].label, kind, *line) for kind, row in table.items() for line in _lines(row)]
    show_table("what can be folded to what", ("family", "", "", "", ""), rows)
    show_text(
        "MLA needs rotary frequencies that do not depend on the length, and no window below "
        "max_position_embeddings."
    )
    from ...checkpoints.quantised.schemes import SCHEMES  # which imports torch

    read = "; ".join(f"{method}: {scheme.reads}" for method, scheme in SCHEMES.items())
    show_text(f"Quantised sources are read, and all but their attention keeps its bytes. {read}.")


def whole_classes() -> dict[str, tuple[str | None, tuple[str, ...], str]]:
    """Return what each multimodal class of the installed transformers builds, by model type, sorted.

    They are those in which an output is loaded: classes that write text from text and other inputs. Only
    their configurations are imported.

    Returns:
        The model type of its text tower, `any` where text_config names that, or None; what the tower can
        become in its place; and a sentence, which is the reason where that is nothing.

    Example:
        >>> found = whole_classes()
        >>> found["llava"][:2], found["gemma3"][:2]
        (('any', ('gqa', 'mqa', 'mla')), ('gemma3_text', ('gqa', 'mqa')))
    """
    from transformers import CONFIG_MAPPING, AutoConfig
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    )

    found: dict[str, tuple[str | None, tuple[str, ...], str]] = {}
    for kind in sorted({*MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, *MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES}):
        parts = getattr(CONFIG_MAPPING[kind], "sub_configs", {})
        if getattr(CONFIG_MAPPING[kind], "is_encoder_decoder", False):
            found[kind] = None, (), _SEQUENCE
        elif "text_config" not in parts or not is_multimodal({**parts, "model_type": kind}):
            found[kind] = None, (), _NO_PLACE
        elif parts["text_config"] is AutoConfig:
            found[kind] = ANY, ("gqa", "mqa", "mla"), ""
        else:
            text = str(parts["text_config"].model_type)
            if as_causal(text) not in FAMILIES:
                found[kind] = text, (), verdict(text, FAMILIES)
                continue
            heads = support(as_causal(text))[:2]
            targets = tuple(cell.target for cell in heads if cell.status != "no")
            found[kind] = text, targets, "" if targets else "its class has one key/value head per query head"
    return found


def _show_every(as_json: bool) -> None:
    """Show all model types of transformers' causal language models, and those of its multimodal models."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    found = {kind: verdict(kind, FAMILIES) for kind in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)}
    whole = whole_classes()
    if as_json:
        multimodal = {
            kind: {"text": text, "in_place": list(targets), "why": why, "tested": kind in TESTED}
            for kind, (text, targets, why) in whole.items()
        }
        show_json({"causal": found, "multimodal": multimodal})
        return
    show_table("causal language models of transformers", ("model_type", ""), list(found.items()))
    rows = [
        (
            kind,
            text or "-",
            "; ".join(filter(None, (", ".join(targets), why))),
            "yes" if kind in TESTED else "",
        )
        for kind, (text, targets, why) in whole.items()
    ]
    columns = ("model_type", "text tower", "folded in its place to", "tested")
    show_table("multimodal models of transformers", columns, rows)
    show_text(
        "any: text_config names the text tower, which can become what its family can, as mla in the stock "
        "class. Rows say what the configuration of a class allows; of tested classes, tests run folds with "
        "images. With --text-only a tower is written alone, and takes every target of its family."
    )


def _lines(row: tuple[Support, ...]) -> list[tuple[str, str, str]]:
    """Return targets, container and result; targets with one result share a line."""
    targets: dict[tuple[str, str], list[str]] = {}
    for cell in row:
        targets.setdefault((cell.container or "-", str(cell)), []).append(cell.target)
    return [(", ".join(shared), container, result) for (container, result), shared in targets.items()]
