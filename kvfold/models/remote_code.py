"""Code that travels next to the weights of a remote output, and outputs that carry it.

A remote output is loaded by kvfold's own classes, which are the same files: no file of the output runs.
"""

import hashlib
import shutil
from pathlib import Path
from typing import Any

from ..checkpoints.directory import read_config
from ..core.errors import InvalidInput
from . import shipped

FILES = (
    "configuration_kvfold.py",
    "modeling_kvfold.py",
    "attention_kvfold.py",
    "decoding_kvfold.py",
    "kernels_kvfold.py",
    "layers_kvfold.py",
)
MODEL_TYPE = "kvfold"
ARCHITECTURE = "KvfoldForCausalLM"
AUTO_MAP = {
    "AutoConfig": "configuration_kvfold.KvfoldConfig",
    "AutoModel": "modeling_kvfold.KvfoldModel",
    "AutoModelForCausalLM": f"modeling_kvfold.{ARCHITECTURE}",
}
HERE = Path(shipped.__path__[0])  # the directory of the files
# SHA-256 of the files of earlier versions. They compute the same with this version's classes, which stand for
# them; a test loads an output that has them.
EARLIER = {
    "configuration_kvfold.py": (
        "f0c00bbc4d9bf45db06af3b3be174cb0a137dce6b9da28664bc1007e9772afeb",
        "734f4300d7726e5bfa457ac6118b6ca9ebba408a1af8ff69c1059c53345aceab",
        "20d8244877c7da9fe2cf1489e745fa4c6f5fbc7fa35432d548f5a8e400da2308",
    ),
    "modeling_kvfold.py": (
        "9ab10afe71cbf1927eca4d13b0689f5fa79044661f642167e33588fd90d249f8",
        "3a1092541fa14a4d6051f02a528050d87356f2cc07cef7ffaf2e7b19148f9e48",
    ),
    "attention_kvfold.py": (
        "3fdace985e99c6d5f0fd7879793e69c5074f9ee12d7af81fb3770bc9639e43c7",
        "dd1bf5e20def66f41a10f207a9564bb173126e2cf3338785a7fe7f25de82eb99",
        "a7f7cd5a0b7be8b606a9eb7cb8ce04035f0ce81f2a889fbb600201e07512d0bf",
        "edce1f680c32e8f734582a18f9db2faa4360307fb94142747fa8bfa1a7903698",
        "207e9061dc42cc56c749890ab308dc5387a5ac024e1710756a456182de5d439b",
        "f237c652309e90e0d56b8a818d876f95e9ac805082b547ba595ecd9c6b6b82fe",
    ),
    "decoding_kvfold.py": (
        "abbbcc40d24a7365b8bc9e6161056155f63bb3d8177601df6f204e5a67df7e93",
        "65a5b10b1c9ee6048aa051b79e6371e99e15b86ddebac8419de62576a03f3fb9",
        "b7b801bdf5e5a32408b34828ef9a05cddc77aa1b20cde66801c0c1ecd11fa8b2",
        "15470b52a03b9ce9b677f05ca44509eaa1d1ba72ce237449918ae56d7cd8e291",
        "68321ee73913a5381a383045c7a7d6e2ee9dc9d8c4f9b16876c82c7c492bb531",
        "0db11902822362a3ada128a9a586b92269d38105242742e29d3e4e4a1330416e",
        "2e18fdf8ea1017c13c1b5ee3d997048b68b1bdcb075a73b86cc724310367d1de",
    ),
    "kernels_kvfold.py": (
        "e12b98291658197ebab3367d5700f829745e9ba78597c13d31c75af578a4e579",
        "0ec17d0613279d182122bafe651474accf0a2ad120edc86bad8f36accc550096",
        "5cf3eaef9a860438b64dbda6555a819ee78bbc2d78d16c6b54b80062b6c4ec8c",
        "77fb964976906f6423e37e4d5b66be06615758317439ce131699e2d8ffe7f943",
    ),
    "layers_kvfold.py": (
        "22917650276d235a55ceae2895b074eb860dfea05bb03550f778af4af3f1a873",
        "4c93afe4711106ae925e3d9698de82cf2c9e7af2c3ee79ee4139af85bc794ac0",
        "5c91ca52969d9c9136970c0bf264c44bd491842d67944f96a4cd6e8f0b6f774e",
    ),
}


def ship(source: Path, out: Path) -> None:
    """Copy the code of one output into another that is made from it.

    Args:
        source: the output; nothing is copied where it has no code.
        out: the directory that gets the files.
    """
    for name in FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, out / name)


def is_remote(directory: Path) -> bool:
    """Return whether a checkpoint is a remote output, by the model type in its config.json."""
    try:
        return bool(read_config(directory).get("model_type") == MODEL_TYPE)
    except InvalidInput:  # of which whoever loads it says more
        return False


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


def _is_own(directory: Path, name: str) -> bool:
    found = _digest(directory / name)
    return found == _digest(HERE / name) or found in EARLIER[name]


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
