"""What one draft is made by: the user's sizes and form, with the choices that were made for them."""

from dataclasses import dataclass, replace
from typing import Any

from ..algebra.target import Sizes
from ..formats.serving_widths import Profile


@dataclass(frozen=True, kw_only=True)
class DraftOptions:
    """The options of one draft.

    Attributes:
        sizes: of the target.
        container: one of `engines.containers_for`.
        slots: the kind of rotary slots; None: open.
        engines: that must run the output.
        profile: the widths that they take; None where they take any.
        theta: `rope_theta` of their table of slots; None: the source's own.
    """

    sizes: Sizes
    container: str
    slots: str | None = None
    engines: tuple[str, ...] = ()
    profile: Profile | None = None
    theta: float | None = None

    def with_sizes(self, **changed: Any) -> "DraftOptions":
        """Return the same with other sizes or another form."""
        return replace(self, sizes=replace(self.sizes, **changed))
