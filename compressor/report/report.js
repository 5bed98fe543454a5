// Draws the page, and again where the window gets another width.

const drawing = document.getElementById("drawing");
const form = drawing?.querySelector("form");
if (form) {
  form.hidden = false;
  form.addEventListener("change", (event) => {
    drawing.dataset.by = event.target.value;
  });
}
const redrawLayers = layerTable();
const drawOthers = () => {
  drawTradeOff();
  drawHistory();
  drawTrainings();
  drawHistograms();
};
const redraw = () => {
  drawOthers();
  redrawLayers();
};
drawOthers();
let width = document.body.clientWidth;
let timer;
new ResizeObserver(() => {
  if (document.body.clientWidth === width) return;
  width = document.body.clientWidth;
  clearTimeout(timer);
  timer = setTimeout(redraw, 120);
}).observe(document.body);
