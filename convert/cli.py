"""`kvfold convert`, also installed as `convert`. Nothing heavy is imported until there is work."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..core.cache_dtypes import CACHE_DTYPES
from ..core.console import is_first, loading, show_json, show_text
from ..core.processes import Launched
from ..core.units import ByteSize
from .algebra.target import NAMES
from .decide.engines import ENGINES
from .efforts import EFFORTS

if TYPE_CHECKING:
    from ..results import Folded
    from .request import FoldRequest

_EFFORTS = "; ".join(
    f"{name}: {row.sequences} sequences, "
    + (f"{row.steps} steps of {row.batch} of them" if row.steps else "the closed form")
    for name, row in EFFORTS.items()
)
DTYPES = ("auto", "float32", "bfloat16", "float16")
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
@click.option("--to", type=click.Choice(NAMES), help="Attention of the output (required).")
@click.option("--kv-heads", type=int, help="GQA: key/value heads of the output.")
@click.option(
    "--rank", metavar="N|full", help="MLA: kv_lora_rank; `full` keeps everything and saves nothing (a proof)."
)
@click.option(
    "--rope-dim", type=int, help="MLA: qk_rope_head_dim, cached next to the latent; chosen when left out."
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
    help="MLA: a rotary key next to the latent, or keys that are rebuilt, then rotated. Default: decoupled; "
    "of a source with key norms, chosen by the predicted loss and the engines.",
)
@click.option(
    "--container",
    type=click.Choice(("auto", "stock", "remote")),
    help="MLA: the DeepSeek-V3 class, or the source's class with code shipped next to the weights. Auto: "
    "stock where it fits.",
)
@click.option(
    "--latent-norm",
    type=click.Choice(("auto", "fitted", "linear")),
    default="auto",
    show_default=True,
    help="MLA in the stock class: fit the latent to the class's norm, so that any tool can train and "
    "quantise the output, or make the norm linear by a small scale, which other tools destroy. Auto: "
    "fitted, but linear for --rank full.",
)
@click.option(
    "--cache-dtype",
    type=click.Choice(tuple(CACHE_DTYPES)),
    default="bfloat16",
    show_default=True,
    help="Prepare the fold for a cache of this format: the coordinates of what is cached are chosen "
    "for it, and refinement sees its rounding.",
)
@click.option(
    "--engine",
    "engines",
    metavar="NAME,...",
    help=f"Engines that must run the output: {', '.join(ENGINES)}. The output takes the least lossy "
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
    metavar="self|none|stdlib|FILE|DATASET|self+FILE",
    help="Text on which the loss of a fold is predicted and measured: `self` (default), text that the model "
    "writes; `none`, weights alone; `stdlib`, the source text of Python's standard library without what "
    "`kvfold eval --text stdlib` reads; a text (UTF-8 of any suffix, or .txt, .jsonl, .json, .parquet, "
    "also compressed, or a directory of these); a data set, org/name[:config[:split[:field]]]; half of each, "
    "as in self+FILE; or saved statistics (.safetensors).",
)
@click.option(
    "--layerwise/--no-layerwise",
    default=None,
    help="Take statistics with one layer in memory at a time; by default when the model does not fit whole.",
)
@click.option(
    "--effort",
    type=click.Choice(tuple(EFFORTS)),
    default="default",
    show_default=True,
    help=f"Time against quality. {_EFFORTS}.",
)
@click.option("--sequences", type=click.IntRange(min=1), help="Calibration sequences; overrides --effort.")
@click.option(
    "--length",
    type=click.IntRange(min=2),
    help="Tokens of each; by default 256 where the source writes text and 512 of another text, or fewer "
    "where the source was trained on fewer, if that shows.",
)
@click.option(
    "--context",
    metavar="TOKENS",
    help="Length of the texts that the output is for: distances beyond the calibration text are extrapolated "
    "to it, at most to 4096. Default: texts of all lengths up to the source's positions, or to where its own "
    "text breaks down.",
)
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of the calibration."
)
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
    "closed form. Overrides --effort.",
)
@click.option(
    "--method",
    help="GQA, MQA: subspace (default), aligned, aligned:grouped or mean. MLA: subspace, or a published "
    "rule to compare with: svd, transmla, care, no-sqrt-care, transmla-care, mha2mla, xecomla. mha2mla takes "
    ":high, :low or :uniform for its rotary pairs (default: by 2-norm) and :split to decompose keys and "
    "values apart, e.g. mha2mla:high:split; transmla and the rules of care take :foldN (FreqFold) and "
    ":balanceR.",
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
    help="Dtype of the output; auto: the source's; what is dequantised takes that of most other numbers, or "
    "bfloat16. float16 is refused where a weight is larger than 65,504, and takes a fitted latent norm.",
)
@click.option(
    "--dequantize",
    is_flag=True,
    help="Write all weights of a quantised source unquantised; otherwise only attention is.",
)
@click.option(
    "--text-only",
    is_flag=True,
    help="Write the folded text tower of a multimodal model alone, as a causal language model.",
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
    help="At the end: `lint` checks the rules of `kvfold verify`, `full` also runs the output against its "
    "source. Exit code 3 where the output, which stays, fails.",
)
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    help="Layers folded at once; by default one per core, if they fit in memory.",
)
@click.option("--dry-run", is_flag=True, help="Show what would be done and what it costs; write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
def main(config: Path | None, dry_run: bool, as_json: bool, **options: Any) -> None:
    """Fold the attention of MODEL (a directory or a Hub id) into a new checkpoint with a smaller KV cache.

    The source is never touched and nothing is overwritten. A killed run is resumed when the same command is
    given again.
    """
    request = _read_request(config, options)
    with loading():
        from ..fold_run import carry_out
        from ..fold_run import dry_run as plan_of
        from .decide.outline import show_plan

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
        show_plan(plan, str(cost))


def _read_request(config: Path | None, options: dict[str, Any]) -> "FoldRequest":
    """Return what the options ask for; those on the command line override those in the file."""
    from ..core.errors import InvalidInput
    from .request import fold_request, read_config

    ctx = click.get_current_context()
    default = click.core.ParameterSource.DEFAULT
    given = {name: value for name, value in options.items() if ctx.get_parameter_source(name) != default}
    if config is not None:
        return read_config(config, given)
    for parameter in ctx.command.params:
        if parameter.name in {"model", "to"} and options[parameter.name] is None:
            raise click.MissingParameter(ctx=ctx, param=parameter)
    options_of = {each.name: each.opts[-1] for each in ctx.command.params if isinstance(each, click.Option)}
    try:
        return fold_request(given)
    except InvalidInput as mistake:  # of a field, which a user of the command knows as an option
        field, found, rest = str(mistake).partition(" is ")
        raise InvalidInput(f"{options_of.get(field, field)}{found}{rest}") from None


def _show(folded: "Folded", as_json: bool) -> None:
    """Show what was written, in the first of several processes; exit code 3 where it fails its check."""
    from ..verification.verify import FAILED

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
    """Return a line about what was done, and what to do next."""
    from ..checkpoints.directory import read_config as read_checkpoint_config
    from .families.recognition import is_multimodal

    record, cache = folded.record, folded.cache
    before, after = (cache[side]["elements_per_token_per_layer"] for side in ("before", "after"))
    loss = folded.predicted_loss
    cost = "" if loss is None else f", predicted loss {loss:.4f} nats per token"
    if loss is not None and loss > LARGE:
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
    if is_multimodal(read_checkpoint_config(folded.directory)):
        train = (
            "\nor train its text tower: kvfold convert --text-only, then kvfold distill and kvfold assemble"
        )
    return (
        f"{folded.directory}: {record['target']['name'].upper()} by {record['method']}, cache {before} -> "
        f"{after} elements per token and layer ({cache['ratio']:.1%}){cost}\n"
        f"Next: kvfold eval {place} --text FILE{as_stored}{'' if is_exact else train}"
    )


if __name__ == "__main__":
    main()
