"""Code that travels next to the weights of a remote output, and outputs that carry it.

A remote output is loaded by kvfold's own classes, which are the same files: no file of the output runs.
"""

import hashlib
import math
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..checkpoints.directory import read_config
from ..core.errors import InvalidInput
from ..core.files import whole_file
from . import shipped

ATTENTION = "attention_kvfold.py"
FILES = (
    "configuration_kvfold.py",
    "modeling_kvfold.py",
    "attention_kvfold.py",
    "decoding_kvfold.py",
    "kernels_kvfold.py",
    "layers_kvfold.py",
)
MODEL_TYPE = "kvfold"
FORMS = ("decoupled", "intact")
GATES = (None, "gate_proj", "g_proj")
ARCHITECTURE = "KvfoldForCausalLM"
AUTO_MAP = {
    "AutoConfig": "configuration_kvfold.KvfoldConfig",
    "AutoModel": "modeling_kvfold.KvfoldModel",
    "AutoModelForCausalLM": f"modeling_kvfold.{ARCHITECTURE}",
}
_LARGEST = 2**20  # bytes of a file of kvfold's code
HERE = Path(shipped.__path__[0])  # the directory of the files
# SHA-256 of the files of earlier versions; new ones go to the end. They compute the same with this version's
# classes, which stand for them; a test loads an output that has them.
EARLIER = {
    "configuration_kvfold.py": (
        "f0c00bbc4d9bf45db06af3b3be174cb0a137dce6b9da28664bc1007e9772afeb",
        "734f4300d7726e5bfa457ac6118b6ca9ebba408a1af8ff69c1059c53345aceab",
        "20d8244877c7da9fe2cf1489e745fa4c6f5fbc7fa35432d548f5a8e400da2308",
        "b90debb0806315fd4361bf46cbdf4c36d90bc53712e13f8a928f9c52484a66f8",
        "83bcb2ecf6c5f143d4b7ef87da272f23e9cb0a4aa545197452e38dd5018190a8",
        "dc84236c768ac5fe31e5055b2ec6c76fd6ffdbde28fbf4a6d0be037588637f03",
        "253b972cee7bfc1f4037c86484121f76408c0e4ac800c7c6e6200607d02a24ec",
    ),
    "modeling_kvfold.py": (
        "9ab10afe71cbf1927eca4d13b0689f5fa79044661f642167e33588fd90d249f8",
        "3a1092541fa14a4d6051f02a528050d87356f2cc07cef7ffaf2e7b19148f9e48",
        "f7506da34d5e60e497436ebaeda5cb02e1918fa31c2d5904e277d7c189747e6b",
        "e2b78a62dca90d103f49f833c61663eae59c88ab93656dd32bde5112f451aeec",
        "d553ded43d7a0ef7ce3adb68a1899bcc0339acf0023b419a3de77acd1061af5d",
        "91483066c2898b40a541791c8c121a319ad91048da4b0c6c9728a52f816cf35e",
        "0bd18afe1644eac0a9b00ae0f9747e03788e0d825866f47748eae71fb002836b",
    ),
    "attention_kvfold.py": (
        "3fdace985e99c6d5f0fd7879793e69c5074f9ee12d7af81fb3770bc9639e43c7",
        "dd1bf5e20def66f41a10f207a9564bb173126e2cf3338785a7fe7f25de82eb99",
        "a7f7cd5a0b7be8b606a9eb7cb8ce04035f0ce81f2a889fbb600201e07512d0bf",
        "edce1f680c32e8f734582a18f9db2faa4360307fb94142747fa8bfa1a7903698",
        "207e9061dc42cc56c749890ab308dc5387a5ac024e1710756a456182de5d439b",
        "f237c652309e90e0d56b8a818d876f95e9ac805082b547ba595ecd9c6b6b82fe",
        "67c9622c492cdb4fc49534e1861b3f7696bdab6878826c559370cdcfd3c3e2c4",
        "0877863919b375f1c06feabe340326b038121bc3ddf6c55503a2ae23c04322ce",
        "0518f82186882ada61f2a9f2ff74507af4615bf18e7ac0141c73c5ba17859fa4",
        "4c3515d9799ec91dadbde345d88fe06f98c11eaf6ea149b0b926d99ac77b2c26",
        "520c727a50a88de94a8b8df5912c27e793aff9b50aa5ec5cc6564e7d062f6207",
        "dc7533f2fb0b54e04bd126e350528ee9c8f255e3ca89e654382ee0c73a78686a",
    ),
    "decoding_kvfold.py": (
        "abbbcc40d24a7365b8bc9e6161056155f63bb3d8177601df6f204e5a67df7e93",
        "65a5b10b1c9ee6048aa051b79e6371e99e15b86ddebac8419de62576a03f3fb9",
        "b7b801bdf5e5a32408b34828ef9a05cddc77aa1b20cde66801c0c1ecd11fa8b2",
        "15470b52a03b9ce9b677f05ca44509eaa1d1ba72ce237449918ae56d7cd8e291",
        "68321ee73913a5381a383045c7a7d6e2ee9dc9d8c4f9b16876c82c7c492bb531",
        "0db11902822362a3ada128a9a586b92269d38105242742e29d3e4e4a1330416e",
        "2e18fdf8ea1017c13c1b5ee3d997048b68b1bdcb075a73b86cc724310367d1de",
        "51cf08192a5dd735d9da51e71c4beecdc952296647d9dd7a9501694670104305",
        "7e1f8492c6ab0a2cdb04bcdfb6c729ade2626e6a111ccfd93daec5cb0e803af1",
    ),
    "kernels_kvfold.py": (
        "71fca4018c17ea732c0436615cfb31383d21bd5290e8d07ec6a6cb5b670e6a92",
        "911ed4fccc53e087d93bf42c3aa936dae3e28907de38082c93f7ad4376057fcb",
        "e12b98291658197ebab3367d5700f829745e9ba78597c13d31c75af578a4e579",
        "0ec17d0613279d182122bafe651474accf0a2ad120edc86bad8f36accc550096",
        "5cf3eaef9a860438b64dbda6555a819ee78bbc2d78d16c6b54b80062b6c4ec8c",
        "77fb964976906f6423e37e4d5b66be06615758317439ce131699e2d8ffe7f943",
        "261c756d1767b2dad89f4ac28fcae9e46302aba7a1b9b2664dfbbb6ce841fb66",
        "ddddf2de0a2e910ce74715de21ccc20cfe4b136e2e2337ef73f817ec56a742ad",
        "9992686278923dcc6679b2aed8b92067088f17161d47e1912bfa4652dd181fdb",
    ),
    "layers_kvfold.py": (
        "22917650276d235a55ceae2895b074eb860dfea05bb03550f778af4af3f1a873",
        "4c93afe4711106ae925e3d9698de82cf2c9e7af2c3ee79ee4139af85bc794ac0",
        "5c91ca52969d9c9136970c0bf264c44bd491842d67944f96a4cd6e8f0b6f774e",
        "0fc0f680d21b8145c0785944e29dfde4396f4159b7a51e9777a92f29e24b2763",
        "2eea250b16042d1a2f0ddf7304a42a2185a49428d2807dab96944497b2c249e8",
        "a95c46900f10f81b9302733526e3c4fc6c4b31e333d21196d33d294b08af0385",
        "49ffe8799e4a83f8ae897f9b92b0bf0da798785e376fd1ae4dbb8520f86631d3",
        "f1ad0ed461247ab88276e528053fa6b04d7d8205563df49abf8c9800d2849623",
    ),
}


