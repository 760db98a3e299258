"""CPU seconds of the phases of a fold: `python -m benchmarks.fold_phases FILE convert MODEL ...`.

The command is kvfold's own, with clocks around the functions in which phases begin. Phases are those of
`convert/decide/costs/fold_cost.py`; what is in none of the others is the start. Use `--jobs 1`: layers that
are folded at once share the process's clock.
"""

import functools
import importlib
import json
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from kvfold.cli import main as kvfold

PLACES = {
    "calibration.study._own_text": "text",
    "calibration.study._within_reach": "text",
    "calibration.study._collect": "statistics",
    "decide.draft.choose_slots": "closed form",
    "settle.preparation.settle": "measured choices",
    "write.rewrite.fold": "closed form",
    "layer.finish._with_rounded_length": "rounded length",
    "layer.finish._fitted": "refinement",  # or, without steps, the output projection and a measurement
    "layer.finish._prepared": "quantised cache",
}
# Phases that hold functions of others, and the phase that all their time is given to; the first that is open
# counts.
WHOLE = {"quantised cache": "quantised cache", "measured choices": "closed form"}


class Clock:
    """CPU seconds of this process by phase, each without the phases inside it."""

    def __init__(self) -> None:
        self.found = defaultdict[str, float](float)
        self._open, self._last = ["start"], 0.0

    def turn(self) -> None:
        """Give the time since the last turn to the phase that is open."""
        # The choice of a width folds some layers by their closed form, and what is prepared for a
        # format is refined again, with the same functions.
        phase = next((WHOLE[phase] for phase in WHOLE if phase in self._open), self._open[-1])
        now = time.process_time()
        self.found[phase] += now - self._last
        self._last = now

    def watch(self, place: str, phase: str) -> None:
        """Count a function's time to a phase."""
        name, _, attribute = place.rpartition(".")
        module = importlib.import_module(f"kvfold.convert.{name}")
        function = getattr(module, attribute)

        @functools.wraps(function)
        def timed(*given: Any, **named: Any) -> Any:
            self.turn()
            self._open.append(phase)
            try:
                return function(*given, **named)
            finally:
                self.turn()
                self._open.pop()

        setattr(module, attribute, timed)


def main() -> None:
    """Run a command of kvfold and write the seconds of its phases."""
    file, *words = sys.argv[1:]
    clock = Clock()
    for place, phase in PLACES.items():
        clock.watch(place, phase)
    kvfold(words, standalone_mode=False)
    clock.turn()
    found = {phase: round(seconds, 2) for phase, seconds in clock.found.items()}
    Path(file).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
