"""The request of a migration, and its working directory.

    <out>.partial/  lock  journal.jsonl  statistics.safetensors  folded/STEP/  distilled/STEP/

Each checkpoint appears under its name only when it is whole, so the same command resumes after the last one.
"""

import json
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..convert.calibration.reach import default_length
from ..convert.decide.plan import Plan
from ..convert.efforts import EFFORTS
from ..convert.families.source import Source, open_source
from ..convert.request import FoldRequest, fold_request
from ..convert.settle.settle import make_plan
from ..core.command_options import words_of
from ..core.console import notice, processes_in_all
from ..core.errors import InvalidInput, renamed
from ..core.hub import resolve
from ..core.units import read_share, show_percent, show_trained
from ..core.work import working_directory
from ..distill.data.samples import check_texts
from ..distill.recipe.default_recipe import default_save, default_stage, default_steps, weights_of
from ..distill.recipe.recipe import Evaluate, Recipe
from ..distill.recipe.recipe_file import as_recipe
from ..distill.watch.held_out import check_held_out
from ..eval.assertions import Assertion, parse, short_names
from ..eval.options import Options
from ..models.causal_lm import describe
from ..models.load_options import LoadOptions
from ..texts.calibration_name import names_statistics
from ..texts.corpus import Text, read_text
from ..texts.documents import check_calibration
from ..texts.sources import check_encoding, check_source
from .migration_options import STEPS, WINDOW, MigrationOptions

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Step:
    """A size on the way.

    Attributes:
        name: its proportion of the source's cache, such as `25%`, or `mqa`.
        sizes: the options of `target.from_options`.
        plan: the fold by weights alone, which knows the output's shapes.
    """

    name: str
    sizes: dict[str, Any]
    plan: Plan


@dataclass(frozen=True, kw_only=True)
class Migration:
    """A checked request.

    Attributes:
        wanted: the request as the user made it.
        source: the directory of its model.
        steps: from the largest cache to the smallest.
        bound: the condition on an evaluation.
        text: held-out text.
        options: how the text is read.
        calibration: the arguments of `study`.
        refine: steps of the fold's refinement.
        recipe: of every step's distillation; student and output are filled in.
        overrides: of the recipe, as `--set` has them.
    """

    wanted: MigrationOptions
    source: Path
    steps: tuple[Step, ...]
    bound: Assertion
    text: Text
    options: Options
    calibration: dict[str, Any]
    refine: int
    recipe: Recipe
    overrides: tuple[str, ...]

    @property
    def out(self) -> Path:
        """The output as the user named it."""
        return self.wanted.out

    @property
    def partial(self) -> Path:
        """The working directory."""
        return working_directory(self.out)

    @property
    def unmet(self) -> Path:
        """The output if no step stays within the bound."""
        return Path(f"{self.out}.unmet")

    @property
    def command(self) -> str:
        """The command that makes the same output again, without `--out`."""
        wanted = self.wanted
        others = {"model", "to", "until", "out", "settings", "keep_steps"}
        values = wanted.model_dump(exclude=others, exclude_defaults=True, exclude_none=True)
        if "steps" in values:
            values["steps"] = tuple(map(show_percent, values["steps"]))
        if "tokens_per_step" in values:
            values["tokens_per_step"] = show_trained(wanted.tokens_per_step)
        words = words_of(MigrationOptions, {"to": wanted.to, "until": wanted.until, **values})
        settings = [f"{key}={json.dumps(value)}" for key, value in wanted.settings.items()]
        words += [word for setting in [*self.overrides, *settings] for word in ("--set", setting)]
        return shlex.join(["kvfold", "migrate", wanted.model, *words])

    def asked(self) -> dict[str, Any]:
        """Return everything that the numbers depend on.

        It must stay the same between two runs; the bound and the list of steps may change.
        """
        return {
            "kvfold_migrate": SCHEMA,
            "source": open_source(self.source).checkpoint.identity(),
            "to": self.wanted.to,
            "text": self.text.sha256,
            "window": self.options.window,
            "max_windows": self.options.max_windows,
            "calibration": self.calibration,
            "effort": self.wanted.effort,
            "refine": self.refine,
            "recipe": {
                key: value
                for key, value in self.recipe.resolved().items()
                if key not in {"student", "output", "save"}
            },
        }


