"""The named protocols: GPTQ's against a direct loop, lm-evaluation-harness's against itself."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from kvfold.core.errors import InvalidInput
from kvfold.eval.options import Options
from kvfold.eval.run import evaluate
from kvfold.eval.windows import cut, window_length
from kvfold.models.causal_lm import describe
from kvfold.texts import document_rows
from kvfold.texts.corpus import Text, read_text
from kvfold.texts.wikitext import articles, plain_spelling, words

from ..support.task_runs import ROWS
from .conftest import Make

CPU = Options(device="cpu")


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    file = tmp_path / "rows.json"
    file.write_text(json.dumps({"text": ROWS}), encoding="utf-8")
    return file


@pytest.fixture(scope="session")
def with_bos(make: Make) -> Path:
    """A checkpoint whose tokenizer puts BOS before every text by itself, as Llama's do."""
    from tokenizers.processors import TemplateProcessing

    directory = make(seed=3)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    backend = tokenizer.backend_tokenizer
    backend.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>").save_pretrained(directory)
    return directory


def gptq_perplexity(directory: Path, rows: list[str], window: int) -> float:
    """The loop of the GPTQ line of work, as directly as it can be written."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    ids = tokenizer("\n\n".join(rows), return_tensors="pt").input_ids
    losses = []
    for number in range(ids.numel() // window):
        batch = ids[:, number * window : (number + 1) * window]
        with torch.no_grad():
            logits = model(batch).logits
        loss = torch.nn.functional.cross_entropy(logits[0, :-1], batch[0, 1:])
        losses.append(loss.float() * window)
    return float(torch.exp(torch.stack(losses).sum() / (len(losses) * window)))


@pytest.mark.parametrize("window", [16, 64])
def test_two_checkpoints_under_gptq_equal_a_loop(mha: Path, with_bos: Path, rows: Path, window: int) -> None:
    text = read_text(f"wikitext2-gptq-{window}", rows)
    for directory, bos in ((mha, "none"), (with_bos, "first")):
        result = evaluate(directory, None, text, CPU)
        assert (result.protocol.name, result.protocol.bos) == (f"wikitext2-gptq-{window} bos={bos}", bos)
        assert result.protocol.window == window
        assert result.ppl.student.perplexity == pytest.approx(
            gptq_perplexity(directory, ROWS, window), rel=1e-5
        )
        assert result.ppl.student.word_perplexity is None


@pytest.mark.parametrize("window", [None, 40, 7])
def test_word_perplexity_is_lm_evaluation_harnesss_own(
    mha: Path, with_bos: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    pytest.importorskip("lm_eval", reason="pip install 'kvfold[eval]' to compare with lm-evaluation-harness")
    text = read_text("lm-eval:wikitext", rows)
    for directory in (mha, with_bos):
        theirs = harness(directory, tmp_path / "pages.json", monkeypatch, window)
        result = evaluate(directory, None, text, Options(device="cpu", window=window))
        ours = result.ppl.student
        assert result.protocol.window == (window or 64)
        assert ours.word_perplexity == pytest.approx(theirs["word_perplexity,none"], rel=1e-5)
        assert ours.byte_perplexity == pytest.approx(theirs["byte_perplexity,none"], rel=1e-5)
        assert ours.bits_per_byte == pytest.approx(theirs["bits_per_byte,none"], rel=1e-5)


def harness(
    directory: Path, file: Path, monkeypatch: pytest.MonkeyPatch, window: int | None
) -> dict[str, Any]:
    """Return the results of the harness's own task `wikitext`, on our articles in place of its data set's."""
    import lm_eval
    import yaml
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks.wikitext import preprocess_wikitext

    monkeypatch.setenv("HF_DATASETS_CACHE", str(file.parent / "datasets"))
    file.write_text("\n".join(json.dumps({"page": article}) for article in articles(ROWS)), encoding="utf-8")
    described = (Path(preprocess_wikitext.__file__).parent / "wikitext.yaml").read_text(encoding="utf-8")
    described = described.replace("!function preprocess_wikitext.", "")
    config = {
        **yaml.safe_load(described),
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {"test": str(file)}, "cache_dir": str(file.parent / "datasets")},
        "training_split": None,
        "validation_split": None,
        "doc_to_target": preprocess_wikitext.wikitext_detokenizer,
        "process_results": preprocess_wikitext.process_results,
    }
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    asked = HFLM(
        pretrained=model, tokenizer=AutoTokenizer.from_pretrained(directory), batch_size=2, max_length=window
    )
    found = lm_eval.simple_evaluate(
        model=asked,
        tasks=[ConfigurableTask(config=config)],
        task_manager=TaskManager(include_defaults=False),
        bootstrap_iters=0,
    )
    return dict(found["results"]["wikitext"])


def test_articles_begin_at_their_titles_and_keep_every_byte_of_the_file() -> None:
    first, second = articles(ROWS)
    assert first.startswith(" = First tale = \n \n He said")
    assert second == " = Second tale = \n \n Short . \n"
    whole = "".join(row or " \n" for row in ROWS)
    assert " \n" + first + "\n" + second == whole  # the line before the first title is no article
    assert words(second) == 8


@pytest.mark.parametrize(("page", "plain"), [
    (" 1 @,@ 000 @-@ odd 3 @.@ 5 : yes ; no . Oh ! Eh ? Ah , well",
     " 1,000-odd 3.5: yes; no. Oh! Eh? Ah, well"),
    (" ( a ) [ b ] { c } \" d \" ' e '", " (a) [b] {c} \"d\" 'e'"),
    (" = = = = \n x N y 's foxes ' 20 ° C", " ====\nx 1 y's foxes' 20°C"),
])  # fmt: skip
def test_spelling_is_made_plain(page: str, plain: str) -> None:
    assert plain_spelling(page) == plain


def test_marks_without_an_end_take_no_time() -> None:
    """The harness's regular expressions take the cube of the number of blanks."""
    for mark in "([{\"'":
        assert plain_spelling(f"a {mark}" + "\t" * 10**6 + "b") == f"a {mark}" + "\t" * 10**6 + "b"


