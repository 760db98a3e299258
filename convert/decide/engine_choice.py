"""The choice of an output format that all named engines run.

The rules that `kvfold verify` applies to written files decide here too, on the planned config.json and
tensor shapes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ...core.errors import InvalidInput
from ...engines.rules.engine_names import ENGINES
from ...engines.rules.engine_rules import format_findings, lint_written
from ...engines.rules.output_kinds import UNKNOWN
from ...engines.rules.rule_types import LintFinding, Written
from ...models.remote_code import HERE
from .plan import Draft, Plan

SERVED = "serving"  # the stock class in the widths that engines have kernels for
_FORMS = {
    "remote": "code of its own (--container remote)",
    SERVED: "the stock class for serving (--container stock)",
}


def are_served(engines: Sequence[str]) -> bool:
    """Return whether one of the engines runs the stock class in the serving widths only."""
    return any(engine != "transformers" for engine in engines)


def containers_for(engines: Sequence[str], to: str, container: str | None) -> tuple[str, ...]:
    """Return the output formats to try, the least lossy first; `container` is the user's choice."""
    choice = container or "auto"
    if to != "mla" or not are_served(engines):
        return (choice,)
    if choice == "stock":
        return (SERVED,)
    if choice == "remote":
        return ("remote",)
    # Slots of any frequency lose less than those of the stock table, but need code of their own.
    return ("remote", SERVED)


def choose_plan(engines: Sequence[str], containers: Sequence[str], make: Callable[[str], Draft]) -> Draft:
    """Return the first draft that all engines run with a smaller cache, its notices with the reasons.

    Where there is only one format to try, a plan whose cache is not smaller in every engine is accepted too.
    `make` returns the draft of one of the containers, or raises InvalidInput.

    Raises:
        InvalidInput: no plan is accepted; the message gives the reason for each container.
    """
    if not engines:
        return make(containers[0])
    is_only = len(containers) == 1
    refused: dict[str, InvalidInput | LintFinding] = {}
    for container in containers:
        try:
            draft = make(container)
        except InvalidInput as refusal:
            if is_only:
                raise
            refused[container] = refusal
            continue
        found = judge(draft.plan, engines)
        failing = [finding for finding in found if finding.fails]
        unsaved = [finding for finding in found if finding.effect == "saves no cache"]
        unsaved += [finding for finding in found if finding.effect == UNKNOWN]
        if not failing and (is_only or not unsaved):
            told = (*_reasons(engines, container, refused), *draft.plan.notices, *map(str, unsaved))
            return replace(draft, plan=replace(draft.plan, notices=told))
        refused[container] = (failing or unsaved)[0]
    sentences = {str(why) for why in refused.values()}
    raise InvalidInput(sentences.pop() if len(sentences) == 1 else _refusal(engines, refused))


def _refusal(engines: Sequence[str], refused: Mapping[str, InvalidInput | LintFinding]) -> str:
    """Return the sentence for engines that no output format suits: a clause for each, and one remedy."""
    clauses, remedy = list[str](), "use --to gqa"
    for container, why in refused.items():
        sentence = f"{why.engine} {why.effect}: {why.sentence}" if isinstance(why, LintFinding) else str(why)
        clause, _, advice = sentence.partition("; ")
        stock = "--container stock"
        option = stock if container == SERVED else f"--container {container}"
        clauses.append(f"for {option}, {clause.removeprefix(f'{stock} cannot hold this source: ')}")
        if isinstance(why, InvalidInput) and advice not in ("", "use --container remote"):
            remedy = advice
    return f"no output format of this target suits {', '.join(engines)}: {'; '.join(clauses)}; {remedy}"


def judge(output: Plan | Written, engines: Sequence[str]) -> list[LintFinding]:
    """Lint a planned output for some engines, from its config.json and the tensors' shapes."""
    return lint_written(output if isinstance(output, Written) else _written(output), engines)


def _written(plan: Plan) -> Written:
    is_linear = plan.latent_norm == "linear"
    return Written(HERE, plan.config, plan.read_specs, is_linear, plan.tokenizer, plan.scheme)


def unfit(output: Plan | Written, engines: Sequence[str]) -> dict[str, list[LintFinding]]:
    """Return for each engine the findings that keep it from running an output with its smaller cache."""
    found = judge(output, engines)
    against = [finding for finding in found if finding.fails or finding.effect in ("saves no cache", UNKNOWN)]
    return {engine: [finding for finding in against if finding.engine == engine] for engine in engines}


def engine_notices(plan: Plan, engines: Sequence[str]) -> tuple[str, ...]:
    """Say which engines run a stock latent output, and what keeps the others from it.

    Where some are named, nothing is said of others.
    """
    if engines or _written(plan).layout != "stock":
        return ()
    against = unfit(plan, ENGINES)
    running = [engine for engine in ENGINES if not against[engine]]
    others: dict[str, list[str]] = {}
    for engine in ENGINES:
        if against[engine]:
            others.setdefault(against[engine][0].sentence.partition("; ")[0], []).append(engine)
    if not others:
        return ()
    reasons = "; ".join(f"{', '.join(names)} ({why})" for why, names in others.items())
    told = f"load the output in {', '.join(running)}; others would not run it right: {reasons}"
    if plan.source.family.latent:
        return (told,)
    return (f"{told}; for one of them, fold to GQA or name it with --engine",)


def format_notices(plan: Plan, engines: Sequence[str], dtype: str) -> tuple[str, ...]:
    """Say which engines store the output's cache in the format that it is prepared for.

    Raises:
        InvalidInput: one of them does not store such a cache in it.
    """
    if dtype == "bfloat16":
        return ()
    refusal = format_refusal(plan, engines, dtype)
    if refusal is not None:
        raise InvalidInput(refusal)
    layout = _written(plan).layout
    found = {engine: format_findings(layout, engine, dtype) for engine in ENGINES}
    known = [engine for engine in ENGINES if {finding.effect for finding in found[engine]} == {"note"}]
    said = f"{', '.join(known)} can store it so" if known else "no engine is known to store it so"
    return (f"the cache is prepared for {dtype}: {said} (kvfold verify --cache-dtype {dtype})",)


def format_refusal(plan: Plan, engines: Sequence[str], dtype: str) -> str | None:
    """Return a sentence on the first of some engines that does not store the output's cache in a format."""
    layout = _written(plan).layout
    for engine in engines:
        for finding in format_findings(layout, engine, dtype):
            if finding.fails:
                return f"--cache-dtype {dtype} does not suit --engine {engine}: {finding.sentence}"
    return None


def _reasons(
    engines: Sequence[str], container: str, refused: Mapping[str, InvalidInput | LintFinding]
) -> tuple[str, ...]:
    """Return a sentence on the format that was chosen and those that were refused."""
    if container not in _FORMS:
        return ()
    sentence = f"for {', '.join(engines)} the output is {_FORMS[container]}"
    for name, why in refused.items():
        sentence += f"; {_FORMS[name]} was not taken: {why}"
    return (sentence,)
