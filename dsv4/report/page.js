(() => {
  "use strict";
  const byId = (id) => document.getElementById(id);
  const specs = JSON.parse(byId("specs").textContent);
  const controls = ["variant", "mode", "against", "tap"].map(byId).filter(Boolean);
  const views = new Map();
  const rowsOf = new Map();
  let tables = {};

  const unpack = async () => {
    const bytes = Uint8Array.from(atob(byId("data").textContent), (char) => char.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return JSON.parse(await new Response(stream).text());
  };

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
    const key = panel.key.map((part) => (part.startsWith("=") ? part.slice(1) : byId(part).value)).join("|");
    const [column, value] = panel.only.split("=");
    return rows(panel.data, key).filter((row) => !column || String(row[column]) === value);
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

  const update = async () => {
    for (const [id, view] of views) {
      const panel = specs[id];
      const found = chosen(panel);
      rowsOf.set(id, found);
      const figure = byId(`p-${id}`);
      figure.querySelector(".empty").hidden = found.length > 0;
      figure.querySelector(".chart").hidden = found.length === 0;
      const details = figure.querySelector("details");
      details.querySelector("summary").textContent = `Table (${found.length} rows)`;
      if (details.open) fill(details);
      if (!panel.data) continue;
      if (panel.pick) view.signal("pick", byId("tap").value);
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

  const pick = (_name, value) => {
    const tap = value?.tap?.[0];
    const select = byId("tap");
    if (!tap || ![...select.options].some((option) => option.value === tap)) return;
    select.value = tap;
    update();
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
    for (const control of controls) control.addEventListener("change", update);
    for (const details of document.querySelectorAll("details.rows")) {
      details.addEventListener("toggle", () => details.open && fill(details));
    }
    for (const link of document.querySelectorAll("[data-variant]")) {
      link.addEventListener("click", () => { byId("variant").value = link.dataset.variant; update(); });
    }
    document.documentElement.dataset.ready = "yes";
  };

  start().catch((error) => {
    const box = byId("trouble");
    if (box) [box.hidden, box.textContent] = [false, `The charts could not be drawn in this browser: ${error}`];
    console.error(error);
  });
})();
