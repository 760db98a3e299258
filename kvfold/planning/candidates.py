"""The targets that a source could be folded to.

GQA at every divisor, MLA at shares of its cache and as engines take it.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..checkpoints.shards import TensorSpec
from ..convert.algebra.subspaces import decomposing
from ..convert.algebra.target import GroupedTarget, LatentGeometry, budget_elements
from ..convert.calibration.statistics import Statistics
from ..convert.decide.engine_choice import unfit
from ..convert.decide.plan import Plan
from ..convert.families.source import Source
from ..convert.formats.serving_widths import PROFILES
from ..convert.request import FoldRequest, fold_request
from ..convert.settle.settle import make_plan
from ..convert.towers.tower import Tower
from ..convert.towers.tower_targets import check_request, tower_request
from ..convert.towers.whole_checkpoint import names_in_place, whole_config
from ..core.errors import InvalidInput
from ..engines.rules.engine_names import ENGINES
from ..engines.rules.rule_types import Written
from ..models.remote_code import HERE

_MOVED = "statistics will choose slots that are not on its table of frequencies"
SHARES = ("50%", "37.5%", "25%", "18.75%", "12.5%", "6.25%")  # of the source's cache, for MLA


@dataclass(frozen=True)
class Surroundings:
    """A text tower with shape and dtype of the tensors that stay around it, whatever the tower becomes."""

    tower: Tower
    specs: Mapping[str, TensorSpec]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A planned target.

    Attributes:
        request: as a user would give it.
        plan: of the request.
        engines: for each engine nothing, where it runs the output with its smaller cache, or why it does not.
        inside: the text tower that is folded in its place in a multimodal checkpoint, with what stays
            around it; None: no such.
        allocates: the plan is by weights alone, and `kvfold convert` will choose other rotary slots, by
            statistics; it loses less than this plan.
    """

    request: FoldRequest
    plan: Plan
    engines: Mapping[str, str]
    inside: Surroundings | None = None
    allocates: bool = False

    @property
    def kind(self) -> str:
        """Return what it shares with candidates of other sizes: `gqa`, `mla decoupled`, `mla intact`."""
        target = self.plan.target
        return "gqa" if isinstance(target, GroupedTarget) else f"mla {target.rope}"

    @property
    def label(self) -> str:
        """Return the target in a few words."""
        target, container = self.plan.target, self.plan.container
        if isinstance(target, GroupedTarget):
            return "MQA" if target.num_key_value_heads == 1 else f"GQA-{target.num_key_value_heads}"
        if target.rope == "intact":
            return f"MLA {target.kv_lora_rank}, rope intact"
        if container.profile is not None:
            return f"MLA {container.profile}, serving"
        uniform = " uniform" if self.request.slots == "uniform" else ""
        return f"MLA {target.kv_lora_rank}+{target.qk_rope_head_dim}, {self.container}{uniform}"

    @property
    def container(self) -> str:
        """Return `stock`, `remote`, `grouped` or `rehosted`."""
        return self.plan.container.kind

    @property
    def others(self) -> Collection[TensorSpec]:
        """Return shape and dtype of the tensors around a tower, such as those of images."""
        return () if self.inside is None else self.inside.specs.values()

    @property
    def architecture(self) -> str:
        """Return the class of the output."""
        config = self.plan.config
        if self.inside is not None:
            config = whole_config(self.inside.tower, config)
        return str((config.get("architectures") or [config["model_type"]])[0])

    @property
    def served_by(self) -> tuple[str, ...]:
        """Return the engines that run it with its smaller cache."""
        return tuple(name for name, reason in self.engines.items() if not reason)

    def with_statistics(self, statistics: Statistics) -> "Candidate":
        """Plan the same target by statistics.

        They may divide its cache otherwise, so that other engines take it.
        """
        with decomposing("the statistics"):
            return _candidate(self.plan.source, self.request, statistics, self.inside)


