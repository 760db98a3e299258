"""Which engines run an output, asked of its plan.

The rules that `kvfold verify` asks of the written files decide here too.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...core.errors import InvalidInput
from ...models.remote_code import HERE
from ...verification.verify import ENGINES
from .engine_rules import lint_written
from .lint import Finding, Written

if TYPE_CHECKING:
    from .plan import Plan

SERVED = "serving"  # the stock class in the widths that engines have kernels for
_FORMS = {
    "remote": "code of its own (--container remote)",
    SERVED: "the stock class for serving (--container stock)",
}


def read_engines(text: str | None) -> tuple[str, ...]:
    """The engines that a comma list names; none where there is no list.

    Raises:
        InvalidInput: one that kvfold knows no rules of.
    """
    if text is None:
        return ()
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in ENGINES:
            raise InvalidInput(
                f"--engine {name!r} is not one that kvfold knows; these are: {', '.join(ENGINES)}"
            )
    return names


def are_served(engines: Sequence[str]) -> bool:
    """Whether one of them takes the stock class in the serving widths only."""
    return bool(set(engines) - {ENGINES[0]})


def containers_for(engines: Sequence[str], to: str, container: str | None) -> tuple[str, ...]:
    """The output formats to try, the least lossy first.

    Args:
        engines: that must run the output; none: no engine was named.
        to: `gqa`, `mqa` or `mla`.
        container: the user's choice of `auto`, `stock` or `remote`.
    """
    if to != "mla" or not are_served(engines):
        return (container or "auto",)
    # Slots of any frequency lose less than those of the stock table, but need their own code.
    return {"stock": (SERVED,), "remote": ("remote",)}.get(container or "auto", ("remote", SERVED))


def choose_plan(engines: Sequence[str], containers: Sequence[str], make: Callable[[str], "Plan"]) -> "Plan":
    """The first plan that all engines run with a smaller cache; where there is no choice, one that saves none
    will do.

    Args:
        engines: that must run the output.
        containers: of `containers_for`.
        make: a container's plan; it may refuse.

    Raises:
        InvalidInput: there is none; says why for each.
    """
    if not engines:
        return make(containers[0])
    refused: dict[str, str] = {}
    for container in containers:
        try:
            plan = make(container)
        except InvalidInput as refusal:
            if len(containers) == 1:
                raise
            refused[container] = str(refusal)
            continue
        found = judge(plan.config, plan.specs, engines)
        unsaved = [finding for finding in found if finding.effect == "saves no cache"]
        against = [finding for finding in found if finding.fails] or (unsaved if len(containers) > 1 else [])
        if not against:
            return _accepted(plan, engines, container, refused, unsaved)
        refused[container] = str(against[0])
    reasons = "; ".join(f"{_FORMS[name]}: {why}" if name in _FORMS else why for name, why in refused.items())
    raise InvalidInput(f"no output of this kind would do for {', '.join(engines)}: {reasons}")


def judge(config: Mapping[str, Any], specs: Mapping[str, Any], engines: Sequence[str]) -> list[Finding]:
    """What some engines would do with an output that is planned: config.json and the tensors' shapes tell."""
    return lint_written(Written(HERE, dict(config), specs), engines)


def _accepted(
    plan: "Plan",
    engines: Sequence[str],
    container: str,
    refused: Mapping[str, str],
    unsaved: Sequence[Finding],
) -> "Plan":
    """The plan, with sentences on what was chosen, what was not, and where it saves nothing."""
    others = "".join(f"; {_FORMS[name]} was not taken: {why}" for name, why in refused.items())
    chosen = (
        [f"for {', '.join(engines)} the output is {_FORMS[container]}{others}"] if container in _FORMS else []
    )
    return replace(plan, engines=tuple(engines), notices=(*chosen, *plan.notices, *map(str, unsaved)))
