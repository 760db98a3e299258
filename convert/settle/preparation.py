"""The steps before a fold: resolve the source, plan, take statistics where needed, plan again."""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ...checkpoints.card import read_card
from ...checkpoints.directory import check_output, check_side_files
from ...checkpoints.identity import check_unchanged
from ...core.console import announce, notice
from ...core.disk import check_outside
from ...core.errors import InvalidInput
from ...core.hub import resolve
from ...core.processes import together
from ...core.untrusted import shorten
from ...texts.calibration_name import names_statistics
from ..algebra.subspaces import decomposing
from ..algebra.target import GroupedTarget, query_rank
from ..calibration.reach import default_length
from ..calibration.study import study
from ..calibration.text_length import context_notice
from ..decide.draft import make_draft
from ..decide.fold_cost import cost_of
from ..decide.plan import Plan
from ..families.config_fields import known_ids
from ..families.source import Source
from ..methods.table import OWN, check_calibrated, reads_statistics
from ..request import FoldRequest
from .settle import settle

# Directions that a text moves at least. One letter moves one, prose as single letters 17, prose in the tokens
# of usual vocabularies hundreds.
_NARROW = 8
# Text of less than this many runs of tokens repeats a few sentences; 12,288 tokens of a model's own have
# thousands.
_RUN, _REPEATED = 4, 256


def prepare(
    request: FoldRequest,
    *,
    dry_run: bool = False,
    source: Source | None = None,
    begun: Callable[[FoldRequest, Path, int], AbstractContextManager[Path]] | None = None,
) -> Plan:
    """Return the plan of a request, for which statistics are taken where the fold reads them.

    Args:
        request: what the user asked for.
        dry_run: whether nothing will be written; then weights alone decide, unless the request names a
            calibration.
        source: what the request names, where it is open already.
        begun: entered while statistics are taken, with the request as it will be recorded, the output, and
            the bytes of its weights; it gives a directory that keeps them for a run that is interrupted.

    Raises:
        InvalidInput: the source cannot be folded like this, the output exists, or the calibration is
            unusable.
    """
    with together():  # before any long work, so that mistakes show at once
        directory = resolve(request.model, request.revision)
        plan = settle(make_draft(source or directory, request))
        told = _code_notices(request, plan.source)
        check_side_files(directory)
        read_card(directory)  # the output's card takes its licence
        if request.out is not None and not dry_run:
            check_output(request.out, directory)
        check_outside({"--save-statistics": request.save_statistics}, (directory, request.out))
        calibration = choose_calibration(request, plan, dry_run)
        asked = plan.request
        if calibration is not None:
            file = Path(calibration)  # the record is read from other directories too
            recorded = {"calibration": str(file.resolve()) if file.exists() else calibration}
            refine = None if calibration == "none" else plan.refine
            asked = asked.model_copy(update={**recorded, "refine": refine})
        size = sum(spec.nbytes for spec in plan.specs.values())
        claim = begun(asked, output_of(request, plan), size) if begun else nullcontext()
    with claim as kept:
        if begun:
            announce(partial(_opening, replace(plan, request=asked), calibration))
        if calibration is not None:
            statistics = study(
                plan.source,
                calibration,
                sequences=request.taken.sequences,
                length=request.length,
                seed=request.seed,
                save=request.save_statistics,
                layerwise=request.layerwise,
                work=None if request.out is None else request.out.parent,
                kept=kept,
            )
            with together():
                check_unchanged(plan.source.checkpoint)
            if statistics is not None:
                with decomposing("the statistics"):
                    plan = settle(make_draft(source or directory, request, statistics))
            plan = replace(plan, request=asked)
    told += [
        *_statistics_notices(request, plan),
        *_narrow_text(plan),
        *_context_notices(plan),
        *_source_notices(plan),
    ]
    return replace(plan, notices=(*plan.notices, *told))


def _opening(plan: Plan, calibration: str | None) -> str:
    """Return a line that says what a fold will be, on which text, for which engines and at what cost.

    The plan is by weights alone, with the request as it will be recorded.
    """
    target = plan.target.to_dict()
    sizes = ", ".join(f"{name} {value}" for name, value in target.items() if name != "name")
    divides = "slots" in target and plan.request.rope_dim is None and not plan.source.family.latent
    if calibration not in (None, "none") and divides:
        cached = target["kv_lora_rank"] + target["qk_rope_head_dim"]
        how = "measured" if plan.effort.widths else "predicted"
        sizes = f"{cached} cached numbers per token and layer, divided as is {how} to lose least"
    text = "weights alone"
    if calibration is not None and names_statistics(calibration):
        text = f"the statistics {calibration}"
    elif calibration not in (None, "none"):
        own = "text of its own" if calibration == "self" else calibration
        length = plan.request.length or default_length(plan.source, calibration)
        text = f"{plan.request.taken.sequences} sequences of {length} tokens of {own}"
    return (
        f"{target['name'].upper()}: {sizes}; container {plan.container.kind}, for "
        f"{', '.join(plan.engines) or 'transformers'}; by {text}; {cost_of(plan)}"
    )


