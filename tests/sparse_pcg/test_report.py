"""``explain``: numbers of a model of known shape, times in their place, one page that reads well on a phone."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch import nn

import sparse_pcg
from sparse_pcg import Options, PrefillRunner, Report, explain
from sparse_pcg.gates import Deployment
from sparse_pcg.kv import PagedKV
from sparse_pcg.models import DSAModel, preset
from sparse_pcg.report import describe
from tests.sparse_pcg import toys

pytestmark = pytest.mark.usefixtures("fresh")


def _toy_report(measure: bool = True) -> Report:
    fn = sparse_pcg.compile(toys.Toy(3), capture_sizes=[8], compiler="eager")
    args = toys.inputs(8)
    for _ in range(3):
        fn(*args)
    return describe(fn, args, {}, measure=measure)


def test_a_toy_of_three_layers() -> None:
    report = _toy_report()
    assert [c.op for c in report.cuts] == ["toy::mix_into"] * 3
    assert {c.why for c in report.cuts} == {"tagged cudagraph_unsafe"}
    line = next(i for i, t in enumerate(Path(toys.__file__).read_text().splitlines(), 1) if "toy.mix_into(y" in t)
    assert all(c.source.startswith(f"{toys.__file__}:{line} in forward") for c in report.cuts)
    assert [p.distinct for p in report.pieces] == [0, 1, 1, 2]
    assert [c.layers for c in report.cuts] == [(0, 0), (1, 1), (2, 2)]
    # lin, tanh, store; then the residual, the gather and its sum: 3 kernels and 3 more in each piece between
    assert [p.kernels for p in report.pieces] == [3, 6, 6, 3]
    assert report.pieces[-1].nbytes == 8 * 8 * 4
    times = [s.us for s in (*report.cuts, *report.pieces)]
    assert all(t is not None and t > 0 for t in times) and "CPU" in report.measured
    assert len(report.static_inputs) == 3 * 3 and len(report.copied_inputs) == 2
    assert json.loads(json.dumps(report.to_dict()))["cuts"][1]["place"] == 3


def test_without_measuring_nothing_is_replayed() -> None:
    with sparse_pcg.stats().expect(replays=1):
        report = _toy_report(measure=False)
    assert report.measured == "" and all(c.us is None for c in report.cuts)
    assert "nothing was measured" in _page(report)


def test_a_runner_shows_buckets_floor_and_gates() -> None:
    config = preset("tiny")
    kv = PagedKV(config.num_layers, num_pages=8, dtype=torch.float32)
    options = Options(capture_sizes=(8, 16), compiler="eager", short_graphs=False)
    runner = PrefillRunner(DSAModel(config, dtype=torch.float32), kv, options, deployment=Deployment(dcp=2))
    with pytest.raises(ValueError, match="capture"):
        explain(runner)
    runner.capture(progress=False)
    report = explain(runner)
    assert [b["size"] for b in report.buckets] == [8, 16] and report.floor == runner.floor
    assert report.gates[0][:2] == ("attn_in_graph", False)
    text = str(report)
    assert "off (decode context parallelism (2 ranks)" in text and "sparse_pcg::mla_attention" in text
    assert "bucket 16" in report.measured and text in str(report)


class _Named(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        torch.ops.toy.mix_untagged(x * 2, out)
        return out + 1


def test_a_cut_named_by_an_option_says_so() -> None:
    fn = sparse_pcg.compile(_Named(), capture_sizes=[8], compiler="eager", cut_ops=["toy::mix_untagged"])
    report = explain(fn, torch.randn(8, 4))
    assert [c.why for c in report.cuts] == ["named in option cut_ops"]


# The page.


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.targets: list[str] = []
        self.outside: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.ids |= {named["id"]} if named.get("id") else set()
        if tag == "a":
            self.targets.append((named["href"] or "").removeprefix("#"))
        self.outside += [v for k, v in attrs if k in ("src", "href") and v and not v.startswith("#")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def _page(report: Report) -> str:
    from sparse_pcg.report_page import render

    return render(report)


def test_the_page_is_whole_and_alone() -> None:
    report = _toy_report()
    report.options["cut_ops"] = ("<script>alert(1)</script>",)
    links = _Links()
    text = _page(report)
    links.feed(text)
    assert links.open == [] and links.outside == [] and "<script" not in text
    assert len(links.targets) == len(report.cuts) + len(report.pieces) and set(links.targets) <= links.ids


def test_widths_are_to_scale() -> None:
    report = _toy_report()
    for number, piece in enumerate(report.pieces):
        object.__setattr__(piece, "us", 10.0 * (number + 1))
    widths = re.findall(r'--w:([\d.]+);--c:#\w+" title="piece', _page(report))
    assert [float(w) for w in widths] == [10.0, 20.0, 30.0, 40.0]


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="folder"):
        Report().to_html(tmp_path / "no" / "page.html")


_BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_PROBE = """<script>addEventListener('load', () => {
  const bars = [...document.querySelectorAll('.bar a')].map(b => Math.round(b.getBoundingClientRect().width * 10));
  document.title = JSON.stringify({scroll: document.documentElement.scrollWidth, window: innerWidth, bars,
    colour: getComputedStyle(document.querySelector('.bar a')).backgroundColor});
})</script></body>"""


@pytest.mark.skipif(_BROWSER is None, reason="there is no Chromium (Debian: apt-get install chromium)")
@pytest.mark.parametrize("width", [360, 1200])
def test_in_a_browser_nothing_scrolls_sideways(width: int, tmp_path: Path) -> None:
    report = _toy_report()
    report.copied_inputs.append("a_name_without_any_place_to_break" * 8)
    # Chromium's window is at least 500 wide: a frame of the wanted width stands for the phone.
    page = _page(report).replace("</body>", _PROBE)
    (tmp_path / "page.html").write_text(page)
    frame = (
        f"<iframe id=f src=page.html style='border:0;width:{width}px;height:900px'></iframe><script>"
        "f.onload = () => setTimeout(() => document.body.append(f.contentDocument.title), 50)</script>"
    )
    (tmp_path / "frame.html").write_text(f"<!doctype html><body>{frame}</body>")
    done = subprocess.run(
        [
            str(_BROWSER),
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            *(
                "--allow-file-access-from-files",
                "--virtual-time-budget=3000",
                f"--user-data-dir={tmp_path / 'profile'}",
            ),
            "--dump-dom",
            (tmp_path / "frame.html").as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    found = re.search(r"\{\"scroll\".*?\}", done.stdout)
    assert found is not None, done.stdout[-2000:] + done.stderr[-2000:]
    seen = json.loads(found.group().replace("&quot;", '"'))
    assert seen["window"] == width and seen["scroll"] <= width
    assert len(seen["bars"]) == 7 and min(seen["bars"]) >= 39 and seen["colour"] != "rgba(0, 0, 0, 0)"
