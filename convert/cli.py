"""`kvfold convert`, also installed as `convert`. Nothing heavy is imported until there is work."""

import re
import shlex
from pathlib import Path
from typing import Any

import click

from .console import Command, notice, show_json, show_table
from .errors import InvalidInput
from .target import NAMES

DTYPES = ("auto", "float32", "bfloat16")
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def read_size(ctx: click.Context, param: click.Parameter, value: str) -> int:
    """Bytes as people write them: 500MB, 5GB."""
    match = re.fullmatch(r"(\d+)\s*(|KB|MB|GB)", value.upper())
    if match is None or int(match[1]) == 0:
        raise click.BadParameter(f"{value!r} is no size; write for example 500MB or 5GB")
    return int(match[1]) * UNITS[match[2]]


@click.command("convert", cls=Command)
@click.argument("model")
@click.option("--to", type=click.Choice(NAMES), required=True, help="Attention of the output.")
@click.option("--kv-heads", type=int, help="GQA: key/value heads of the output.")
@click.option("--rank", metavar="N|full", help="MLA: kv_lora_rank; `full` keeps everything and saves nothing (a proof).")
@click.option("--rope-dim", type=int, help="MLA: qk_rope_head_dim, cached beside the latent; chosen when left out.")
@click.option("--kv-budget", metavar="SHARE", help="GQA, MLA: cache after the fold as a share of the source's, e.g. 25%.")
@click.option(
    "--calibration",
    metavar="none|self|FILE",
    default="none",
    show_default=True,
    help="MLA: fold by predicted loss, from statistics on text of the model's own, a text file, or saved statistics.",
)
@click.option("--sequences", type=click.IntRange(min=1), default=48, show_default=True, help="Calibration sequences.")
@click.option(
    "--length",
    type=click.IntRange(min=2),
    default=512,
    show_default=True,
    help="Tokens of each; no more than it was trained on.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the calibration.")
@click.option("--save-statistics", type=click.Path(path_type=Path), metavar="FILE", help="Keep the statistics (.safetensors).")
@click.option("--method", help="GQA, MQA: subspace (default), aligned or mean. MLA: subspace.")
@click.option("--out", type=click.Path(path_type=Path), help="Output directory; must not exist. Default: ./<model>-<target>.")
@click.option("--revision", help="Branch, tag or commit of a Hub id.")
@click.option(
    "--dtype", type=click.Choice(DTYPES), default="auto", show_default=True, help="Of the output; auto: the source's."
)
@click.option(
    "--shard-size", callback=read_size, metavar="SIZE", default="5GB", show_default=True, help="Largest size of a weight file."
)
@click.option("--dry-run", is_flag=True, help="Show what would be done and what it costs; write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
def main(
    model: str,
    to: str,
    method: str | None,
    out: Path | None,
    revision: str | None,
    dtype: str,
    shard_size: int,
    dry_run: bool,
    as_json: bool,
    calibration: str,
    sequences: int,
    length: int,
    seed: int,
    save_statistics: Path | None,
    **sizes: Any,
) -> None:
    """Fold the attention of MODEL (a directory or a Hub id) into a new checkpoint with a smaller KV cache.

    The source is never touched and nothing is overwritten. A killed run goes on when the same command is given again.
    """
    from .checkpoint import check_output
    from .hub import resolve
    from .plan import make_plan
    from .rewrite import rewrite
    from .shards import SHARD_SIZE

    directory, taken = resolve(model, revision), {"sequences": sequences, "length": length, "seed": seed}
    plan = make_plan(directory, to, sizes, method, dtype)  # before any long work: mistakes show at once
    if out is not None and not dry_run:
        check_output(out, directory)
    if calibration != "none" or save_statistics:
        from .study import study

        if to != "mla":
            raise InvalidInput(f"--calibration {calibration} does not apply to --to {to}, which is folded by weights alone")
        statistics = study(plan.source, calibration, **taken, save=save_statistics)
        plan = make_plan(directory, to, sizes, method, dtype, statistics)
    out = out or Path(default_name(model, plan.target.to_dict()))
    if dry_run:
        show_json(plan.to_dict()) if as_json else show_plan(plan.to_dict())
        return
    check_output(out, directory)
    for text in plan.notices:
        notice(text)
    how: dict[str, Any] = {"calibration": calibration, **taken} if calibration != "none" else {}
    how["shard_size"] = None if shard_size == SHARD_SIZE else shard_size
    command = command_line(model, to, {**sizes, **how}, plan.method, revision, dtype)
    record = rewrite(plan, out, command, shard_size, None if Path(model).is_dir() else model.partition("@")[0])
    show_json({"out": str(out), **record}) if as_json else click.echo(_summary(record, out))


def _summary(record: dict[str, Any], out: Path) -> str:
    """What was done, in a line, and what to do next."""
    before, after = (record["cache"][side]["elements_per_token_per_layer"] for side in ("before", "after"))
    predicted = record["predicted_loss"]
    cost = "" if predicted is None else f", predicted loss {predicted:.4f} nats a token"
    share = f"{record['cache']['ratio']:.1%}"
    return (
        f"{out}: {record['target']['name'].upper()} by {record['method']}, cache {before} -> {after} elements per token and "
        f"layer ({share}){cost}\nNext: kvfold eval {shlex.quote(str(out))} --text FILE"
    )


def default_name(model: str, target: dict[str, Any]) -> str:
    """`<model>-gqa-4`, `<model>-mqa`, `<model>-mla-512-64` or `<model>-mla-full`."""
    widths = {"gqa": ["num_key_value_heads"], "mqa": [], "mla": ["kv_lora_rank", "qk_rope_head_dim"]}[target["name"]]
    parts = ["full"] if target.get("slots") == "source" else [str(target[width]) for width in widths]
    stem = Path(model).resolve().name if Path(model).is_dir() else model.partition("@")[0].rpartition("/")[2]
    return "-".join([stem, target["name"], *parts])


def command_line(model: str, to: str, sizes: dict[str, Any], method: str, revision: str | None, dtype: str) -> str:
    """The command that gives the same output again, with the choices that were made for the user."""
    options = {"to": to, **sizes, "method": method, "revision": revision, "dtype": None if dtype == "auto" else dtype}
    given = [
        word for name, value in options.items() if value is not None for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    return shlex.join(["kvfold", "convert", model, *given])


def show_plan(plan: dict[str, Any]) -> None:
    """A plan as a table."""
    cache = plan["cache"]
    rows = [
        ("source", f"{plan['source']} ({plan['family']}, {plan['layers']} layers)"),
        ("output", f"{plan['container']}, {plan['dtype']}, {plan['output_bytes'] / 1e6:,.1f} MB, method {plan['method']}"),
        ("target", ", ".join(f"{key} {value}" for key, value in plan["target"].items())),
    ]
    for side in ("before", "after"):
        size = cache[side]
        at = ", ".join(
            f"{int(n) // 1024}k: {sizes[side == 'after'] / 1e6:,.1f} MB" for n, sizes in plan["cache_bytes_at"].items()
        )
        rows.append((f"cache {side}", f"{size['elements_per_token_per_layer']} elements per token and layer; {at}"))
    rows += [(name, " x ".join(map(str, shape))) for name, shape in plan["attention_of_layer_0"].items()]
    rows += [("note", text) for text in plan["notices"]]
    show_table("plan (nothing is written)", ("", ""), rows)


if __name__ == "__main__":
    main()