def _code_notices(request: FoldRequest, source: Source) -> list[str]:
    """Return a sentence where config.json names code of its own, which is not read."""
    named = source.checkpoint.config.get("auto_map")
    code = named.get("AutoModelForCausalLM") if isinstance(named, dict) else None
    if not isinstance(code, str):
        return []
    stock = source.family.architecture
    told = f"config.json names code of its own in auto_map, {shorten(code)}, which kvfold does not read"
    if code.rpartition(".")[2] != stock and not request.ignore_code:
        raise InvalidInput(f"{told}; to fold the weights as {stock} of transformers, add --ignore-code")
    return [f"{told}: the output computes what {stock} of transformers computes"]


def _source_notices(plan: Plan) -> list[str]:
    """Return sentences on heads, layers and tokens that a user may take for something else."""
    source, told = plan.source, list[str]()
    heads = plan.target.num_key_value_heads if isinstance(plan.target, GroupedTarget) else None
    if heads == source.geometry.num_key_value_heads:
        told.append(
            f"the output has {heads} key/value heads, as many as the source, so its cache is not smaller; "
            "fewer --kv-heads make it smaller"
        )
    before, after = f"{source.family.prefix}{source.family.o}.weight".split("{layer}")
    places = re.compile(rf"{re.escape(before)}(\d+){re.escape(after)}")
    numbers = sorted(int(found[1]) for found in map(places.fullmatch, source.checkpoint) if found)
    behind = [str(number) for number in numbers if number >= source.layers]
    if behind:
        told.append(
            f"layer {', '.join(behind)} comes after the {source.layers} layers of config.json: it predicts "
            "further tokens and is copied with the attention of the source, so that engines cannot load it "
            "for speculative decoding; run the output without that"
        )
    named, size = source.checkpoint.config, source.config["vocab_size"]
    absent = known_ids(named, size)
    if absent:
        fields = " and ".join(f"{field} {shorten(named[field])}" for field in absent)
        told.append(
            f"config.json has {fields}, beyond the {size} tokens of the vocabulary; they are taken as absent"
        )
    return told


def _context_notices(plan: Plan) -> list[str]:
    """Return a sentence where `--context` has no effect on a fold, or less than it says."""
    source, context, family = plan.source, plan.request.context, plan.source.family
    if context is None:
        return []
    unread = None
    if isinstance(plan.target, GroupedTarget) and (family.k_norm is not None or family.value_norm):
        unread = "heads with norms are merged alike for every distance"
    elif plan.container.folds_jointly:
        unread = "its keys are rebuilt and rotated, which loses nothing of any distance"
    if unread is not None:
        return [f"--context {context} has no effect on this fold: {unread}"]
    length = min(plan.request.length or default_length(source, plan.request.calibration), source.positions)
    if plan.statistics is not None:
        length = plan.statistics.layers[0].input_BTD.shape[1]
    told = context_notice(source, context, length)
    return [] if told is None else [told]