_BOUNDED = ("ppl", "fidelity")  # suites that measure what a bound may be about
_EXAMPLES = "'ppl<1.02x' or 'kl<0.05'"
# How a fold with less loss compares with a bound, by the third part of a number's path.
_BETTER = {
    **dict.fromkeys(("student", "difference", "ratio", "kl", "kl_percentiles", "kl_max"), "<"),
    **dict.fromkeys(("delta_p_rms", "kl_by_position"), "<"),
    **dict.fromkeys(("same_top1", "recovered_share", "nll_correlation"), ">"),
}
# Keys of the recipe that are filled in by options.
_OPTIONS = {
    "evaluate.source": "--text",
    "data.source": "--train",
    "evaluate.seq_len": "--window",
    "data.seq_len": "--window",
}


def read_bound(text: str) -> Assertion:
    """Return the bound that a text describes.

    It is `ppl<1.02x`, a multiple of the source's perplexity, or a comparison of `kvfold eval --assert` with a
    number that the suites `ppl` and `fidelity` measure.

    Raises:
        InvalidInput: the text has another form, or does not limit the loss.
    """
    times = re.fullmatch(r"\s*ppl\s*([<>]=?)\s*(\d+(?:\.\d*)?)x\s*", text)
    known = f"{_EXAMPLES}, of {', '.join(short_names(_BOUNDED))}"
    bound = parse(
        f"ppl.ratio{times[1]}{times[2]}" if times else text,
        _BOUNDED,
        label=f"--until {text!r}",
        examples=known,
        not_run=f"bound what kvfold migrate measures, for example {known}",
    )
    better = _BETTER.get(bound.path[2]) if bound.path[0] == "suites" else None
    if better is None:
        raise InvalidInput(f"--until {text!r} does not limit the loss; write for example {known}")
    if not times and bound.path[-1] == "perplexity" and bound.bound < 2:
        raise InvalidInput(
            f"--until {text!r} bounds the perplexity itself, which is hardly ever below 2; did you mean "
            f"'{text.strip()}x'?"
        )
    if bound.relation[0] != better:
        meant = text.strip().replace(bound.relation, better + bound.relation[1:])
        raise InvalidInput(
            f"--until {text!r} does not hold for a fold that loses less, so no search can end at it; did you "
            f"mean '{meant}'?"
        )
    return Assertion(text.strip(), bound.path, bound.relation, bound.bound)


def read_request(asked: MigrationOptions, overrides: tuple[str, ...] = ()) -> Migration:
    """Return the migration that a user asks for, checked before any long work.

    Raises:
        InvalidInput: names the option that cannot be used.
    """
    if processes_in_all() > 1:
        raise InvalidInput("kvfold migrate runs in one process; start it without a launcher")
    bound = read_bound(asked.until)
    directory = resolve(asked.model)
    source = open_source(directory)
    content = read_text(asked.text)
    window = content.window or asked.window or min(source.positions, WINDOW)
    if asked.window not in (None, window):
        raise InvalidInput(
            f"--text {asked.text} has windows of {window} tokens; leave out --window {asked.window}"
        )
    if window > source.positions:
        raise InvalidInput(
            f"--window {window} exceeds the {source.positions} positions of {asked.model}; use at most "
            f"{source.positions}"
        )
    calibration = asked.calibration
    if calibration != "none" and not names_statistics(calibration):
        check_calibration(calibration)
    if calibration == "none" and asked.refine:
        raise InvalidInput(
            f"--refine {asked.refine} needs text to refine on; leave it out, or use --calibration self"
        )
    effort = EFFORTS[asked.effort]
    return Migration(
        wanted=asked,
        source=directory,
        steps=_read_steps(source, asked.to, asked.steps),
        bound=bound,
        text=content,
        options=Options(window=window, max_windows=asked.max_windows),
        calibration={
            "calibration": calibration,
            "sequences": effort.sequences if asked.sequences is None else asked.sequences,
            # None leaves the length to `study`, which takes less where the source's own text breaks down.
            "length": None if default_length(source, calibration) <= window else window,
            "seed": asked.seed,
        },
        refine=effort.steps if asked.refine is None else asked.refine,
        recipe=_read_recipe(source, asked, window, overrides),
        overrides=overrides,
    )


