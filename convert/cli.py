"""`kvfold convert`, also installed as `convert`. Nothing heavy is imported until there is work."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..core.console import is_first, loading, notice, show_json
from ..core.errors import InvalidInput
from ..core.processes import Launched, together
from ..core.units import ByteSize
from .algebra.target import NAMES, query_rank

if TYPE_CHECKING:
    from .calibration.statistics import Statistics
    from .decide.plan import Plan

DTYPES = ("auto", "float32", "bfloat16")


@click.command("convert", cls=Launched)
@click.argument("model")
@click.option("--to", type=click.Choice(NAMES), required=True, help="Attention of the output.")
@click.option("--kv-heads", type=int, help="GQA: key/value heads of the output.")
@click.option(
    "--rank", metavar="N|full", help="MLA: kv_lora_rank; `full` keeps everything and saves nothing (a proof)."
)
@click.option(
    "--rope-dim", type=int, help="MLA: qk_rope_head_dim, cached beside the latent; chosen when left out."
)
@click.option(
    "--kv-budget",
    metavar="SHARE",
    help="GQA, MLA: cache after the fold as a share of the source's, e.g. 25%.",
)
@click.option(
    "--q-lora-rank",
    metavar="N|full",
    help="MLA: make the queries of all heads from N numbers. Saves weights and their reads; the KV cache "
    "does not change.",
)
@click.option(
    "--rope",
    type=click.Choice(("decoupled", "intact")),
    help="MLA: a rotary key beside the latent (default), or keys that are rebuilt, then rotated.",
)
@click.option(
    "--container",
    type=click.Choice(("auto", "stock", "remote")),
    help="MLA: the DeepSeek-V3 class, or the source's class with code shipped beside the weights. Auto: "
    "stock where it fits.",
)
@click.option(
    "--engine",
    metavar="NAME,...",
    help="What must run the output: transformers, vllm, sglang, llama.cpp. Takes the least lossy "
    "container that all accept.",
)
@click.option(
    "--slots",
    type=click.Choice(("allocated", "uniform")),
    help="MLA: rotary slots where they save most (with statistics), or on the table that stock engines "
    "compute.",
)
@click.option(
    "--calibration",
    metavar="self|none|FILE|DATASET",
    help="What the loss of a fold is predicted and measured on: `self` (default), text that the model "
    "writes; `none`, weights "
    "alone; a text (.txt, .jsonl, .json, .parquet, also compressed, or a directory of them); a data set, "
    "org/name[:config[:split[:field]]]; or saved statistics (.safetensors).",
)
@click.option(
    "--layerwise/--no-layerwise",
    default=None,
    help="Take statistics with one layer in memory at a time; by default when the model does not fit whole.",
)
@click.option(
    "--sequences", type=click.IntRange(min=1), default=48, show_default=True, help="Calibration sequences."
)
@click.option(
    "--length",
    type=click.IntRange(min=2),
    default=512,
    show_default=True,
    help="Tokens of each; no more than it was trained on.",
)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the calibration.")
@click.option(
    "--save-statistics",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Keep the statistics (.safetensors).",
)
@click.option(
    "--refine",
    type=click.IntRange(min=0),
    metavar="STEPS",
    help="Steps by which each layer alone is fitted to the source's on the calibration text; 0: the "
    "closed form. Default: 100.",
)
@click.option(
    "--method",
    help="GQA, MQA: subspace (default), aligned or mean. MLA: subspace, or a published rule to compare with: "
    "svd, transmla, mha2mla, care, xecomla. mha2mla takes :high, :low or :uniform for its rotary pairs "
    "(default: by 2-norm) "
    "and :split to decompose keys and values apart, e.g. mha2mla:high:split.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="Output directory; must not exist. Default: ./<model>-<target>.",
)
@click.option("--revision", help="Branch, tag or commit of a Hub id.")
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    default="auto",
    show_default=True,
    help="Of the output; auto: the source's.",
)
@click.option(
    "--shard-size",
    type=ByteSize(),
    metavar="SIZE",
    default="5GB",
    show_default=True,
    help="Largest size of a weight file.",
)
@click.option(
    "--verify",
    type=click.Choice(("full", "lint", "none")),
    default="lint",
    show_default=True,
    help="At the end: `lint` asks the rules of `kvfold verify`, `full` also runs the output beside its "
    "source.",
)
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    help="Layers folded at once; by default one a core, if they fit in memory.",
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
    calibration: str | None,
    layerwise: bool | None,
    sequences: int,
    length: int,
    seed: int,
    refine: int | None,
    save_statistics: Path | None,
    **sizes: Any,
) -> None:
    """Fold the attention of MODEL (a directory or a Hub id) into a new checkpoint with a smaller KV cache.

    The source is never touched and nothing is overwritten. A killed run goes on when the same command is
    given again.
    """
    with loading():
        from ..checkpoints.directory import check_output
        from ..core.hub import resolve
        from .decide.outline import show_plan
        from .decide.plan import make_plan
        from .methods.refinement import STEPS

    how, taken = (
        (sizes.pop("verify"), sizes.pop("jobs")),
        {"sequences": sequences, "length": length, "seed": seed},
    )
    with together():  # before any long work: mistakes show at once
        directory = resolve(model, revision)
        plan = make_plan(directory, to, sizes, method, dtype)
        if out is not None and not dry_run:
            check_output(out, directory)
        calibration = choose_calibration(calibration, plan, sizes["slots"], refine, save_statistics, dry_run)
    statistics = calibration and _study(
        plan, calibration, out, **taken, layerwise=layerwise, save=save_statistics
    )
    if statistics:
        plan = make_plan(directory, to, sizes, method, dtype, statistics, STEPS if refine is None else refine)
    out = out or Path(default_name(model, plan.target.to_dict()))
    if dry_run and is_first():
        show_json(plan.to_dict()) if as_json else show_plan(plan.to_dict())
    if dry_run:
        return
    chosen = _choices(calibration, plan.refine if statistics else None, taken, shard_size)
    command = command_line(model, to, {**sizes, **chosen}, plan.method, revision, dtype)
    _carry_out(plan, out, command, shard_size, model, as_json, *how)


def _choices(
    calibration: str | None, refine: int | None, taken: dict[str, int], shard_size: int
) -> dict[str, Any]:
    """What was chosen of calibration and files, as options.

    `refine` is None where there are no statistics.
    """
    from ..checkpoints.shards import SHARD_SIZE

    drawn = refine is not None and calibration and not calibration.endswith(".safetensors")
    if calibration and Path(calibration).exists():
        calibration = str(
            Path(calibration).resolve()
        )  # the command is in a record that others read elsewhere
    size = None if shard_size == SHARD_SIZE else shard_size
    return {"calibration": calibration, **(taken if drawn else {}), "refine": refine, "shard_size": size}


def _study(plan: "Plan", calibration: str, out: Path | None, **how: Any) -> "Statistics | None":
    """Statistics of a plan's source; what does not fit in memory goes beside the output meanwhile."""
    from .calibration.study import study

    return study(plan.source, calibration, work=out and out.parent, **how)


