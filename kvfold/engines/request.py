"""`VerifyRequest`: everything that a user can ask of a check."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator

from ..core.cache_dtypes import CacheDtypeName
from ..core.command_options import Option
from ..core.console import notice
from ..core.errors import InvalidInput
from ..core.files import whole_file, write_json
from ..core.option_types import Place, as_list
from ..core.settings import Settings
from .rules.engine_names import ENGINES, EngineName
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
    restore: bool = False
    """First write what transformers 4 and engines read, and saving with transformers 5 drops, into DIR."""
    run: bool = True
    """Also load it and its source, in a process that cannot import kvfold."""


def carry_out(asked: VerifyRequest) -> VerificationReport:
    """Check what a request names, after its code or its rotary fields are renewed where that is asked for.

    Raises:
        InvalidInput: there is no checkpoint, its source is gone, or memory is too small.
    """
    if asked.llama_cpp is not None and "llama.cpp" not in asked.engines:
        raise InvalidInput(
            f"--llama-cpp {asked.llama_cpp} is for --engine llama.cpp, which is not asked for; give both"
        )
    if asked.renew_code:
        from ..models.remote_code import renew

        place, names = asked.directory, renew(asked.directory)
        notice(
            f"renewed {', '.join(names)} in {place}" if names else f"the code of {place} is this version's"
        )
    if asked.restore:
        _restore(asked.directory)
    return verify(
        asked.directory,
        asked.engines,
        asked.source,
        run=asked.run,
        llama_cpp=asked.llama_cpp,
        cache_dtype=asked.cache_dtype,
    )


def _restore(directory: Path) -> None:
    """Write config.json and tokenizer_config.json so that readers of older releases find their fields.

    Raises:
        InvalidInput: there is no checkpoint, or a file to change is a link.
    """
    from ..checkpoints.directory import read_config
    from ..convert.families.config_fields import former_rope, former_tokenizer
    from ..core.untrusted import read_json

    config = read_config(directory)
    files = {"config.json": (config, config | former_rope(config))}
    tokenizer = directory / "tokenizer_config.json"
    if tokenizer.is_file() and (directory / "tokenizer.json").is_file():
        saved = read_json(tokenizer)
        files[tokenizer.name] = saved, former_tokenizer(saved)
    changed = {name: pair for name, pair in files.items() if pair[0] != pair[1]}
    if not changed:
        notice(f"{directory} lacks no field that transformers 4 or an engine reads")
    for name in changed:
        if (directory / name).is_symlink():
            raise InvalidInput(
                f"{directory / name} is a link, as in a cache of downloads; restore a copy (cp -rL)"
            )
    for name, (old, new) in changed.items():
        with whole_file(directory / name, replace=True) as temporary:
            write_json(temporary, new)
        fields = ", ".join(field for field in new if field not in old or new[field] != old[field])
        notice(f"wrote {fields} into {directory / name}")
