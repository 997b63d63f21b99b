// A completion: token by token with colours, or as a conversation where tools or environments took part.
(() => {
  "use strict";
  const report = (window.report = window.report || {});
  const { html, useEffect, useRef, useState } = htmPreact;
  const FIRST_TOKENS = 1200;
  const FIRST_CHARACTERS = 4000;

  // Long text, of which the beginning is shown until more is asked for.
  report.Text = ({ text, className = "" }) => {
    const [all, setAll] = useState(false);
    const long = text.length > FIRST_CHARACTERS;
    const shown = report.visible(all || !long ? text : text.slice(0, FIRST_CHARACTERS));
    return html`<div class="text ${className}">${shown}</div>
      ${long && html`<button type="button" class="more" aria-expanded=${all} onClick=${() => setAll(!all)}>
        ${all ? "show less" : `show all ${text.length.toLocaleString("en")} characters`}</button>`}`;
  };

  const details = (rollout, group, i) => {
    const of = (name) => (rollout[name] ? rollout[name][i] : undefined);
    const rows = [`token ${i + 1}`];
    if (of("mask") === 0) return `${rows[0]} · not trained on: of a tool or an environment`;
    const version = of("versions");
    if (version !== undefined) {
      const age = group.policy_version === undefined ? "" : `, ${group.policy_version - version} behind the policy`;
      rows.push(`version ${version}${age}`);
    }
    const ratio = of("log_ratios");
    if (ratio !== undefined) rows.push(`importance ratio ${report.number(Math.exp(ratio))}`);
    if (of("advantages") !== undefined) rows.push(`advantage ${report.number(of("advantages"))}`);
    if (of("entropies") !== undefined) rows.push(`entropy ${report.number(of("entropies"))} nats`);
    return rows.join(" · ");
  };

  // Direct DOM instead of components: there may be ten thousand tokens on a page.
  const fill = (box, rollout, mode, most, from, to) => {
    const { values, className, fallback } = report.MODES[mode];
    const list = rollout[values];
    const fragment = document.createDocumentFragment();
    for (let i = from; i < to; i += 1) {
      const value = list ? list[i] : fallback;
      const token = document.createElement("span");
      const foreign = rollout.mask && !rollout.mask[i] && mode !== "mask"; // of a tool: no version, no ratio
      token.className = value === undefined || value === null || foreign ? "t none" : `t ${className(value, most)}`;
      token.dataset.i = i;
      const text = report.visible(rollout.tokens[i]);
      token.textContent = text === "" ? "·" : text.replace(/\n/g, "↵\n");
      if (rollout.cut && i === rollout.cut[0]) {
        const gap = document.createElement("span");
        gap.className = "gap";
        gap.textContent = ` [${rollout.cut[1].toLocaleString("en")} tokens left out] `;
        fragment.append(gap);
      }
      fragment.append(token);
    }
    box.replaceChildren(fragment);
  };

  // Tokens of a part of a rollout; the one under the pointer or reached by arrow keys is described below.
  const TokenBox = ({ rollout, group, mode, most, from, to, onToken, label }) => {
    const box = useRef(null);
    const [all, setAll] = useState(false);
    const end = all ? to : Math.min(to, from + FIRST_TOKENS);
    useEffect(() => fill(box.current, rollout, mode, most, from, end), [rollout, mode, most, from, end]);
    const select = (token) => {
      const old = box.current.querySelector(".current");
      if (old) old.classList.remove("current");
      if (!token) return;
      token.classList.add("current");
      onToken(details(rollout, group, Number(token.dataset.i)));
    };
    const onKey = (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      const tokens = [...box.current.querySelectorAll(".t")];
      const at = tokens.findIndex((token) => token.classList.contains("current"));
      select(tokens[Math.max(0, Math.min(tokens.length - 1, at + step))]);
    };
    return html`<div class="tokens" ref=${box} tabindex="0" role="group" aria-label=${label} onKeyDown=${onKey}
        onMouseOver=${(e) => e.target.dataset.i && select(e.target)} onClick=${(e) => e.target.dataset.i && select(e.target)}></div>
      ${end < to && html`<button type="button" class="more" onClick=${() => setAll(true)}>show all ${to - from} tokens</button>`}`;
  };

  // Parts of a rollout with several turns: what the policy said, and what a tool or an environment answered.
  const partsOf = (rollout) => {
    const length = rollout.tokens.length;
    const ends = new Set((rollout.turns || []).map((turn) => turn.end));
    const parts = [];
    let begin = 0;
    for (let i = 1; i <= length; i += 1) {
      const changes = i < length && rollout.mask && rollout.mask[i] !== rollout.mask[i - 1];
      if (i === length || changes || (ends.has(i) && !rollout.cut)) {
        parts.push({ from: begin, to: i, policy: !rollout.mask || rollout.mask[begin] !== 0 });
        begin = i;
      }
    }
    return parts;
  };

  report.isConversation = (group, rollout) => (rollout.turns || []).length > 1 || Boolean(rollout.mask && rollout.mask.includes(0));

  const Conversation = (props) => {
    const { rollout } = props;
    let turn = 0;
    return partsOf(rollout).map((part) => {
      const reward = part.policy && rollout.turns && rollout.turns[turn] ? ` · reward ${report.number(rollout.turns[turn].reward)}` : "";
      if (part.policy) turn += 1;
      const title = part.policy ? `policy, turn ${turn}${reward}` : "tool or environment";
      return html`<div class="bubble ${part.policy ? "policy" : "tool"}" key=${part.from}>
        <div class="role">${title}</div><${TokenBox} ...${props} ...${part} label=${title} /></div>`;
    });
  };

  report.Completion = (props) => {
    const { rollout, group } = props;
    if (!rollout.tokens) return html`<${report.Text} text=${rollout.text || ""} />`;
    const body = report.isConversation(group, rollout)
      ? html`<${Conversation} ...${props} />`
      : html`<${TokenBox} ...${props} from=${0} to=${rollout.tokens.length} label="tokens of sample ${rollout.sample}; arrow keys move" />`;
    return html`${body}${rollout.text && html`<details class="whole"><summary>whole text</summary><${report.Text} text=${rollout.text} /></details>`}`;
  };

  report.Prompt = ({ group }) =>
    group.messages
      ? html`<div class="conversation">${group.messages.map((message, i) => html`<div class="bubble ${message.role}" key=${i}>
          <div class="role">${report.visible(String(message.role))}</div><${report.Text} text=${String(message.content)} /></div>`)}</div>`
      : html`<div class="bubble user"><div class="role">prompt</div><${report.Text} text=${group.prompt} /></div>`;

  report.Legend = ({ mode, rollouts }) => {
    const entries = report.MODES[mode].legend(rollouts);
    return html`<ul class="legend" aria-label="colours">${entries.map(([name, text]) =>
      html`<li key=${text}><span class="t ${name}">${text}</span></li>`)}</ul>`;
  };
})();
