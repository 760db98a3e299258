"""`kvfold verify`: rules for each engine on a written checkpoint, then a run apart from kvfold.

The rules (engine_rules.py) read config.json and headers. The run (probe.py) is a fresh process that cannot
import kvfold. It loads the checkpoint as any user would, and compares it with its source on text that the
source writes. No code from the checkpoint runs: an output with code of its own is loaded from a copy that
holds kvfold's files instead (code_files.py).
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..core.console import notice
from ..core.grid import Grid, Tabular
from ..core.units import show_bytes, show_kinds
from .engine_runs import run_llama_cpp, started_engines
from .fresh_process import MODULES, PROBES, Check, NotRun, Packed, run_apart, serve
from .llama_programs import LlamaCpp
from .rules.engine_names import ENGINES

if TYPE_CHECKING:
    from .rules.rule_types import LintFinding, Written

FAILED = 3  # exit code, distinct from a user's mistake (2) and from a fault of kvfold (1)
SEQUENCES, LENGTH = 4, 128  # of the text that is compared on
EXACT = 5e-5  # by which logits of a lossless fold may differ in float32, where they vary by one or less
ROUNDING = 0.05  # nats: what 16 bits cost a lossless fold at most, where a wrong one is tenths of a nat away
TIE = 1e-3  # logits nearer than this share of their deviation are as good
Precision = Literal["exact", "rounded"]


@dataclass(frozen=True, repr=False)
class VerificationReport(Tabular):
    """The result of a verification.

    Attributes:
        directory: the checkpoint.
        engines: that were asked for.
        findings: broken rules.
        checks: of the code, where it fails, and what the run measured; empty where it was not run.
        measured: its numbers.
        unasked: what was not done, in sentences.
    """

    directory: Path
    engines: tuple[str, ...]
    findings: tuple[LintFinding, ...]
    checks: tuple[Check, ...]
    measured: dict[str, Any]
    unasked: tuple[str, ...]

    @property
    def failures(self) -> list[str]:
        """Return why the checkpoint should not be used in one of the engines; empty when it may."""
        broken = [str(finding) for finding in self.findings if finding.fails]
        return broken + [f"{check.name}: {check.detail}" for check in self.checks if check.passed is False]

    def grid(self) -> Grid:
        """Return every check and broken rule, a line each."""
        words = {True: "ok", False: "FAILS", None: "-"}
        rows = [(check.name, words[check.passed], check.detail) for check in self.checks]
        for finding in self.findings:
            state = "FAILS" if finding.fails else "-"
            rows.append((finding.engine, state, str(finding).partition(" ")[2]))
        broken = {finding.engine for finding in self.findings}
        rows += [(name, "ok", "no rule is broken") for name in self.engines if name not in broken]
        rows += [("note", "-", sentence) for sentence in self.unasked]
        return Grid(str(self.directory), ("", "", ""), rows)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for `--json`."""
        return {
            "directory": str(self.directory),
            "engines": list(self.engines),
            "passed": not self.failures,
            "findings": [{**asdict(finding), "fails": finding.fails} for finding in self.findings],
            "checks": [asdict(check) for check in self.checks],
            "measured": self.measured,
            "unasked": list(self.unasked),
        }


def verify(
    directory: Path,
    engines: Iterable[str] = ENGINES[:1],
    source: Path | None = None,
    *,
    run: bool = True,
    llama_cpp: Path | None = None,
    cache_dtype: str | None = None,
) -> VerificationReport:
    """Apply the rules of some engines, and run a checkpoint and its source in transformers.

    The engines that can be started here run it too: vLLM, SGLang and MLX where they are installed, llama.cpp
    where its directory is given.

    Args:
        directory: the checkpoint.
        engines: of ENGINES.
        source: the checkpoint that it was made from; None takes the one in its kvfold.json.
        run: load it; otherwise only the rules are applied.
        llama_cpp: directory of llama.cpp, with its converter and its programs.
        cache_dtype: number format that the engines are to store the cache in; None: the model's dtype. The
            runs keep theirs.

    Raises:
        NotRun: memory does not hold the checkpoint or its source.
        InvalidInput: there is no checkpoint or no such format, its source is missing, or llama.cpp is not
            where it should be.
    """
    from ..checkpoints.quantised.packed_checkpoint import is_quantised
    from ..models.code_files import foreign_code
    from .rules.engine_rules import format_findings, lint
    from .rules.rule_types import open_written

    asked = tuple(dict.fromkeys(engines))
    findings = tuple(lint(directory, asked))
    formats: list[LintFinding] = []
    if cache_dtype is not None:
        layout = open_written(directory).layout
        formats = [found for engine in asked for found in format_findings(layout, engine, cache_dtype)]
    started, unasked = started_engines(asked, findings, llama_cpp, run=run)
    if run and is_quantised(directory):
        others = ", ".join(["transformers", *(engine for engine in started if MODULES.get(engine) != "vllm")])
        unasked.append(
            f"{others}: its quantised weights were run dequantised to bfloat16, without the vendor's kernels"
        )
    findings = (*findings, *formats)
    code = foreign_code(directory)
    if code:
        foreign = Check("code", False, f"{code}, so the checkpoint was not run")
        return VerificationReport(directory, asked, findings, (foreign,), {}, tuple(unasked))
    if not run:
        unasked.append("the checkpoint was not run")
        return VerificationReport(directory, asked, findings, (), {}, tuple(unasked))
    llama = None if llama_cpp is None or "llama.cpp" not in started else LlamaCpp.at(llama_cpp)
    checks, measured = _run(directory, source, started, llama)
    return VerificationReport(directory, asked, findings, tuple(checks), measured, tuple(unasked))


