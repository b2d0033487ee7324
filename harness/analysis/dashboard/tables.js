"use strict";
// Columns of a run: decoded from base64, appended to as the run grows, thinned to the number of pixels.

function bytes(text) {
  if (Uint8Array.fromBase64) return Uint8Array.fromBase64(text);
  const raw = atob(text), out = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) out[i] = raw.charCodeAt(i);
  return out;
}

function unpack(packed) {
  const columns = {};
  for (const [name, column] of Object.entries(packed.columns)) {
    const low = new Float32Array(bytes(column.low).buffer);
    columns[name] = { low, high: column.high ? new Float32Array(bytes(column.high).buffer) : low };
  }
  return {
    length: packed.num_rows,
    total: packed.total,
    iteration: new Float64Array(bytes(packed.iteration).buffer),
    time: new Float64Array(bytes(packed.time).buffer),
    columns,
  };
}

function joined(first, second) {
  const out = new first.constructor(first.length + second.length);
  out.set(first);
  out.set(second, first.length);
  return out;
}

// The rows of two tables, one after the other; a column that one of them lacks has a gap there.
function append(table, more) {
  if (more.length === 0) return table;
  const gap = (length) => new Float32Array(length).fill(NaN);
  const columns = {};
  for (const name of new Set([...Object.keys(table.columns), ...Object.keys(more.columns)])) {
    const a = table.columns[name] || { low: gap(table.length), high: gap(table.length) };
    const b = more.columns[name] || { low: gap(more.length), high: gap(more.length) };
    const low = joined(a.low, b.low);
    columns[name] = { low, high: a.low === a.high && b.low === b.high ? low : joined(a.high, b.high) };
  }
  return {
    length: table.length + more.length,
    total: more.total,
    iteration: joined(table.iteration, more.iteration),
    time: joined(table.time, more.time),
    columns,
  };
}

// Binary search: the first index whose value is not below x, in ascending values.
function seek(values, x) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < x) low = middle + 1; else high = middle;
  }
  return low;
}

// First and last row of the view, and one more on either side, so that lines reach the edges.
function within(xs, view) {
  if (!view) return [0, xs.length];
  return [Math.max(0, seek(xs, view[0]) - 1), Math.min(xs.length, seek(xs, view[1]) + 2)];
}

// At most two points for each of `most` groups of rows: the lowest and the highest, in their order.
function thinned(xs, column, view, most) {
  const [first, last] = within(xs, view), x = [], y = [];
  const groupSize = Math.max(1, Math.ceil((last - first) / most));
  for (let start = first; start < last; start += groupSize) {
    const end = Math.min(last, start + groupSize);
    let least = -1, greatest = -1;
    for (let i = start; i < end; i++) {
      if (least < 0 ? column.low[i] === column.low[i] : column.low[i] < column.low[least]) least = i;
      if (greatest < 0 ? column.high[i] === column.high[i] : column.high[i] > column.high[greatest]) greatest = i;
    }
    if (least < 0) {
      x.push(xs[start]); y.push(null);
    } else if (column.low[least] === column.high[greatest]) {
      x.push(xs[least]); y.push(column.low[least]);
    } else if (least <= greatest) {
      x.push(xs[least], xs[greatest]); y.push(column.low[least], column.high[greatest]);
    } else {
      x.push(xs[greatest], xs[least]); y.push(column.high[greatest], column.low[least]);
    }
  }
  return { x, y };
}

// Moving average over about a sixtieth of the run, less at the steep start; gaps and the rows of `skipped` are ignored.
function smoothed(column, skipped) {
  const n = column.low.length, reach = Math.max(1, Math.floor(n / 120)), out = new Float32Array(n);
  const sums = new Float64Array(n + 1), counts = new Float64Array(n + 1);
  for (let i = 0; i < n; i++) {
    const value = (column.low[i] + column.high[i]) / 2, known = value === value && !(skipped && skipped.high[i] === 1);
    sums[i + 1] = sums[i] + (known ? value : 0);
    counts[i + 1] = counts[i] + (known ? 1 : 0);
  }
  for (let i = 0; i < n; i++) {
    const near = Math.min(reach, i), first = i - near, last = Math.min(n, i + near + 1);
    out[i] = (sums[last] - sums[first]) / (counts[last] - counts[first]);
  }
  return { low: out, high: out };
}

// The moving average of the applied losses, and the losses of rejected updates, as columns of the steps.
function addLosses({ columns }) {
  const { loss, refused } = columns;
  if (!loss) return;
  columns.loss_smooth = smoothed(loss, refused);
  if (refused) {
    const rejected = loss.high.map((value, row) => (refused.high[row] === 1 ? value : NaN));
    columns.loss_rejected = { low: rejected, high: rejected };
  }
}

// For a heat map: the highest value of each column in at most `most` groups of rows.
function heat(table, xs, names, view, most) {
  const [first, last] = within(xs, view), groupSize = Math.max(1, Math.ceil((last - first) / most)), x = [];
  for (let start = first; start < last; start += groupSize) x.push(xs[start]);
  const z = names.map((name) => x.map((_, group) => {
    const high = table.columns[name].high, start = first + group * groupSize;
    let greatest = null;
    for (let i = start; i < Math.min(last, start + groupSize); i++)
      if (high[i] === high[i] && (greatest === null || high[i] > greatest)) greatest = high[i];
    return greatest;
  }));
  return { x, z };
}
