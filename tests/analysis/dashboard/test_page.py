"""The HTML of the page: complete, self-contained, and safe against text from files."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from harness.analysis.dashboard.goodput import Account
from harness.analysis.dashboard.loss_causes import LossCause
from harness.analysis.dashboard.page import fill_template, library, render
from harness.analysis.dashboard.page_data import facts_of, page_data, spell_seconds, state_of
from harness.analysis.dashboard.story import Story
from harness.analysis.markdown_html import to_html
from harness.core.events import ActionKind, Intervention, Outcome, RunEnded, RunStarted, SystemSampled
from harness.core.rundir import RunDir
from tests.analysis.dashboard.logs import BEGUN, long_run, record, write

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>"


def story_of(run: RunDir) -> Story:
    story = Story()
    story.read_more(run)
    return story


def facts(run: RunDir, now_s: float = BEGUN) -> dict[str, Any]:
    return facts_of(run, story_of(run), now_s=now_s)


def document(run: RunDir) -> str:
    return render(page_data(run, story_of(run), now_s=BEGUN))


def without_library(text: str) -> str:
    assert text.count(library()) == 1
    return text.replace(library(), "")


def test_page_is_complete_and_loads_nothing(tmp_path: Path) -> None:
    text = without_library(document(RunDir(long_run(tmp_path / "first", 60))))
    assert "{{" not in text
    assert not re.search(r"(?:src|href)\s*=\s*[\"']?(?!data:|#)[a-z]+:", text)
    assert "@import" not in text
    assert "url(" not in text


def test_every_account_and_cause_of_lost_time_has_a_color() -> None:
    script = resources.files("harness.analysis.dashboard").joinpath("page.js").read_text()
    colors = set(
        re.findall(r"--(\w+):", resources.files("harness.analysis.dashboard").joinpath("page.css").read_text())
    )
    for table, names in (("SHARES", Account), ("CAUSE_COLORS", LossCause)):
        body = re.search(rf"const {table} = {{(.*?)}};", script, re.DOTALL)
        assert body
        entries = dict(re.findall(r'(\w[\w ]*)"?: "(\w+)"', body[1]))
        assert entries.keys() == set(names)
        assert set(entries.values()) <= colors


def test_policy_allows_only_embedded_scripts(tmp_path: Path) -> None:
    text = document(RunDir(long_run(tmp_path / "first", 5)))
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    scripts = re.findall(r"<script>(.*?)</script>", text, flags=re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    assert f"script-src {allowed};" in policy[1]
    assert policy[1].startswith("default-src 'none'")
    assert "connect-src" not in policy[1]


def test_script_tags_in_names_and_reasons_are_escaped(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "<script>alert(1)<")
    order = Intervention(time=BEGUN, iteration=1, who=EVIL, reason=EVIL, changes={EVIL: EVIL})
    batch = {"rarest": [[1, 2, None]], "rows": {EVIL: 1}}
    write(
        run.events,
        [
            RunStarted(time=BEGUN, iteration=0, world_size=1, num_steps=2, step=0, resumed_from=EVIL),
            record(1, time=BEGUN, refused=True, batch=batch),
            order,
            RunEnded(time=BEGUN, iteration=1, step=1, exit_code=0, reason=EVIL),
        ],
    )
    text = without_library(document(run))
    assert "<script>alert" not in text
    assert "<img" not in text
    assert "&lt;script&gt;alert(1)&lt;" in text
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, flags=re.DOTALL)
    assert data is not None
    read = json.loads(data[1])["facts"]
    assert read["run"]["reason"] == EVIL
    assert read["guilty"][0]["rows"] == f"{EVIL} 1"


def test_html_in_a_postmortem_is_escaped(tmp_path: Path) -> None:
    run = RunDir(long_run(tmp_path / "first", 60))
    folder = run.path / "incidents" / "002"
    folder.mkdir(parents=True)
    links = "![loss](loss.png) [x](javascript:alert(3)) [data](evidence.json)"
    text = f"# Spike\n\n{EVIL}\n\n{links}\n\n| a |\n|---|\n| 1 |\n"
    (folder / "postmortem.md").write_text(text, encoding="utf-8")
    first, second, _ = facts(run)["incidents"]
    assert first["postmortem"] == ""
    assert first["links"] == []
    assert second["links"] == [["postmortem.md", "incidents/002/postmortem.md"]]
    html = second["postmortem"]
    assert "<h1>Spike</h1>" in html
    assert "<td>1</td>" in html
    assert '<a href="incidents/002/loss.png">loss</a>' in html
    assert '<a href="incidents/002/evidence.json">data</a>' in html
    assert "<script" not in html
    assert "<img" not in html
    assert 'href="javascript' not in html


def test_absolute_links_are_unchanged() -> None:
    assert to_html("[a](https://b.c/d)", folder="f") == '<p><a href="https://b.c/d">a</a></p>\n'


def test_spare_machines_cost_as_much_as_the_others(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    machines = {"n1": [0, 1], "n2": [2, 3]}
    start = RunStarted(time=BEGUN, iteration=0, world_size=4, num_steps=9, step=0, machines=machines)
    write(run.events, [start, record(1, time=BEGUN + 3600)])
    run.config.write_text("cluster: {price_per_gpu_hour: 2}\nlaunch: {ranks_per_gpu: 1, spares: 1}\n")
    assert facts(run)["run"]["cost"] == pytest.approx(2 * 6)


def test_facts_of_a_run(tmp_path: Path) -> None:
    run = RunDir(long_run(tmp_path / "first", 400))
    run.config.write_text("cluster:\n  price_per_gpu_hour: 3.6\n", encoding="utf-8")
    page_facts = facts(run)
    assert page_facts["run"] | {"loss": "", "eval_loss": "", "tokens_per_s": 0} == {
        "name": "first",
        "state": "done",
        "state_more": "exit code 0",
        "reason": "all steps done",
        "step": 400,
        "num_steps": 400,
        "tokens": 379 * 1024,
        "loss": "",
        "eval_loss": "",
        "tokens_per_s": 0,
        "mfu": 0.41,
        "eta_s": None,
        "started": BEGUN,
        "num_starts": 2,
        "world_size": 8,
        "unread": "",
        "cost": pytest.approx(3.6 * 8 * 200 / 3600),
    }
    run.config.write_text("cluster: {price_per_gpu_hour: 3.6}\nlaunch: {ranks_per_gpu: 4, spares: 0}\n")
    assert facts(run)["run"]["cost"] == pytest.approx(3.6 * 2 * 200 / 3600), "four ranks share a GPU"
    incident = page_facts["incidents"][0]
    assert incident["answer"] == "rewind"
    assert incident["actions"] == [
        ["100", "rewind", "loss_spike of batch 99",
         "restored snapshot of iteration 90, 10 steps lost, 0.20 s; batch 99 excluded"],
    ]  # fmt: skip
    assert incident["findings"] == [["100", "loss_spike: 9.00 against a bound of 4.00"]]
    assert page_facts["guilty"][0]["rarest"] == "147 (1, 12), 156 (2, 105), 157 (2, 107)"
    assert page_facts["who"]["rank_time_who"] == "most often rank 5 (100% of the steps)"
    goodput = page_facts["goodput"]
    assert goodput["lost_more"] == "21 steps rejected or undone"
    causes = {item["cause"]: (item["times"], item["steps"]) for item in goodput["causes"]}
    assert (causes["rewind or rollback"], causes["rejected updates"]) == ((2, 20), (1, 1))
    kept = next(item for item in goodput["accounts"] if item["account"] == "kept")
    assert sum(item["share"] for item in goodput["causes"]) + kept["share"] == pytest.approx(1)


def test_an_empty_run_has_a_page(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.events.touch()
    page_facts = facts(run)
    assert (page_facts["run"]["state"], page_facts["run"]["loss"], page_facts["marks"]) == ("silent", "none yet", [])
    assert "</html>" in document(run)


def test_failed_action_is_shown_as_failed(tmp_path: Path) -> None:
    story = story_of(RunDir(long_run(tmp_path / "first", 40)))
    failed = Outcome(
        time=BEGUN, iteration=20, kind=ActionKind.rewind, incident=2, succeeded=False, step=20, steps_lost=0
    )
    story.incidents.add(failed)
    incident = facts_of(RunDir(tmp_path), story, now_s=BEGUN)["incidents"][1]
    assert incident["actions"][0][3] == "failed: no state to restore"


def test_state_of_a_run() -> None:
    story = Story()
    assert state_of(story, now_s=0)[0] == "silent"
    story.add(RunStarted(time=BEGUN, iteration=0, world_size=1, num_steps=2, step=0))
    assert state_of(story, now_s=BEGUN + 59) == ("running", "")
    assert state_of(story, now_s=BEGUN + 7300) == ("silent", "no event for 2 h 1 min")
    story.add(Intervention(time=BEGUN, iteration=0, who="a", reason="", changes={"command": "pause"}))
    assert state_of(story, now_s=BEGUN + 7300)[0] == "paused"
    story.system.latest = SystemSampled(time=BEGUN + 7200, iteration=0, rank=0, host="h", every_s=20.0, cpu_load=0.5)
    assert state_of(story, now_s=BEGUN + 7260)[0] == "paused"
    killed = ("silent", "paused, and no sample of its machine for 1 min")
    assert state_of(story, now_s=BEGUN + 7261) == killed, "its machines are sampled while it is paused"
    for code, word in ((0, "done"), (3, "halted"), (75, "stopped"), (1, "crashed")):
        story.add(RunEnded(time=BEGUN, iteration=0, step=0, exit_code=code, reason=""))
        assert state_of(story, now_s=BEGUN)[0] == word


def test_small_renderers() -> None:
    assert [spell_seconds(s) for s in (5.9, 61, 3600 * 5 + 60, 86400 * 3 + 3600)] == [
        "5 s",
        "1 min",
        "5 h 1 min",
        "3 d 1 h",
    ]
    assert fill_template("a{{x}}b{{y}}", x="{{y}}", y="2") == "a{{y}}b2"
