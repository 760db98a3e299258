"""The suite `storage`: the loss that the number format of the cache adds, for `--cache-dtype`.

The student is scored twice on the same windows: with its cache in the format, and as it computes.
"""

from ...checkpoints.quality_blocks import StorageBlock
from ..estimate import estimate, paired_difference
from ..scores import UNQUANTISED
from ..subject import Subject
from .fidelity import short


def rows(found: StorageBlock, roles: tuple[str, ...]) -> list[list[str]]:
    """Return the lines of the table, each a label and one cell per role."""
    lines = [
        (f"with the cache in {found.cache_dtype}: KL added, nats", short(found.kl)),
        ("  its maximum", f"{found.kl_max:.4g}"),
        ("  same top-1 as without", str(found.same_top1)),
        ("  NLL added, nats", short(found.nll)),
    ]
    if found.kl_to_teacher is not None:
        lines.append(("  KL(teacher || student) added", short(found.kl_to_teacher)))
    return [[label, value] for label, value in lines]


def measure(subject: Subject) -> StorageBlock:
    """Compare the student with itself without the format."""
    scores = subject.scores
    kind = subject.options.cache_dtype
    assert kind is not None, "the suite is chosen with --cache-dtype alone"
    counts, others = scores.counts, scores.others
    to_teacher = None
    if scores.kl_S is not None:
        to_teacher = paired_difference(
            scores.by_window(scores.kl_S), scores.by_window(others["kl_unquantised"]), counts
        )
    return StorageBlock(
        cache_dtype=kind,
        kl=estimate(scores.by_window(others["kl_added"]), counts),
        kl_max=float(others["kl_added"].max()),
        same_top1=estimate(scores.by_window(others["same_added"]), counts),
        nll=paired_difference(
            scores.by_window(scores.nll["student"]), scores.by_window(scores.nll[UNQUANTISED]), counts
        ),
        unquantised_nll=estimate(scores.by_window(scores.nll[UNQUANTISED]), counts),
        kl_to_teacher=to_teacher,
    )
