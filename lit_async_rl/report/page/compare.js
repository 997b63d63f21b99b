// The same prompts at two times or in two runs: held-out prompts at every validation, and common training prompts.
(() => {
  "use strict";
  const report = (window.report = window.report || {});
  const { html, useMemo, useState } = htmPreact;

  // For each prompt its completions, each with run and step, in this order.
  const collect = (runs) => {
    const prompts = new Map();
    const add = (prompt, answer, sample) => {
      if (!prompts.has(prompt)) prompts.set(prompt, { prompt, answer, samples: [] });
      prompts.get(prompt).samples.push(sample);
    };
    for (const run of runs) {
      for (const { prompt, answer, samples } of run.held_out || [])
        for (const sample of samples) add(prompt, answer, { ...sample, run, where: `${run.label}, validation at step ${sample.step}` });
    }
    for (const run of runs)
      for (const group of run.rollouts || [])
        for (const r of group.rollouts)
          add(group.prompt, group.answer, {
            run, step: group.step, reward: r.reward, text: r.text || (r.tokens || []).join(""),
            where: `${run.label}, step ${group.step}, sample ${r.sample}`,
          });
    return [...prompts.values()].filter(({ samples }) => new Set(samples.map((s) => `${s.run.label}/${s.step}`)).size > 1);
  };

  const Side = ({ name, samples, number, setNumber }) => html`<article class="rollout">
    <label>${name} <select class="side" value=${number} onChange=${(e) => setNumber(Number(e.target.value))}>
      ${samples.map((sample, i) => html`<option value=${i}>${sample.where}</option>`)}</select></label>
    <p>reward <strong>${report.number(samples[number].reward)}</strong></p>
    <${report.Text} text=${samples[number].text} key=${number} className="completion" />
  </article>`;

  const Pair = ({ entry }) => {
    const { samples } = entry;
    const [before, setBefore] = useState(0);
    const [after, setAfter] = useState(samples.length - 1);
    return html`<div>
      <div class="bubble user"><div class="role">prompt</div><${report.Text} text=${entry.prompt} /></div>
      ${entry.answer && html`<p class="answer">answer: <code>${report.visible(String(entry.answer))}</code></p>`}
      <div class="side-by-side two">
        <${Side} name="before" samples=${samples} number=${before} setNumber=${setBefore} />
        <${Side} name="after" samples=${samples} number=${after} setNumber=${setAfter} />
      </div></div>`;
  };

  report.Compare = ({ runs }) => {
    const prompts = useMemo(() => collect(runs), [runs]);
    const [number, setNumber] = useState(0);
    if (!prompts.length) return html`<p class="empty">No prompt was sampled twice. Held-out prompts (data.validation.prompts) are, at every validation.</p>`;
    const at = Math.min(number, prompts.length - 1);
    return html`<section class="panel">
      <h2>the same prompt, before and after</h2>
      <div class="controls"><label>prompt <select id="prompt" value=${at} onChange=${(e) => setNumber(Number(e.target.value))}>
        ${prompts.slice(0, 500).map(({ prompt, samples }, i) => html`<option value=${i}>${report.visible(prompt.slice(0, 60))} (${samples.length})</option>`)}
      </select></label></div>
      <${Pair} key=${prompts[at].prompt} entry=${prompts[at]} />
    </section>`;
  };
})();
