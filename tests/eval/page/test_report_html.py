"""`kvfold report`: page and pictures show what the files hold, need nothing else, and refuse the rest."""

import json
import math
import re
import shlex
import warnings
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from kvfold.checkpoints.eval_json import BLOCKS
from kvfold.checkpoints.quality_blocks import Estimate, GenerationBlock
from kvfold.core.untrusted import type_adapter
from kvfold.eval.cli import main as evaluate
from kvfold.eval.page.canvas import LIGHT
from kvfold.eval.page.groups import labels, read_groups
from kvfold.eval.page.quality import bounds, points_by_bytes
from kvfold.eval.page.sections import verdict

from ...support.commands import run_main
from ...support.pages import (
    NEEDS_EXTRA,
    generation,
    record,
    report,
    run_report,
    suites,
    write_checkpoint,
    write_example,
)
from ..conftest import Make

pytestmark = NEEDS_EXTRA
DASH = "\N{EN DASH}"  # for what is not known


def page_of(tmp_path: Path, *directories: Path) -> str:
    result = run_report(*directories, "--out", tmp_path / "page.html")
    assert result.exit_code == 0, result.output
    return (tmp_path / "page.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any], Path]:
    """A page with everything on it, what --json says of it, and the directory of its pictures."""
    root = tmp_path_factory.mktemp("example")
    result = run_report(*write_example(root), "--out", root / "page", "--png", root / "png", "--json")
    assert result.exit_code == 0, result.output
    return (root / "page").read_text(encoding="utf-8"), json.loads(result.stdout), root / "png"


class Page(HTMLParser):
    """The tables of a page by caption, its titles and texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.titles: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self._path: list[str] = []
        self._rows: list[list[str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._path.append(tag)
        self.attributes += attrs
        if tag == "tr":
            self._rows.append([])
        elif tag == "table":
            self._rows = []
        elif tag in {"td", "th"}:
            self._rows[-1].append("")
        elif tag in {"figcaption", "h3"}:
            self.titles.append("")

    def handle_endtag(self, tag: str) -> None:
        while self._path and self._path.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        tag = self._path[-1] if self._path else ""
        if tag in {"td", "th"}:
            self._rows[-1][-1] += data
        elif tag in {"figcaption", "h3"}:
            self.titles[-1] += data
        elif tag == "caption":
            self.tables[data] = self._rows


def test_the_page_shows_what_the_files_hold(example: tuple[str, dict[str, Any], Path]) -> None:
    page = Page(example[0])
    overview = page.tables["All checkpoints"]
    assert overview[1][:4] == ["source (source)", DASH, "100%", "10"]
    rows = {row[0]: dict(zip(overview[0], row, strict=True)) for row in overview[1:]}
    assert rows["half"]["folded to"] == "MLA (rank 2, rotary 4)"
    assert rows["distilled"]["folded to"] == "MLA (rank 2, rotary 4), distilled"
    assert rows["distilled"]["recovered"] == "75.0%"
    assert (rows["quarter"]["cache"], rows["quarter"]["perplexity"], rows["quarter"]["recovered"]) == (
        "25.00%",
        "12",
        DASH,
    )
    assert rows["quarter"]["ratio to source"] == "1.2 ± 0.01"
    (task,) = page.tables["Benchmark tasks"][1:]
    assert task[:5] == ["half", "arc_easy", "acc_norm", "0.4 ± 0.01", "0.5 ± 0.01"]
    assert task[6:] == ["12", "2", "0.0123"]
    assert [row[1:3] for row in page.tables["Speed: median [quartiles]"][1:]][-1] == ["4", "256"]
    for title in (
        "Perplexity against cache",
        "Cache per token",
        "KL by percentile of tokens",
        "KL by position",
        "Loss by layer: half",
        "Spectrum of the latent: half",
        "Loss by layer: quarter",
        "passkey, % found: half",
        "multikey, % found: source",
        "KL on training text",
        "Perplexity during training: distilled",
        "Decoding speed",
        "Decoding speed relative to the source",
    ):
        assert title in page.titles
    assert "Spectrum of the latent: quarter" not in page.titles
    assert "Loss by layer: distilled" not in page.titles  # the fold it began as has the same record


def test_a_real_conversion_and_evaluation_are_read(make: Make, tmp_path: Path) -> None:
    """A page takes the files that convert and eval write, and the numbers are the same."""
    source, folded, text = make(num_key_value_heads=4), tmp_path / "folded", tmp_path / "text"
    text.write_text("key value cache head fold " * 40)
    arguments = f"convert {source} --to mla --kv-budget 50% --calibration none --out {folded}".split()
    evaluation = f"eval {folded} --text {text} --window 32 --suite ppl,fidelity,cache,speed --out".split()
    quick = ["--speed-context", "8", "--speed-tokens", "2", "--speed-rounds", "3"]
    for command in (arguments, [*evaluation, folded / "eval.json", *quick]):
        run_main(*list(map(str, command)))
    found = json.loads((folded / "eval.json").read_text())["suites"]
    page = Page(page_of(tmp_path, folded))
    row = page.tables["All checkpoints"][2]
    assert row[0] == "folded"
    assert row[3] == f"{found['ppl']['student']['perplexity']:.4g}"
    assert row[5].startswith(f"{found['fidelity']['kl']['mean']:.4g} ± ")
    assert row[2] == "50.00%"
    assert {"Spectrum of the latent: folded", "Decoding speed", "KL by position"} <= set(page.titles)


def test_the_page_needs_nothing_else(example: tuple[str, dict[str, Any], Path]) -> None:
    text = example[0]
    links = {
        value
        for name, value in Page(text).attributes
        if name in {"href", "src", "xlink:href", "srcset"} and value
    }
    assert {"#" if link[0] == "#" else link.partition(":")[0] for link in links} == {"#", "data"}
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", text))
    assert not re.search(r"@import|fetch\(|XMLHttpRequest|\{\{|\{%", text)
    ids = re.findall(r' id="([^"]*)"', text)
    assert {link[1:] for link in links if link[0] == "#"} <= set(ids)


def test_the_figures_follow_the_pages_colours(example: tuple[str, dict[str, Any], Path]) -> None:
    text = example[0]
    drawn = "".join(re.findall(r"<svg.*?</svg>", text, re.S))
    assert not [colour for colour in LIGHT.values() if colour in drawn]
    assert {f"var(--{name})" for name in ("ink", "muted", "rule", "c0", "c1", "c2")} <= set(
        re.findall(r"var\(--\w+\)", drawn)
    )
    assert "<title>half: perplexity 10.5 at 50 % of the cache</title>" in drawn


def test_the_same_files_give_the_same_page(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "fold")
    pages = [
        run_report(directory, "--out", tmp_path / name).exit_code or (tmp_path / name).read_bytes()
        for name in ("a", "b")
    ]
    assert pages[0] == pages[1] != 0


def test_pictures_of_every_figure(example: tuple[str, dict[str, Any], Path]) -> None:
    from matplotlib.image import imread

    text, shown, directory = example
    files = sorted(directory.iterdir())
    assert sorted(shown["pictures"]) == list(map(str, files))
    assert len(files) == text.count("<svg")
    for file in files:
        pixels = imread(file)
        assert 700 < pixels.shape[1] < 1200
        assert pixels.std() > 0.03, file
    rows = {row["checkpoint"]: row for row in shown["groups"][0]["checkpoints"]}
    assert (rows["distilled"]["perplexity"], rows["distilled"]["recovered"]) == (11.0, 0.75)


def test_what_is_missing_is_named_with_a_command_that_parses(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "a fold", {"ppl": suites(12.0, 16)["ppl"]})
    result = run_report(directory, "--out", tmp_path / "page", "--json")
    missing = {
        entry["what"].partition(":")[0]: entry["command"]
        for entry in json.loads(result.stdout)["groups"][0]["missing"]
    }
    assert {"cache", "distance to the source", "needles", "benchmark tasks", "speed"} <= set(missing)
    for command in missing.values():
        words = shlex.split(command)
        if words[1] == "eval":
            context = evaluate.make_context("eval", words[2:])
            assert context.params["model"] == str(directory)
            assert not context.params["out"].exists()
            assert set(context.params["suites"].split(",")) <= BLOCKS.keys()
    assert missing["none of these checkpoints was distilled"] == f"kvfold distill '{directory}'"


def test_rounded_weights_are_named_with_their_command(tmp_path: Path) -> None:
    rounded = {"scheme": "fp8", "command": "kvfold quantize fold --scheme fp8 --out rounded"}
    kept = record("gqa", "quantize") | {"quantize": rounded}
    fold = write_checkpoint(tmp_path / "fold", kept=kept)
    trained = write_checkpoint(tmp_path / "trained", kept={**kept, "distill": {}})
    page = page_of(tmp_path, fold, trained)
    targets = {row[0]: row[1] for row in Page(page).tables["All checkpoints"]}
    assert targets["fold"] == "GQA (heads 2), weights in FP8"
    assert targets["trained"] == "GQA (heads 2), distilled, weights in FP8"
    made = "made by <code>kvfold convert source --to gqa</code>, then <code>kvfold quantize fold --scheme fp8"
    assert page.count(made) == 2


def test_suites_measured_later_stand_next_to_it(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "fold", {"ppl": suites(12.0, 16)["ppl"]})
    more = report(directory, {"cache": suites(12.0, 16)["cache"], "ppl": suites(99.0, 16)["ppl"]}, text=None)
    (directory / "eval-cache.json").write_text(json.dumps(more))
    row = Page(page_of(tmp_path, directory)).tables["All checkpoints"][2]
    assert row[2:4] == ["25.00%", "12"]  # the perplexity of eval.json
    for words, change in (
        ("on other weights", {"checkpoint": more["checkpoint"] | {"identity": "x"}}),
        ("on another text", {"protocol": report(directory, {}, text="another")["protocol"]}),
    ):
        (directory / "eval-cache.json").write_text(json.dumps(more | change))
        result = run_report(directory, "--out", tmp_path / "again")
        assert (result.exit_code, words in result.output) == (2, True), result.output


def test_formats_of_one_checkpoint_are_points_by_their_bytes(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "fold")
    assert "Perplexity against bytes" not in page_of(tmp_path, directory)
    found = suites(14.5, 16)
    found["cache"]["student"] |= {"cache_dtype": "int4", "quantised_bytes_per_token": 24.0}
    more = report(directory, found) | {"cache_dtype": "int4"}
    (directory / "eval-int4.json").write_text(json.dumps(more))
    (one,) = read_groups([directory])[0].members
    assert one.report.ppl.student.perplexity == 12.0, "another format's numbers do not take its place"
    assert points_by_bytes(one) == [(24.0, 14.5, "int4"), (64.0, 12.0, "bfloat16")]
    text = (tmp_path / "formats").with_suffix(".html")
    assert run_report(directory, "--out", text).exit_code == 0
    assert "Perplexity against bytes" in text.read_text()


def test_only_what_is_comparable_stands_together(tmp_path: Path) -> None:
    one, two = (write_checkpoint(tmp_path / name) for name in ("one", "two"))
    other = write_checkpoint(tmp_path / "other", source="another")
    text = write_checkpoint(tmp_path / "text", text="another text")
    alone = write_checkpoint(tmp_path / "alone", suites(12.0, 16), source=None)
    assert [[each.label for each in group.members] for group in read_groups([one, other, two])] == [
        ["one", "two"],
        ["other"],
    ]
    result = run_report(one, two, other, "--out", tmp_path / "a")
    assert "different sources" in result.stderr
    assert (tmp_path / "a").read_text().count("Folded from ") == 2
    assert "same text" in run_report(one, text, "--out", tmp_path / "b").stderr
    result = run_report(one, alone, "--out", tmp_path / "c")
    assert "The source of alone is unknown" in result.stderr
    assert run_report(one, two, "--out", tmp_path / "d").stderr == ""


def test_the_source_itself_may_be_given(tmp_path: Path) -> None:
    fold, itself = write_checkpoint(tmp_path / "fold"), write_checkpoint(tmp_path / "it", source=None)
    own = json.loads((itself / "eval.json").read_text())
    own["checkpoint"]["identity"] = "sha of source"
    (itself / "eval.json").write_text(json.dumps(own))
    (group,) = read_groups([fold, itself, fold])
    assert (group.itself and group.itself.label, [one.label for one in group.members]) == ("it", ["fold"])


def test_names_of_any_kind(tmp_path: Path) -> None:
    names = ["<b>&\"'", "a$b$c_{", "_hidden", "模型", "x" * 90]
    directories = [write_checkpoint(tmp_path / "of" / name) for name in names]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = run_report(*directories, "--out", tmp_path / "page", "--png", tmp_path / "png")
    assert result.exit_code == 0, result.output
    text = (tmp_path / "page").read_text(encoding="utf-8")
    assert "<b>&\"'" not in text
    assert [row[0] for row in Page(text).tables["All checkpoints"][2:]] == names
    assert labels([Path("/a/m"), Path("/b/m")]) == ["a/m", "b/m"]


def test_a_terminal_that_shows_the_page_obeys_no_record(tmp_path: Path) -> None:
    fold = write_checkpoint(
        tmp_path / "fold", kept={**record("mla"), "command": "kvfold convert a\x1b[31m\u202eb"}
    )
    assert run_report(fold, "--out", tmp_path / "page").exit_code == 0
    text = (tmp_path / "page").read_text(encoding="utf-8")
    assert r"kvfold convert a\x1b[31m\u202eb" in text
    assert "\x1b" not in text


def test_error_bars_are_of_the_paired_ratio(tmp_path: Path) -> None:
    ((paired,), (alone,)) = (
        group.members
        for group in read_groups(
            [write_checkpoint(tmp_path / "a"), write_checkpoint(tmp_path / "b", suites(12.0, 16), None)]
        )
    )
    assert bounds(paired) == pytest.approx((10 * 1.18, 10 * 1.22))
    assert bounds(alone) == pytest.approx((math.exp(2.48), math.exp(2.52)))


@pytest.mark.parametrize(
    ("right", "length", "said"),
    [
        ((-0.25, 0.01), 1.25, "answers 25.0 points worse; its answers are 25% longer."),
        ((0.01, 0.02), 0.96, "answers 1.0 points better (within the noise); its answers are 4% shorter."),
    ],
)
def test_a_sentence_says_how_a_checkpoint_writes(
    right: tuple[float, float], length: float, said: str
) -> None:
    mean, error = right
    found = type_adapter(GenerationBlock).validate_python(generation(0.75)).difference
    assert found is not None
    changed = replace(
        found, right=Estimate(mean, error, mean - 2 * error, mean + 2 * error), length=Estimate(length)
    )
    assert (
        verdict(changed) == f"writes text that is 0.0375 nats per token from its source's predictions; {said}"
    )