def _carry_out(
    plan: "Plan",
    out: Path,
    command: str,
    shard_size: int,
    model: str,
    as_json: bool,
    verified: str,
    jobs: int | None,
) -> None:
    """Write the output, check it as far as asked, and say what it is.

    Of several processes the first one alone does so.
    """
    from ..verification.verify import FAILED, verify
    from .decide.engines import ENGINES
    from .write.rewrite import rewrite

    for text in plan.notices:
        notice(text)
    record = rewrite(
        plan, out, command, shard_size, None if Path(model).is_dir() else model.partition("@")[0], jobs
    )
    if not is_first():
        return
    report = None if verified == "none" else verify(out, plan.engines or ENGINES[:1], run=verified == "full")
    checked = {} if report is None else {"verify": report.to_dict()}
    show_json({"out": str(out), **record, **checked}) if as_json else click.echo(_summary(record, out))
    for check in report.checks if report else ():
        notice(f"{check.name}: {check.detail}")
    if report and report.failures:
        click.echo(f"Error: {out} does not pass kvfold verify: {'; '.join(report.failures)}", err=True)
        raise SystemExit(FAILED)


def choose_calibration(
    calibration: str | None,
    plan: "Plan",
    slots: str | None,
    refine: int | None,
    save: Path | None,
    dry_run: bool,
) -> str | None:
    """What a fold is calibrated on: what the user says, else `self`; None where the fold reads no statistics.

    Raises:
        InvalidInput: the user asks for statistics that the fold would not read, or for what it cannot do
        without them.
    """
    from .methods.table import check_calibrated, reads_statistics

    wanted = calibration if calibration is not None or save is None else "self"
    if refine and plan.method != "subspace":
        raise InvalidInput(
            f"--refine {refine} does not apply to --method {plan.method}, which is taken as published; "
            f"leave it out"
        )
    if not reads_statistics(plan.method):
        if wanted not in {None, "none"}:
            option = "--save-statistics" if calibration is None else f"--calibration {calibration}"
            raise InvalidInput(
                f"{option} does not apply to --method {plan.method}, which folds by weights alone"
            )
        wanted = "none"
    target = plan.target.to_dict()
    geometry = plan.source.geometry
    queries = target.get("q_lora_rank") in {None, query_rank(geometry, "full")}
    kept = (target.get("slots") == "source" and queries) or target.get(
        "num_key_value_heads"
    ) == geometry.num_key_value_heads
    if wanted is None and kept and not plan.folds_biases:
        if refine:
            raise InvalidInput(
                f"--refine {refine} has nothing to refine where everything is kept; leave it out"
            )
        return None  # nor anything to choose
    check_calibrated(plan.method, slots, calibrated=wanted != "none", biased=plan.folds_biases)
    if wanted == "none" and refine:
        raise InvalidInput(
            f"--refine {refine} needs text to refine on; leave it out, or use --calibration self"
        )
    if wanted is None and dry_run:
        notice("planned by weights alone, to be quick; the fold itself would use --calibration self")
        return None
    return "self" if wanted is None else wanted


