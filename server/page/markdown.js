// The little Markdown that models write, as elements. Links stay text: nothing a model says is to be clicked on.
//
// Positions are offsets into the source, so that each piece of text knows which tokens it came from.

const FENCE = /^( {0,3})(```+|~~~+)\s*([^`\s]*)[^`]*$/;
const HEADING = /^(#{1,6})\s+(.*?)\s*#*$/;
const ITEM = /^(\s*)(?:([-*+])|(\d{1,9})[.)])(?:\s+|$)/;
const QUOTE = /^ {0,3}>\s?/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const INLINE = new RegExp([
  /(?<ticks>`+)(?!`)(?<code>.+?)(?<!`)\k<ticks>(?!`)/,
  /\*\*(?=\S)(?<strong>.+?)(?<=\S)\*\*/,
  /\*(?=[^\s*])[^*]+?(?<=\S)\*/,
  /(?<!\w)_(?=\S)[^_]+?(?<=\S)_(?!\w)/,
].map((pattern) => pattern.source).join("|"), "g");
const LONGEST_LINE = 4000;

/** `[{kind, end, …}]` in order; all but the last keep their `end` when more source comes. */
export function blocksOf(source) {
  const lines = linesOf(source);
  const blocks = [];
  for (let at = 0; at < lines.length;) {
    const block = blockAt(lines, at);
    at += block.height;
    if (block.kind !== "blank") blocks.push({ ...block, end: lines[at - 1].end });
  }
  return blocks;
}

function linesOf(source) {
  const lines = [];
  for (let start = 0; start <= source.length;) {
    const found = source.indexOf("\n", start);
    const end = found < 0 ? source.length : found;
    lines.push({ text: source.slice(start, end), start, end });
    start = end + 1;
  }
  return lines;
}

function blockAt(lines, at) {
  const { text } = lines[at];
  if (!text.trim()) return { kind: "blank", height: 1 };
  const fence = FENCE.exec(text);
  if (fence) return codeAt(lines, at, fence);
  const heading = HEADING.exec(text);
  if (heading) {
    const [, marks, title] = heading;
    const content = part(lines[at], text.indexOf(title, marks.length), title.length);
    return { kind: "heading", level: marks.length, height: 1, lines: [content] };
  }
  if (RULE.test(text)) return { kind: "rule", height: 1 };
  if (ITEM.test(text)) return listAt(lines, at);
  if (QUOTE.test(text)) return linesWhile(lines, at, "quote", isQuote, (line) => QUOTE.exec(line)[0].length);
  return linesWhile(lines, at, "paragraph", isPlain, indentOf);
}

const isQuote = (line) => QUOTE.test(line);
const indentOf = (line) => line.length - line.trimStart().length;

const isPlain = (line) => line.trim() && ![FENCE, HEADING, RULE, ITEM, QUOTE].some((pattern) => pattern.test(line));

function codeAt(lines, at, [, indent, mark, language]) {
  const isEnd = ({ text }) => text.trim().startsWith(mark) && !text.trim().slice(mark.length).replaceAll(mark[0], "");
  let end = at + 1;
  while (end < lines.length && !isEnd(lines[end])) end++;
  const content = lines.slice(at + 1, end).map((line) => {
    return part(line, Math.min(indent.length, indentOf(line.text)));
  });
  return { kind: "code", language, height: Math.min(end + 1, lines.length) - at, lines: content };
}

function listAt(lines, at) {
  const items = [];
  let end = at;
  for (; end < lines.length; end++) {
    const { text } = lines[end];
    const item = ITEM.exec(text);
    if (item) {
      const [marker, indent, , number] = item;
      const content = part(lines[end], marker.length);
      items.push({ indent: indent.length, number: number === undefined ? null : Number(number), lines: [content] });
    } else if (!text.trim()) {
      const next = lines[end + 1]?.text ?? "";
      if (!ITEM.test(next) && !/^\s{2,}\S/.test(next)) break;
    } else if (/^\s{2,}/.test(text) || isPlain(text) && lines[end - 1].text.trim()) {
      items.at(-1).lines.push(part(lines[end], indentOf(text)));
    } else break;
  }
  return { kind: "list", items, height: end - at };
}

function linesWhile(lines, at, kind, belongs, cutOf) {
  let end = at;
  do end++; while (end < lines.length && belongs(lines[end].text));
  return { kind, height: end - at, lines: lines.slice(at, end).map((line) => part(line, cutOf(line.text))) };
}

const part = (line, offset, length = line.text.length - offset) => [line.start + offset, line.start + offset + length];

/** The element of one block. `leaf(parent, start, end)` adds that part of the source as text. */
export function renderBlock(block, source, leaf) {
  const draw = {
    paragraph: () => withLines("p", block.lines),
    quote: () => withLines("blockquote", block.lines),
    heading: () => withLines(`h${Math.min(6, block.level + 2)}`, block.lines),
    rule: () => document.createElement("hr"),
    code: () => code(block, leaf, source),
    list: () => list(block.items),
  };
  return draw[block.kind]();

  function withLines(tag, lines) {
    const node = document.createElement(tag);
    lines.forEach(([start, end], index) => {
      if (index) node.append(document.createElement("br"));
      inline(node, source, start, end, leaf);
    });
    return node;
  }

  function list(items) {
    const open = (item) => {
      const node = document.createElement(item.number === null ? "ul" : "ol");
      if (item.number !== null && item.number !== 1) node.setAttribute("start", item.number);
      return { node, indent: item.indent };
    };
    const stack = [open(items[0])];
    for (const item of items) {
      while (stack.length > 1 && item.indent < stack.at(-1).indent) stack.pop();
      if (item.indent >= stack.at(-1).indent + 2 && stack.at(-1).node.lastChild) {
        const nested = open(item);
        stack.at(-1).node.lastChild.append(nested.node);
        stack.push(nested);
      }
      stack.at(-1).node.append(withLines("li", item.lines));
    }
    return stack[0].node;
  }
}

function code(block, leaf, source) {
  const node = document.createElement("pre");
  const content = node.appendChild(document.createElement("code"));
  if (block.language) node.dataset.language = block.language;
  block.lines.forEach(([start, end], index) => {
    const isLast = index === block.lines.length - 1;
    leaf(content, start, isLast ? end : Math.min(end + 1, source.length));
  });
  return node;
}

function inline(parent, source, start, end, leaf) {
  if (end - start > LONGEST_LINE) return leaf(parent, start, end);
  let at = start;
  for (const found of source.slice(start, end).matchAll(INLINE)) {
    const from = start + found.index;
    const to = from + found[0].length;
    leaf(parent, at, from);
    const { ticks, strong } = found.groups;
    const tag = ticks ? "code" : strong ? "strong" : "em";
    const width = ticks ? ticks.length : strong ? 2 : 1;
    const node = parent.appendChild(document.createElement(tag));
    if (tag === "code") leaf(node, from + width, to - width);
    else inline(node, source, from + width, to - width, leaf);
    at = to;
  }
  leaf(parent, at, end);
}
