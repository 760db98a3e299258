"""A whole evaluation in this process: the models by role, and the suites in turn."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType

from ..checkpoints.eval_json import SCHEMA, TextProtocol
from ..checkpoints.quality_blocks import SuiteBlock
from ..core.console import is_first
from ..core.errors import InvalidInput
from ..core.files import replace_text
from ..core.memory import enough_memory, remedy_of
from ..core.processes import together
from ..core.settings import Settings
from ..core.work import WorkDir, claimed, discard_finished, working_directory
from ..texts.corpus import Text
from .options import Options
from .result import Result
from .subject import Subject, asked_of, versions
from .suites.catalogue import DEFAULT, SUITES, with_storage


def evaluate(
    student: Path,
    teacher: Path | None,
    text: Text | None,
    options: Options,
    parent: Path | None = None,
    *,
    suites: Sequence[str] = DEFAULT,
    settings: Settings | None = None,
    journal: WorkDir | None = None,
) -> Result:
    """Measure a checkpoint, and its teacher and folded parent where they are given, on the same windows.

    Args:
        student: the checkpoint.
        teacher: the checkpoint to compare it with; None measures the student alone.
        text: the text to read; None where no suite reads one.
        options: how to load the models and how to cut the text.
        parent: the folded checkpoint that `student` was distilled from; the recovered share needs it.
        suites: names of `SUITES`.
        settings: the suites' own options, such as `SuiteSettings`; None: their defaults.
        journal: the finished parts of an interrupted evaluation with the same arguments.

    Returns:
        The result. Under a launcher, only rank 0 has the suites that one process measures alone.

    Raises:
        InvalidInput: a checkpoint cannot be loaded, two checkpoints cannot be compared, the text does not
            suit the windows, a model's logits are not finite, memory is full, or a suite refuses its
            settings.
    """
    suites = with_storage(suites, options.cache_dtype)
    paths = {"student": student, "teacher": teacher, "parent": parent}
    given = {role: path for role, path in paths.items() if path is not None}
    remedy = _remedy(options, "" if text is None else "a smaller --window", is_alone=len(given) == 1)
    with enough_memory(remedy):
        modules = {name: import_module(f".suites.{SUITES[name].module}", __package__) for name in suites}
        for name, module in modules.items():
            if hasattr(module, "check"):
                module.check(asked_of(settings, SUITES[name].settings))
        subject = Subject(given, options, text, settings, journal)
        found = _measure(subject, modules)
        with together():
            subject.check_unchanged()
    protocol = None
    # Where texts are only begun and continued, nothing of them is scored.
    if text is not None and any(SUITES[name].reads_text and SUITES[name].on_all_ranks for name in suites):
        windows = subject.windows
        protocol = TextProtocol(
            name=windows.name,
            text_sha256=text.sha256,
            window=windows.length,
            windows=len(windows.ids_NW),
            bos=windows.bos,
            scored_tokens=int(windows.scored_NT.sum()),
            scored_bytes=windows.bytes,
        )
    return Result(
        schema=SCHEMA,
        checkpoint=subject.checkpoints["student"],
        teacher=subject.checkpoints.get("teacher"),
        parent=subject.checkpoints.get("parent"),
        protocol=protocol,
        suites={name: found[name] for name in suites if name in found},
        device=subject.device,
        versions=versions(),
        cache_dtype=options.cache_dtype,
    )


@contextmanager
def reserved(out: Path) -> Iterator[tuple[WorkDir, Callable[[str], None]]]:
    """Claim the working directory of a report before the long work.

    Yields:
        The working directory, and a function that writes the report.

    Raises:
        InvalidInput: `out` exists or cannot be written, or another evaluation writes it.
    """
    with ExitStack() as stack:
        try:
            discard_finished(out)
            if out.exists() or out.is_symlink():
                raise InvalidInput(f"--out {out} exists; name another file")
            if not out.parent.is_dir():
                raise InvalidInput(f"--out {out}: there is no directory {out.parent}")
            claim = claimed(working_directory(out), "evaluation", keeps=lambda work: bool(work.units))
            work = stack.enter_context(claim)
        except OSError as error:
            raise InvalidInput(
                f"--out {out} cannot be written: {error.strerror}; name another file, or fix that and run "
                "the same command again"
            ) from None

        def write(report: str) -> None:
            place = work.path / "eval.json"
            replace_text(place, report)
            work.finish(place, out)

        yield work, write


def _measure(subject: Subject, modules: Mapping[str, ModuleType]) -> dict[str, SuiteBlock | None]:
    """Return what each suite measures, by its name; see `evaluate` for processes under a launcher."""
    if subject.text is not None:
        _ = subject.windows  # cut by all processes together, before any of them works alone
    with together():
        if is_first():
            for module in modules.values():
                if hasattr(module, "check_room"):
                    module.check_room(subject)
    found: dict[str, SuiteBlock | None] = {}
    for name, module in modules.items():
        if SUITES[name].on_all_ranks:
            found[name] = module.measure(subject)
    with together():
        if is_first():
            for name, module in modules.items():
                if not SUITES[name].on_all_ranks:
                    is_alone = len(subject.checkpoints) == 1
                    with enough_memory(_remedy(subject.options, SUITES[name].shorter, is_alone=is_alone)):
                        found[name] = module.measure(subject)
    return found


def _remedy(options: Options, shorter: str, *, is_alone: bool) -> str:
    """Return what takes less memory; `shorter` makes the texts shorter, and is empty where nothing does."""
    ways = {
        "a smaller --batch-size": options.batch_size > 1,
        shorter: bool(shorter),
        "--dtype bfloat16": options.dtype not in ("bfloat16", "float16"),
        "--one-at-a-time": not options.one_at_a_time and not is_alone,
    }
    return remedy_of(ways, "a machine with more memory")
