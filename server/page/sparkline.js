// The last half minute of a figure, as a line.

const SVG = "http://www.w3.org/2000/svg";
const LENGTH = 120;

export class Sparkline {
  /** The line's top is the largest of `top` and what is shown. */
  constructor(top) {
    this.top = top;
    this.values = [];
    this.node = document.createElementNS(SVG, "svg");
    this.node.setAttribute("class", "spark");
    this.node.setAttribute("viewBox", `0 0 ${LENGTH} 24`);
    this.node.setAttribute("preserveAspectRatio", "none");
    this.node.setAttribute("aria-hidden", "true");
    this.area = this.#path("spark-area");
    this.line = this.#path("spark-line");
  }

  #path(kind) {
    const path = document.createElementNS(SVG, "path");
    path.setAttribute("class", kind);
    return this.node.appendChild(path);
  }

  push(value) {
    this.values.push(value);
    if (this.values.length > LENGTH) this.values.shift();
    const top = Math.max(this.top, ...this.values);
    const left = LENGTH - this.values.length;
    const points = this.values.map((one, index) => `${left + index + 0.5} ${(23 - 22 * one / top).toFixed(1)}`);
    this.line.setAttribute("d", `M${points.join("L")}`);
    this.area.setAttribute("d", `M${left + 0.5} 24L${points.join("L")}L${LENGTH - 0.5} 24Z`);
  }
}
