// The pipeline: who worked and who waited, as a Gantt chart with versions as colours, and as shares of time.
(() => {
  "use strict";
  const report = (window.report = window.report || {});
  const { html, useEffect, useMemo, useRef, useState } = htmPreact;

  const IDLE = new Set(["trainer/wait", "engine/idle"]);
  const ORDER = ["engine", "environment", "reward", "trainer"];
  const SHARES = {
    "engine/decode": "--c0", "engine/prefill": "--c2", "engine/update_weights": "--c3", "reward/score": "--c1", "environment/answer": "--c3",
    "trainer/forward_backward": "--v1", "trainer/optimizer": "--v3", "trainer/wait": "--idle", "trainer/publish": "--span",
    "trainer/checkpoint": "--v4", "trainer/validation": "--v5",
  };
  const LINES = ["solid", "dashed", "dotted"];
  const sharesOf = (timeline) => Object.keys(timeline.bins.shares).filter((kind) => SHARES[kind]);
  const spoken = (kind) => kind.replace("/", ": ").replace("_", " ");
  const short = (kind) => kind.split("/")[1].replace("_", " ");
  const duration = (s) => (s >= 1 ? `${s.toFixed(2)} s` : s >= 1e-3 ? `${(s * 1e3).toFixed(1)} ms` : `${(s * 1e6).toFixed(0)} µs`);

  const laneLabel = (lane) => {
    const name = lane.name.includes(lane.category) || lane.category === "engine" ? lane.name : `${lane.category}: ${lane.name}`;
    return report.visible(lane.where ? `${lane.where}: ${name}` : name);
  };

  // Lanes with spans, the engine above the rewards above the trainer.
  const lanesOf = (timeline, window) => {
    const used = [...new Set(window.spans.map((span) => span[0]))];
    return used.sort((a, b) => {
      const [x, y] = [timeline.lanes[a], timeline.lanes[b]];
      return ORDER.indexOf(x.category) - ORDER.indexOf(y.category) || x.process - y.process || x.thread - y.thread;
    });
  };

  const versionOf = (span) => {
    const [, , , , version, args] = span;
    if (version >= 0) return version;
    const list = Array.isArray(args.versions) ? args.versions.filter(Number.isInteger) : [];
    return list.length ? Math.max(...list) : -1;
  };

  const fill = (kind, version) => {
    if (IDLE.has(kind)) return report.color("--idle");
    if (kind === "trainer/validation" || kind === "trainer/checkpoint") return report.color("--aside");
    if (kind.startsWith("reward") || kind.startsWith("environment")) return report.color("--reward");
    return report.versionColor(version);
  };

  const drawSpan = (spans, kinds) => (params, api) => {
    const lane = api.value(0);
    const [left, middle] = api.coord([api.value(1), lane]);
    const [right] = api.coord([api.value(2), lane]);
    const height = Math.min(api.size([0, 1])[1] * 0.72, 44);
    const area = params.coordSys;
    const x = Math.max(left, area.x);
    const width = Math.min(Math.max(right - left, 1), area.x + area.width - x);
    if (width <= 0 || right < area.x) return null;
    const span = spans[params.dataIndex];
    const kind = kinds[span[1]];
    const version = versionOf(span);
    const idle = IDLE.has(kind);
    const box = {
      type: "rect",
      shape: { x, y: middle - (idle ? height / 8 : height / 2), width, height: idle ? height / 4 : height },
      style: { fill: fill(kind, version), stroke: report.color("--panel"), lineWidth: width > 4 ? 0.6 : 0 },
    };
    if (width < 34 || idle) return box;
    const text = width > 90 && version >= 0 ? `${short(kind)} v${version}` : version >= 0 ? `v${version}` : short(kind);
    return {
      type: "group",
      children: [box, {
        type: "text", silent: true,
        style: { text, x: x + 4, y: middle, fill: report.color("--text"), fontSize: 11, width: width - 6, overflow: "truncate", textVerticalAlign: "middle" },
      }],
    };
  };

  const tipOf = (span, kinds, lane) => {
    const rows = [["lane", laneLabel(lane)], ["begins", `${span[2].toFixed(3)} s`], ["takes", duration(span[3])]];
    for (const [name, value] of Object.entries(span[5])) rows.push([name.replace("_", " "), report.visible(JSON.stringify(value))]);
    return report.tip(short(kinds[span[1]]), rows);
  };

  const ganttOption = (timeline, window, range) => () => {
    const lanes = lanesOf(timeline, window);
    const place = new Map(lanes.map((lane, i) => [lane, i]));
    const begins = window.spans.map((span) => span[2]);
    const first = Math.min(...begins);
    const last = window.spans.reduce((most, span) => Math.max(most, span[2] + span[3]), 0);
    return {
      ...report.chartBase(),
      grid: { left: 112, right: 16, top: 8, bottom: 52 },
      tooltip: { ...report.chartBase().tooltip, formatter: (p) => tipOf(window.spans[p.dataIndex], window.kinds, timeline.lanes[window.spans[p.dataIndex][0]]) },
      dataZoom: [
        { type: "inside", filterMode: "weakFilter", startValue: range[0], endValue: range[1], minValueSpan: 1e-4 },
        { type: "slider", filterMode: "weakFilter", height: 16, bottom: 4, startValue: range[0], endValue: range[1], showDataShadow: false, brushSelect: false, moveHandleSize: 0,
          labelFormatter: (v) => `${Number(v).toFixed(1)} s`, textStyle: { color: report.color("--muted"), fontSize: 10 } },
      ],
      xAxis: { type: "value", min: first, max: last, ...report.axis(), axisLabel: { color: report.color("--muted"), fontSize: 11, showMaxLabel: false, formatter: (v) => `${+v.toFixed(3)} s` } },
      yAxis: { type: "category", inverse: true, data: lanes.map((lane) => laneLabel(timeline.lanes[lane])), ...report.axis(), splitLine: { show: false },
        axisLabel: { color: report.color("--text"), width: 100, overflow: "truncate" } },
      series: [{
        type: "custom", renderItem: drawSpan(window.spans, window.kinds), clip: true, progressive: 0,
        encode: { x: [1, 2], y: 0 },
        data: window.spans.map((span) => [place.get(span[0]), span[2], span[2] + span[3]]),
      }],
    };
  };

  const sharesOption = (timeline) => () => {
    const names = sharesOf(timeline);
    return {
      ...report.chartBase(),
      grid: { left: 8, right: 14, top: 10, bottom: 8, containLabel: true },
      tooltip: { ...report.chartBase().tooltip, trigger: "axis",
        formatter: (points) => report.tip(`from ${points[0].axisValue.toFixed(1)} s`, points.map((p) => [p.seriesName, `${(100 * p.value[1]).toFixed(1)} %`])) },
      xAxis: { type: "value", min: 0, max: timeline.duration, ...report.axis(), splitLine: { show: false }, axisLabel: { color: report.color("--muted"), showMaxLabel: false, formatter: (v) => `${+v.toFixed(1)} s` } },
      yAxis: { type: "value", min: 0, ...report.axis(), axisLabel: { color: report.color("--muted"), formatter: (v) => `${Math.round(100 * v)} %` } },
      series: names.map((kind, n) => ({
        type: "line", name: spoken(kind), step: "end", showSymbol: false, sampling: "average",
        stack: kind.startsWith("trainer") ? "trainer" : undefined,
        areaStyle: kind.startsWith("trainer") ? { opacity: 0.75, color: report.color(SHARES[kind]) } : undefined,
        lineStyle: { width: kind.startsWith("trainer") ? 0.5 : 2, type: LINES[n % LINES.length], color: report.color(SHARES[kind]) },
        itemStyle: { color: report.color(SHARES[kind]) },
        data: [...timeline.bins.shares[kind], timeline.bins.shares[kind].at(-1)].map((share, i) => [i * timeline.bins.width, share]),
      })),
    };
  };

  const percent = (part, whole) => (whole > 0 ? `${((100 * part) / whole).toFixed(1)} %` : "–");

  // Idle shares, as the spans say and as the verdict counted them in the same window.
  report.IdleTable = ({ run }) => {
    const { idle, verdict } = run;
    if (!idle && !verdict) return null;
    const row = (name, of) => html`<tr>
      <th scope="row">${name}</th><td>${idle ? of(idle) : "–"}</td><td>${verdict ? of(verdict) : "–"}</td></tr>`;
    return html`<table class="numbers idle">
      <caption>Idle time${verdict ? ` in the ${report.number(verdict.wall_s)} s of the verdict, without validation` : ""}</caption>
      <thead><tr><th></th><th scope="col">timeline</th><th scope="col">verdict</th></tr></thead>
      <tbody>
        ${row("trainer waits", (i) => percent(i.wait_s, i.wall_s))}
        ${row("engine idle", (i) => percent(Math.max(0, i.wall_s - i.engine_busy_s), i.wall_s))}
        ${row("publishing", (i) => percent(i.sync_s, i.wall_s))}
      </tbody></table>`;
  };

  const Gantt = ({ timeline, theme, label }) => {
    const [number, setNumber] = useState(0);
    const chart = useRef(null);
    const window_ = timeline.windows[Math.min(number, timeline.windows.length - 1)];
    const whole = useMemo(() => {
      const first = Math.min(...window_.spans.map((span) => span[2]));
      return [first, window_.spans.reduce((most, span) => Math.max(most, span[2] + span[3]), first)];
    }, [window_]);
    const zoomed = useRef(null); // kept while a live page is updated
    const option = useMemo(() => ganttOption(timeline, window_, zoomed.current || whole), [window_, theme]);
    const limits = useRef(whole);
    limits.current = whole;
    const now = () => {
      const { startValue, endValue } = chart.current.getOption().dataZoom[0];
      return [startValue, endValue];
    };
    const follow = (made) => {
      chart.current = made;
      made.on("datazoom", () => {
        const [a, b] = now();
        zoomed.current = b - a > 0.98 * (limits.current[1] - limits.current[0]) ? null : [a, b];
      });
    };
    const show = (begin, end) => {
      const length = Math.min(end - begin, whole[1] - whole[0]);
      const startValue = Math.max(whole[0], Math.min(begin, whole[1] - length));
      chart.current.dispatchAction({ type: "dataZoom", startValue, endValue: startValue + length });
    };
    const zoom = (factor) => { const [a, b] = now(); const c = (a + b) / 2; show(c - ((b - a) / 2) * factor, c + ((b - a) / 2) * factor); };
    const move = (share) => { const [a, b] = now(); show(a + (b - a) * share, b + (b - a) * share); };
    const actions = { "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), ArrowLeft: () => move(-0.3), ArrowRight: () => move(0.3), 0: () => show(...whole) };
    const onKey = (event) => {
      if (chart.current && actions[event.key] && !event.ctrlKey && event.target.tagName !== "SELECT") { event.preventDefault(); actions[event.key](); }
    };
    const button = (key, text, name) => html`<button type="button" aria-label=${name} title="${name} (key ${key})" onClick=${() => chart.current && actions[key]()}>${text}</button>`;
    return html`<div class="gantt" tabindex="0" onKeyDown=${onKey} aria-label="${label}. Plus and minus zoom, arrow keys move, 0 shows all.">
      <div class="controls">
        ${timeline.windows.length > 1 && html`<label>part of the run
          <select class="part" value=${number} onChange=${(e) => { zoomed.current = null; setNumber(Number(e.target.value)); }}>
            ${timeline.windows.map((w, i) => html`<option value=${i}>${w.steps ? `steps ${w.steps[0]} to ${w.steps[1]}` : `part ${i + 1}`}</option>`)}
          </select></label>`}
        <span class="buttons">
          ${button("+", "+", "zoom in")}${button("-", "−", "zoom out")}${button("ArrowLeft", "←", "earlier")}
          ${button("ArrowRight", "→", "later")}${button("0", "all", "show all")}
        </span>
        <span class="hint">colours are policy versions; thin grey bars are idle time</span>
      </div>
      <${report.Chart} className=${lanesOf(timeline, window_).length > 5 ? "tallest" : "tall"} option=${option} label=${label} onReady=${follow} />
    </div>`;
  };

  report.Pipeline = ({ runs, theme }) => html`${runs.map((run) => html`<section class="panel" key=${run.label}>
    <h2>${runs.length > 1 ? `${run.label}: ` : ""}engine, rewards, trainer</h2>
    ${run.timeline
      ? html`<${Gantt} timeline=${run.timeline} theme=${theme} label=${`Timeline of ${run.name}`} />
          <${report.IdleTable} run=${run} />
          <${Shares} timeline=${run.timeline} theme=${theme} />`
      : report.isFineTuned(run)
        ? html`<p class="empty">Supervised fine-tuning has no engine and no rewards.</p>`
        : html`<p class="empty">This run has no timeline (files timeline/rank*.json). The charts show its idle shares by step.</p>`}
  </section>`)}`;

  const DASHES = { solid: "", dashed: "6 4", dotted: "2 3" };
  const Key = ({ color, line }) => html`<svg viewBox="0 0 22 10" aria-hidden="true">${line === "area"
    ? html`<rect width="22" height="10" style=${{ fill: color }} />`
    : html`<line x1="0" y1="5" x2="22" y2="5" stroke-width="2" stroke-dasharray=${DASHES[line]} style=${{ stroke: color }} />`}</svg>`;

  const Shares = ({ timeline, theme }) => {
    const option = useMemo(() => sharesOption(timeline), [timeline, theme]);
    return html`<figure><figcaption>share of the time over the whole run</figcaption>
      <ul class="keys">${sharesOf(timeline).map((kind, n) => html`<li key=${kind}>
        <${Key} color=${`var(${SHARES[kind]})`} line=${kind.startsWith("trainer") ? "area" : LINES[n % LINES.length]} />${spoken(kind)}</li>`)}</ul>
      <${report.Chart} option=${option} className="middle" label="Share of time of each activity over the run" /></figure>`;
  };
})();