def test_spelling_is_lm_evaluation_harnesss_own() -> None:
    theirs = pytest.importorskip("lm_eval.tasks.wikitext.preprocess_wikitext")
    for article in articles(ROWS):
        assert plain_spelling(article) == theirs.wikitext_detokenizer({"page": article})
        assert words(article) == theirs.process_results({"page": article}, (0.0,))["word_perplexity"][1]


def test_rolling_windows_score_every_token_once_with_as_much_before_it_as_fits(mha: Path, rows: Path) -> None:
    described, text = describe(mha, CPU), read_text("lm-eval:wikitext", rows)
    windows = cut(text, described, 10, CPU)
    tokens = [token for document in text.documents for token in described.tokenizer(document).input_ids]
    done = 0
    for ids, scored in zip(windows.ids_NW[:, 1:], windows.scored_NT, strict=True):
        own = ids[scored].tolist()
        assert own == tokens[done : done + len(own)]
        first = int(scored.nonzero()[0])
        assert ids[:first].tolist() == tokens[done - first : done]  # a document's last window reaches back
        done += len(own)
    assert done == len(tokens)
    assert int((windows.scored_NT.sum(1) < 10).sum()) == 2
    assert windows.bytes == sum(len(article.encode()) for article in articles(ROWS))


def test_bytes_of_scored_tokens_are_those_of_the_text(mha: Path) -> None:
    text = Text("x", ("héros ° €" * 20,))
    described = describe(mha, CPU)
    size = len(text.joined.encode())
    assert cut(text, described, size + 1, CPU).bytes == size
    # Tokens are bytes here, and a character counts at the first of its own.
    at = {"h": 1, "é": 2, "°": 2, "€": 3}
    per_token = [
        n for character in text.joined for n in (at.get(character, 1), *[0] * (at.get(character, 1) - 1))
    ]
    found = cut(text, described, 7, Options(bos=False))
    assert found.bytes_N.tolist() == [
        sum(per_token[start + 1 : start + 7]) for start in range(0, size - 6, 7)
    ]


