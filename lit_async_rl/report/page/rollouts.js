// The rollout viewer: filters, list of groups, and all completions of a group side by side.
(() => {
  "use strict";
  const report = (window.report = window.report || {});
  const { html, useEffect, useMemo, useState } = htmPreact;
  const PAGE = 40;
  const RANGES = [["step", "step"], ["reward", "reward"], ["length", "length"], ["staleness", "staleness"]];

  const staleness = (group, rollout) =>
    group.policy_version === undefined || rollout.oldest === undefined ? undefined : group.policy_version - rollout.oldest;
  const valueOf = { step: (group) => group.step, reward: (_, r) => r.reward, length: (_, r) => r.length, staleness };

  // Whether a rollout meets all conditions; values it does not have meet none.
  const passes = (group, rollout, filter) =>
    RANGES.every(([name]) => {
      const { min, max } = filter[name] || {};
      if (min === undefined && max === undefined) return true;
      const value = valueOf[name](group, rollout);
      return value !== undefined && value !== null && (min === undefined || value >= min) && (max === undefined || value <= max);
    }) && (!filter.text || textOf(group, rollout).includes(filter.text));

  const textOf = (group, rollout) => `${group.prompt || ""}${rollout.text || (rollout.tokens || []).join("")}`;
  const mean = (values) => values.reduce((sum, value) => sum + value, 0) / Math.max(1, values.length);

  const Filters = ({ filter, setFilter, total, found }) => {
    const change = (name, side) => (event) => {
      const value = event.target.value === "" ? undefined : Number(event.target.value);
      setFilter({ ...filter, [name]: { ...filter[name], [side]: value } });
    };
    return html`<fieldset class="filters"><legend>filter</legend>
      ${RANGES.map(([name, label]) => html`<div class="range" key=${name}>
        <span>${label}</span>
        <input type="number" step="any" aria-label="smallest ${label}" id="min-${name}" placeholder="min" onInput=${change(name, "min")} />
        <input type="number" step="any" aria-label="largest ${label}" id="max-${name}" placeholder="max" onInput=${change(name, "max")} />
      </div>`)}
      <input type="search" id="text" aria-label="text that prompt or completion contain" placeholder="text" onInput=${(e) => setFilter({ ...filter, text: e.target.value })} />
      <p class="hint" role="status" id="found">${found} of ${total} rollouts</p>
    </fieldset>`;
  };

  const GroupButton = ({ entry, selected, onSelect, several }) => {
    const { group, rollouts } = entry;
    const rewards = rollouts.map((rollout) => rollout.reward).filter(Number.isFinite);
    const title = (group.prompt || "").slice(0, 80);
    return html`<button type="button" class="entry" aria-pressed=${selected} onClick=${onSelect}>
      <span class="step">${several ? `${entry.run.label} · ` : ""}step ${group.step}</span>
      <span class="reward">reward ${rewards.length ? report.number(mean(rewards)) : "–"}</span>
      <span class="excerpt">${report.visible(title)}</span>
    </button>`;
  };

  const facts = (group, rollout) => [
    ["reward", report.number(rollout.reward)],
    ...Object.entries(rollout.parts || {}).map(([name, value]) => [name, report.number(value)]),
    ["length", rollout.length === undefined ? "–" : `${rollout.length} tokens`],
    ["versions", rollout.oldest === rollout.newest ? report.number(rollout.oldest) : `${rollout.oldest} to ${rollout.newest}`],
    ["staleness", report.number(staleness(group, rollout))],
    ["ended by", rollout.finish || "–"],
  ];

  const Rollout = ({ group, rollout, mode, most, onToken }) => html`<article class="rollout">
    <header><h4>sample ${rollout.sample}</h4>
      <dl>${facts(group, rollout).map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl></header>
    <${report.Completion} group=${group} rollout=${rollout} mode=${mode} most=${most} onToken=${onToken} />
  </article>`;

  const Group = ({ entry, mode, setMode, several }) => {
    const [token, setToken] = useState("");
    const { group, rollouts } = entry;
    const most = useMemo(() => report.largest(group.rollouts, "advantages"), [group]);
    useEffect(() => setToken(""), [group]);
    return html`<div class="group" id="group">
      <h3>${several ? `${entry.run.label}: ` : ""}step ${group.step}, group ${group.group}</h3>
      <${report.Prompt} group=${group} />
      ${group.answer !== undefined && html`<p class="answer">answer: <code>${report.visible(String(group.answer))}</code></p>`}
      <div class="controls sticky">
        <label>colour by <select id="mode" value=${mode} onChange=${(e) => setMode(e.target.value)}>
          ${Object.entries(report.MODES).map(([name, { label }]) => html`<option value=${name}>${label}</option>`)}
        </select></label>
        <span class="inspector" role="status" id="token">${token || "point at a token, or focus a completion and press the arrow keys"}</span>
      </div>
      <${report.Legend} mode=${mode} rollouts=${rollouts} />
      <div class="side-by-side">${rollouts.map((rollout) =>
        html`<${Rollout} key=${`${group.step}-${group.group}-${rollout.sample}`} group=${group} rollout=${rollout} mode=${mode} most=${most} onToken=${setToken} />`)}</div>
    </div>`;
  };

  report.Rollouts = ({ runs }) => {
    const [filter, setFilter] = useState({});
    const [mode, setMode] = useState("version");
    const [selected, setSelected] = useState(null);
    const [shown, setShown] = useState(PAGE);
    const all = useMemo(() => runs.flatMap((run) => (run.rollouts || []).map((group) => ({ run, group }))), [runs]);
    const total = useMemo(() => all.reduce((sum, { group }) => sum + group.rollouts.length, 0), [all]);
    const found = useMemo(
      () => all.map(({ run, group }) => ({ run, group, key: `${run.label}/${group.step}/${group.group}`, rollouts: group.rollouts.filter((r) => passes(group, r, filter)) }))
        .filter((entry) => entry.rollouts.length),
      [all, filter],
    );
    const several = runs.length > 1;
    if (!all.length) return html`<p class="empty">There are no samples yet: SampleLogger writes samples.jsonl, RolloutTape the tape.</p>`;
    const entry = found.find(({ key }) => key === selected) || found[found.length - 1];
    const place = found.indexOf(entry);
    const pages = found.slice(Math.max(0, found.length - shown)).reverse();
    const go = (by) => found[place + by] && setSelected(found[place + by].key);
    return html`<div class="rollouts">
      <aside class="panel">
        <${Filters} filter=${filter} setFilter=${setFilter} total=${total} found=${found.reduce((sum, e) => sum + e.rollouts.length, 0)} />
        <div class="buttons"><button type="button" onClick=${() => go(-1)} disabled=${place <= 0}>earlier</button>
          <button type="button" onClick=${() => go(1)} disabled=${place < 0 || place >= found.length - 1}>later</button></div>
        <nav class="list" aria-label="groups">${pages.map((e) => html`<${GroupButton} key=${e.key} entry=${e} several=${several} selected=${e === entry} onSelect=${() => setSelected(e.key)} />`)}
          ${found.length > shown && html`<button type="button" class="more" onClick=${() => setShown(shown + 200)}>show earlier groups</button>`}</nav>
      </aside>
      <main class="panel">${entry ? html`<${Group} entry=${entry} mode=${mode} setMode=${setMode} several=${several} />` : html`<p class="empty">No rollout meets these conditions.</p>`}</main>
    </div>`;
  };
})();