def verify_fold(out: Path, asked: Sequence[str], how: str) -> VerificationReport | None:
    """Verify a fold that was just written.

    Where memory does not hold the run, the fold is complete all the same: a notice says that it was not run,
    and the rules alone are applied.

    Returns:
        The report; None for `none`.

    Raises:
        InvalidInput: as of `verify`.
    """
    if how == "none":
        return None
    from ..checkpoints.quantised.schemes import SCHEMES
    from .rules.rule_types import open_written

    engines = tuple(asked)
    if not asked:
        # That transformers does not read a source's quantised weights is no fault of the fold.
        scheme = SCHEMES.get(open_written(out).scheme)
        engines = ENGINES[:1] if scheme is None or not scheme.note else ()
    if how == "full":
        try:
            return verify(out, engines)
        except NotRun as lack:
            notice(
                f"{out} is written; it was not run, since {lack.reason}; check it later with kvfold verify "
                f"{shlex.quote(str(out))}"
            )
    return verify(out, engines, run=False)


def _run(
    directory: Path, source: Path | None, started: Sequence[str], llama: LlamaCpp | None
) -> tuple[list[Check], dict[str, Any]]:
    from ..checkpoints.record import read_record, source_directory
    from ..models.code_files import clean_copy
    from ..models.dequantised import dequantised_copy
    from ..models.remote_code import is_remote
    from .rules.rule_types import open_written

    record = read_record(directory)
    source = source_directory(directory, "--source") if source is None else source
    calibration = (record or {}).get("calibration") or {}
    seed = calibration.get("seed", 0) + 1  # held back: other text than it was calibrated on
    written = open_written(directory)
    probed = [engine for engine in started if engine in PROBES]
    asked: dict[str, Any] = {"seed": seed, "answers": bool(probed), "source": None} | _size(written, source)
    with ExitStack() as stack:
        remote = is_remote(directory)
        stored = stack.enter_context(clean_copy(directory)) if remote else directory.resolve()
        place = stack.enter_context(dequantised_copy(stored))
        packed = Packed.of(stored, source)
        if source is not None:
            asked["source"] = str(stack.enter_context(dequantised_copy(source.resolve())))
        asked |= {"directory": str(place), "trust": remote}  # the copy's code is kvfold's own
        kind = written.layout
        asked |= {"latent": kind in {"stock", "decoupled"}, "multimodal": kind.startswith("multimodal")}
        seen = run_apart("probe.py", asked)
        if "failed" in seen:
            return [Check("loads", False, seen["failed"].replace(str(place), str(directory)))], {}
        checks = _judge(written, record, source, seen)
        answers = seen.pop("answers", None)
        for engine in probed if answers is not None else ():
            found, seen[engine] = serve(engine, asked, answers, _claimed(record), packed)
            checks += found
        if llama is not None and seen["finite"]:
            whole = None if asked["source"] is None else Path(asked["source"])
            found, seen["llama.cpp"] = run_llama_cpp(llama, place, whole, _claimed(record))
            checks += found
        return checks, seen


def _judge(
    written: Written, record: dict[str, Any] | None, source: Path | None, seen: dict[str, Any]
) -> list[Check]:
    """Return the checks of what probe.py measured."""
    missing = seen["missing"]
    lack = f"{len(missing)} weights are missing, e.g. {missing[0]}" if missing else "no weight is missing"
    loaded = f"as {seen['class']}, {lack}"
    finite = "logits are finite" if seen["finite"] else "logits are NaN or infinite"
    checks = [Check("loads", not missing, loaded), Check("finite", seen["finite"], finite)]
    if not seen["finite"]:
        return checks
    gap = seen["greedy_gap"]
    same = "greedy tokens with the cache are those without it"
    if gap:
        same = f"greedy tokens with the cache fall short of those without it by {gap:.1e}"
    checks.append(Check("cache", gap <= TIE * seen.get("logit_deviation", 1.0), same))
    checks.append(_cache(seen["cache"], record, written))
    if (record or {}).get("weights"):
        from ..checkpoints.record import other_weights

        changed = other_weights(written.directory)  # training with another tool is no failure
        sentence = changed or "those that kvfold.json describes"
        checks.append(Check("weights", None if changed else True, sentence))
    return checks + ([] if source is None else [_distance(seen, _lossless(record, written, source))])


def _claimed(record: dict[str, Any] | None) -> float | None:
    """Return the elements per token and layer that the record says are cached."""
    cache = (record or {}).get("cache")
    return None if cache is None else cache["after"]["elements_per_token_per_layer"]