def _statistics_notices(request: FoldRequest, plan: Plan) -> list[str]:
    """Return a sentence where options that the user gave have no effect on statistics saved earlier."""
    statistics = plan.statistics
    if statistics is None or request.calibration is None or not names_statistics(request.calibration):
        return []
    length = statistics.layers[0].input_BTD.shape[1]
    found = {"sequences": statistics.tokens // length, "length": length, "seed": statistics.seed}
    asked = {name: getattr(request, name) for name in found if name in request.model_fields_set}
    if asked.get("length") is not None:
        asked["length"] = min(asked["length"], plan.source.positions)  # as where the statistics were taken
    unread = [name for name, value in asked.items() if value is not None and value != found[name]]
    if not unread:
        return []
    options = ", ".join(f"--{name} {getattr(request, name)}" for name in unread)
    verb = "has" if len(unread) == 1 else "have"
    return [
        f"{options} {verb} no effect: the statistics in {request.calibration} are of "
        f"{found['sequences']} sequences of {length} tokens by seed {statistics.seed}"
    ]


def _narrow_text(plan: Plan) -> list[str]:
    """Return a sentence where the text repeats itself so much that it shows next to nothing of the model.

    The first layer's inputs are one direction per token, those of later layers one per token in its context.
    So the number of different tokens, and that of runs of `_RUN` tokens, bounds how many directions move.
    """
    if plan.statistics is None:
        return []
    ids_BT = plan.statistics.ids_BT
    so = (
        "the predicted loss holds for such text only, and other text may lose far more; use --calibration "
        "FILE with varied text, or --calibration none"
    )
    different, moved = _varied(ids_BT[..., None])
    if moved < min(_NARROW, plan.source.config["vocab_size"] / 16):  # some languages have few letters
        return [
            f"the calibration text moves {moved:.1f} of {plan.source.geometry.hidden_size} directions of the "
            f"first layer's input, since it has {different} different tokens: {so}"
        ]
    different, moved = _varied(ids_BT.unfold(1, min(_RUN, ids_BT.shape[1]), 1))
    if moved < min(_REPEATED, ids_BT.numel() / 16):
        return [
            f"the calibration text repeats itself: its {ids_BT.numel():,} tokens have {different} different "
            f"runs of {_RUN}: {so}"
        ]
    return []


def _varied(windows_BXL: Tensor) -> tuple[int, float]:
    """Return how many windows of tokens (B, X, L) differ, and that number weighted by how often each comes.

    The latter is the exponential of the entropy of their counts.
    """
    counts_X = windows_BXL.flatten(0, 1).unique(dim=0, return_counts=True)[1].double()
    return len(counts_X), torch.special.entr(counts_X / counts_X.sum()).sum().exp().item()


def choose_calibration(request: FoldRequest, plan: Plan, dry_run: bool) -> str | None:
    """Return what a fold is calibrated on: the user's choice, else `self`; None where it reads no statistics.

    The plan is by weights alone.

    Raises:
        InvalidInput: the user asks for statistics that the fold would not read, or for what it cannot do
            without them.
    """

    def refuse(why: str, *options: str) -> None:
        for name in options:
            value = getattr(request, name)
            if value not in (None, 0, "default"):
                raise InvalidInput(f"--{name} {value} {why}")

    asked = request.calibration
    wanted = "self" if asked is None and request.save_statistics is not None else asked
    if plan.method != OWN:
        published = f"does not apply to --method {plan.method}, which is taken as published; leave it out"
        refuse(published, "refine", "context")
    if not reads_statistics(plan.method):
        if request.save_statistics is not None:
            raise InvalidInput(
                f"--save-statistics does not apply to --method {plan.method}, which folds by weights alone"
            )
        if wanted not in {None, "none"}:
            notice(f"--calibration {asked} is ignored: --method {plan.method} folds by weights alone")
        wanted = "none"
    target, geometry = plan.target.to_dict(), plan.source.geometry
    keeps_queries = target.get("q_lora_rank") in {None, query_rank(geometry, "full")}
    keeps_everything = target.get("num_key_value_heads") == geometry.num_key_value_heads
    keeps_everything |= target.get("slots") == "source" and keeps_queries
    if wanted is None and keeps_everything and not plan.folds_biases:
        refuse("has no effect where everything is kept; leave it out", "refine", "context")
        return None
    about = plan.method, plan.target, plan.source.rotary_width
    check_calibrated(*about, calibrated=wanted != "none", biased=plan.folds_biases)
    if wanted == "none":
        why = "has no effect without calibration text; leave it out, or use --calibration self"
        refuse(why, "refine", "effort", "context")
    if wanted is None and dry_run:
        divided = " and may divide the budget into another rank and rotary width"
        may = divided if request.to == "mla" and request.kv_budget is not None else ""
        notice(f"planned by weights alone, to be quick; the fold itself uses --calibration self{may}")
        return None
    return "self" if wanted is None else wanted


def output_of(request: FoldRequest, plan: Plan) -> Path:
    """Return the output directory: the user's, or one that is named after the model and the target.

    It is `<model>-gqa-4`, `<model>-mqa`, `<model>-mla-512-64` or `<model>-mla-full`, with `-q96` for queries
    of rank 96.
    """
    if request.out is not None:
        return request.out
    target, model = plan.target.to_dict(), request.model
    widths = {"gqa": ["num_key_value_heads"], "mqa": [], "mla": ["kv_lora_rank", "qk_rope_head_dim"]}
    parts = [str(target[width]) for width in widths[target["name"]]]
    if target.get("slots") == "source":
        parts = ["full"]
    if "q_lora_rank" in target:
        parts.append(f"q{target['q_lora_rank']}")
    is_directory = Path(model).is_dir()
    stem = Path(model).resolve().name if is_directory else model.partition("@")[0].rpartition("/")[2]
    return Path("-".join([stem, target["name"], *parts]))
