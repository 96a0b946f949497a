// Markdown of a model as elements. Texts become text nodes only: no HTML, no links and no images come from a model.

const BLOCK = /^(?:(#{1,6}) +(.*)|( *)(?:[-*+]|(\d+)[.)]) +(.*)|(```).*)$/;
const SPANS = /(`[^`]+`|\*\*[^*\s](?:[^*]*[^*\s])?\*\*|(?<![\w*])\*[^*\s](?:[^*]*[^*\s])?\*(?![\w*]))/;

/** The elements of a text: headings, lists, code and paragraphs, which keep their line breaks. */
export function markdown(text) {
  const blocks = [];
  let open = null; // the list or paragraph that the next line may continue
  const lines = text.split("\n");
  for (let at = 0; at < lines.length; at += 1) {
    const [, hashes, title, , number, item, fence] = lines[at].match(BLOCK) ?? [];
    if (hashes !== undefined) {
      blocks.push(element(hashes.length < 3 ? "h3" : "h4", title));
      open = null;
    } else if (fence !== undefined) {
      const end = lines.findIndex((line, index) => index > at && line.startsWith(fence));
      const code = document.createElement("pre");
      code.textContent = lines.slice(at + 1, end < 0 ? lines.length : end).join("\n");
      blocks.push(code);
      [open, at] = [null, end < 0 ? lines.length : end];
    } else if (item !== undefined) {
      const name = number === undefined ? "UL" : "OL";
      if (open?.tagName !== name) {
        blocks.push((open = document.createElement(name)));
        if (number !== undefined) open.start = Number(number);
      }
      open.append(element("li", item));
    } else if (lines[at].trim() === "") {
      if (open?.tagName === "P") open = null;
    } else if (open?.tagName === "P") {
      open.append("\n", ...spans(lines[at]));
    } else {
      blocks.push((open = element("p", lines[at])));
    }
  }
  return blocks;
}

function element(name, text) {
  const made = document.createElement(name);
  made.append(...spans(text));
  return made;
}

function spans(text) {
  return text.split(SPANS).map((part, index) => {
    if (index % 2 === 0) return part;
    const [name, width] = part[0] === "`" ? ["code", 1] : part[1] === "*" ? ["strong", 2] : ["em", 1];
    const made = document.createElement(name);
    made.textContent = part.slice(width, -width);
    return made;
  });
}
