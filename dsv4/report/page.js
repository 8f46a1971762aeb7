(() => {
  "use strict";
  const byId = (id) => document.getElementById(id);
  const specs = JSON.parse(byId("specs").textContent);
  const controls = ["variant", "mode", "against", "tap", "rung", "prompt"].map(byId).filter(Boolean);
  const CLICKED = { tap: "tap", variant: "rung" }; // a clicked row's column -> the control that it sets
  const views = new Map();
  const rowsOf = new Map();
  let tables = {};

  const unpack = async () => {
    const bytes = Uint8Array.from(atob(byId("data").textContent), (char) => char.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return JSON.parse(await new Response(stream).text());
  };

  const part = (name) => (name.startsWith("=") ? name.slice(1) : name === "*" ? name : byId(name).value);

  /** Keys of a table that match these parts; "*" is any. */
  const keys = (name, parts) =>
    parts.includes("*")
      ? Object.keys(tables[name].rows).filter((key) => key.split("|").every((own, at) => ["*", own].includes(parts[at])))
      : [parts.join("|")];

  /** Rows of one key of a table, as objects; cosines come back from their distance to 1. */
  const rows = (name, key) => {
    const { columns, texts, rows: found } = tables[name];
    const values = found[key];
    if (!values) return [];
    return values[0].map((_, place) => {
      const row = {};
      columns.forEach((column, at) => {
        const value = values[at][place];
        row[column] = texts[column] ? texts[column][value] : value;
      });
      for (const [cosine, error] of [["cos", "err"], ["cos_row", "err_row"]]) {
        if (error in row) row[cosine] = row[error] === null ? null : 1 - row[error];
      }
      return row;
    });
  };

  const chosen = (panel) => {
    if (!panel.data) return panel.spec.datasets.rows;
    const [column, value] = panel.only.split("=");
    const found = keys(panel.data, panel.key.map(part)).flatMap((key) => rows(panel.data, key));
    return found.filter((row) => !column || String(row[column]) === value);
  };

  const text = (value) => {
    if (value === null || value === undefined) return "—";
    if (typeof value !== "number" || Number.isInteger(value)) return String(value);
    return Math.abs(value) >= 1e-3 ? String(Number(value.toPrecision(9))) : value.toExponential(2);
  };

  const fill = (details) => {
    const id = details.closest(".panel").id.slice(2);
    const { columns } = specs[id];
    const table = document.createElement("table");
    table.className = "plain";
    const head = table.createTHead().insertRow();
    for (const [, title] of columns) {
      const cell = document.createElement("th");
      cell.scope = "col";
      cell.textContent = title;
      head.append(cell);
    }
    const body = table.createTBody();
    for (const row of rowsOf.get(id)) {
      const line = body.insertRow();
      for (const [column] of columns) line.insertCell().textContent = text(row[column]);
    }
    details.querySelector(".scroll").replaceChildren(table);
  };

  const depends = (panel, control) => panel.key.includes(control) || panel.signals.some(([, name]) => name === control);

  /** Draw what depends on a control that was changed, or everything. */
  const update = async (control) => {
    if (["rung", "prompt", undefined].includes(control)) showPair();
    for (const [id, view] of views) {
      const panel = specs[id];
      if (control && !depends(panel, control)) continue;
      const found = chosen(panel);
      rowsOf.set(id, found);
      const figure = byId(`p-${id}`);
      figure.querySelector(".empty").hidden = found.length > 0;
      figure.querySelector(".chart").hidden = found.length === 0;
      const details = figure.querySelector("details");
      details.querySelector("summary").textContent = `Table (${found.length} rows)`;
      if (details.open) fill(details);
      if (!panel.data) continue;
      for (const [signal, name] of panel.signals) view.signal(signal, byId(name).value);
      await view.data("rows", found).resize().runAsync();
    }
  };

  /** Tooltips without markup of their own and without inline styles in the page's text. */
  const tip = (_handler, event, _item, value) => {
    const box = byId("tip");
    box.hidden = !value;
    if (!value) return;
    const table = document.createElement("table");
    for (const [name, content] of Object.entries(value)) {
      if (content === "" || content === null || content === "null" || content === "NaN") continue;
      const row = table.insertRow();
      row.insertCell().textContent = name;
      row.insertCell().textContent = content;
    }
    box.replaceChildren(table);
    const { width, height } = box.getBoundingClientRect();
    box.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 6))}px`;
    box.style.top = `${Math.max(4, Math.min(event.clientY + 14, innerHeight - height - 6))}px`;
  };

  const choose = (id, value) => {
    const select = byId(id);
    if (!value || !select || ![...select.options].some((option) => option.value === value)) return;
    select.value = value;
    update(id);
  };

  const pick = (_name, value) => {
    for (const [column, id] of Object.entries(CLICKED)) choose(id, value?.[column]?.[0]);
  };

  const span = (className, content = "") => {
    const made = document.createElement("span");
    made.className = className;
    made.textContent = content;
    return made;
  };

  /** What has no glyph is shown beside it, not in its place: copied text is the text. */
  const CONTROLS = { "\n": "↵", "\t": "⇥" };
  const visible = (chars, className) => {
    const made = span(className);
    for (const piece of chars.join("").split(/(\p{C}|\p{Zl}|\p{Zp})/u)) {
      if (!/^[\p{C}\p{Zl}\p{Zp}]$/u.test(piece)) {
        made.append(piece);
        continue;
      }
      const shown = span("ctl");
      shown.dataset.mark = CONTROLS[piece] ?? `U+${piece.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;
      made.append(shown, CONTROLS[piece] ? piece : "");
    }
    return made;
  };

  /** One text in spans: as the other's, the first difference, the copies of a loop, and the token that ended it. */
  const write = (figure, row) => {
    const chars = [...row.text];
    const place = figure.querySelector("pre");
    const edges = new Set([0, chars.length]);
    const split = (at) => at > 0 && at < chars.length && edges.add(at);
    if (row.difference >= 0) [row.difference, row.difference + 1].forEach(split);
    if (row.onset >= 0) for (let at = row.onset; at < chars.length; at += row.period) split(at);
    const found = [...edges].sort((one, other) => one - other);
    place.replaceChildren();
    found.slice(0, -1).forEach((from, at) => {
      const names = [from < row.difference ? "same" : from === row.difference ? "first" : "rest"];
      if (row.onset >= 0 && from >= row.onset) names.push("copy", Math.floor((from - row.onset) / row.period) % 2 ? "even" : "odd");
      place.append(visible(chars.slice(from, found[at + 1]), names.join(" ")));
    });
    if (!chars.length) place.append(span("nothing", row.end ? "no token before the end" : row.said));
    const last = span(row.difference === chars.length && row.end ? "stop first" : "stop", row.end);
    if (row.end) place.append(last);
    place.classList.toggle("differs", row.difference >= 0);
  };

  /** Both panes stand at the first difference, line by line beside each other. */
  const align = (panes) => {
    const marks = panes.map((pane) => pane.querySelector(".first")).filter(Boolean);
    const room = panes.map((pane) => pane.scrollHeight - pane.clientHeight);
    const wanted = marks.map((mark) => mark.offsetTop - mark.parentElement.clientHeight / 3);
    for (const pane of panes) pane.scrollTop = marks.length ? Math.min(...wanted, ...room) : 0;
  };

  const showPair = () => {
    if (!byId("rung")) return;
    const [rung, prompt] = [byId("rung").value, byId("prompt").value];
    const found = rows("texts", `${rung}|${prompt}`);
    byId("pair-said").textContent = found[0]?.said ?? "This rung has no text of this prompt.";
    for (const figure of document.querySelectorAll(".written")) {
      const row = found.find(({ whose }) => whose === figure.dataset.whose);
      write(figure, row ?? { text: "", difference: -1, onset: -1, end: "", said: "nothing written" });
      if (figure.dataset.whose === "own") figure.querySelector(".whose").textContent = rung;
    }
    align([...document.querySelectorAll(".written pre")]);
    for (const link of document.querySelectorAll(".pick")) {
      const current = link.dataset.rung === rung && link.dataset.prompt === prompt;
      if (current) link.setAttribute("aria-current", "true");
      else link.removeAttribute("aria-current");
    }
  };

  const start = async () => {
    tables = await unpack();
    const options = { mode: "vega-lite", renderer: "svg", ast: true, actions: false, defaultStyle: false, tooltip: tip, logLevel: 1 }; // log errors only
    for (const place of document.querySelectorAll(".chart")) {
      const id = place.dataset.panel;
      const { spec } = specs[id];
      spec.datasets.rows = chosen(specs[id]);
      const { view } = await vegaEmbed(place, spec, options);
      views.set(id, view);
      try { view.addSignalListener("cell", pick); } catch { /* this chart has no cells to click */ }
    }
    await update();
    for (const control of controls) control.addEventListener("change", () => update(control.id));
    for (const details of document.querySelectorAll("details.rows")) {
      details.addEventListener("toggle", () => details.open && fill(details));
    }
    for (const link of document.querySelectorAll("[data-variant]")) {
      link.addEventListener("click", () => choose("variant", link.dataset.variant));
    }
    for (const link of document.querySelectorAll("[data-rung]")) {
      link.addEventListener("click", () => {
        choose("prompt", link.dataset.prompt);
        choose("rung", link.dataset.rung);
      });
    }
    const panes = [...document.querySelectorAll(".written pre")];
    for (const pane of panes) {
      pane.addEventListener("scroll", () => {
        if (pane.matches(":hover, :focus")) for (const other of panes) other.scrollTop = pane.scrollTop;
      });
    }
    document.documentElement.dataset.ready = "yes";
  };

  start().catch((error) => {
    const box = byId("trouble");
    if (box) [box.hidden, box.textContent] = [false, `The charts could not be drawn in this browser: ${error}`];
    console.error(error);
  });
})();
