"""`VerifyRequest`: everything that a user can ask of a check."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator

from ..convert.decide.engines import ENGINES, EngineName
from ..core.cache_dtypes import CacheDtypeName
from ..core.command_options import Option
from ..core.console import notice
from ..core.option_types import Place, as_list
from ..core.settings import Settings
from .engine_runs import check_llama_cpp
from .verify import VerificationReport, verify


def _once(engines: tuple[EngineName, ...]) -> tuple[EngineName, ...]:
    if not engines:
        raise ValueError(f"it should name an engine: {', '.join(ENGINES)}")
    return tuple(dict.fromkeys(engines))


def _is_directory(place: Path) -> Path:
    if not place.is_dir():
        raise ValueError("it is not a directory")
    return place


_Directory = Annotated[Place, AfterValidator(_is_directory), Option(metavar="DIR")]


class VerifyRequest(Settings):
    """A check as a user asks for it: `kvfold verify` takes its fields as options."""

    directory: _Directory
    """The checkpoint."""
    engines: Annotated[
        tuple[EngineName, ...],
        BeforeValidator(as_list),
        AfterValidator(_once),
        Option("--engine", repeated=True),
    ] = ("transformers",)
    """Engine whose rules are applied; may be given several times."""
    source: _Directory | None = None
    """The checkpoint that it was made from. Default: as kvfold.json says."""
    llama_cpp: _Directory | None = None
    """llama.cpp, with convert_hf_to_gguf.py and its built programs: runs --engine llama.cpp."""
    cache_dtype: CacheDtypeName | None = None
    """Also say which engines store this output's cache in that number format."""
    renew_code: bool = False
    """First replace the Python files of an earlier kvfold in DIRECTORY with this version's."""
    run: bool = True
    """Whether to load it next to its source too, in a process that cannot import kvfold."""


def carry_out(asked: VerifyRequest) -> VerificationReport:
    """Check what a request names, after its code is renewed where that is asked for.

    Raises:
        InvalidInput: there is no checkpoint, its source is gone, or memory is too small.
    """
    check_llama_cpp(asked.engines, asked.llama_cpp)
    if asked.renew_code:
        from ..models.remote_code import renew

        place, names = asked.directory, renew(asked.directory)
        notice(
            f"renewed {', '.join(names)} in {place}" if names else f"the code of {place} is this version's"
        )
    return verify(
        asked.directory,
        asked.engines,
        asked.source,
        run=asked.run,
        llama_cpp=asked.llama_cpp,
        cache_dtype=asked.cache_dtype,
    )