def _summary(record: dict[str, Any], out: Path) -> str:
    """What was done, in a line, and what to do next."""
    before, after = (record["cache"][side]["elements_per_token_per_layer"] for side in ("before", "after"))
    predicted = record["predicted_loss"]
    cost = "" if predicted is None else f", predicted loss {predicted:.4f} nats a token"
    share = f"{record['cache']['ratio']:.1%}"
    return (
        f"{out}: {record['target']['name'].upper()} by {record['method']}, cache {before} -> {after} "
        f"elements per token and "
        f"layer ({share}){cost}\nNext: kvfold eval {shlex.quote(str(out))} --text FILE"
    )


def default_name(model: str, target: dict[str, Any]) -> str:
    """`<model>-gqa-4`, `<model>-mqa`, `<model>-mla-512-64` or `<model>-mla-full`, and `-q96` for queries of
    rank 96.
    """
    widths = {"gqa": ["num_key_value_heads"], "mqa": [], "mla": ["kv_lora_rank", "qk_rope_head_dim"]}[
        target["name"]
    ]
    parts = ["full"] if target.get("slots") == "source" else [str(target[width]) for width in widths]
    parts += [f"q{target['q_lora_rank']}"] if "q_lora_rank" in target else []
    stem = Path(model).resolve().name if Path(model).is_dir() else model.partition("@")[0].rpartition("/")[2]
    return "-".join([stem, target["name"], *parts])


def command_line(
    model: str, to: str, sizes: dict[str, Any], method: str, revision: str | None, dtype: str
) -> str:
    """The command that gives the same output again, with the choices that were made for the user."""
    options = {
        "to": to,
        **sizes,
        "method": method,
        "revision": revision,
        "dtype": None if dtype == "auto" else dtype,
    }
    given = [
        word
        for name, value in options.items()
        if value is not None
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    return shlex.join(["kvfold", "convert", model, *given])


if __name__ == "__main__":
    main()
