"""`kvfold convert`, also installed as `convert`. Nothing heavy is imported until there is work."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..core.command_options import given, read_options, takes
from ..core.console import is_first, loading, show_json, show_table, show_text
from ..core.processes import Launched
from ..core.units import show_kinds
from .request import FoldRequest, read_config

if TYPE_CHECKING:
    from ..results import Folded

LARGE = 0.1  # nats of predicted loss above which two to six times as much was measured (docs/concepts.md)
EXACT = 5e-4  # nats of predicted loss below which training is not suggested


@click.command("convert", cls=Launched)
@click.argument("model", required=False, metavar="MODEL")
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A request in YAML or JSON: a mapping of `model` and these options with `_` for `-`, such as "
    "`kv_budget: 25%`, except --dry-run and --json. The command line overrides it.",
)
@takes(FoldRequest, without=("model",))
@click.option("--dry-run", is_flag=True, help="Show what would be done and what it costs; write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
def main(config: Path | None, dry_run: bool, as_json: bool, **options: Any) -> None:
    """Fold the attention of MODEL (a directory or a Hub id) into a new checkpoint with a smaller KV cache.

    The source is never touched and nothing is overwritten. A killed run is resumed when the same command is
    given again.
    """
    if config is not None:
        request = read_config(config, given(options))
    else:
        request = read_options(FoldRequest, options)
    with loading():
        from ..fold_run import carry_out
        from ..fold_run import dry_run as plan_of

    if not dry_run:
        _show(carry_out(request), as_json)
        return
    planned = plan_of(request)
    if planned is None:  # not the first of several processes
        return
    plan, cost = planned
    if as_json:
        show_json({**plan, "fold": cost.to_dict()})
    else:
        _show_plan(plan, str(cost))


def _show(folded: "Folded", as_json: bool) -> None:
    """Show what was written, in the first of several processes; exit code 3 where it fails its check."""
    from ..engines.verify import FAILED

    if not is_first():
        return
    out, report = folded.directory, folded.verification
    if as_json:
        checked = {} if report is None else {"verify": report.to_dict()}
        show_json({"out": str(out), **folded.record, **checked})
    else:
        show_text(_summary(folded))
    if report is not None and report.failures:
        click.echo(f"Error: {out} does not pass kvfold verify: {'; '.join(report.failures)}", err=True)
        raise SystemExit(FAILED)


def _summary(folded: "Folded") -> str:
    from ..checkpoints.directory import read_config as read_checkpoint_config
    from .families.recognition import is_multimodal

    record, cache = folded.record, folded.cache
    before, after = (cache[side]["elements_per_token_per_layer"] for side in ("before", "after"))
    loss = folded.predicted_loss
    cost = "" if loss is None else f", predicted loss {loss:.4f} nats per token"
    measured = record.get("measured_kl")
    if measured is not None:
        tokens = measured["sequences"] * measured["length"]
        cost += f", KL {measured['kl']:.4f} on {tokens:,} held-back tokens of its calibration text"
    elif loss is not None and loss > LARGE:
        cost += " (summed over layers measured alone; together they may lose several times that)"
    stored = record.get("cache_dtype", {})
    if "predicted_loss" in stored:
        cost += (
            f" and {stored['predicted_loss']:.4f} with its cache in {stored['name']} "
            f"({stored['unprepared']:.4f} unprepared)"
        )
    as_stored = f" --cache-dtype {stored['name']}" if stored else ""
    place = shlex.quote(str(folded.directory))
    is_exact = record["request"].get("rank") == "full" or (loss is not None and loss < EXACT)
    train = f"\nor train it: kvfold distill {place}"
    again = ""
    if (record.get("calibration") or {}).get("text") == "self":
        again = "\nor fold again with --calibration FILE: text like what it will read often lets it lose less"
    if is_multimodal(read_checkpoint_config(folded.directory)):
        train = (
            "\nor train its text tower: kvfold convert --text-only, then kvfold distill and kvfold assemble"
        )
    return (
        f"{folded.directory}: {record['target']['name'].upper()} by {record['method']}, cache {before} -> "
        f"{after} elements per token and layer ({cache['ratio']:.1%}){cost}\n"
        f"Next: kvfold eval {place} --text FILE{as_stored}{'' if is_exact else train + again}"
    )


def _show_plan(plan: dict[str, Any], cost: str) -> None:
    """Print a plan, as `Plan.to_dict` returns it, and its predicted cost as a table."""
    cache, tower = plan["cache"], plan.get("tower")
    size = f"{plan['output_bytes'] / 1e6:,.1f} MB"
    rows = [("source", f"{plan['source']} ({plan['family']}, {plan['layers']} layers)")]
    rows += [] if tower is None else _tower_rows(tower)
    rows += [
        ("output", f"{plan['container']}, {plan['dtype']}, {size}, method {plan['method']}"),
        ("target", ", ".join(f"{key} {value}" for key, value in plan["target"].items())),
    ]
    for index, side in enumerate(("before", "after")):
        at = ", ".join(
            f"{int(n) // 1024}k: {sizes[index] / 1e6:,.1f} MB" for n, sizes in plan["cache_bytes_at"].items()
        )
        elements = cache[side]["elements_per_token_per_layer"]
        rows.append((f"cache {side}", f"{elements} elements per token and layer; {at}"))
    for kind, counts in cache.get("kinds", {}).items():
        told = f"{counts['layers']} layers cache {counts['before']} -> {counts['after']} elements"
        rows.append((f"{kind}", told))
    if "layers" in cache:
        kinds = show_kinds(cache["layers"])
        told = f"{kinds}; the cache is that of layers that attend, the others pass unchanged"
        rows.append(("layers", told))
    if plan["query_parameters"]:
        direct, made = plan["query_parameters"]
        told = f"{direct:,} -> {made:,} parameters ({made / direct - 1:+.0%}); the cache does not change"
        rows.append(("queries", told))
    rows += [("engines", ", ".join(plan["engines"]))] if plan["engines"] else []
    rows += [(name, " x ".join(map(str, shape))) for name, shape in plan["attention_of_layer_0"].items()]
    rows.append(("this fold", f"{cost}, on this machine while nothing else runs"))
    rows += [("note", text) for text in plan["notices"]]
    show_table("plan (nothing is written)", ("", ""), rows)


def _tower_rows(tower: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the lines about the text tower of a multimodal checkpoint."""
    size, others, work = (f"{tower[name] / 1e6:,.1f} MB" for name in ("bytes", "other_bytes", "work_bytes"))
    place, disk, when = "written alone (--text-only)", ", which stays in OUT.tower", ""
    if tower["in_place"]:
        place, disk = f"folded in its place; {others} of other tensors keep their bytes", ", and folded"
        when = " while it runs"
    latent = ", MLA in the stock class"
    if tower["targets_in_place"]["mla"]:
        is_alone = not tower["targets_alone"]["mla"]
        latent = "; MLA of the tower alone, with --text-only" if is_alone else "; no MLA"
    return [
        ("text tower", f"{size}, {place}"),
        ("possible in its place", f"GQA, MQA{latent}"),
        (f"disk{when}", f"{work} in addition to the output: the tower as it was{disk}"),
    ]


if __name__ == "__main__":
    main()
