"use strict";
(() => {
  const SHADES = [0, 0.22, 0.38, 0.52, 0.68, 0.84, 1];
  const NEVER = 255, MOST_OUTLINES = 400, SIDE = 640;
  const byId = (id) => document.getElementById(id);
  const table = byId("layer-table"), body = table.tBodies[0], slider = byId("level");
  let layer = null;

  const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const percent = (share) => Number((100 * share).toPrecision(3)) + "%";
  const number = (value) => Number(value.toPrecision(4)).toString();
  const whole = (value) => value.toLocaleString("en");
  const plural = (count, word) => whole(count) + " " + word + (count === 1 ? "" : "s");
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();

  function paint(canvas, rows, cols, shade, outlines, size) {
    const pen = canvas.getContext("2d");
    pen.globalAlpha = 1;
    pen.fillStyle = colour("paper");
    pen.fillRect(0, 0, SIDE, SIDE);
    pen.fillStyle = colour("blue");
    const down = Array.from({ length: rows + 1 }, (_, i) => Math.round(i * SIDE / rows));
    const across = Array.from({ length: cols + 1 }, (_, j) => Math.round(j * SIDE / cols));
    for (let i = 0; i < rows; i++) {
      for (let j = 0; j < cols; j++) {
        const alpha = shade(i * cols + j);
        if (alpha === 0) continue;
        pen.globalAlpha = alpha;
        pen.fillRect(across[j], down[i], across[j + 1] - across[j], down[i + 1] - down[i]);
      }
    }
    pen.globalAlpha = 1;
    pen.lineWidth = 3;
    for (const [top, left, height, width, hub] of outlines) {
      pen.strokeStyle = colour(hub ? "amber" : "red");
      const x = left * SIDE / size[1], y = top * SIDE / size[0];
      pen.strokeRect(x + 1.5, y + 1.5, Math.max(1, width * SIDE / size[1] - 3), Math.max(1, height * SIDE / size[0] - 3));
    }
  }

  // Neighbours whose gap is at or before the stop are in one block: runs of them are the blocks, single ones dormant.
  function blocksAt(stop) {
    const { gaps, sides } = layer;
    const found = { blocks: 0, largest: 0, dormantRows: 0, dormantColumns: 0, outlines: [] };
    let row = 0, column = 0;
    for (let start = 0; start < sides.length;) {
      let end = start, rows = 0;
      while (true) {
        rows += sides[end];
        if (end < gaps.length && gaps[end] <= stop) end++; else break;
      }
      const length = end - start + 1, columns = length - rows;
      if (length === 1) {
        if (rows) found.dormantRows++; else found.dormantColumns++;
      } else {
        found.blocks++;
        found.largest = Math.max(found.largest, length);
        found.outlines.push([row, column, rows, columns, false]);
      }
      row += rows;
      column += columns;
      start = end + 1;
    }
    found.outlines.sort((a, b) => b[2] * b[3] - a[2] * a[3]);
    found.outlines.length = Math.min(found.outlines.length, MOST_OUTLINES);
    return found;
  }

  function list(target, entries) {
    target.replaceChildren(...entries.flatMap(([name, text, value]) => {
      const term = document.createElement("dt"), entry = document.createElement("dd");
      term.textContent = name;
      entry.textContent = text;
      entry.dataset.name = name;
      entry.dataset.value = value;
      return [term, entry];
    }));
  }

  function showLevel() {
    const stop = Number(slider.value), levels = layer.levels, [rows, cols] = layer.grid;
    const cells = rows * cols;
    const threshold = levels.thresholds[stop], kept = levels.kept[stop];
    const entries = [
      ["Threshold |w| ≥", number(threshold), threshold],
      ["Level under f0", number(levels.null_levels[stop]), levels.null_levels[stop]],
      ["Weights kept", whole(kept) + " (" + percent(kept / Math.max(1, levels.entries)) + ")", kept],
    ];
    let outlines = [], spoken;
    if (levels.counts) {
      const c = Object.fromEntries(Object.entries(levels.counts).map(([name, values]) => [name, values[stop]]));
      entries.push(
        ["Strongly connected parts", whole(c.strong), c.strong],
        ["Weak components", whole(c.components), c.components],
        ["Largest strong part", percent(c.largest), c.largest],
        ["Layers", whole(c.layers), c.layers],
        ["Isolated neurons", whole(c.isolated), c.isolated]);
      spoken = plural(c.strong, "strongly connected part") + ", " + plural(c.isolated, "isolated neuron");
    } else {
      const found = blocksAt(stop), share = found.largest / Math.max(1, layer.sides.length);
      outlines = found.outlines;
      entries.push(
        ["Blocks", whole(found.blocks), found.blocks],
        ["Largest block", percent(share) + " of the neurons", share],
        ["Dormant outputs", whole(found.dormantRows), found.dormantRows],
        ["Dormant inputs", whole(found.dormantColumns), found.dormantColumns]);
      spoken = plural(found.blocks, "block") + ", the largest with " + percent(share) + " of the neurons, "
        + plural(found.dormantRows, "dormant output") + ", " + plural(found.dormantColumns, "dormant input");
    }
    list(byId("level-numbers"), entries);
    const sentence = "|w| ≥ " + number(threshold) + ": " + percent(kept / Math.max(1, levels.entries)) + " kept, " + spoken;
    slider.setAttribute("aria-valuetext", sentence);
    byId("leveled").setAttribute("aria-label", "The matrix at " + sentence);
    paint(byId("leveled"), rows, cols, (cell) => {
      let step = 0;
      while (step < SHADES.length - 1 && layer.cells[step * cells + cell] <= stop) step++;
      return SHADES[step];
    }, outlines, layer.size);
  }

  function showPictures() {
    const [rows, cols] = layer.grid;
    paint(byId("before"), rows, cols, (cell) => layer.before[cell] / 255, [], layer.size);
    paint(byId("after"), rows, cols, (cell) => layer.after[cell] / 255, layer.outlines, layer.size);
    showLevel();
  }

  function chart(title, svg) {
    const figure = document.createElement("figure"), heading = document.createElement("h4");
    heading.textContent = title;
    figure.append(heading, document.importNode(new DOMParser().parseFromString(svg, "image/svg+xml").documentElement, true));
    return figure;
  }

  function open(index, move) {
    layer = JSON.parse(byId("layer-" + index).textContent);
    for (const field of ["before", "after"]) layer[field] = bytes(layer[field]);
    layer.cells = bytes(layer.levels.cells);
    layer.gaps = bytes(layer.levels.gaps);
    layer.sides = bytes(layer.levels.sides);
    layer.index = index;
    byId("detail").hidden = false;
    byId("detail-name").textContent = layer.name;
    byId("detail-verdict").textContent = layer.verdict;
    byId("after-order").textContent = layer.order;
    byId("picture-key").textContent = layer.key;
    byId("before").setAttribute("aria-label", "The matrix as stored. " + layer.key);
    byId("after").setAttribute("aria-label", "The matrix reordered, " + layer.order + ". " + layer.verdict);
    byId("level-note").textContent = layer.note;
    slider.max = layer.levels.thresholds.length - 1;
    slider.value = layer.levels.start;
    byId("layer-charts").replaceChildren(...layer.charts.map(([title, svg]) => chart(title, svg)));
    byId("facts").replaceChildren(...layer.facts.map(([name, text]) => {
      const line = document.createElement("tr"), head = document.createElement("th"), cell = document.createElement("td");
      head.scope = "row";
      head.textContent = name;
      cell.textContent = text;
      line.append(head, cell);
      return line;
    }));
    for (const row of body.rows) {
      if (row.dataset.layer === String(index)) row.setAttribute("aria-current", "true");
      else row.removeAttribute("aria-current");
    }
    showPictures();
    if (move) {
      byId("detail-name").focus({ preventScroll: true });
      byId("detail").scrollIntoView();
    }
  }

  function step(by) {
    const rows = Array.from(body.rows).filter((row) => !row.hidden);
    const at = rows.findIndex((row) => row.dataset.layer === String(layer.index));
    if (rows.length) open(rows[(at + by + rows.length) % rows.length].dataset.layer, false);
  }

  function sort(head) {
    const column = head.cellIndex, falling = head.getAttribute("aria-sort") === "ascending";
    for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", falling ? "descending" : "ascending");
    const key = (row) => row.cells[column].dataset.value;
    const numeric = head.dataset.kind === "number";
    const order = Array.from(body.rows).map((row) => [numeric ? Number(key(row)) : key(row), row]);
    const compare = numeric ? (a, b) => a[0] - b[0] : (a, b) => a[0].localeCompare(b[0], "en", { numeric: true });
    order.sort(falling ? (a, b) => compare(b, a) : compare);
    body.append(...order.map(([, row]) => row));
  }

  for (const head of table.tHead.rows[0].cells) head.querySelector("button").addEventListener("click", () => sort(head));
  body.addEventListener("click", (event) => {
    const row = event.target.closest("tr");
    if (row) open(row.dataset.layer, true);
  });
  byId("filter").addEventListener("input", (event) => {
    const wanted = event.target.value.toLowerCase();
    for (const row of body.rows) row.hidden = !row.cells[0].dataset.value.toLowerCase().includes(wanted);
  });
  byId("previous").addEventListener("click", () => step(-1));
  byId("following").addEventListener("click", () => step(1));
  slider.addEventListener("input", showLevel);
  byId("level-reset").addEventListener("click", () => {
    slider.value = layer.levels.start;
    showLevel();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => layer && showPictures());
  if (body.rows.length) open(table.dataset.first, false);
})();
