"""The Python API: each function builds a request, runs it and returns a result.

Nothing is printed. Notices go to the result and to the logger `kvfold`; progress goes to a callback, which is
called with a description, how many items are done and how many there are. Every mistake in what is given is
an `InvalidInput`, a `ValueError`; only arguments that are missing or one too many are a `TypeError`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from .arguments import directories_of, directory_of, optional_path, optional_text, public, text_of
from .core.console import ProgressCallback, calling
from .core.errors import InvalidInput
from .results import Folded, Measurements, Published, Quantized, TrainingRun

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from .convert.request import GQA, MLA, MQA
    from .distill.recipe.recipe import Recipe
    from .engines.verify import VerificationReport
    from .planning.recommendation import Candidates


@overload
def fold(
    source: str | Path,
    target: GQA | MQA | MLA,
    *,
    out: str | Path | None = None,
    engines: Sequence[str] = (),
    progress: ProgressCallback | None = None,
    **options: Any,
) -> Folded: ...


@overload
def fold(
    source: PreTrainedModel,
    target: GQA | MQA | MLA,
    *,
    tokenizer: PreTrainedTokenizerBase,
    engines: Sequence[str] = (),
    progress: ProgressCallback | None = None,
    **options: Any,
) -> PreTrainedModel: ...


@public
def fold(
    source: str | Path | PreTrainedModel,
    target: GQA | MQA | MLA,
    *,
    out: str | Path | None = None,
    engines: Sequence[str] = (),
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: ProgressCallback | None = None,
    **options: Any,
) -> Folded | PreTrainedModel:
    """Fold a model's attention so that its KV cache becomes smaller.

    A directory or a Hub id becomes a new directory; the source is never changed and nothing is overwritten. A
    loaded transformers model becomes another loaded model: both are written to a temporary directory on the
    way, which takes their size twice on disk, and memory holds both at the end.

    Args:
        source: a directory, a Hub id with an optional `@revision`, or a loaded transformers model.
        target: what the attention becomes: `GQA(...)`, `MQA()` or `MLA(...)`.
        out: a new directory, by default `./<model>-<target>`; leave it out for a loaded model.
        engines: engines that must run the output: transformers, vllm, sglang, llama.cpp, mlx and others.
        tokenizer: the tokenizer of a loaded model.
        progress: called with a description, how many items are done and how many there are.
        options: other fields of `kvfold.convert.request.FoldRequest`, such as `calibration` or `refine`.

    Returns:
        The folded checkpoint; of a loaded model the folded model, on its device and in its dtype.

    Raises:
        InvalidInput: the source cannot be folded like this, or a value is unusable.

    Example:
        >>> import kvfold
        >>> folded = kvfold.fold(
        ...     demo, kvfold.MLA(kv_budget="25%"), out=work / "folded", sequences=4, length=64, refine=0
        ... )
        >>> folded.cache["ratio"]
        0.25
        >>> model = folded.load(dtype="bfloat16")
    """
    from .convert.request import request_of
    from .fold_run import carry_out, fold_loaded

    options["engines"] = engines
    with calling(progress):
        if isinstance(source, str | Path):
            if tokenizer is not None:
                raise InvalidInput("tokenizer is for a loaded model; a directory and a Hub id have their own")
            return carry_out(request_of(source, target, out=out, **options))
        if out is not None and hasattr(source, "save_pretrained"):
            raise InvalidInput(f"out is {str(out)!r}; leave it out, since a loaded model has no output")
        return fold_loaded(source, target, tokenizer, **options)


@public
def plan(
    source: str | Path,
    *,
    context: int | str | None = None,
    memory: int | str | None = None,
    batch: int = 1,
    engines: Sequence[str] = (),
    progress: ProgressCallback | None = None,
    **options: Any,
) -> Candidates:
    """Compare the targets that a source could be folded to, and name the one to take. Nothing is written.

    Args:
        source: a directory, or a Hub id with an optional `@revision`.
        context: tokens of each sequence: a number, or a text such as `"32k"` (32 x 1024); None: 32k, or the
            source's positions where these are fewer.
        memory: bytes for weights, cache and activations, or a text such as `"24GB"`; None: unbounded.
        batch: sequences at once.
        engines: engines that must run the output; none: any.
        progress: called with a description, how many items are done and how many there are.
        options: other fields of `kvfold.planning.request.PlanRequest`, such as `calibration`.

    Returns:
        The candidates, the best first. It shows itself as a table; `.chosen` is the one to take.

    Raises:
        InvalidInput: the source cannot be folded to a smaller cache, or a value is unusable.

    Example:
        >>> import kvfold
        >>> table = kvfold.plan(demo, context=512, memory="24GB")
        >>> table.chosen["label"], len(table) > 10
        ('MLA 128, rope intact', True)
    """
    from .planning.recommendation import PlanRequest, recommend

    options |= {"context": context, "memory": memory, "batch": batch, "engines": engines}
    with calling(progress):
        return recommend(PlanRequest.read({"model": text_of(source, "source"), **options}))


@public
def train(
    recipe: str | Path | Recipe | Mapping[str, Any],
    *,
    settings: Mapping[str, Any] | None = None,
    progress: ProgressCallback | None = None,
) -> TrainingRun:
    """Train a folded checkpoint against its source. A run that was stopped is resumed by the same call.

    Args:
        recipe: a YAML file, a `Recipe`, a mapping of a recipe's keys (a place in it may be a `Path`), or the
            directory of a fold, which is then trained on text that its source writes.
        settings: values that replace the recipe's own, by key: `{"stages.0.lr": 1e-4}`, with lists from 0.
        progress: called with a stage's name, how many steps are done and how many there are.

    Returns:
        The distilled checkpoint and its losses.

    Raises:
        InvalidInput: something in the recipe cannot be used, the training diverged, or the disk is full.
        kvfold.core.signals.Interrupted: SIGINT or SIGTERM stopped the training; its state is saved.

    Example:
        >>> import kvfold
        >>> few = {"stages.0.tokens": 128, "stages.0.batch_tokens": 64, "device": "cpu"}
        >>> run = kvfold.train(work / "folded", settings=few)
        >>> run.steps, run.directory.name
        (2, 'folded-distilled')
    """
    from .distill.parallel.launch import check_launched, is_launched
    from .distill.recipe.recipe_file import as_recipe
    from .distill.run.job import distill

    recipe = as_recipe(recipe, settings)
    check_launched()
    if recipe.profile not in {None, "cpu", "single"} and not is_launched():
        raise InvalidInput(
            f"profile is {recipe.profile}, which needs several processes; use kvfold distill, or leave it out"
        )
    if recipe.profile == "cpu":
        recipe = recipe.model_copy(update={"device": "cpu"})
    with calling(progress) as heard:
        result = distill(recipe)
    return TrainingRun(directory=result.output, report=result.to_dict(), notices=tuple(heard.notices))


@public
def evaluate(
    directory: str | Path,
    *,
    text: str | Path | None = None,
    suites: Sequence[str] = ("ppl", "fidelity", "cache"),
    teacher: str | Path | None = None,
    out: str | Path | None = None,
    progress: ProgressCallback | None = None,
    **options: Any,
) -> Measurements:
    """Measure a checkpoint on a text, with its teacher on the same windows.

    Args:
        directory: the checkpoint, a directory or a Hub id.
        text: a protocol such as `wikitext2-gptq-2048`, `stdlib`, or a file: UTF-8, or rows with documents
            in a field `text` (.jsonl, .json, .parquet), also compressed; None if no suite reads one.
        suites: what to measure: `ppl`, `fidelity`, `cache`, `speed`, `retrieval`, `ruler`, `generation`,
            `tasks`.
        teacher: the model to compare with; by default the source named in kvfold.json.
        out: a file for the JSON report, from which an interrupted evaluation is resumed.
        progress: called with a description, how many items are done and how many there are.
        options: other fields of `kvfold.eval.options.EvalRequest`, such as `window`, `device` or
            `speed_batch`.

    Returns:
        What was measured. `result["kl.mean"]` is a number by its path.

    Raises:
        InvalidInput: a checkpoint or the text cannot be used, or a suite refuses.

    Example:
        >>> import kvfold
        >>> found = kvfold.evaluate(work / "folded", text="stdlib", window=64, max_windows=2)
        >>> 0 < found["kl.mean"] < 5, found["cache.ratio"]
        (True, 0.25)
    """
    from .eval.options import EvalRequest
    from .eval.request import run_request

    given = {**options, "suites": suites, "model": text_of(directory, "directory")}
    given |= {"text": optional_text(text, "text"), "teacher": optional_text(teacher, "teacher")}
    file = optional_path(out, "out")
    with calling(progress) as heard:
        given = {name: value for name, value in given.items() if value is not None}
        result = run_request(EvalRequest.read(given), file)
    return Measurements(report=result.to_json(), table=result.grid(), notices=tuple(heard.notices))


@public
def verify(
    directory: str | Path,
    *,
    engines: Iterable[str] = ("transformers",),
    source: str | Path | None = None,
    run: bool = True,
    cache_dtype: str | None = None,
    llama_cpp: str | Path | None = None,
    renew_code: bool = False,
    restore: bool = False,
) -> VerificationReport:
    """Check that a checkpoint is what it claims to be, in the engines that are to run it.

    Args:
        directory: the checkpoint.
        engines: engines whose rules are asked: transformers, vllm, sglang, llama.cpp, mlx and others.
        source: what it was made of; by default as its kvfold.json says.
        run: whether to load it next to its source too, in a process that cannot import kvfold.
        cache_dtype: a number format in which the engines are to store its cache; None: as it is computed.
        llama_cpp: directory of llama.cpp, built, which is to run it where that engine is asked for.
        renew_code: first replace its Python files of an earlier kvfold with this version's.
        restore: first write what transformers 4 and engines read and saving with transformers 5 drops, into
            config.json and tokenizer_config.json.

    Returns:
        What was found; `.failures` is empty where the checkpoint may be used.

    Raises:
        InvalidInput: there is no checkpoint or no such engine, its source is gone, or memory is too small.

    Example:
        >>> import kvfold
        >>> kvfold.verify(work / "folded", run=False).failures
        []
    """
    from .engines.request import VerifyRequest
    from .engines.request import carry_out as check

    given = {"directory": directory_of(directory), "engines": engines, "source": source, "run": run}
    given |= {"cache_dtype": cache_dtype, "llama_cpp": llama_cpp, "renew_code": renew_code}
    given |= {"restore": restore}
    return check(VerifyRequest.read(given))


@public
def quantize(
    directory: str | Path,
    scheme: str,
    *,
    out: str | Path | None = None,
    group_size: int | None = None,
    shard_size: int | str = "5GB",
    progress: ProgressCallback | None = None,
) -> Quantized:
    """Round the linear weights of a checkpoint to 8 or 4 bits, as compressed-tensors stores them.

    Args:
        directory: the checkpoint, folded or not; it is not changed.
        scheme: `fp8`, `w4a16` or `w8a8`.
        out: the output directory, which must not exist; by default `./<name>-<scheme>`.
        group_size: columns of a weight that share a scale, for `w4a16`; None: 128, 64 or 32, by the widths.
        shard_size: most bytes of a weight file: a number, or a text such as `5GB`.
        progress: called with a description, how many tensors are done and how many there are.

    Returns:
        The quantised checkpoint, and what was rounded.

    Raises:
        InvalidInput: compressed-tensors is missing, or the checkpoint cannot be quantised like this.

    Example:
        >>> import kvfold
        >>> kvfold.quantize(work / "folded", "w4a16", out=work / "q").record["stage"]
        'quantize'
    """
    from .quantisation.quantize import plan_quantize, write_quantized
    from .quantisation.request import QuantizeRequest

    given = {"directory": directory_of(directory), "scheme": scheme, "out": out}
    with calling(progress):
        asked = QuantizeRequest.read({**given, "group_size": group_size, "shard_size": shard_size})
        plan = plan_quantize(asked.directory, asked.scheme, asked.out, group=asked.group_size)
        return Quantized(directory=plan.out, record=write_quantized(plan, asked.shard_size))


@public
def publish(
    directory: str | Path,
    repository: str,
    *,
    private: bool = False,
    verify: str | None = None,
    dry_run: bool = False,
    progress: ProgressCallback | None = None,
) -> Published:
    """Publish a checkpoint as a repository of the Hub, with a model card, in one commit.

    Args:
        directory: the checkpoint, which kvfold wrote; it is not changed.
        repository: `owner/name`.
        private: whether the repository is to be private; False: a new one is as its owner's settings say.
        verify: `lint` or `full`; by default full where the source is at hand.
        dry_run: whether nothing is sent; no network is touched.
        progress: called with a description, how many files are sent and how many there are.

    Returns:
        The card, the files and the commit.

    Raises:
        InvalidInput: the checkpoint fails its check, the name is none, or the Hub cannot be reached.

    Example:
        >>> import kvfold
        >>> kvfold.publish(work / "folded", "me/folded", verify="lint", dry_run=True).commit is None
        True
    """
    from .publishing.publish import PublishRequest, release

    given = {"directory": directory_of(directory), "repository": text_of(repository, "repository")}
    asked = PublishRequest.read({**given, "private": private, "verify": verify, "dry_run": dry_run})
    with calling(progress):
        found = release(asked)
    if failures := "; ".join(found.verification.failures):
        raise InvalidInput(f"{directory} does not pass kvfold verify, so nothing was uploaded: {failures}")
    return found


@public
def report(
    directories: Sequence[str | Path], out: str | Path = "report.html", *, png: str | Path | None = None
) -> Path:
    """Write what was measured of some checkpoints as one HTML page that needs no network.

    Args:
        directories: checkpoints with an eval.json.
        out: the page; must not exist.
        png: a new directory for every figure as a PNG; None for none.

    Returns:
        The page.

    Raises:
        InvalidInput: a library is missing, a place is taken, or a directory holds no evaluation.

    Example:
        >>> import kvfold
        >>> file = work / "folded" / "eval.json"
        >>> kvfold.evaluate(work / "folded", text="stdlib", window=64, max_windows=2, out=file)["cache.ratio"]
        0.25
        >>> kvfold.report([work / "folded"], work / "report.html").name
        'report.html'
    """
    from .eval.page.document import write_page

    places = directories_of(directories)
    file = Path(text_of(out, "out"))
    write_page(places, file, optional_path(png, "png"))
    return file
