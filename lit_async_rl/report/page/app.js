// The page: tabs, theme, and updates while a run goes on.
(() => {
  "use strict";
  const report = window.report;
  const { html, render, useEffect, useState } = htmPreact;
  const TABS = [["overview", "Overview"], ["curves", "Curves"], ["pipeline", "Pipeline"], ["rollouts", "Rollouts"], ["compare", "Compare"]];
  const THEMES = { auto: "light dark", light: "light", dark: "dark" };
  const POLL_MS = 2000;

  const Overview = ({ runs, theme }) => html`
    ${runs.map((run) => html`<section class="panel overview" key=${run.label}>
      <h2>${runs.length > 1 ? `${run.label}: ` : ""}${run.name}</h2>
      ${!report.isFineTuned(run) && html`<p class="verdict">${run.verdict ? report.visible(run.verdict.text) : "The run has no verdict yet; the first comes after 50 steps, or at its end."}</p>`}
      <div class="tables">
        <table class="numbers"><caption>Summary</caption><tbody>
          ${(run.summary || []).map(([name, value]) => html`<tr key=${name}><th scope="row">${name}</th><td>${value}</td></tr>`)}
        </tbody></table>
        <${report.IdleTable} run=${run} />
      </div>
      ${(run.notes || []).map((note) => html`<p class="note">${report.visible(note)}</p>`)}
    </section>`)}
    <${report.Curves} runs=${runs} theme=${theme} only=${["Loss", "Divergence from the teacher", "Reward", "Held-out", "Staleness", "Effective sample size", "Throughput", "Idle"]} />
    ${runs.map((run) => run.config && html`<details class="panel" key=${run.label}><summary>configuration of ${run.name}</summary><pre>${report.visible(run.config)}</pre></details>`)}`;

  const VIEWS = { overview: Overview, curves: report.Curves, pipeline: report.Pipeline, rollouts: report.Rollouts, compare: report.Compare };

  const Tabs = ({ tab, setTab }) => {
    const onKey = (event) => {
      const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!by) return;
      const next = (TABS.findIndex(([name]) => name === tab) + by + TABS.length) % TABS.length;
      setTab(TABS[next][0]);
      event.currentTarget.children[next].focus();
    };
    return html`<div role="tablist" aria-label="views" onKeyDown=${onKey}>
      ${TABS.map(([name, label]) => html`<button type="button" role="tab" id="tab-${name}" key=${name} aria-selected=${name === tab} aria-controls="view"
        tabindex=${name === tab ? 0 : -1} onClick=${() => setTab(name)}>${label}</button>`)}
    </div>`;
  };

  // Follows a run that goes on: asks for the parts that have changed since the last answer.
  const useUpdates = (data, setData) => {
    const [state, setState] = useState(data.live ? "live" : "");
    useEffect(() => {
      if (!data.live) return undefined;
      let timer = 0;
      let known = data.runs[0].parts;
      let pause = POLL_MS;
      const ask = async () => {
        const began = performance.now();
        try {
          const answer = await fetch(`data?known=${encodeURIComponent(JSON.stringify(known))}`, { cache: "no-store" });
          if (!answer.ok) throw new Error(String(answer.status));
          const changes = await answer.json();
          if (JSON.stringify(changes.parts) !== JSON.stringify(known))
            setData((old) => ({ ...old, runs: [{ ...old.runs[0], ...changes }] }));
          known = changes.parts;
          pause = POLL_MS;
          setState(`live, ${new Date().toLocaleTimeString("en-GB")}`);
        } catch {
          setState("the watch command has ended");
          pause = Math.min(2 * pause, 60000);
        }
        timer = setTimeout(ask, Math.max(pause, 10 * (performance.now() - began))); // the run needs the processor more
      };
      timer = setTimeout(ask, POLL_MS);
      return () => clearTimeout(timer);
    }, []);
    return state;
  };

  const App = ({ first }) => {
    const [data, setData] = useState(first);
    const start = TABS.some(([name]) => `#${name}` === location.hash) ? location.hash.slice(1) : "overview";
    const [tab, setTab] = useState(start);
    const [theme, setTheme] = useState("auto");
    const [system, setSystem] = useState(matchMedia("(prefers-color-scheme: dark)").matches);
    const state = useUpdates(data, setData);
    useEffect(() => {
      matchMedia("(prefers-color-scheme: dark)").addEventListener("change", (e) => setSystem(e.matches));
    }, []);
    const change = (name) => {
      document.documentElement.style.colorScheme = THEMES[name];
      report.forgetColors();
      setTheme(name);
    };
    useEffect(() => report.forgetColors(), [system]);
    const View = VIEWS[tab];
    return html`<header class="top">
        <h1>${data.runs.map((run) => run.name).join(" and ")}</h1>
        <span class="state" role="status" id="state">${state}</span>
        <label class="theme">theme <select id="theme" value=${theme} onChange=${(e) => change(e.target.value)}>
          ${Object.keys(THEMES).map((name) => html`<option value=${name}>${name}</option>`)}</select></label>
      </header>
      <${Tabs} tab=${tab} setTab=${(name) => { history.replaceState(null, "", `#${name}`); setTab(name); }} />
      <div id="view" role="tabpanel" aria-labelledby="tab-${tab}"><${View} runs=${data.runs} theme=${`${theme}${system}`} /></div>`;
  };

  const content = JSON.parse(document.getElementById("data").textContent);
  content.runs.forEach((run, i) => { run.label = content.runs.length > 1 ? "AB"[i] : "run"; });
  render(html`<${App} first=${content} />`, document.getElementById("app"));
})();