@pytest.mark.parametrize(("text", "options", "sentence"), [
    ("wikitext2-gptq-65", {}, "--text wikitext2-gptq-65: 65 exceeds the 64 positions of"),
    ("wikitext2-gptq-64", {"window": 32},
     "--window 32: --text wikitext2-gptq-64 has windows of 64; leave out one of them"),
    ("wikitext2-gptq-64", {"bos": True},
     "--bos: --text wikitext2-gptq-64 itself decides where BOS stands; leave the option out"),
    ("lm-eval:wikitext", {"bos": False},
     "--no-bos: --text lm-eval:wikitext itself decides where BOS stands; leave the option out"),
    ("wikitext2-gptq-1", {}, "a window has at least 2 tokens"),
])  # fmt: skip
def test_what_contradicts_a_protocol_is_one_sentence(
    mha: Path, rows: Path, text: str, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        evaluate(mha, None, read_text(text, rows), Options(device="cpu", **options))


@pytest.mark.parametrize("name", ["wikitext2-gptq-64", "lm-eval:wikitext"])
def test_rows_that_are_too_few_say_so(mha: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "few.json").write_text('["", ""]')
    with pytest.raises(
        InvalidInput, match=r"has 2 tokens, but a .* 64 takes 64 of them; .*-2 would fit|holds no text"
    ):
        evaluate(mha, None, read_text(name, tmp_path / "few.json"), CPU)


def test_a_tokenizer_without_bos_or_eos_starts_no_document(make: Make, rows: Path) -> None:
    with pytest.raises(InvalidInput, match=r"starts documents with .* EOS; the tokenizer of .* has neither"):
        evaluate(make(bos=None), None, read_text("lm-eval:wikitext", rows), CPU)


@pytest.mark.parametrize(("content", "sentence"), [
    (None, "cannot be read: No such file or directory"),
    ("{", "is not JSON"),
    ("{}", "holds no rows"),
    ("[]", "holds no rows"),
    ("[1]", "holds no rows"),
    ('{"text": "a"}', "holds no rows"),
])  # fmt: skip
def test_a_file_without_rows_is_one_sentence(tmp_path: Path, content: str | None, sentence: str) -> None:
    file = tmp_path / "rows.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(InvalidInput, match=f"--rows {file} {sentence}"):
        read_text("wikitext2-gptq-64", file)


def test_rows_are_for_wikitext_2_only(rows: Path) -> None:
    with pytest.raises(InvalidInput, match="--rows is for WikiText-2, not for --text stdlib"):
        read_text("stdlib", rows)


def test_without_a_file_the_rows_are_the_hubs(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked: list[Any] = []

    def load_dataset(name: str, configuration: str, *, split: str, streaming: bool) -> Any:
        asked.append((name, configuration, split, streaming))
        return datasets.Dataset.from_dict({"text": ROWS})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(document_rows, "_read_apart", lambda request, _: document_rows.open_rows(request))
    assert read_text("wikitext2-gptq-64").documents == tuple(ROWS)
    assert asked == [("Salesforce/wikitext", "wikitext-2-raw-v1", "test", False)]


def test_the_hub_cannot_be_reached(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_DATASETS_CACHE", raising=False)
    with pytest.raises(InvalidInput, match=r"^Salesforce/wikitext cannot be read: .*; .* its rows .* --rows"):
        read_text("lm-eval:wikitext")


def test_a_long_model_reads_whole_articles(make: Make, rows: Path) -> None:
    described = describe(make(max_position_embeddings=9999), CPU)
    text = read_text("lm-eval:wikitext", rows)
    assert window_length(None, [described], text) == 9999
    assert cut(text, described, 9999, CPU).ids_NW.shape[1] == 1 + max(
        len(document.encode()) for document in text.documents
    )
