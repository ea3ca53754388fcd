// The texts that are shown with less contrast than WCAG asks for: [[text, contrast, foreground, background]].
const canvas = new OffscreenCanvas(1, 1);
const context = canvas.getContext("2d", { willReadFrequently: true });

/** What colours, each laid over those before it, look like. */
function blended(colours) {
  for (const colour of colours) {
    context.fillStyle = colour;
    context.fillRect(0, 0, 1, 1);
  }
  return [...context.getImageData(0, 0, 1, 1).data].slice(0, 3);
}

function luminance(colour) {
  const [red, green, blue] = colour.map((value) => value / 255).map((value) =>
    value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}

function backgrounds(element) {
  const colours = [];
  for (let one = element; one; one = one.parentElement) colours.unshift(getComputedStyle(one).backgroundColor);
  return ["white", ...colours];
}

const poor = [];
for (const element of document.body.querySelectorAll("*")) {
  const hasText = [...element.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim());
  const at = element.getBoundingClientRect();
  if (!hasText || at.width < 2 || at.bottom < 0 || !element.checkVisibility({ visibilityProperty: true })) continue;
  const style = getComputedStyle(element);
  const behind = backgrounds(element);
  const ground = blended(behind);
  const ink = blended([...behind, style.color]);
  const [dark, light] = [luminance(ground), luminance(ink)].sort((one, other) => one - other);
  const contrast = (light + 0.05) / (dark + 0.05);
  const size = parseFloat(style.fontSize);
  const isLarge = size >= 24 || size >= 18.66 && Number(style.fontWeight) >= 700;
  if (contrast < (isLarge ? 3 : 4.5)) poor.push([element.textContent.trim().slice(0, 40), contrast, style.color, `${ground}`]);
}
return poor;