def _read_steps(source: Source, to: str, shares: tuple[float, ...] | None) -> tuple[Step, ...]:
    """Return the sizes, each smaller than the one before; of the defaults, those that the source allows."""
    directory = source.checkpoint.directory
    given = ",".join(map(show_percent, shares or ()))
    if to == "mqa":
        if shares is not None:
            raise InvalidInput(
                f"--steps {given} does not apply to --to mqa, which has one size; use --to gqa for several"
            )
        plan = make_plan(directory, FoldRequest(model=str(directory), to="mqa"))
        return (Step(name="mqa", sizes={}, plan=plan),)
    steps: list[Step] = []
    for share in shares or STEPS:
        # In percent, since the directories of two steps must not begin with each other's names.
        name = show_percent(share)
        sizes = {"kv_budget": name if float(read_share(name, "--steps")) == share else str(share)}
        try:
            plan = make_plan(directory, fold_request({"model": str(directory), "to": to, **sizes}))
            if steps and plan.cache()["ratio"] >= steps[-1].plan.cache()["ratio"]:
                raise InvalidInput(
                    f"{name} gives no smaller cache than {steps[-1].name} before it; name falling sizes"
                )
        except InvalidInput as reason:
            sentence = renamed(str(reason), {"--kv-budget": "--steps"})
            if shares is not None:
                raise InvalidInput(
                    sentence if sentence.startswith("--steps") else f"--steps {given}: {sentence}"
                ) from None
            if not steps and share == STEPS[-1]:
                raise
            notice(f"there is no step of {name}: {sentence}")
            continue
        steps.append(Step(name=name, sizes=sizes, plan=plan))
    return tuple(steps)


def _read_recipe(source: Source, asked: MigrationOptions, window: int, overrides: tuple[str, ...]) -> Recipe:
    """Return the recipe of every step, with the user's own settings.

    Its texts exist, and the evaluation's is not among them.
    """
    keys = {f"--set {override}": override.partition("=")[0] for override in overrides}
    keys |= {f"settings[{key!r}]": key for key in asked.settings}  # of a call in Python
    for name, key in keys.items():
        if key in {"student", "output"}:
            raise InvalidInput(f"{name}: every step has its own student and output; leave it out")
    tokens, text = asked.tokens_per_step, asked.text
    content: dict[str, Any] = {  # forward KL, with the batch left to kvfold
        "schema": 1,
        "student": str(asked.out),
        "teacher": str(source.checkpoint.directory),
        "output": str(asked.out),
        "data": {
            "seq_len": window,
            "seed": asked.seed,
            "source": asked.train or ("stdlib" if text == "stdlib" else "self"),
        },
        "stages": [default_stage(weights_of(source.checkpoint), tokens, window)],
        # For the curve, and the proof that the text is not trained on.
        "evaluate": {"source": text, "every": max(1, default_steps(tokens, window) // 5), "windows": 16},
        "save": {"every": default_save(tokens, window)},
    }
    recipe = as_recipe(content, asked.settings, overrides)
    with naming_options():
        for named in recipe.data.sources:
            check_source(named.source)
            check_encoding(named.source)
        student = describe(source.checkpoint.directory, LoadOptions())
        sentences, samples = check_texts(recipe, student)
        # The distillation may look at another text than the bound, or at none.
        judged = recipe.model_copy(update={"evaluate": Evaluate(source=text, seq_len=window)})
        check_held_out(judged, student, samples)
    if recipe.evaluate is not None:
        check_held_out(recipe, student, samples)
    for sentence in sentences:
        notice(_with_options(sentence))
    for sentence in recipe.few_steps():
        notice(f"--tokens-per-step {show_trained(tokens)}: {sentence}")
    return recipe


@contextmanager
def naming_options() -> Iterator[None]:
    """Let mistakes in the block name `--text` and `--train` in place of the keys that a recipe has for them.

    Raises:
        InvalidInput: as in the block.
    """
    try:
        yield
    except InvalidInput as mistake:
        raise InvalidInput(_with_options(str(mistake))) from None


def _with_options(sentence: str) -> str:
    for key, option in _OPTIONS.items():
        sentence = re.sub(rf"(?<![\w./-]){re.escape(key)}(?= )", option, sentence)
    return sentence