# Those of attention that know no argument `cache`: from transformers 5.24 on they decode without a cache.
CACHELESS = frozenset(EARLIER[ATTENTION][:10])


def ship(source: Path, out: Path) -> None:
    """Write the code of one output into another that is made from it.

    Code of an earlier kvfold becomes this version's, which newer releases of transformers run too.

    Args:
        source: the output; nothing is written where it has no code.
        out: the directory that gets the files.
    """
    place = HERE if carries_own_code(source) else source
    for name in FILES:
        if (source / name).is_file():
            shutil.copyfile(place / name, out / name)


def loses_cache(directory: Path) -> bool:
    """Return whether the code of an output decodes without its cache from transformers 5.24 on."""
    return _digest(directory / ATTENTION) in CACHELESS


def renew(directory: Path) -> list[str]:
    """Replace the code of an earlier kvfold in an output with this version's.

    Each file is replaced whole or not at all, and attention last: an output that is renewed by half still
    breaks the rule that asked for it.

    Args:
        directory: a remote output.

    Returns:
        The names of the files that were replaced.

    Raises:
        InvalidInput: it is no remote output, a file of its code is missing or not kvfold's, or one that would
            be replaced is a link. Nothing was replaced.
        OSError: the directory cannot be written.
    """
    if read_config(directory).get("model_type") != MODEL_TYPE:
        raise InvalidInput(f"{directory} brings no code of kvfold's, so there is none to renew")
    for name in FILES:
        if not _is_own(directory, name):
            state = "not that of any kvfold" if (directory / name).exists() else "missing"
            raise InvalidInput(
                f"{directory / name} is {state}, so nothing was replaced; fold the source again"
            )
    names = [name for name in FILES if _digest(directory / name) in EARLIER[name]]
    names.sort(key=ATTENTION.__eq__)
    for name in names:
        if (directory / name).is_symlink():
            raise InvalidInput(
                f"{directory / name} is a link, as in a cache of downloads; renew the code of a copy (cp -rL)"
            )
    for name in names:
        mode = stat.S_IMODE((directory / name).stat().st_mode)
        with whole_file(directory / name, replace=True) as temporary:
            shutil.copyfile(HERE / name, temporary)
            temporary.chmod(mode)
    return names


