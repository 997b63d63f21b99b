"""The report as a file: self-contained, small, safe, and made from whatever a killed run left."""

from __future__ import annotations

import json
import random
import re
import shutil

import pytest
from made_runs import make_run, rollout, write_metrics, write_samples, write_timeline

from lit_async_rl.report import write_report
from lit_async_rl.report.commands import main


def data_of(path) -> dict:
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', path.read_text())
    return json.loads(found[1])


def test_a_report_is_one_file_that_loads_nothing(tmp_path):
    run = make_run(tmp_path / "run" / "v0")
    assert write_report(run) == run / "report.html"
    out = write_report(run, out=tmp_path / "deep" / "report.html")
    text = out.read_text()
    own = re.sub(r"<script>.*?</script>", "", text, flags=re.S)
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", own)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1]
    assert "default-src 'none'" in policy
    assert "connect-src 'none'" in policy
    assert "unsafe" not in policy
    assert len(text) < 3e6


@pytest.mark.slow
def test_the_report_of_a_thousand_steps_is_small(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    write_metrics(run, 1000)
    write_samples(run, 1000, 16, tokens=60)
    write_timeline(run, 1000, 2, more=8)
    out = write_report(run, out=tmp_path / "report.html")
    assert out.stat().st_size < 10e6
    found = data_of(out)["runs"][0]
    assert found["timeline"]["num_spans"] > 25_000
    assert found["rollouts"][-1]["step"] == 1000


def test_text_cannot_leave_its_script_element(tmp_path):
    run = make_run(tmp_path / "run" / "v0", steps=2)
    evil = "</script><script>alert(1)</script><!--<script>]]>\u2028&amp;"
    with (run / "samples.jsonl").open("a") as file:
        file.write(json.dumps(rollout(3, 7, 0, prompt=evil, completion=evil, answer=evil, tokens=[evil])) + "\n")
    (run / "config.yaml").write_text(evil)
    out = write_report(run, out=tmp_path / "report.html")
    assert out.read_text().count("<script") == 1 + len(re.findall(r"<script>", out.read_text()))
    assert "alert(1)</script>" not in out.read_text()
    found = data_of(out)["runs"][0]
    assert found["rollouts"][-1]["prompt"] == evil
    assert found["config"] == evil


def test_a_run_killed_at_any_moment_leaves_a_report(tmp_path):
    whole = make_run(tmp_path / "whole", steps=12)
    files = ("metrics.csv", "samples.jsonl", "held_out.jsonl", "timeline/rank0.json", "config.yaml")
    rng = random.Random(0)
    for number in range(25):
        run = tmp_path / str(number)
        shutil.copytree(whole, run)
        for name in files:
            path = run / name
            if rng.random() < 0.2:
                path.unlink()
            else:
                path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])
        (run / "timeline").mkdir(exist_ok=True)
        assert data_of(write_report(run, out=tmp_path / f"{number}.html"))["runs"][0]["name"]


def test_two_runs_and_the_command_line(tmp_path, capsys):
    one, other = make_run(tmp_path / "a" / "v0", steps=5), make_run(tmp_path / "b" / "v0", steps=5, lag=0)
    main([str(one), str(other), "--out", str(tmp_path / "two.html")])
    assert "two.html: 1" in capsys.readouterr().out
    assert [run["name"] for run in data_of(tmp_path / "two.html")["runs"]] == ["a/v0", "b/v0"]
    main([str(one)])
    assert (one / "report.html").is_file()
    for arguments in ([str(tmp_path)], [str(tmp_path / "missing")]):
        with pytest.raises(SystemExit, match=r"error: .* is not the folder of a run"):
            main(arguments)


def test_ranks_come_into_one_trace(tmp_path):
    run = make_run(tmp_path / "run" / "v0", steps=3)
    one = (run / "timeline" / "rank0.json").read_text()
    (run / "timeline" / "rank1.json").write_text(one.replace('"pid": 0', '"pid": 1'))
    out = tmp_path / "trace.json"
    main([str(run), "--out", str(tmp_path / "report.html"), "--trace", str(out)])
    events = json.loads(out.read_text())
    assert {event["pid"] for event in events} == {0, 1}
    assert len(events) % 2 == 0
    shutil.rmtree(run / "timeline")
    with pytest.raises(SystemExit, match="error: there is no timeline"):
        main([str(run), "--out", str(tmp_path / "report.html"), "--trace", str(out)])
