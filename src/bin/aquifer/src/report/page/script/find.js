// Finds blocks: under the pointer, and all that live at an instant.

// The block at a time and an offset, or the nearest within the slack; -1 without one.
function blockAt(run, t, a, slackTime, slackBytes) {
  const { birth, end, offset, bytes, count } = run.blocks;
  const chunks = chunksOf(run);
  let near = -1;
  let nearest = Infinity;
  for (let c = 0; c < chunks.count; c++) {
    if (birth[c * CHUNK] > t + slackTime) break;
    if (chunks.lastEnd[c] < t - slackTime) continue;
    if (chunks.highest[c] < a - slackBytes || chunks.lowest[c] > a + slackBytes) continue;
    const until = Math.min((c + 1) * CHUNK, count);
    for (let i = c * CHUNK; i < until; i++) {
      const late = Math.max(birth[i] - t, t - end[i], 0);
      const off = Math.max(offset[i] - a, a - offset[i] - bytes[i], 0);
      if (late > slackTime || off > slackBytes) continue;
      const inside = late === 0 && off === 0 && t < end[i] && a < offset[i] + bytes[i];
      if (inside) return i;
      const distance = (slackTime > 0 ? late / slackTime : 0) + (slackBytes > 0 ? off / slackBytes : 0);
      if (distance < nearest) [near, nearest] = [i, distance];
    }
  }
  return near;
}

// Calls `each` for the blocks that are born and not yet reusable at a time.
function forBlocksAt(run, t, each) {
  const { birth, end, count } = run.blocks;
  const chunks = chunksOf(run);
  for (let c = 0; c < chunks.count; c++) {
    if (birth[c * CHUNK] > t) break;
    if (chunks.lastEnd[c] <= t) continue;
    const until = Math.min((c + 1) * CHUNK, count);
    for (let i = c * CHUNK; i < until && birth[i] <= t; i++) {
      if (end[i] > t) each(i);
    }
  }
}

// What lives at a time, by group: {live, pending, blocks, groups: [{group, bytes, blocks}]}. As in the
// curves, live blocks count what was requested.
function livingAt(run, t, groups) {
  const { freed, requested, bytes: occupied } = run.blocks;
  const sums = new Map();
  let [live, pending, blocks] = [0, 0, 0];
  forBlocksAt(run, t, (i) => {
    if (freed[i] <= t) {
      pending += occupied[i];
      return;
    }
    const bytes = requested[i];
    live += bytes;
    blocks += 1;
    const group = groups.of[i];
    const sum = sums.get(group);
    if (sum === undefined) sums.set(group, { group, bytes, blocks: 1 });
    else {
      sum.bytes += bytes;
      sum.blocks += 1;
    }
  });
  return { live, pending, blocks, groups: [...sums.values()] };
}

// The largest blocks that live at a time.
function largestAt(run, t, most) {
  const { freed, bytes } = run.blocks;
  const found = [];
  let least = -1;
  const keep = () => {
    found.sort((a, b) => bytes[b] - bytes[a] || a - b);
    found.length = Math.min(found.length, most);
    if (found.length === most) least = bytes[found[most - 1]];
  };
  forBlocksAt(run, t, (i) => {
    if (freed[i] <= t || bytes[i] <= least) return;
    found.push(i);
    if (found.length >= most * 4) keep();
  });
  keep();
  return found;
}
