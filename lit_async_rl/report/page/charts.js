// Charts of the metrics, drawn by ECharts when they come into view.
(() => {
  "use strict";
  const report = (window.report = window.report || {});
  const { html, useEffect, useMemo, useRef, useState } = htmPreact;

  const CHARTS = [
    { title: "Loss", unit: "nats per token", about: "Mean of −log π over the trained tokens of records.", names: ["train/loss", "val/loss"] },
    { title: "Divergence from the teacher", unit: "nats per token", names: ["policy/teacher_divergence"] },
    { title: "Reward", axis: "reward", about: "Mean of a step.", names: ["reward/mean", "reward/mean_sampled"] },
    { title: "Parts of the reward", axis: "reward", prefixes: ["reward/part/"] },
    { title: "Held-out", axis: "share, or reward", about: "Prompts that are not trained on. Accuracy is the share of correct completions.", prefixes: ["val/", "eval/"] },
    { title: "Staleness", unit: "versions", about: "Publications between the sampling of a token and its step. Steady: versions that pass while a group is in progress.", names: ["sample/staleness_mean", "sample/staleness_p95", "sample/staleness_max", "perf/steady_staleness"] },
    { title: "Lag that the learning rate allows", unit: "versions", about: "Lag at which half of the effective samples would be lost.", names: ["drift/half_lag"] },
    { title: "Distance of the weights from those that sampled", unit: "L2 norm", about: "Ratios stay near 1 within the radius.", names: ["drift/step", "drift/stale", "drift/radius"] },
    { title: "Path of the weights", unit: "L2 norm", about: "How far the weights have moved.", names: ["drift/path", "drift/total"] },
    { title: "Effective sample size", unit: "share", about: "(Σw)² / (n Σw²) of the importance weights: 1 is fresh data.", names: ["importance/ess_ratio", "importance/ess_ratio_token"] },
    { title: "KL(μ‖π) per token", unit: "nats", about: "From the policy that sampled to the one that is trained.", names: ["importance/kl_k1", "importance/kl_k2", "importance/kl_k3"] },
    { title: "Parts of the log-ratio", unit: "nats per token", about: "Discrepancy: engine and trainer compute differently. Staleness: the weights have changed.", names: ["ratio/discrepancy", "ratio/staleness"] },
    { title: "Entropy", unit: "nats", about: "Of the policy, mean over tokens.", names: ["policy/entropy"] },
    { title: "Gradient norm", unit: "L2 norm", about: "Before clipping.", names: ["grad/norm"] },
    { title: "Cosine of consecutive gradients", axis: "cosine", names: ["grad/cosine"] },
    { title: "Throughput", unit: "tokens per second", about: "Tokens that the trainer trained on.", names: ["perf/tokens_per_s"] },
    { title: "Idle", unit: "share of the step", about: "The trainer waits for rollouts; the engine has nothing to sample.", names: ["perf/trainer_wait_share", "perf/engine_idle_share"] },
    { title: "Completion length", unit: "tokens", names: ["rollout/length_mean"] },
    { title: "Time of a step", unit: "seconds", names: ["perf/step_s"] },
  ];
  const LABELS = { // of legends; others: the metric without its group
    "train/loss": "training", "val/loss": "held-out", "policy/teacher_divergence": "policy", "val/token_accuracy": "token accuracy",
    "val/pass@1": "held-out accuracy", "val/reward": "held-out reward", "val/cut_share": "cut at the token limit",
    "reward/mean": "trained on", "reward/mean_sampled": "all sampled groups",
    "sample/staleness_mean": "mean", "sample/staleness_p95": "95th percentile", "sample/staleness_max": "maximum", "perf/steady_staleness": "steady",
    "drift/half_lag": "lag", "drift/step": "one step", "drift/stale": "since sampling", "drift/radius": "radius", "drift/path": "sum of all steps", "drift/total": "from the first weights",
    "importance/ess_ratio": "sequences", "importance/ess_ratio_token": "tokens",
    "importance/kl_k1": "estimator k1", "importance/kl_k2": "estimator k2", "importance/kl_k3": "estimator k3",
    "perf/tokens_per_s": "trained tokens", "perf/trainer_wait_share": "trainer waits", "perf/engine_idle_share": "engine idle",
    "rollout/length_mean": "mean", "perf/step_s": "step", "grad/norm": "gradient", "grad/cosine": "cosine", "policy/entropy": "policy",
  };
  const label = (name) => LABELS[name] || name.replace(/\w+\//, "");
  const LINES = ["solid", "dashed", "dotted"];

  // A chart in a box of its own; `option` is made only once the box is visible.
  report.Chart = ({ option, label, className = "", group, onReady }) => {
    const box = useRef(null);
    const state = useRef({});
    state.current.option = option;
    const draw = () => state.current.chart && state.current.chart.setOption(state.current.option(), { replaceMerge: ["series"] });
    useEffect(() => {
      const here = state.current;
      const begin = () => {
        if (here.chart || !box.current) return;
        here.chart = echarts.init(box.current, null, { renderer: "canvas" });
        if (group) here.chart.group = group;
        draw();
        if (group) echarts.connect(group);
        if (onReady) onReady(here.chart);
      };
      const seen = new IntersectionObserver((entries) => entries.some((e) => e.isIntersecting) && setTimeout(begin, 0));
      const sized = new ResizeObserver(() => here.chart && here.chart.resize());
      seen.observe(box.current);
      sized.observe(box.current);
      addEventListener("beforeprint", begin); // also what has not come into view
      return () => {
        removeEventListener("beforeprint", begin);
        seen.disconnect();
        sized.disconnect();
        if (here.chart) here.chart.dispose();
        here.chart = null;
      };
    }, []);
    useEffect(draw, [option]);
    return html`<div class="chart ${className}" ref=${box} role="img" aria-label=${label}></div>`;
  };

  // Content of a tooltip: elements with text, never markup.
  report.tip = (title, rows) => {
    const box = document.createElement("div");
    const head = document.createElement("strong");
    head.textContent = title;
    box.append(head);
    for (const [name, value] of rows) {
      const line = document.createElement("div");
      line.textContent = `${name}: ${value}`;
      box.append(line);
    }
    return box;
  };

  report.chartBase = () => ({
    animation: false,
    backgroundColor: "transparent",
    textStyle: { color: report.color("--text"), fontFamily: "system-ui, sans-serif" },
    tooltip: {
      confine: true,
      backgroundColor: report.color("--panel"),
      borderColor: report.color("--line"),
      textStyle: { color: report.color("--text"), fontSize: 12 },
    },
  });

  const axis = () => ({
    axisLabel: { color: report.color("--muted"), fontSize: 11 },
    axisLine: { lineStyle: { color: report.color("--line") } },
    splitLine: { lineStyle: { color: report.color("--line"), opacity: 0.5 } },
  });
  report.axis = axis;
  const named = (name, nameGap) => ({ name, nameGap, nameLocation: "middle", nameMoveOverlap: true, nameTextStyle: { color: report.color("--muted"), fontSize: 11 } });

  const smoothed = (values, width) => {
    if (width < 2) return values;
    let sum = 0;
    let number = 0;
    const kept = [];
    return values.map((value) => {
      kept.push(value);
      if (value !== null) { sum += value; number += 1; }
      if (kept.length > width) {
        const old = kept.shift();
        if (old !== null) { sum -= old; number -= 1; }
      }
      return number ? sum / number : null;
    });
  };

  // A reward of 0 or 1 is the accuracy: one line of the two.
  const repeats = (runs, name) =>
    name === "val/reward" && runs.every(({ curves }) => {
      const { [name]: reward, "val/pass@1": accuracy } = curves ? curves.series : {};
      return !reward || (accuracy && JSON.stringify(reward) === JSON.stringify(accuracy));
    });

  // Supervised fine-tuning: no engine, no rollouts, no verdict.
  report.isFineTuned = ({ curves }) => Boolean(curves && curves.series["train/loss"]);

  const elsewhere = (name) => CHARTS.some(({ names = [] }) => names.includes(name));

  const namesOf = (runs, chart) => {
    const all = [...new Set(runs.flatMap((run) => Object.keys(run.curves ? run.curves.series : {})))];
    return chart.names
      ? chart.names.filter((name) => all.includes(name))
      : all.filter((name) => chart.prefixes.some((prefix) => name.startsWith(prefix)) && !elsewhere(name) && !repeats(runs, name));
  };

  const seriesOf = (runs, names, width) =>
    runs.flatMap((run, r) =>
      names.filter((name) => run.curves && run.curves.series[name]).map((name, n) => {
        const { axis: number, y } = run.curves.series[name];
        const x = run.curves.axes[number];
        const values = smoothed(y, width);
        const color = report.color(`--c${(runs.length > 1 ? r : n) % 4}`);
        return {
          type: "line",
          name: runs.length > 1 ? `${run.label}: ${name}` : name,
          data: x.map((step, i) => [step, values[i]]),
          showSymbol: x.length < 30,
          symbolSize: 5,
          sampling: "lttb",
          connectNulls: false,
          lineStyle: { width: 1.8, type: LINES[n % LINES.length], color },
          itemStyle: { color },
        };
      }),
    );

  const legendRows = (number) => Math.ceil(number / (innerWidth < 600 ? 2 : 3));

  report.curveOption = (runs, chart, names, width) => () => ({
    ...report.chartBase(),
    grid: { left: 26, right: 14, top: 28 + 16 * (legendRows(names.length * runs.length) - 1), bottom: 22, containLabel: true },
    legend: {
      type: "plain", top: 0, left: 0, itemWidth: 22, itemHeight: 8, itemGap: 8, textStyle: { color: report.color("--muted"), fontSize: 11, lineHeight: 12 },
      formatter: (name) => runs.length > 1 ? name.replace(/^(\w: )(.*)$/, (_, run, metric) => run + label(metric)) : label(name), // tooltips have the whole name
    },
    tooltip: {
      ...report.chartBase().tooltip,
      trigger: "axis",
      formatter: (points) =>
        report.tip(`step ${points[0].axisValue}`, points.map((p) => [p.seriesName, report.number(p.value[1], 4)])),
    },
    dataZoom: [{ type: "inside", zoomOnMouseWheel: "ctrl", moveOnMouseMove: true, filterMode: "none" }],
    xAxis: { type: "value", min: "dataMin", max: "dataMax", ...axis(), ...named("optimizer step", 24), splitLine: { show: false } },
    yAxis: { type: "value", scale: true, ...axis(), ...named(chart.axis || chart.unit || label(names[0]), 42) },
    series: seriesOf(runs, names, width),
  });

  const Curve = ({ runs, chart, names, width, theme }) => {
    const option = useMemo(() => report.curveOption(runs, chart, names, width), [runs, width, theme, names.join()]);
    return html`<figure class="panel"><figcaption>${chart.title}${chart.unit && html` <small>(${chart.unit})</small>`}${chart.about && html`<span class="about">${chart.about}</span>`}</figcaption>
      <${report.Chart} option=${option} group="curves" label=${`${chart.title} by optimizer step: ${names.join(", ")}`} />
    </figure>`;
  };

  report.Curves = ({ runs, theme, only }) => {
    const [width, setWidth] = useState(1);
    const [other, setOther] = useState("");
    const charts = CHARTS.map((chart) => ({ chart, names: namesOf(runs, chart) })).filter(({ names }) => names.length);
    const shown = only ? charts.filter(({ chart }) => only.includes(chart.title)) : charts;
    const all = [...new Set(runs.flatMap((run) => Object.keys(run.curves ? run.curves.series : {})))].sort();
    if (!charts.length) return html`<p class="empty">This run has logged no metrics yet.</p>`;
    return html`
      ${!only && html`<div class="controls">
        <label>smoothing
          <select id="smoothing" value=${width} onChange=${(e) => setWidth(Number(e.target.value))}>
            ${[[1, "none"], [5, "5 points"], [20, "20 points"], [100, "100 points"]].map(([v, t]) => html`<option value=${v}>${t}</option>`)}
          </select>
        </label>
        <label>another metric
          <select id="metric" value=${other} onChange=${(e) => setOther(e.target.value)}>
            <option value="">choose</option>${all.map((name) => html`<option value=${name}>${name}</option>`)}
          </select>
        </label>
        <span class="hint">Ctrl and wheel zoom, dragging moves; all charts show the same step.</span>
      </div>`}
      <div class="charts">
        ${other && html`<${Curve} key=${other} runs=${runs} chart=${{ title: other }} names=${[other]} width=${width} theme=${theme} />`}
        ${shown.map(({ chart, names }) =>
          html`<${Curve} key=${chart.title} runs=${runs} chart=${chart} names=${names} width=${width} theme=${theme} />`)}
      </div>`;
  };
})();
