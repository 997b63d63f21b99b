// Colours of the page for charts, classes of token colours, and text made visible.
(() => {
  "use strict";
  const report = (window.report = window.report || {});
  const NUM_VERSION_COLORS = 6;
  let resolved = {};

  // Computed colour of a CSS variable, which may depend on the theme.
  report.color = (name) => {
    if (!resolved[name]) {
      const probe = document.createElement("span");
      probe.className = "probe";
      probe.style.color = `var(${name})`;
      document.body.append(probe);
      resolved[name] = getComputedStyle(probe).color;
      probe.remove();
    }
    return resolved[name];
  };
  report.forgetColors = () => {
    resolved = {};
  };
  report.versionColor = (version) => report.color(version < 0 ? "--span" : `--v${version % NUM_VERSION_COLORS}`);

  const step = (value, bounds) => bounds.filter((bound) => value > bound).length;
  const signed = (value, bounds) => (value < 0 ? `n${step(-value, bounds)}` : `p${step(value, bounds)}`).replace(/.0$/, "none");
  const RATIO = [0.02, 0.2, 0.7]; // of |log pi/mu|
  const SHARE = [0.02, 0.33, 0.66]; // of the group's largest |advantage|
  const ENTROPY = [0.02, 0.1, 0.3, 0.7, 1.2]; // nats

  // For each way to colour tokens: label, name of the values, class of one value, legend.
  report.MODES = {
    version: {
      label: "version",
      values: "versions",
      className: (value) => `v${value % NUM_VERSION_COLORS}`,
      legend: (rollouts) => {
        const found = [...new Set(rollouts.flatMap((rollout) => rollout.versions || []))].sort((a, b) => a - b);
        return found.slice(-24).map((version) => [`v${version % NUM_VERSION_COLORS}`, `version ${version}`]);
      },
    },
    ratio: {
      label: "importance ratio",
      values: "log_ratios",
      className: (value) => signed(value, RATIO),
      legend: () => [
        ["n3", "π/μ below 0.5"], ["n2", "0.5 to 0.82"], ["n1", "0.82 to 0.98"], ["none", "about 1"],
        ["p1", "1.02 to 1.22"], ["p2", "1.22 to 2"], ["p3", "above 2"],
      ],
    },
    advantage: {
      label: "advantage",
      values: "advantages",
      className: (value, most) => signed(most ? value / most : 0, SHARE),
      legend: (rollouts) => {
        const most = report.largest(rollouts, "advantages");
        const at = (share) => (share * most).toFixed(2);
        return [
          ["n3", `below −${at(SHARE[2])}`], ["n2", `−${at(SHARE[2])} to −${at(SHARE[1])}`], ["n1", "slightly negative"],
          ["none", "about 0"], ["p1", "slightly positive"], ["p2", `${at(SHARE[1])} to ${at(SHARE[2])}`],
          ["p3", `above ${at(SHARE[2])}`],
        ];
      },
    },
    mask: {
      label: "mask",
      values: "mask",
      fallback: 1,
      className: (value) => (value ? "p2" : "n2 masked"),
      legend: () => [["p2", "trained on"], ["n2 masked", "not trained on (tool, environment)"]],
    },
    entropy: {
      label: "entropy",
      values: "entropies",
      className: (value) => `s${step(value, ENTROPY)}`,
      legend: () => [
        ["s0", "below 0.02 nats"], ["s1", "0.02 to 0.1"], ["s2", "0.1 to 0.3"], ["s3", "0.3 to 0.7"], ["s4", "0.7 to 1.2"],
        ["s5", "above 1.2"],
      ],
    },
    none: { label: "no colours", values: "tokens", className: () => "none", legend: () => [] },
  };

  report.largest = (rollouts, name) =>
    rollouts.reduce((most, rollout) => (rollout[name] || []).reduce((m, v) => Math.max(m, Math.abs(v)), most), 0);

  // Control characters and those that change the direction of text, as visible symbols.
  report.visible = (text) =>
    text
      .replace(/[\u0000-\u0008\u000b-\u001f]/g, (c) => String.fromCharCode(0x2400 + c.charCodeAt(0)))
      .replace(/\u007f/g, "\u2421")
      .replace(
        /[\u0080-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]/g,
        (c) => `⟨U+${c.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`,
      );

  report.number = (value, digits = 3) =>
    value === null || value === undefined || Number.isNaN(value)
      ? "–"
      : Number.isInteger(value) && Math.abs(value) < 1e7
        ? String(value)
        : Number(value).toPrecision(digits);
})();