def find_candidates(
    source: Source,
    shares: Sequence[str],
    engines: Sequence[str] = (),
    *,
    inside: Surroundings | None = None,
) -> tuple[list[Candidate], dict[str, str]]:
    """Plan every target of a source without statistics, MLA at some shares of its cache.

    For kinds without any candidate the reason is returned too. Without engines any may run the output.

    Raises:
        InvalidInput: a share is none.
    """
    found: dict[Any, Candidate] = {}
    refused: dict[str, str] = {}
    had = set()
    for share in shares:
        budget_elements(source.geometry, share)
    for kind, to, options in _wanted(source, shares):
        try:
            asked = _request(source, to, {**options, **({"engines": engines} if engines else {})})
            if inside is not None:
                check_request(asked, inside.tower)
                asked = tower_request(asked)
            candidate = _candidate(source, asked, None, inside)
        except InvalidInput as refusal:
            refused.setdefault(kind, str(refusal))
            continue
        if not candidate.served_by:
            refused.setdefault(kind, "; ".join(dict.fromkeys(candidate.engines.values())))
        elif candidate.plan.cache()["ratio"] < 1:
            had.add(kind)
            found.setdefault((candidate.label, candidate.container, candidate.request.slots), candidate)
    return list(found.values()), {kind: why for kind, why in refused.items() if kind not in had}


def plan_source(source: Source, inside: Surroundings | None) -> Candidate | None:
    """Plan the source as it is, as one more candidate; None where it cannot be written unchanged."""
    if source.family.latent:
        asked = _request(source, "mla", {"rank": "full"})
    else:
        asked = _request(source, "gqa", {"kv_heads": source.geometry.num_key_value_heads})
    try:
        return _candidate(source, asked, None, inside)
    except InvalidInput:
        return None


def _wanted(source: Source, shares: Sequence[str]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield kinds, targets and options to try.

    For equal outputs, the request that a user would make comes first.
    """
    heads = source.geometry.num_key_value_heads
    rotary = bool(source.rotary_width)
    for groups in (n for n in range(heads - 1, 0, -1) if heads % n == 0):
        yield ("gqa", "gqa", {"kv_heads": groups}) if groups > 1 else ("gqa", "mqa", {})
    # The smallest first: where several keep everything, that is the one to ask for.
    for share in sorted(shares, key=lambda share: budget_elements(source.geometry, share)):
        size = {"kv_budget": share}
        if source.family.latent:
            yield "mla decoupled", "mla", size
            continue
        if rotary:
            yield "mla intact", "mla", {**size, "rope": "intact"}
            stock = {**size, "rope": "decoupled", "container": "stock"}
            yield "mla decoupled", "mla", stock
            yield "mla decoupled", "mla", {**stock, "slots": "uniform"}
        yield "mla decoupled", "mla", {**size, "rope": "decoupled", "container": "remote"}
    for profile in PROFILES:  # the two sizes of engines' kernels
        if not isinstance(source.geometry, LatentGeometry):
            for engines in ("vllm", "vllm,sglang"):
                yield f"mla for {engines}", "mla", {"engines": engines, "rank": profile.latent}
        elif profile.latent < source.geometry.kv_lora_rank:
            yield "mla decoupled", "mla", {"rank": profile.latent}


def _request(source: Source, to: str, options: Mapping[str, Any]) -> FoldRequest:
    """Return the request for a fold whose layers are not refined, which is what a loss is predicted of."""
    return fold_request({"model": str(source.checkpoint.directory), "to": to, "refine": 0, **options})


def _candidate(
    source: Source,
    request: FoldRequest,
    statistics: Statistics | None,
    inside: Surroundings | None,
) -> Candidate:
    plan = make_plan(source, request, statistics)
    written: Plan | Written = plan
    if inside is not None:
        part, tower = plan.read_specs, inside.tower
        specs = {name: part[ours] for name, ours in names_in_place(tower, part).items()}
        config = whole_config(tower, plan.config)
        is_linear = plan.latent_norm == "linear"
        written = Written(HERE, config, {**inside.specs, **specs}, is_linear, tower.directory, plan.scheme)
    against = unfit(written, plan.engines or ENGINES)
    reasons = {engine: "; ".join(map(str, findings)) for engine, findings in against.items()}
    allocates = statistics is None and request.slots is None
    allocates = allocates and bool(plan.bands) and plan.container.profile is None
    for name, reason in reasons.items():
        if allocates and not reason and name != "transformers":
            reasons[name] = _MOVED
    return Candidate(request=request, plan=plan, engines=reasons, inside=inside, allocates=allocates)
