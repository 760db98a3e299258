"""A plan as `kvfold convert --dry-run` shows it."""

from typing import Any

from ...core.console import show_table
from ...core.units import show_kinds


def show_plan(plan: dict[str, Any], cost: str) -> None:
    """Print a plan as a table.

    Args:
        plan: as `Plan.to_dict` returns it.
        cost: predicted time and memory of the fold, in words.
    """
    cache = plan["cache"]
    at_lengths = plan["cache_bytes_at"].items()
    rows = [
        ("source", f"{plan['source']} ({plan['family']}, {plan['layers']} layers)"),
        *_tower_rows(plan.get("tower")),
        (
            "output",
            f"{plan['container']}, {plan['dtype']}, {plan['output_bytes'] / 1e6:,.1f} MB, method "
            f"{plan['method']}",
        ),
        ("target", ", ".join(f"{key} {value}" for key, value in plan["target"].items())),
    ]
    for side in ("before", "after"):
        size = cache[side]
        at = ", ".join(
            f"{int(n) // 1024}k: {sizes[side == 'after'] / 1e6:,.1f} MB" for n, sizes in at_lengths
        )
        rows.append(
            (f"cache {side}", f"{size['elements_per_token_per_layer']} elements per token and layer; {at}")
        )
    for kind, size in cache.get("kinds", {}).items():
        rows.append(
            (f"{kind}", f"{size['layers']} layers cache {size['before']} -> {size['after']} elements")
        )
    if "layers" in cache:
        kinds = show_kinds(cache["layers"])
        rows.append(
            ("layers", f"{kinds}; the cache is that of layers that attend, the others pass unchanged")
        )
    if plan["query_parameters"]:
        direct, made = plan["query_parameters"]
        rows.append(
            (
                "queries",
                f"{direct:,} -> {made:,} parameters ({made / direct - 1:+.0%}); the cache does not change",
            )
        )
    rows += [("engines", ", ".join(plan["engines"]))] if plan["engines"] else []
    rows += [(name, " x ".join(map(str, shape))) for name, shape in plan["attention_of_layer_0"].items()]
    rows.append(("this fold", f"{cost}, on this machine while nothing else runs"))
    rows += [("note", text) for text in plan["notices"]]
    show_table("plan (nothing is written)", ("", ""), rows)


def _tower_rows(tower: dict[str, Any] | None) -> list[tuple[str, str]]:
    """Return the lines about the text tower of a multimodal checkpoint; none where the source is no such."""
    if tower is None:
        return []
    size, others, work = (f"{tower[name] / 1e6:,.1f} MB" for name in ("bytes", "other_bytes", "work_bytes"))
    stays = f"folded in its place; {others} of other tensors keep their bytes"
    latent = ", MLA in the stock class"
    if tower["targets_in_place"]["mla"]:
        is_alone = not tower["targets_alone"]["mla"]
        latent = "; MLA of the tower alone, with --text-only" if is_alone else "; no MLA"
    disk = (
        ("disk while it runs", f"{work} in addition to the output: the tower as it was, and folded")
        if tower["in_place"]
        else ("disk", f"{work} in addition to the output: the tower as it was, which stays in OUT.tower")
    )
    return [
        ("text tower", f"{size}, {stays if tower['in_place'] else 'written alone (--text-only)'}"),
        ("possible in its place", f"GQA, MQA{latent}"),
        disk,
    ]