def is_remote(directory: Path) -> bool:
    """Return whether a checkpoint is a remote output, by the model type in its config.json."""
    try:
        return bool(read_config(directory).get("model_type") == MODEL_TYPE)
    except InvalidInput:  # of which whoever loads it says more
        return False


def check_form(directory: Path, config: Mapping[str, Any]) -> None:
    """Check what a remote output's config.json says of its form, which its weights do not reveal.

    Args:
        directory: of the output, for errors.
        config: content of its config.json.

    Raises:
        InvalidInput: a field is missing, or has no meaning.
    """
    width = config.get("qk_rope_head_dim")
    try:
        ours, layers = config["kvfold"], config.get("num_hidden_layers", 1)
        tables = ours["frequencies"]
        is_sound = (
            ours["form"] in FORMS
            and ours.get("gate") in GATES
            and len({len(table) for table in tables}) == 1
            and all(math.isfinite(number) for table in tables for number in table)
            and (ours["form"] == "intact" or not isinstance(width, int) or 2 * len(tables[0]) == width)
            and all(number in range(layers) for number in ours.get("layers") or ())
            and all(number in range(len(tables)) for number in ours.get("tables", ()))
        )
    except (TypeError, ValueError, LookupError, AttributeError):
        is_sound = False
    if not is_sound:
        raise InvalidInput(
            f"{directory} has a damaged `kvfold` in config.json; copy config.json from where the checkpoint "
            "came from, or convert the source again"
        )


def source_config(directory: Path) -> Any:
    """Return the stock configuration of the model that a remote output was made from.

    Its fields are read from the output's config.json.
    """
    from transformers import CONFIG_MAPPING

    config = read_config(directory)
    kind = config["kvfold"]["source_model_type"]
    return CONFIG_MAPPING[kind](vocab_size=config["vocab_size"])


def carries_own_code(directory: Path) -> bool:
    """Return whether the code files of a checkpoint are, byte for byte, those of this or an earlier kvfold.

    Then kvfold's own classes can stand for them, and no file of the checkpoint needs to run.
    """
    return is_remote(directory) and all(_is_own(directory, name) for name in FILES)


def missing_code(directory: Path) -> str:
    """Return the names of the code files that a remote output lacks; empty where it has all of them."""
    return ", ".join(name for name in FILES if not (directory / name).exists())


def code_refusal(directory: Path) -> str:
    """Return why a remote output that does not carry kvfold's own code is not loaded, and what to do."""
    missing = missing_code(directory)
    if missing:
        return (
            f"{directory} lacks files of its code ({missing}); copy them from where it came from, "
            "or convert the source again"
        )
    return (
        f"the code in {directory} (*_kvfold.py) is not that of this kvfold; read it, then allow it with "
        "--trust-remote-code, or convert the source again"
    )


def _is_own(directory: Path, name: str) -> bool:
    found = _digest(directory / name)
    return found == _digest(HERE / name) or found in EARLIER[name]


def _digest(path: Path) -> str:
    if not path.is_file() or path.stat().st_size > _LARGEST:
        return ""
    return hashlib.sha256(path.read_bytes()).hexdigest()