def _cache(layers: list[list[float]], record: dict[str, Any] | None, written: Written) -> Check:
    """Compare the growth of the live cache, in the layers that attend, with what the record claims.

    Intact latents keep positions where others keep values.
    """
    from ..convert.families.layers.layer_kinds import ATTENTION
    from ..convert.families.rows import FAMILIES

    counted = [keys if written.layout == "intact" else keys + values for keys, values in layers]
    mean = sum(counted) / len(counted)
    words = f"{mean:g} elements per token and layer in the live cache"
    kinds = ((record or {}).get("cache") or {}).get("layers") or {}
    if kinds:
        words += f", in {len(counted)} of {sum(kinds.values())} layers"
    if written.layout == "intact":
        words += f", and {sum(values for _, values in layers):g} digits of the position per token"
    claimed = _claimed(record)
    if claimed is None:
        return Check("cache size", None, words)
    family = FAMILIES.get(str(written.config.get("model_type")))
    if family is not None and family.caches_queries and written.layout == "grouped":
        return Check(
            "cache size",
            None,
            f"{words}: this class caches every query head; kvfold.json's {claimed} are for vLLM",
        )
    unlike = record["cache"].get("kinds") if record else None
    if unlike:
        wanted = sorted(size["after"] for size in unlike.values() for _ in range(size["layers"]))
        claim = ", ".join(f"{size['after']} in {size['layers']} {kind}" for kind, size in unlike.items())
        return Check("cache size", sorted(counted) == wanted, f"{words}, kvfold.json claims {claim} layers")
    claim = f"{claimed} in {show_kinds(kinds)}" if kinds else str(claimed)
    right = set(counted) == {claimed} and len(counted) == kinds.get(ATTENTION, len(counted))
    return Check("cache size", right, f"{words}, kvfold.json claims {claim}")


def _distance(seen: dict[str, Any], kept: Precision | None) -> Check:
    """Report the distance from the source; it fails only where the checkpoint claims to be equal."""
    words = (
        f"KL {seen['kl']:.2e} nats, same top-1 {seen['same_top1']:.1%}, perplexity {seen['perplexity']:.4g} "
        f"(source {seen['source_perplexity']:.4g}), logits at most {seen['max_difference']:.1e} apart"
    )
    if kept is None:
        return Check("source", None, words)
    if kept == "rounded":
        near = seen["kl"] <= ROUNDING
        return Check(
            "source",
            near,
            words + (": rounding" if near else f": it keeps everything, so at most {ROUNDING} nats"),
        )
    passed = seen["max_difference"] <= EXACT * max(1.0, seen["logit_deviation"])
    return Check(
        "source", passed, f"{words}: " + ("exact" if passed else "it keeps everything, so it should be exact")
    )


def _lossless(record: dict[str, Any] | None, written: Written, source: Path) -> Precision | None:
    """Return the precision in which a checkpoint claims to be equal to its source.

    It is None where something was discarded or trained.
    """
    if record is None or record["stage"] != "convert" or not (record.get("target") and record.get("cache")):
        return None
    from ..convert.algebra.target import query_rank
    from ..convert.families.recognition import complete, family_of, geometry_of
    from .rules.rule_types import open_written

    stored = open_written(source)
    if record["target"]["name"] != "mla":
        is_same = record["cache"]["ratio"] == 1 and _dtypes(written) == _dtypes(stored)
        return "exact" if is_same else None
    queries = record["target"].get("q_lora_rank")
    approximates_biases = _has_biases(stored) and not _has_biases(written)  # they went into weights
    if record["target"].get("slots") != "source" or approximates_biases:
        return None
    if queries is not None:
        geometry = geometry_of(complete(family_of(stored.config), stored.config))
        if queries != query_rank(geometry, "full"):
            return None
    return "exact" if _dtypes(written) == _dtypes(stored) == {"torch.float32"} else "rounded"


def _dtypes(model: Written) -> set[str]:
    return {str(spec.dtype) for spec in model.specs.values()}


def _has_biases(model: Written) -> bool:
    return any("attn" in name and name.endswith(".bias") for name in model.specs)


def _size(written: Written, source: Path | None) -> dict[str, Any]:
    """Return the precision and the amount of text.

    It is float32 where one model at a time fits, otherwise the dtype that the weights are stored in.
    """
    import math

    from ..core.memory import free_bytes
    from .rules.rule_types import open_written

    models = [written] + ([] if source is None else [open_written(source)])
    counts = [sum(math.prod(spec.shape) for spec in model.specs.values()) for model in models]
    stored = [sum(spec.nbytes for spec in model.specs.values()) for model in models]
    length = min(LENGTH, *(model.get("max_position_embeddings", LENGTH) for model in models))
    logits = 8 * SEQUENCES * length * written.get("vocab_size", 1)  # of both models, float32
    free = free_bytes() - logits
    if max(stored) > free:
        raise NotRun(
            f"{written.directory} takes {show_bytes(max(stored))} of memory to run, but only "
            f"{show_bytes(max(free, 0))} are free"
        )
    dtype = "float32" if 4 * max(counts) <= free else "auto"
    return {"dtype": dtype, "sequences": SEQUENCES, "length": length}
